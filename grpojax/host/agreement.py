"""Checks that all processes start the same run: the same settings, data, weights and versions."""

import fnmatch
import hashlib
import importlib.metadata
import json
import platform
import socket
from collections.abc import Mapping
from typing import Any

from etils import epath

from grpojax.host import files, processes, settings
from grpojax.host.errors import UserError

# What a number, a token or a checkpoint depends on: another version of one of them may give others.
_PACKAGES = (
    *("grpojax", "jax", "jaxlib", "libtpu", "flax", "optax", "numpy"),
    *("transformers", "tokenizers", "orbax-checkpoint"),
)
_END = 1 << 20


def agree(**facts: Any) -> None:
    """Raises `UserError` on all processes unless each came with the same facts. Every process must call it.

    The processes exchange one digest for each fact, and the facts themselves only if the digests differ. The versions
    of Python and of the packages that results depend on are among the facts.

    Args:
      facts: facts by name; plain data as in JSON.

    Example:
      >>> agree(config={"train": {"steps": 3}}, data="5f1c")
    """
    facts |= {"versions": versions()}
    digests = {name: digest(_text(fact).encode()) for name, fact in facts.items()}
    message = _text({"host": socket.gethostname(), "digests": digests})
    messages = [json.loads(text) for text in processes.meet(message)]
    first = messages[0]["digests"]
    odd = [i for i, w in enumerate(messages) if w["digests"] != first]
    if not odd:
        return
    every = [json.loads(text) for text in processes.meet(_text(facts))]
    lines = []
    for i in odd:
        differ = [
            line for name in every[0] | every[i] for line in _differences(name, every[0].get(name), every[i].get(name))
        ]
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        lines.append(f"process {i} ({messages[i]['host']}): {'; '.join(differ[:3])}{more}")
    name = messages[0]["host"]
    raise UserError(
        f"the processes do not start the same run; process 0 ({name}) and others differ (0's -> theirs):\n"
        + "\n".join(lines)
    )


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a run's results depend on, as far as these are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def digest_of_files(folder: epath.PathLike, *patterns: str) -> str:
    """A digest of a folder's files that match some patterns: their names, sizes, and first and last MiB."""
    parts = []
    # No `glob`: epath's takes the name of a local folder as a pattern too.
    named = [f for f in files.listing(folder) if not f.name.startswith(".")]
    for file in [f for f in named if any(fnmatch.fnmatchcase(f.name, pattern) for pattern in patterns)]:
        size = file.stat().length
        with file.open("rb") as f:
            parts += [f"{file.name} {size}".encode(), f.read(_END)]
            f.seek(max(0, size - _END))
            parts.append(f.read(_END))
    return digest(*parts)


def digest(*parts: bytes) -> str:
    """A digest of bytes, as hexadecimal digits.

    Example:
      >>> digest(b"a", b"b") == digest(b"ab")
      True
    """
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.hexdigest()[:32]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _differences(name: str, first: Any, other: Any) -> list[str]:
    if first == other:
        return []
    if isinstance(first, Mapping) and isinstance(other, Mapping):
        return [line if name == "config" else f"{name} {line}" for line in settings.diff(first, other)]
    return [f"{name}: {first} -> {other}"]
