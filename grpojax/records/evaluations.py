"""Evaluations on disk: a line for each problem, the folder from which a stopped one resumes, and comparisons."""

import dataclasses
import errno
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from pydantic import TypeAdapter

from grpojax.data import Problem
from grpojax.evaluation import Attempt, paired_test
from grpojax.host import claims, files, settings
from grpojax.host.console import log
from grpojax.host.errors import UserError


def to_line(attempt: Attempt) -> str:
    """A line of the per-problem file, with its line break."""
    line = dataclasses.asdict(attempt)
    for sample in line["samples"]:
        for name in ("missing", "episode"):
            if not sample[name]:
                del sample[name]
    return json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"


def write(path: epath.PathLike, done: Sequence[Attempt]) -> None:
    """Writes a whole per-problem file at once."""
    files.make_folder(files.path(path).parent)
    files.write(path, "".join(map(to_line, done)).encode())


def read(path: epath.PathLike) -> list[Attempt]:
    """The attempts in a per-problem file, or in the folder of an evaluation; a torn last line is left out.

    Raises:
      UserError: there is no such file, or a line is not from an evaluation.
    """
    file = files.path(path)
    try:
        of_parts = False
        if file.is_dir():
            file = file / "problems.jsonl"
            of_parts = files.in_bucket(file) and not file.exists()
        text = _of_parts(file) if of_parts else files.read(file)
        lines = text.split(b"\n")[:-1]
    except OSError as e:
        raise UserError(f"{file}: {e.strerror}; give the file or the folder of an evaluation") from None
    line_type, done = TypeAdapter(Attempt), []
    for number, line in enumerate(lines, 1):
        try:
            done.append(line_type.validate_json(line, strict=True))
            if not done[-1].samples:
                raise ValueError("no samples")
        except ValueError:  # pydantic's is one
            raise UserError(f"{file}:{number}: no line of an evaluation's per-problem file") from None
    return done


def _of_parts(file: epath.Path) -> bytes:
    """The file of an unfinished evaluation in a bucket: ``problems/N.jsonl`` has the lines from the Nth on.

    Two processes that write there at the same time draw the same samples. A part is left out if it does not begin where
    the parts before it end.
    """
    parts = [part for part in files.listing(file.parent / "problems") if part.stem.isdecimal()]
    if not parts and not (file.parent / "settings.json").exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
    text = b""
    for part, lines in zip(parts, files.read_all(parts), strict=True):
        if int(part.stem) == text.count(b"\n"):
            text += lines
    return text


class Record:
    """The folder of an evaluation: ``settings.json``, ``problems.jsonl`` with a line a problem, ``summary.json``.

    For a ``with`` statement. If it is opened again with the same settings, it goes on after the last whole line. In a
    bucket, each batch is an object of its own until all is done; then ``problems.jsonl`` is written.

    Args:
      directory: a new one, or that of an evaluation with the same settings.
      given: all settings that the results depend on, as plain JSON-able data.
      problems: all problems to evaluate, in order.

    Raises:
      UserError: the directory holds something else, the settings differ, or another process writes there.
    """

    def __init__(self, directory: epath.PathLike, given: Mapping[str, Any], problems: Sequence[Problem]):
        self.directory = files.path(directory)
        self._settings, self._file = dict(given), None
        self._check()
        path = self.directory / "problems.jsonl"
        try:
            files.make_folder(self.directory)
            files.write_json(self.directory / "settings.json", self._settings)
            if not files.in_bucket(path):
                self._file = path.open("ab")
                if missing := claims.lock_file(self._file):
                    log.warning(
                        "%s cannot be locked (%s): a second evaluation there would not be noticed",
                        self.directory,
                        missing,
                    )
                whole = path.read_bytes().rfind(b"\n") + 1
                self._file.truncate(whole)
        except BlockingIOError:
            raise UserError(f"{self.directory}: another evaluation is writing there; wait until it ends") from None
        except OSError as e:
            raise UserError(f"{self.directory}: {e.strerror}; give a folder that can be written as --out") from None
        self.done = read(self.directory)
        if [a.uid for a in self.done] != [p.uid for p in problems[: len(self.done)]]:
            raise UserError(f"{path}: its lines are not those of the first problems; give another --out")

    def _is_fresh(self) -> bool:
        """Whether the folder is empty, or was left by a process that was killed before it wrote the settings."""
        folder = self.directory
        return folder.is_dir() and all(file.name == "settings.json.tmp" for file in files.listing(folder))

    def _check(self) -> None:
        file = self.directory / "settings.json"
        if not file.exists():
            if self.directory.exists() and not self._is_fresh():
                raise UserError(f"{self.directory} exists and is not an evaluation; give another --out")
            return
        try:
            before = json.loads(file.read_text())
        except (OSError, ValueError):
            raise UserError(f"{file} cannot be read; give another --out") from None
        if differ := settings.diff(before, self._settings):
            raise UserError(
                f"{self.directory} holds an evaluation with other settings: {'; '.join(differ[:5])}"[:400]
                + "\ngive another --out, or the settings it was started with"
            )

    def append(self, batch: Sequence[Attempt]) -> None:
        """Writes a batch's lines in one piece, and waits until they are on disk."""
        text = "".join(map(to_line, batch)).encode()
        try:
            if self._file is None:
                files.write(self.directory / "problems" / f"{len(self.done):06d}.jsonl", text)
            else:
                self._file.write(text)
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as e:
            file = self.directory / "problems.jsonl"
            raise UserError(f"{file}: {e.strerror}; once this is fixed, the same command continues") from None
        self.done.extend(batch)

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """Writes ``summary.json``; in a bucket also ``problems.jsonl``."""
        if self._file is None:
            write(self.directory / "problems.jsonl", self.done)
            files.remove_all(files.listing(self.directory / "problems"))
        summary = {"problems": len(self.done), "metrics": metrics, "settings": self._settings}
        files.write_json(self.directory / "summary.json", summary)

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def compare(a: epath.PathLike, b: epath.PathLike) -> str:
    """Compares two per-problem files of the same problems by a paired test; returns a small table.

    If both have verdicts, it compares the share of right samples, otherwise the mean reward.

    Raises:
      UserError: the files do not have the same problems or the same rewards.
    """
    first, second = _matching(a, b)
    uids = sorted(first)
    lines = [f"A = {a}", f"B = {b}", f"{len(uids)} problems in both"]
    has_verdicts = all(x.has_verdict for done in (first, second) for x in done.values())
    if has_verdicts:
        values = [np.array([done[uid].accuracy for uid in uids]) for done in (first, second)]
    else:
        values = _rewards(a, b, first, second, uids, lines)
    c = paired_test(*values)
    for name, done, value in (("A", first, values[0]), ("B", second, values[1])):
        n = len(done[uids[0]].samples)
        kind = "accuracy" if has_verdicts else "reward"
        kind = f"{kind}, avg@{n}" if n > 1 else kind
        lines.append(
            f"{name}  {kind:20}" + (f"{100 * value.mean():6.1f} %" if has_verdicts else f"{value.mean():8.3f}")
        )
    if has_verdicts:
        shown, interval = f"{100 * c.difference:+6.1f} points", f"{100 * c.low:+.1f} to {100 * c.high:+.1f}"
    else:
        shown, interval = f"{c.difference:+8.3f}", f"{c.low:+.3f} to {c.high:+.3f}"
    if c.low == c.high:
        interval = "none: the difference is the same for every problem"
    shown += f"   95 % interval {interval}"
    lines.append(f"B - A{'':18}{shown}")
    p = f"{c.p:.3g}" if c.p >= 1e-9 else "under 1e-9"
    lines.append(f"B is better on {c.better} problems and worse on {c.worse}: p = {p} (sign-flip test)")
    lines += [f"{name}: {note}" for name, path in (("A", a), ("B", b)) if (note := _alike(path))]
    return "\n".join(lines)


def _alike(path: epath.PathLike) -> str | None:
    """The method that an evaluated run's equals (`grpojax.variants.twin_at_one_update`), if its folder says so."""
    folder = files.path(path) if files.path(path).is_dir() else files.path(path).parent
    try:
        return json.loads((folder / "settings.json").read_text())["model"].get("alike")
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def _matching(a: epath.PathLike, b: epath.PathLike) -> tuple[dict[int, Attempt], dict[int, Attempt]]:
    """Both files by problem; raises `UserError` where the problems are not the same."""
    read_a, read_b = read(a), read(b)
    first, second = ({x.uid: x for x in done} for done in (read_a, read_b))
    for path, done, lines in ((a, first, read_a), (b, second, read_b)):
        if not done:
            raise UserError(f"{path}: no problems")
        if len(done) < len(lines):
            raise UserError(f"{path}: a problem occurs twice; each problem of a data set has its own number")
    if first.keys() != second.keys():
        common = len(first.keys() & second.keys())
        raise UserError(
            f"{a} has {len(first)} problems, {b} {len(second)}, and {common} are in both; "
            "evaluate both on the same data with the same --limit"
        )
    for uid, x in first.items():
        if (x.prompt, x.gold) != (second[uid].prompt, second[uid].gold):
            raise UserError(f"problem {uid} is not the same in {a} and {b}; evaluate both on the same data")
    return first, second


def _rewards(
    a: epath.PathLike,
    b: epath.PathLike,
    first: Mapping[int, Attempt],
    second: Mapping[int, Attempt],
    uids: Sequence[int],
    lines: list[str],
) -> list[np.ndarray]:
    """The mean rewards of the problems that have one in both files; adds to ``lines`` what is left out, and why."""
    names = [sorted({name for x in done.values() for s in x.samples for name in s.rewards}) for done in (first, second)]
    if names[0] != names[1]:
        raise UserError(
            f"{a} has the rewards {', '.join(names[0]) or '(none)'}, {b} {', '.join(names[1]) or '(none)'}, and not "
            "both say what is right; evaluate both with the same rewards=[...]"
        )
    values = [np.array([done[uid].reward for uid in uids]) for done in (first, second)]
    both = np.isfinite(values[0]) & np.isfinite(values[1])
    if not both.any():
        raise UserError(f"{a} and {b}: no problem has a reward in both; see what the reward functions say")
    lines.append("compared by reward: not both have a judge's verdicts")
    if not both.all():
        lines.append(f"{(~both).sum()} problems without a valid reward in A or B are left out")
    return [v[both] for v in values]
