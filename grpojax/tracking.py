"""What a run tells: ``metrics.jsonl``, tensorboard events, console lines, and a reward curve."""

import functools
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

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


class Metrics:
    """``metrics.jsonl`` and tensorboard events of a run directory.

    A line is written whole and at once. Resuming at step n drops every line of a later step and any torn last line, so
    the file reads like that of a run that never stopped.
    """

    def __init__(self, directory: Path, resume_at: int):
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
        """Records the values of a step."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if "_board" in self.__dict__:
            self._board.close()


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").split("\n"):
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return lines


def read_metrics(directory: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl``."""
    return _whole_lines(Path(directory) / "metrics.jsonl")


class Programs:
    """Calls jitted functions and says when one compiles: which, for what shapes, how long the first call took."""

    def __init__(self):
        self._seen: set[Any] = set()

    def __call__(self, name: str, function: Callable[..., Any], *args):
        shapes = tuple(str(getattr(x, "shape", x)) for x in jax.tree.leaves(args[1:]))
        if (name, shapes) in self._seen:
            return function(*args)
        self._seen.add((name, shapes))
        start = time.perf_counter()
        out = jax.block_until_ready(function(*args))
        largest = max(shapes, key=len, default="")
        log.info("compiled %s %s: first call %.1f s", name, largest, time.perf_counter() - start)
        return out


def draw_curve(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Reward a step, and evaluation accuracy where there is any, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    train = [(line["step"], line["reward"]) for line in lines if "reward" in line]
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
