"""The env file: project, zone and bucket, the machines to ask for, and limits.

Lines of ``KEY=value`` in a shell's syntax; ``example.env`` has every required key.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import shlex
from pathlib import Path
from typing import Any

from accelerators import Accelerator, parse
from errors import Mistake

BUCKET = r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The keys of an env file, in lower case.

    Args:
      project, zone, bucket: names in Google Cloud; the bucket must be in the zone's region.
      name: name of the request and of its VMs.
      type: a slice. The number in v5e-16 and v6e-8 counts chips, in v4-32 and v5p-32 cores, two per chip.
      max_chip_hours: most chip-hours under this name, over all requests. Then the run is told to save, and the request
        is deleted.
      slices: number of slices of this type.
      spot: whether the VMs cost less and may be taken back at any time.
      runtime: image of the VMs; empty takes the usual one of the type.
      network, subnetwork, service_account: empty takes the project's default.
      forward: names of variables of this machine that the run sees too (``HF_TOKEN WANDB_API_KEY``).
      packages_as_of: no package newer than this day is installed, so that every worker, and every re-creation, gets
        the same versions.
      max_relaunches: most starts of a launched command after the first, for any reason.
      max_failures: most of these starts after it failed by itself.
      poll_seconds: seconds between two looks.
      call_seconds: seconds until a call counts as not answered.
      settle_seconds: seconds from the end of a preempted or failed run until it is started again, while the cloud may
        still take the VMs.
      grace_seconds: seconds from the end of the first process until the others are stopped.
      lost_seconds: seconds that a worker, or the cloud itself, may not answer.
    """

    project: str
    zone: str
    bucket: str
    name: str
    type: str
    max_chip_hours: float
    slices: int = 1
    spot: bool = False
    runtime: str = ""
    network: str = ""
    subnetwork: str = ""
    service_account: str = ""
    forward: str = ""
    packages_as_of: str = "2026-11-20"
    max_relaunches: int = 50
    max_failures: int = 3
    poll_seconds: float = 30
    call_seconds: float = 120
    settle_seconds: float = 60
    grace_seconds: float = 180
    lost_seconds: float = 900

    def __post_init__(self) -> None:
        """Refuses what Google Cloud would refuse only after minutes, or not at all."""
        for field, pattern, example in (
            ("project", r"[a-z][a-z0-9:.-]{4,}[a-z0-9]", "my-project"),
            ("zone", r"[a-z]+-[a-z]+\d+-[a-z]", "us-west4-a"),
            ("bucket", BUCKET, "my-bucket, without gs://"),
            ("name", r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", "grpo, in small letters, digits and -"),
            ("forward", r"(\w+( +\w+)*)?", "HF_TOKEN WANDB_API_KEY"),
            ("packages_as_of", r"\d{4}-\d\d-\d\d", "2026-11-20"),
        ):
            value = getattr(self, field)
            if not re.fullmatch(pattern, value):
                raise Mistake(f"{field.upper()}={value}: write it as in {field.upper()}={example}")
        parse(self.type)
        for field, least in (("slices", 1), ("max_relaunches", 0), ("max_failures", 0), ("max_chip_hours", 0)):
            if not getattr(self, field) >= least:
                raise Mistake(f"{field.upper()}={getattr(self, field)}: must be at least {least}")
        for field in ("poll_seconds", "call_seconds", "settle_seconds", "grace_seconds", "lost_seconds"):
            if not getattr(self, field) > 0:
                raise Mistake(f"{field.upper()}={getattr(self, field)}: must be over 0")

    @property
    def accelerator(self) -> Accelerator:
        """The type of one slice."""
        return parse(self.type)

    @property
    def chips(self) -> int:
        """Number of chips of all slices."""
        return self.accelerator.chips * self.slices


def load(file: Path) -> Settings:
    """Reads an env file."""
    if not file.exists():
        raise Mistake(f"{file}: no such file; copy tpu_scripts/example.env there and fill it in, or give --env FILE")
    kinds = {field.name: field for field in dataclasses.fields(Settings)}
    given: dict[str, Any] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").splitlines(), 1):
        key, equals, rest = line.strip().partition("=")
        if not key or key.startswith("#"):
            continue
        name = key.strip().lower()
        if not equals or name not in kinds:
            close = difflib.get_close_matches(name, kinds, 1)
            hint = f"did you mean {close[0].upper()}?" if close else f"known: {', '.join(kinds).upper()}"
            raise Mistake(f"{file}:{number}: {line.strip()!r} is not KEY=value with a known key; {hint}")
        given[name] = _value(f"{file}:{number}: {key}", str(kinds[name].type), rest)
    missing = [n for n, field in kinds.items() if field.default is dataclasses.MISSING and not given.get(n)]
    if missing:
        raise Mistake(f"{file}: {', '.join(missing).upper()} must be given")
    return Settings(**given)


def _value(where: str, kind: str, text: str) -> Any:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        raise Mistake(f"{where}={text}: a quote is not closed") from None
    if len(words) > 1:
        raise Mistake(f"{where}={text}: a value with spaces needs quotes")
    word = words[0] if words else ""
    try:
        if kind == "bool":
            return {"true": True, "false": False}[word]
        return {"int": int, "float": float, "str": str}[kind](word)
    except (KeyError, ValueError):
        wanted = {"bool": "true or false", "int": "a whole number", "float": "a number"}[kind]
        raise Mistake(f"{where}={word}: must be {wanted}") from None
