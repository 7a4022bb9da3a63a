"""The configs of supervised runs: ``grpojax sft`` and ``grpojax dpo``."""

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from grpojax.extensions.supervised.answered import AnsweredConfig
from grpojax.host import settings
from grpojax.host.errors import UserError, require
from grpojax.models.compute import ModelConfig
from grpojax.programs.optimizer_config import OptimizerConfig
from grpojax.records.metrics import TrackingConfig
from grpojax.run.profiling import ProfileConfig
from grpojax.run.sections import RunConfig
from grpojax.sharding import MeshConfig

# Settings, or beginnings of their names, that change how a run is executed and recorded but not what it computes.
EXECUTION = (
    "run.",
    "mesh.",
    "tracking.",
    "compile_cache",
    "profile.",
    "model.remat",
    "model.attention",
    "train.microbatches",
    "train.eval_every",
    "train.checkpoint_",
    "train.hang_policy",
    "train.keep",
    "train.log_every",
    "train.max_skipped",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LoopConfig:
    """The loop: its length, its updates, evaluations and checkpoints.

    Attributes:
      batch_size: prompts of an update, each with its answers.
      steps: length of the run in updates. Give this or ``epochs``.
      epochs: length of the run in passes over the data. The last update is filled up from the next pass.
      seed: seed of the data's order.
      microbatches: parts of an update that are computed one after the other, to save memory; the gradient is the same.
      eval_every: steps between evaluations on ``data.validation``; 0 evaluates only before the first step and after the
        last one.
      checkpoint_every: steps between saves; 0 saves by ``checkpoint_minutes``, and at the end.
      checkpoint_minutes: most minutes between saves, by the clock of the first process; 0 saves by
        ``checkpoint_every``.
      hang_policy: what happens if a step takes ten times the median (`grpojax.host.watchdog`). Both print what each
        thread does. "warn" goes on; "stop" ends the run, which then resumes from its last save.
      keep: number of newest checkpoints that are kept. The one with the least held-out loss is kept as well.
      log_every: steps between lines on the console.
      max_skipped: the run stops after this many updates in a row whose gradient is not finite. Such an update changes
        nothing.
    """

    batch_size: int
    steps: int | None = None
    epochs: int | None = None
    seed: int = 0
    microbatches: int = 1
    eval_every: int = 0
    checkpoint_every: int = 0
    checkpoint_minutes: float = 10.0
    hang_policy: Literal["warn", "stop"] = "warn"
    keep: int = 2
    log_every: int = 1
    max_skipped: int = 5

    def __post_init__(self) -> None:
        counts = ("batch_size", "steps", "epochs", "microbatches", "keep", "log_every", "max_skipped")
        periods = ("eval_every", "checkpoint_every", "checkpoint_minutes")
        require(self, **dict.fromkeys(counts, "[1, inf)"), **dict.fromkeys(periods, "[0, inf)"))
        require(self, seed="[0, 2147483647]")
        if (self.steps is None) == (self.epochs is None):
            raise UserError(f"steps={self.steps}, epochs={self.epochs}: give one of them")

    def updates(self, entries: int) -> int:
        """Updates of the whole run on so many entries of the data."""
        return self.steps or math.ceil((self.epochs or 1) * entries / self.batch_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTTrainConfig(_LoopConfig):
    """The loop of ``grpojax sft``.

    Attributes:
      group: most answers of one prompt in an update. They share the prompt's forward pass. If a prompt has more
        answers, several updates learn from them.
      aggregate: "token_mean" weighs every token alike, "sequence_mean" every answer.
    """

    group: int = 8
    aggregate: Literal["token_mean", "sequence_mean"] = "token_mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, group="[1, inf)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOTrainConfig(_LoopConfig):
    """The loop of ``grpojax dpo``; ``batch_size`` counts pairs.

    Attributes:
      beta: how closely the policy is held to the model that it started from.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, beta="(0, inf)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Supervised:
    """A whole supervised run, as one YAML file describes it.

    Attributes:
      model: the policy: its weights, and how they run.
      data: the questions with their answers, and those to evaluate on.
      run: where the run writes its files.
      optimizer: the policy's optimiser and its schedule.
      tracking: what is logged besides the metrics.
      mesh: how the devices are divided.
      profile: which steps are traced.
      compile_cache: folder of compiled programs: "auto" is ``~/.cache/grpojax``, None keeps nothing.
    """

    model: ModelConfig
    data: AnsweredConfig
    run: RunConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    tracking: TrackingConfig = TrackingConfig()
    mesh: MeshConfig = MeshConfig()
    profile: ProfileConfig = ProfileConfig()
    compile_cache: str | None = "auto"

    def resolved(self) -> dict[str, Any]:
        """The recipe as plain data."""
        return settings.to_dict(self)

    def may_differ(self, name: str) -> bool:
        """Whether a run may be resumed with another value of the setting with this dotted name.

        That is so of settings that change only how a step is executed, and of the number of steps as long as the
        learning rate does not depend on it.
        """
        lasts = name in ("train.steps", "train.epochs") and self.optimizer.schedule == "constant"
        return name.startswith(EXECUTION) or lasts

    def _check(self, train: _LoopConfig) -> None:
        self.profile.check(train.steps)
        for name in ("samples", "texts_every"):
            value = getattr(self.tracking, name)
            if value != getattr(TrackingConfig, name):
                raise UserError(f"tracking.{name}={value!r}: nothing is sampled here; leave it out")
        if self.model.adapter is not None and not self.model.adapter.merged:
            raise UserError("model.adapter.merged=false: nothing is sampled here; leave it out")
        if train.eval_every and self.data.validation is None:
            raise UserError(f"train.eval_every={train.eval_every}: there is no data.validation to evaluate on")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTConfig(_Supervised):
    """The recipe of ``grpojax sft``.

    Attributes:
      train: length of the run, the loss, evaluations and checkpoints.
    """

    train: SFTTrainConfig

    def __post_init__(self) -> None:
        self._check(self.train)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOConfig(_Supervised):
    """The recipe of ``grpojax dpo``.

    Attributes:
      train: length of the run, the loss, evaluations and checkpoints.
    """

    train: DPOTrainConfig

    def __post_init__(self) -> None:
        self._check(self.train)


def load_sft(path: str | Path, overrides: Iterable[str] = ()) -> SFTConfig:
    """Reads a recipe; raises `UserError` for anything in it that is not right."""
    return settings.load(SFTConfig, path, overrides)


def load_dpo(path: str | Path, overrides: Iterable[str] = ()) -> DPOConfig:
    """As `load_sft`."""
    return settings.load(DPOConfig, path, overrides)
