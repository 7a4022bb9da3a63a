"""The state that outlives a command: the launched command, its number of starts, and the spent chip-hours."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from cloud import Seen
from errors import Failure, Mistake


@dataclasses.dataclass
class Ledger:
    """The state of a name, in a small file.

    Args:
      file: its file; None keeps nothing (a dry run).
      chips: number of chips of all slices.
      spent_seconds: chip-seconds of VMs that are gone.
      since: when the present VMs were made, in seconds since 1970; None without any.
      identity: identity of these VMs.
      command: the last launched command.
      attempt: number of its last start, counted over all commands.
      started: whether any process of this command may have been started.
      take_over: whether this start may break the claim on run.dir that the start before has left.
      relaunches: starts of this command after the first.
      failures: starts after it failed by itself.
      installed: the source that `setup` was given; the full path of a wheel.
      folder: the folder of `setup`, whose files are sent.
      packages: digest of the installed packages.
      offsets: bytes of each worker's log that were copied already.
    """

    file: Path | None
    chips: int
    spent_seconds: float = 0.0
    since: float | None = None
    identity: str = ""
    command: list[str] = dataclasses.field(default_factory=list)
    attempt: int = 0
    started: bool = False
    take_over: bool = False
    relaunches: int = 0
    failures: int = 0
    installed: str = ""
    folder: str = ""
    packages: str = ""
    offsets: dict[str, int] = dataclasses.field(default_factory=dict)

    def save(self) -> None:
        """Writes the file, completely or not at all."""
        if self.file is None:
            return
        kept = {k: v for k, v in dataclasses.asdict(self).items() if k not in ("file", "chips")}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        draft = self.file.with_suffix(".new")
        draft.write_text(json.dumps(kept, indent=2) + "\n")
        os.replace(draft, self.file)

    def note(self, seen: Seen, now: float) -> None:
        """Counts the time of the VMs from their creation until they are seen gone, also while no command looked."""
        if self.since is not None and (not seen.workers or seen.identity != self.identity):
            if seen.kind == "pending" and seen.detail.startswith("ACTIVE"):
                return  # A VM that is being repaired is there, and paid for.
            self.spent_seconds += max(0.0, now - self.since) * self.chips
            self.since = None
        if seen.workers and self.since is None:
            self.since, self.identity = min(now, seen.born or now), seen.identity
        self.save()

    def chip_hours(self, now: float) -> float:
        """Chip-hours under this name so far."""
        running = 0.0 if self.since is None else max(0.0, now - self.since) * self.chips
        return (self.spent_seconds + running) / 3600

    def next_attempt(self) -> None:
        """Notes that the command is started again; no process of the start before is left."""
        self.attempt += 1
        self.offsets = {}
        self.take_over = self.started
        self.save()

    def starting(self) -> list[str]:
        """The command line to start it with now."""
        self.started = True
        self.save()
        return taking_over(self.command) if self.take_over else self.command


def load(file: Path, chips: int) -> Ledger:
    """The saved ledger, or a new one."""
    if not file.exists():
        return Ledger(file, chips)
    try:
        return Ledger(file, chips, **json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise Failure(f"{file}: cannot be read ({error}); move it away to count chip-hours from 0") from None


def taking_over(command: Sequence[str]) -> list[str]:
    """The command with the option to break a claim: a killed process leaves it, and it lasts ten minutes.

    grpojax's own commands with a claim get the option. Others, such as a script, find it in TAKE_OVER.

    Example:
      >>> taking_over(["env", "A=b", "grpojax", "train", "c.yaml"])
      ['env', 'A=b', 'grpojax', 'train', '--take-over', 'c.yaml']
      >>> taking_over(["sh", "train.sh"])
      ['env', 'TAKE_OVER=--take-over', 'sh', 'train.sh']
    """
    words, at = list(command), 0
    while at < len(words) and (words[at] == "env" or re.match(r"\w+=", words[at])):
        at += 1
    name = PurePosixPath(words[at]).name if at < len(words) else ""
    if re.fullmatch(r"python[\d.]*", name) and words[at + 1 : at + 3] == ["-m", "grpojax.cli.main"]:
        at += 2
    elif name != "grpojax":
        return ["env", "TAKE_OVER=--take-over", *words]
    at += 2 if words[at + 1 : at + 2] == ["--debug"] else 1
    if words[at : at + 1] in (["train"], ["sft"], ["dpo"]) and "--take-over" not in words:
        words.insert(at + 1, "--take-over")
    return words


@contextlib.contextmanager
def alone(file: Path) -> Iterator[None]:
    """A context in which no other command of this machine works on the same name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Mistake(f"another tpu.py works on {file.stem}; end it first (Ctrl-C leaves the run alone)") from None
        yield
