"""The files that a worker gets from this machine: the current folder, the scripts, variables, and packages to
install."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import shlex
import subprocess
import tarfile
from pathlib import Path

from errors import Mistake
from settings import Settings

HERE = Path(__file__).parent
PYTHON, UV = "3.12", "0.9.30"
EXTRAS = "[tpu,gcs]"
MOST_BYTES = 200 * 2**20


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Files for a worker, packed, and the arguments of ``setup.sh`` after the bundle's name.

    Args:
      name: digest of files and arguments; it does not depend on the variables' values.
      packed: a gzipped tar of them.
      arguments: requirement, Python, uv, day.
    """

    name: str
    packed: bytes
    arguments: tuple[str, ...]


def make(settings: Settings, source: str, folder: Path, leave: Path) -> Bundle:
    """Packs a folder.

    Args:
      settings: the variables to forward, and the day of the packages.
      source: the source that grpojax is installed from: ``.``, the folder; a wheel; ``git+https://...@ref``.
      folder: its files that git tracks or would track are sent.
      leave: the env file, which is not sent.
    """
    files = {f"tree/{name}": folder / name for name in _tracked(folder) if (folder / name) != leave}
    files.update({name: HERE / name for name in ("job.sh", "setup.sh")})
    if source == ".":
        if "tree/pyproject.toml" not in files or not any(name.startswith("tree/grpojax/") for name in files):
            raise Mistake(f"{folder}: no source of grpojax here; go to its checkout, or give --from")
        requirement = f"./tree{EXTRAS}"
    elif source.endswith(".whl"):
        if not Path(source).is_file():
            raise Mistake(f"--from {source}: no such file")
        requirement = f"./{Path(source).name}{EXTRAS}"
        files[Path(source).name] = Path(source)
    elif source.startswith("git+"):
        requirement = f"grpojax{EXTRAS} @ {source}"
    else:
        raise Mistake(f"--from {source}: must be . (this folder), a wheel (FILE.whl) or git+URL@REF")
    contents = {name: (path.read_bytes(), os.access(path, os.X_OK)) for name, path in sorted(files.items())}
    size = sum(len(data) for data, _ in contents.values())
    if size > MOST_BYTES:
        largest = max(contents, key=lambda name: len(contents[name][0]))
        raise Mistake(f"{folder}: {size >> 20} MiB to send, {largest} the largest; put data into the bucket instead")
    digest = hashlib.sha256(repr((arguments(requirement, settings), settings.forward)).encode())
    for name, (data, executable) in contents.items():
        digest.update(f"{name} {executable} {len(data)}\n".encode() + data)
    contents["variables"] = (variables(settings), False)
    return Bundle(digest.hexdigest()[:12], _pack(contents), arguments(requirement, settings))


def arguments(requirement: str, settings: Settings) -> tuple[str, ...]:
    """Of ``setup.sh``, after the bundle's name."""
    return requirement, PYTHON, UV, settings.packages_as_of


def variables(settings: Settings) -> bytes:
    """Lines for a shell that set what FORWARD names."""
    lines = []
    for name in settings.forward.split():
        if name not in os.environ:
            raise Mistake(f"FORWARD names {name}, which is not set here; export it, or take it out of FORWARD")
        lines.append(f"export {name}={shlex.quote(os.environ[name])}\n")
    return "".join(lines).encode()


def _tracked(folder: Path) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=folder, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise Mistake(
            f"{folder}: git cannot list it, and what it lists is sent; `git init`, or go to a checkout"
        ) from None
    names = sorted(set(os.fsdecode(name) for name in listed.stdout.split(b"\0") if name))
    return [name for name in names if (folder / name).is_file() and not name.startswith(".tpu/")]


def _pack(contents: dict[str, tuple[bytes, bool]]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as tar:
        for name, (data, executable) in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o700 if executable else 0o600
            tar.addfile(entry, io.BytesIO(data))
    return packed.getvalue()
