"""What a run tells: ``metrics.jsonl``, tensorboard events, samples, console lines, and a reward curve."""

import dataclasses
import functools
import gzip
import hashlib
import json
import logging
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from grpojax.errors import UserError

log = logging.getLogger("grpojax")


class _Console(logging.Handler):
    """Lines on whatever standard output is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), flush=True)


def setup_console(level: int = logging.INFO) -> None:
    """Plain lines on standard output, each with the time."""
    handler = _Console()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.handlers[:] = [handler]
    log.setLevel(level)
    log.propagate = False


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
        if self.texts_every < 0:
            raise UserError(f"texts_every={self.texts_every}: must be 0 (never) or more")


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
                self._board.add_histogram(
                    "completions/length", np.array([r["length"] for r in samples]), step
                )

    def close(self) -> None:
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


def samples_path(directory: str | Path, step: int) -> Path:
    """Where the samples of a step are."""
    return Path(directory) / "samples" / f"step_{step:06d}.jsonl.gz"


def read_samples(directory: str | Path, step: int | None = None) -> tuple[int, list[dict[str, Any]]]:
    """The step (the newest if not given) and its samples; raises `UserError` where there are none."""
    folder = Path(directory) / "samples"
    steps = sorted(int(p.name[5:11]) for p in folder.glob("step_[0-9][0-9][0-9][0-9][0-9][0-9].jsonl.gz"))
    if not steps:
        raise UserError(f"{folder} holds no samples")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise UserError(f"{folder} has no samples of step {step}; it has {steps[0]} to {steps[-1]}")
    path = samples_path(directory, step)
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return step, [json.loads(line) for line in file]
    except (OSError, EOFError, ValueError, zlib.error) as e:
        raise UserError(f"{path} cannot be read: {e}") from None


def ranked_samples(samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Samples from best to worst; those without a reward last."""
    return sorted(samples, key=lambda s: (s["reward"] is None, -(s["reward"] or 0.0)))


class Table:
    """A row a step: under column heads on a terminal, as ``name value`` elsewhere; with the time that is left."""

    COLUMNS = (
        ("reward", "reward", ".3f"), ("zero-std", "frac_reward_zero_std", ".2f"), ("length", "completions/mean_length", ".1f"),
        ("kl", "kl", ".4f"), ("entropy", "entropy", ".3f"), ("grad", "grad_norm", ".3f"), ("tok/s", "tokens_per_s", ".0f"),
        ("seconds", "time/step_s", ".2f"),
    )  # fmt: skip

    def __init__(self, steps: int, *, terminal: bool | None = None):
        self._steps, self._rows, self._pace = steps, 0, 0.0
        self._heads: tuple[str, ...] = ()
        self._terminal = sys.stdout.isatty() if terminal is None else terminal

    def row(self, step: int, values: Mapping[str, float]) -> None:
        """Logs a step."""
        seconds = values["time/step_s"]
        # The first step compiles; after it, a running mean.
        self._pace = seconds if self._rows < 2 else 0.9 * self._pace + 0.1 * seconds
        left = _duration(self._pace * (self._steps - step))
        number = lambda x, spec: format(x, spec) if math.isfinite(x) else "-"  # noqa: E731
        shown = [(head, number(values[name], spec)) for head, name, spec in self.COLUMNS if name in values]
        if not self._terminal:
            text = "  ".join(f"{head} {value}" for head, value in shown)
            log.info("step %d/%d  %s  left %s", step, self._steps, text, left)
        else:
            heads = ("step", *(head for head, _ in shown), "left")
            if self._rows % 20 == 0 or heads != self._heads:
                log.info("%s", "".join(f"{head:>10}" for head in heads))
                self._heads = heads
            log.info(
                "%s",
                "".join(f"{cell:>10}" for cell in (f"{step}/{self._steps}", *(v for _, v in shown), left)),
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


def write_json(file: Path, value: Any) -> None:
    """Writes a file whole or not at all."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, file)


def read_metrics(directory: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl``."""
    return _whole_lines(Path(directory) / "metrics.jsonl")


class Programs:
    """Calls jitted functions and says when one compiles: which, for what shapes, and how long its first call took."""

    def __init__(self):
        self._seen: set[Any] = set()

    def __call__(self, name: str, function: Callable[..., Any], *args, static: Any = None):
        """``function(*args)``; ``static`` is what it was made with beyond its arguments and compiles anew for."""
        shapes = tuple(str(getattr(x, "shape", x)) for x in jax.tree.leaves(args[1:]))
        if (name, static, shapes) in self._seen:
            return function(*args)
        self._seen.add((name, static, shapes))
        log.info("compiling %s %s", name, max(shapes, key=len, default=""))
        start = time.perf_counter()
        out = jax.block_until_ready(function(*args))
        log.info("compiled %s: first call %.1f s", name, time.perf_counter() - start)
        return out


def draw_curve(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Reward a step, and evaluation accuracy where there is any, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    train = [(line["step"], line["reward"]) for line in lines if line.get("reward") is not None]
    evals = [(line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]
    if train:
        axes.plot(*zip(*train, strict=True), color="#9ecae1", linewidth=1, label="reward of the step")
        window = max(1, len(train) // 20)
        smooth = [
            (train[i][0], sum(r for _, r in train[max(0, i - window + 1) : i + 1]) / min(i + 1, window))
            for i in range(len(train))
        ]
        axes.plot(*zip(*smooth, strict=True), color="#2171b5", label=f"mean of {window} steps")
    if evals:
        axes.plot(*zip(*evals, strict=True), "o-", color="#d94801", label="held-out greedy accuracy")
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
