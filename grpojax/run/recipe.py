"""The config of a run: one section for each module, each section that module's own frozen dataclass."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from grpojax import variants
from grpojax.advantages import Signals
from grpojax.data.problems import DataConfig
from grpojax.evaluation import EvaluateConfig, judge_of
from grpojax.host import settings
from grpojax.host.errors import UserError
from grpojax.models.sharding import MeshConfig
from grpojax.programs.sampler import SamplerConfig
from grpojax.programs.update import OptimizerConfig
from grpojax.records.metrics import TrackingConfig
from grpojax.rewards import RewardConfig, RewardsConfig

# What the trainer gives to variants beyond rewards, lengths, tokens and log-probs (`variants.NEEDS`).
SUPPLIED = ("displacement_weights", "entropy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy, and how it is run.

    Attributes:
      path: a Hugging Face folder; ``builtin:tiny`` is the one in the package.
      dtype: of activations and of the weights while they multiply. Master weights are always float32.
      remat: "layer" recomputes each layer in the backward pass, "matmuls" all of it but the products with weights,
        "none" keeps its activations.
      attention: "auto" picks by platform; "xla", "splash" (TPU), "cudnn" (NVIDIA, bfloat16).
    """

    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["layer", "matmuls", "none"] = "layer"
    attention: Literal["auto", "xla", "splash", "cudnn"] = "auto"

    def __post_init__(self):
        if self.attention == "cudnn" and self.dtype == "float32":
            raise UserError("attention='cudnn' needs dtype: bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig(SamplerConfig):
    """What a step samples: ``prompts`` prompts with ``group`` samples each (`SamplerConfig` for the rest).

    Training samples from the whole distribution at a temperature over 0: with tokens cut off, or a point mass, the
    ratio to the policy's own log-probs would be off by the mass that was cut.
    """

    prompts: int = 8

    def __post_init__(self):
        super().__post_init__()
        if self.prompts < 1:
            raise UserError(f"prompts={self.prompts}: must be at least 1")
        if self.temperature == 0:
            raise UserError(
                "temperature=0.0: greedy samples of a prompt are all the same; train at a temperature over 0"
            )
        if self.truncates:
            raise UserError(
                "top_k, top_p and min_p cut off tokens, and the policy's log-probs would not be those of the samples; "
                "train with top_k=0, top_p=1, min_p=0"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop.

    Attributes:
      steps: rollouts of the whole run.
      seed: of the data's order and of all draws.
      iterations: passes over each rollout.
      minibatches: updates in a pass, each on its share of the prompts.
      microbatches: parts that an update takes one after the other, to save memory; the gradient is the same.
      eval_every: steps between evaluations; 0 evaluates only before and after.
      eval_limit: problems evaluated at most.
      eval_samples: completions of each; over 1, metrics have pass@n and maj@n too where there is a judge.
      eval_temperature: 0 is greedy.
      checkpoint_every: steps between saves; 0 saves only at the end.
      keep: newest checkpoints kept (the best by eval/reward stays too).
      log_every: steps between lines on the console.
      max_skipped: updates in a row whose gradient is not finite, and that so change nothing, before the run stops.
    """

    steps: int
    seed: int = 0
    iterations: int = 1
    minibatches: int = 1
    microbatches: int = 1
    eval_every: int = 0
    eval_limit: int = 256
    eval_samples: int = 1
    eval_temperature: float = 0.0
    checkpoint_every: int = 0
    keep: int = 2
    log_every: int = 1
    max_skipped: int = 5

    def __post_init__(self):
        for name, least in {
            "steps": 1, "seed": 0, "iterations": 1, "minibatches": 1, "microbatches": 1, "eval_every": 0,
            "eval_limit": 1, "eval_samples": 1, "eval_temperature": 0, "checkpoint_every": 0, "keep": 1, "log_every": 1,
            "max_skipped": 1,
        }.items():  # fmt: skip
            if getattr(self, name) < least:
                raise UserError(f"{name}={getattr(self, name)}: must be at least {least}")
        if self.seed >= 2**31:
            raise UserError(f"seed={self.seed}: must be under 2^31")
        if self.eval_samples > 1000:
            raise UserError(f"eval_samples={self.eval_samples}: must be at most 1000")
        if self.eval_samples > 1 and self.eval_temperature == 0:
            raise UserError(
                f"eval_samples={self.eval_samples} would all be the same at eval_temperature=0; give it one over 0"
            )

    @property
    def updates_a_rollout(self) -> int:
        """Optimiser updates of a step. With one, the ratio is exactly 1."""
        return self.iterations * self.minibatches

    @property
    def updates(self) -> int:
        """Optimiser updates in the whole run."""
        return self.steps * self.updates_a_rollout


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """Dynamic sampling (DAPO, arXiv 2503.14476): groups that teach nothing are dropped, and others sampled instead.

    Attributes:
      metric: the reward that decides; None takes the first of the list. A group stays if its samples differ in it, or
        as the variant says if it has a filter of its own. Other rewards keep no group: a format bonus varies in
        groups that are all wrong.
      max_rollouts: rollouts of a step at most. What is missing after the last is filled up with dropped groups, which
        then weigh nothing.
      success: the reward from which on a sample passes, for a variant with a filter of its own; None is 1.
    """

    metric: str | None = None
    max_rollouts: int = 3
    success: float | None = None

    def __post_init__(self):
        if self.max_rollouts < 1:
            raise UserError(f"max_rollouts={self.max_rollouts}: must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run keeps what it writes."""

    dir: str


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
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    tracking: TrackingConfig = TrackingConfig()
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self):
        variant = self.make_variant()
        self.make_filter()
        self._check_variant(variant)
        judge_of(self.make_rewards(), self.evaluate.judge)
        if self.rollout.prompts % self.train.minibatches:
            raise UserError(
                f"train.minibatches={self.train.minibatches} does not divide rollout.prompts={self.rollout.prompts}"
            )

    def make_rewards(self) -> RewardsConfig:
        """The rewards; a bare list has the defaults of `RewardsConfig` for the rest."""
        if isinstance(self.rewards, RewardsConfig):
            return self.rewards
        try:
            return RewardsConfig(terms=self.rewards)
        except ValueError as e:
            raise UserError(f"rewards: {e}") from None

    def make_filter(self) -> FilterConfig | None:
        """Dynamic sampling; None without. A variant may bring it along."""
        names, own = [term.metric for term in self.make_rewards().terms], self.make_variant().keep is not None
        if self.filter == "none" or (self.filter == "auto" and not own):
            return None
        given = self.filter if isinstance(self.filter, FilterConfig) else FilterConfig()
        if given.metric is not None and given.metric not in names:
            raise UserError(f"filter.metric={given.metric!r} is no reward of the run; they are {', '.join(names)}")
        if given.success is not None and not own:
            raise UserError(
                f"filter.success={given.success:g}: this variant has no filter of its own; groups whose rewards differ stay"
            )
        return given

    @property
    def deciding_reward(self) -> str:
        """The reward that says whether a sample succeeded: the filter's metric, or the first of the list."""
        given = self.make_filter()
        named = given.metric if given is not None else None
        return named or self.make_rewards().terms[0].metric

    def _check_variant(self, variant: variants.Variant) -> None:
        """Raises `UserError` where the variant does not go with the rest of the recipe."""
        names = [term.name for term in self.make_rewards().terms]
        if self._variant_options().get("overlong_limit") and "soft_overlong" in names:
            raise UserError(
                f"variant {variant.name!r} punishes overlong samples, and so does the reward soft_overlong: leave the "
                "reward out, or set variant.overlong_limit and variant.overlong_buffer to null"
            )
        if variant.objective.needs_displacement_weights and self.train.updates_a_rollout == 1:
            raise UserError(
                "variant.llds_coef acts from the second update of a rollout on: raise train.iterations or "
                "train.minibatches over 1, or set it to 0"
            )
        rewards = np.zeros((2, self.rollout.group), np.float32)
        tokens = np.zeros((2, self.rollout.group, 3), np.float32)
        signals = Signals(
            lengths=rewards.astype(np.int32), mask=tokens > 0, behavior_logps=tokens, ref_logps=tokens, entropy=tokens,
            tokens=tokens.astype(np.int32),
        )  # fmt: skip
        try:  # such as pass@k with k over the group
            jax.eval_shape(variant.advantage, rewards, signals)
        except ValueError as e:
            raise UserError(f"variant {variant.name!r} with rollout.group={self.rollout.group}: {e}") from None

    def _variant_options(self) -> dict[str, Any]:
        """The variant's name and its overrides; what depends on the run's lengths is filled in from them."""
        given: dict[str, Any] = {"name": self.variant} if isinstance(self.variant, str) else dict(self.variant)
        name, longest = given.get("name"), self.rollout.max_tokens
        if not isinstance(name, str):
            raise UserError("variant: give a name, as in `variant: grpo` or `variant: {name: grpo, clip_high: 0.28}`")
        try:
            parameters = variants.parameters(name)
        except ValueError as e:
            raise UserError(f"variant: {e}") from None
        if given.get("aggregate", parameters["aggregate"]) == "constant":
            given.setdefault("constant", float(longest))
        elif parameters["constant"] is inspect.Parameter.empty:
            given.setdefault("constant", None)
        if "overlong_limit" in parameters and not {"overlong_limit", "overlong_buffer"} & given.keys():
            given |= {"overlong_limit": longest, "overlong_buffer": max(longest // 5, 1)}
        limit = given.get("overlong_limit")
        if isinstance(limit, int) and limit > longest:
            raise UserError(
                f"variant.overlong_limit={limit} is never reached: samples end at rollout.max_tokens={longest}"
            )
        return given

    def make_variant(self) -> variants.Variant:
        """The variant with its overrides. From ``rollout.max_tokens`` come, where they are not given, the divisor of
        ``aggregate: constant``, and DAPO's overlong_limit with a fifth of it as overlong_buffer."""
        given = self._variant_options()
        name = given.pop("name")
        section = dataclasses.make_dataclass("VariantConfig", variants.annotations(name), frozen=True)
        section = settings.build(dataclasses.make_dataclass("Root", [("variant", section)]), {"variant": given}).variant
        try:
            variant = variants.get(name, **dataclasses.asdict(section))
        except ValueError as e:
            raise UserError(f"variant: {e}") from None
        try:
            variants.check_needs(variant, SUPPLIED)
        except ValueError as e:
            raise UserError(f"{e}: the trainer does not have that yet") from None
        return variant


def load(path: str | Path, overrides=()) -> Config:
    """Reads a recipe; raises `UserError` for anything in it that is not right."""
    return settings.load(Config, path, overrides)
