"""The config of a run: one section for each module, each section that module's own frozen dataclass."""

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from grpojax.data import DataConfig
from grpojax.evaluation import EvaluateConfig, judge_of
from grpojax.host import settings
from grpojax.host.errors import UserError
from grpojax.models.compute import ModelConfig
from grpojax.models.sharding import MeshConfig
from grpojax.programs.optimizer import OptimizerConfig
from grpojax.records.metrics import TrackingConfig
from grpojax.rewards import RewardConfig, RewardsConfig
from grpojax.run import method
from grpojax.run.sections import FilterConfig, RolloutConfig, RunConfig, TrainConfig

# Settings, or beginnings of their names, that change how a run is executed and recorded but not what it computes.
EXECUTION = (
    "run.",
    "mesh.",
    "tracking.",
    "evaluate",
    "model.remat",
    "model.attention",
    "rollout.slots",
    "train.microbatches",
    "train.eval_",
    "train.checkpoint_every",
    "train.keep",
    "train.log_every",
    "train.max_skipped",
    "rewards.workers",
    "rewards.timeout_s",
    "rewards.memory_mb",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run, as one YAML file describes it."""

    model: ModelConfig
    data: DataConfig
    rewards: tuple[RewardConfig, ...] | RewardsConfig
    rollout: RolloutConfig
    train: TrainConfig
    run: RunConfig
    variant: str | dict[str, Any] = "grpo"
    filter: FilterConfig | Literal["auto", "none"] = "auto"  # "auto" is the variant's own, if it has one
    evaluate: EvaluateConfig = EvaluateConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    tracking: TrackingConfig = TrackingConfig()
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self) -> None:
        judge_of(self.method.rewards, self.evaluate.judge)
        if self.rollout.prompts % self.train.minibatches:
            raise UserError(
                f"train.minibatches={self.train.minibatches} does not divide rollout.prompts={self.rollout.prompts}"
            )

    @functools.cached_property
    def method(self) -> method.Method:
        """Variant, rewards and filter, resolved."""
        return method.resolve(self.variant, self.rewards, self.filter, self.rollout, self.train)

    def resolved(self) -> dict[str, Any]:
        """The recipe as plain data, in which what can be written in two ways is written in one."""
        name = {"name": self.variant} if isinstance(self.variant, str) else self.variant
        return settings.to_dict(dataclasses.replace(self, variant=name, rewards=self.method.rewards))

    def may_differ(self, name: str) -> bool:
        """Whether a run may be resumed with another value of the setting with this dotted name.

        That is so of settings that change only how a step is executed, and of the number of steps as long as the
        learning rate does not depend on it.
        """
        return name.startswith(EXECUTION) or (name == "train.steps" and self.optimizer.schedule == "constant")


def load(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Reads a recipe; raises `UserError` for anything in it that is not right."""
    return settings.load(Config, path, overrides)
