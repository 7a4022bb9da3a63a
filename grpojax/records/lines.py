"""The lines of ``metrics.jsonl``: a local file that grows or, since no object in a bucket can grow, one object for each
step.

In a bucket, ``metrics.jsonl`` has the lines from before the run was last started, and ``metrics/NNNNNN.jsonl`` has
those of one step since then. A step's own object replaces its lines in the file.
"""

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import IO, Any

from etils import epath

from grpojax.host import files
from grpojax.host.console import log

Line = dict[str, Any]

INVALID = "rewards/invalid"  # share of a step's samples without a valid reward
MANY_INVALID = 0.25  # from this share on a mean over the other samples says little


def is_sound(line: Mapping[str, Any], name: str) -> bool:
    """Whether a reward, or what follows from it, is of more than three quarters of the samples.

    Args:
      line: of a step or of an evaluation.
      name: the metric.

    Example:
      >>> is_sound({"reward": 1.0, "rewards/invalid": 0.8}, "reward")
      False
      >>> is_sound({"eval/reward": 0.5, "eval/invalid": 1, "eval/samples": 16}, "eval/reward")
      True
    """
    part, _, _ = name.rpartition("/")
    if part not in ("eval", "test"):
        return (line.get(INVALID) or 0.0) < MANY_INVALID
    missing = max(line.get(f"{part}/{kind}") or 0 for kind in ("invalid", "unjudged"))
    return missing < MANY_INVALID * line.get(f"{part}/samples", math.inf)


def read(directory: epath.PathLike) -> list[Line]:
    """All lines of a run in the order of their steps; torn lines are left out."""
    file = files.path(directory) / "metrics.jsonl"
    if not files.in_bucket(file):
        return _parsed(file.read_bytes()) if file.exists() else []
    parts = _parts(directory)
    there = ([file] if file.exists() else []) + parts
    texts = files.read_all(there)
    first = _parsed(texts.pop(0)) if len(texts) > len(parts) else []
    written_again = {int(part.stem) for part in parts}
    return sorted(
        [line for line in first if line["step"] not in written_again]
        + [line for text in texts for line in _parsed(text)],
        key=lambda line: line["step"],
    )


class Lines:
    """Writes the lines of a run from a step on; lines of later steps are dropped.

    Args:
      directory: of the run.
      resume_at: the last step whose lines stay; 0 for none.
      uploads: writes what goes to a bucket.
    """

    def __init__(self, directory: epath.PathLike, resume_at: int, uploads: files.Uploads):
        self._directory, self._uploads, self._file = files.path(directory), uploads, None
        kept = [line for line in read(directory) if line["step"] <= resume_at] if resume_at else []
        file = self._directory / "metrics.jsonl"
        files.write(file, _text(kept))
        if files.in_bucket(file):
            files.remove_all(_parts(directory))
        else:
            self._file = file.open("ab")
        self._last = [line for line in kept if line["step"] == resume_at]

    def append(self, line: Line) -> None:
        """Adds a step's line, which is written whole and at once."""
        if self._file is not None:
            self._file.write(_text([line]))
            self._file.flush()
            self._file = self._there(self._file, line)
            return
        self._last = [*(x for x in self._last if x["step"] == line["step"]), line]
        self._uploads.write(self._directory / "metrics" / f"{line['step']:06d}.jsonl", _text(self._last))

    def _there(self, file: IO[bytes], line: Line) -> IO[bytes]:
        """The local file: another one, with this line, if somebody has removed or replaced it."""
        path = os.fspath(self._directory / "metrics.jsonl")
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                return file
        file.close()
        file = open(path, "ab")  # noqa: SIM115  closed by `close`
        file.write(_text([line]))
        file.flush()
        log.warning("%s was removed or replaced; its lines before step %d are gone", path, line["step"])
        return file

    def close(self) -> None:
        """Ends the local file."""
        if self._file is not None:
            self._file.close()


def _parts(directory: epath.PathLike) -> list[epath.Path]:
    return [file for file in files.listing(files.path(directory) / "metrics") if file.stem.isdecimal()]


def _text(lines: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _parsed(text: bytes) -> list[Line]:
    lines = []
    for line in text.decode(errors="replace").split("\n"):
        try:
            read = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(read, dict) and isinstance(read.get("step"), int):
            lines.append(read)
    return lines
