"""The metrics of a run: ``metrics.jsonl``, tensorboard events, samples, console lines, and a reward curve."""

import dataclasses
import gzip
import hashlib
import json
import math
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from grpojax.host import files
from grpojax.host.console import log
from grpojax.host.errors import UserError, require
from grpojax.records import lines
from grpojax.records.board import Board, Events
from grpojax.records.samples import ranked_samples, samples_path


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """What a run logs besides ``metrics.jsonl`` and the tensorboard events.

    Attributes:
      samples: keep every sample of every step in ``samples/``, for ``grpojax show``.
      texts_every: steps between texts of the best and the worst sample, and histograms, in tensorboard; 0 for never.
      wandb: project of Weights & Biases that the run logs to as well (``pip install wandb``); None for none.
    """

    samples: bool = True
    texts_every: int = 10
    wandb: str | None = None

    def __post_init__(self):
        require(self, texts_every="[0, inf)")


class Metrics:
    """Everything that a run directory records about its steps.

    A line of ``metrics.jsonl`` is written whole and at once. Resuming at step n drops every line of a later step and
    any torn last line, so the file reads like that of a run that never stopped. Objects in a bucket cannot grow: there
    each step's lines are an object of their own (`grpojax.records.lines`), written while the run goes on.
    """

    def __init__(
        self, directory: epath.Path, resume_at: int, config: TrackingConfig | None = None, wandb: Any | None = None
    ):
        self.config, self._wandb = config or TrackingConfig(), wandb
        self._directory, self._uploads = files.path(directory), files.Uploads()
        self._lines = lines.Lines(self._directory, resume_at, self._uploads)
        self._board = Board(self._directory / "tensorboard", resume_at or None, self._uploads)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Records the values of a step. A value that is not finite, such as the mean of nothing, becomes null."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._lines.append({"step": step, **dict.fromkeys(values), **finite})
        self._board.add(lambda board: _add_scalars(board, step, finite))
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
            path = samples_path(self._directory, step)
            if not files.in_bucket(path):
                path.parent.mkdir(exist_ok=True)
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in samples)
            self._uploads.write(path, gzip.compress(text.encode(errors="replace"), 5, mtime=0))
        ranked = [s for s in ranked_samples(samples) if s["reward"] is not None] if self._wants_texts(step) else []
        if ranked:
            self._board.add(lambda board: _add_texts(board, step, ranked, samples))

    def flush(self) -> None:
        """Waits until all lines and samples so far are in their files. Call it before a checkpoint."""
        self._uploads.wait()

    def close(self) -> None:
        """Ends the files."""
        self._lines.close()
        self._board.close()
        self._uploads.close()


def _add_scalars(board: Events, step: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        board.add_scalar(name, value, step)


def _add_texts(
    board: Events, step: int, ranked: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]]
) -> None:
    """The best and the worst sample, and histograms."""
    for name, row in (("best", ranked[0]), ("worst", ranked[-1])):
        text = f"**{row['prompt']}**\n\n{row['completion']}\n\nreward {row['reward']:g}"
        board.add_text(f"samples/{name}", text, step)
    board.add_histogram("reward", np.array([r["reward"] for r in ranked]), step)
    board.add_histogram("completions/length", np.array([r["length"] for r in samples]), step)


class NoMetrics:
    """Stands in for `Metrics` in the processes that write no files."""

    def __init__(
        self, directory: epath.Path, resume_at: int, config: TrackingConfig | None = None, wandb: Any | None = None
    ):
        pass

    def write(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def wants_samples(self, step: int) -> bool:
        return False

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def start_wandb(project: str, directory: epath.Path) -> Any:
    """The run of Weights & Biases that goes with a run directory, new or resumed.

    Raises:
      UserError: wandb is not installed, or refuses the run, such as where nobody is logged in.
    """
    try:
        import wandb  # pyrefly: ignore
    except ImportError:
        raise UserError(f"tracking.wandb={project!r} needs wandb: pip install wandb") from None
    place = hashlib.sha256(str(files.absolute(directory)).encode()).hexdigest()[:8]
    try:
        return wandb.init(
            project=project,
            name=directory.name,
            dir=tempfile.gettempdir() if files.in_bucket(directory) else str(directory),
            resume="allow",
            id=re.sub(r"""[/\\#?%:;,'"]|^\s+""", "-", f"{directory.name}-{place}"),  # what an id cannot have
        )
    except Exception as e:  # whatever wandb raises
        raise UserError(
            f"tracking.wandb={project!r}: wandb cannot start: {' '.join(str(e).split())[:200]}\n"
            "`wandb login` or WANDB_API_KEY logs in; WANDB_MODE=offline needs neither, and `wandb sync` sends it later"
        ) from None


class Table:
    """One row for each step: under column heads on a terminal, as ``name value`` elsewhere.

    From the second row on it has the remaining time: the first one compiles, and says nothing about those that follow.

    Args:
      steps: number of steps of the whole run; None if it ends by something else, and rows then show the share of that.
      columns: head, metric and format of each; metrics that a step lacks are left out. So is a share of
        samples without a valid reward that is 0.
      terminal: whether the output is a terminal; None finds out.
    """

    COLUMNS = (
        ("reward", "reward", ".3f"),
        ("invalid", lines.INVALID, ".1%"),
        ("zero-std", "frac_reward_zero_std", ".2f"),
        ("length", "completions/mean_length", ".1f"),
        ("calls", "episode/calls", ".2f"),
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
        self._had_invalid = False
        self._terminal = sys.stdout.isatty() if terminal is None else terminal

    def row(self, step: int, values: Mapping[str, float], *, progress: float = 0.0) -> None:
        """Logs a step, after which ``progress`` of the whole run is done."""
        seconds = values["time/step_s"]
        self._pace = seconds if self._rows < 2 else 0.9 * self._pace + 0.1 * seconds  # a running mean
        whole = step / max(progress, 1e-9) if self._steps is None else self._steps
        left = _duration(self._pace * max(0.0, whole - step)) if self._rows else "-"
        where = f"{step}/{self._steps}" if self._steps is not None else f"{step} ({min(progress, 1.0):.0%})"
        invalid = values.get(lines.INVALID, 0.0) > 0
        self._had_invalid |= invalid
        shows = self._had_invalid if self._terminal else invalid  # a column that comes and goes has new heads each time
        present = [
            (head, values[name], spec)
            for head, name, spec in self._columns
            if name in values and (shows or name != lines.INVALID)
        ]
        shown = [(head, format(x, spec) if math.isfinite(x) else "-") for head, x, spec in present]
        if not self._terminal:
            told = shown if left == "-" else [*shown, ("left", left)]
            log.info("step %s  %s", where, "  ".join(f"{head} {value}" for head, value in told))
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


def read_metrics(directory: epath.PathLike) -> list[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl``; in a bucket, of the objects that make it up."""
    return lines.read(directory)
