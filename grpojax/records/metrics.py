"""What a run tells: ``metrics.jsonl``, tensorboard events, samples, console lines, and a reward curve."""

import dataclasses
import functools
import gzip
import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpojax.host.console import log
from grpojax.host.errors import UserError, require
from grpojax.records.samples import ranked_samples, samples_path


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """What is kept besides ``metrics.jsonl`` and the tensorboard events.

    Attributes:
      samples: keep every sample of every step in ``samples/``, for ``grpojax show``.
      texts_every: steps between the best and worst sample as texts, and histograms, in tensorboard; 0 for never.
      wandb: a project of Weights & Biases to log to as well (``pip install wandb``).
    """

    samples: bool = True
    texts_every: int = 10
    wandb: str | None = None

    def __post_init__(self):
        require(self, texts_every="[0, inf)")


class Metrics:
    """Everything that a run directory records of its steps.

    A line of ``metrics.jsonl`` is written whole and at once. Resuming at step n drops every line of a later step and
    any torn last line, so the file reads like that of a run that never stopped.
    """

    def __init__(self, directory: Path, resume_at: int, config: TrackingConfig | None = None):
        self.config = config or TrackingConfig()
        self._wandb = _start_wandb(self.config.wandb, directory) if self.config.wandb else None
        self._path = directory / "metrics.jsonl"
        kept = [line for line in _whole_lines(self._path) if line["step"] <= resume_at] if resume_at else []
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, self._path)
        self._file = self._path.open("a", encoding="utf-8")
        self._resume_at = resume_at

    @functools.cached_property
    def _board(self):
        from tensorboardX import SummaryWriter

        return SummaryWriter(str(self._path.parent / "tensorboard"), purge_step=self._resume_at or None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Records the values of a step; one that is not finite, such as the mean of nothing, is null."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._file.write(json.dumps({"step": step, **dict.fromkeys(values), **finite}) + "\n")
        self._file.flush()
        for name, value in finite.items():
            self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(finite, step=step)

    def wants_samples(self, step: int) -> bool:
        """Whether `write_samples` would keep anything of this step."""
        return self.config.samples or self._wants_texts(step)

    def _wants_texts(self, step: int) -> bool:
        return self.config.texts_every > 0 and step % self.config.texts_every == 0

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Records the samples of a step: rows with at least ``prompt``, ``completion``, ``reward`` and ``length``."""
        if self.config.samples:
            path = samples_path(self._path.parent, step)
            path.parent.mkdir(exist_ok=True)
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in samples)
            temporary = path.with_suffix(".tmp")
            temporary.write_bytes(gzip.compress(text.encode(errors="replace"), 5, mtime=0))
            os.replace(temporary, path)
        if self._wants_texts(step):
            ranked = [s for s in ranked_samples(samples) if s["reward"] is not None]
            for name, row in (("best", ranked[0]), ("worst", ranked[-1])) if ranked else ():
                text = f"**{row['prompt']}**\n\n{row['completion']}\n\nreward {row['reward']:g}"
                self._board.add_text(f"samples/{name}", text, step)
            if ranked:
                self._board.add_histogram("reward", np.array([r["reward"] for r in ranked]), step)
                self._board.add_histogram("completions/length", np.array([r["length"] for r in samples]), step)

    def close(self) -> None:
        """Ends the files."""
        self._file.close()
        if "_board" in self.__dict__:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


class NoMetrics:
    """Stands in for `Metrics` in the processes that write no files."""

    def __init__(self, directory: Path, resume_at: int, config: TrackingConfig | None = None):
        pass

    def write(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def wants_samples(self, step: int) -> bool:
        return False

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        pass

    def close(self) -> None:
        pass


def _start_wandb(project: str, directory: Path):
    try:
        import wandb  # pyrefly: ignore
    except ImportError:
        raise UserError(f"tracking.wandb={project!r} needs wandb: pip install wandb") from None
    place = hashlib.sha256(str(directory.absolute()).encode()).hexdigest()[:8]
    return wandb.init(
        project=project,
        name=directory.name,
        dir=str(directory),
        resume="allow",
        id=f"{directory.name}-{place}",
    )


class Table:
    """A row a step: under column heads on a terminal, as ``name value`` elsewhere; with the time that is left.

    Args:
      steps: of the whole run; None where it ends by something else, which rows then have the share of.
      columns: head, metric and format of each; what a step does not have is left out.
      terminal: whether it is one; None finds out.
    """

    COLUMNS = (
        ("reward", "reward", ".3f"),
        ("zero-std", "frac_reward_zero_std", ".2f"),
        ("length", "completions/mean_length", ".1f"),
        ("kl", "kl", ".4f"),
        ("entropy", "entropy", ".3f"),
        ("grad", "grad_norm", ".3f"),
        ("tok/s", "tokens_per_s", ".0f"),
        ("seconds", "time/step_s", ".2f"),
    )

    def __init__(
        self,
        steps: int | None,
        *,
        columns: Sequence[tuple[str, str, str]] = COLUMNS,
        terminal: bool | None = None,
    ):
        self._columns = columns
        self._steps, self._rows, self._pace = steps, 0, 0.0
        self._heads: tuple[str, ...] = ()
        self._terminal = sys.stdout.isatty() if terminal is None else terminal

    def row(self, step: int, values: Mapping[str, float], *, share: float = 0.0) -> None:
        """Logs a step; ``share`` of the whole run is behind it then."""
        seconds = values["time/step_s"]
        # The first step compiles; after it, a running mean.
        self._pace = seconds if self._rows < 2 else 0.9 * self._pace + 0.1 * seconds
        whole = step / max(share, 1e-9) if self._steps is None else self._steps
        left = _duration(self._pace * max(0.0, whole - step))
        where = f"{step}/{self._steps}" if self._steps is not None else f"{step} ({min(share, 1.0):.0%})"
        present = [(head, values[name], spec) for head, name, spec in self._columns if name in values]
        shown = [(head, format(x, spec) if math.isfinite(x) else "-") for head, x, spec in present]
        if not self._terminal:
            text = "  ".join(f"{head} {value}" for head, value in shown)
            log.info("step %s  %s  left %s", where, text, left)
        else:
            heads = ("step", *(head for head, _ in shown), "left")
            if self._rows % 20 == 0 or heads != self._heads:
                log.info("%s", "".join(f"{head:>10}" for head in heads))
                self._heads = heads
            log.info(
                "%s",
                "".join(f"{cell:>10}" for cell in (where, *(v for _, v in shown), left)),
            )
        self._rows += 1


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").split("\n"):
            try:
                read = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(read, dict) and isinstance(read.get("step"), int):
                lines.append(read)
    return lines


def read_metrics(directory: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl``."""
    return _whole_lines(Path(directory) / "metrics.jsonl")
