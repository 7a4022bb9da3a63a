"""The sections of a recipe that are the loop's own; the others are their modules'."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from grpojax import extension
from grpojax.host.errors import UserError, require
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.run import exclusions

if TYPE_CHECKING:
    AllocationConfig = CurriculumConfig = Any
else:
    AllocationConfig = extension.section("rollout.sample_allocation")
    CurriculumConfig = extension.section("rollout.curriculum")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetireConfig:
    """Solved prompts are left out of later passes over the data (`grpojax.run.problem_order`).

    This is the experiment "culling" (`grpojax.variants`), and the no-positive resampling of ScaleRL (arXiv 2510.13786).

    Attributes:
      share: share of a prompt's samples that must pass for it to be solved. None takes the variant's: 1 for culling,
        0.9 for ScaleRL.
      success: a sample passes if its reward is at least this. None takes ``filter.success``, or 1 if rewards are 0 and
        1. A graded reward needs one of the two.
      readmit_after: passes over the data that leave a solved prompt out; None leaves it out of all of them.
    """

    share: float | None = None
    success: float | None = None
    readmit_after: int | None = None

    def __post_init__(self) -> None:
        if self.share is not None:
            require(self, share="(0, 1]")
        if self.readmit_after is not None:
            require(self, readmit_after="[1, inf)")


@dataclasses.dataclass(frozen=True, kw_only=True)
@extension.with_sections("rollout")
class RolloutConfig(SamplerConfig):
    """What a step samples: ``prompts`` prompts with ``group`` samples each (`SamplerConfig` has the other keys).

    Training draws from the whole distribution, at a temperature over 0. With tokens cut off, or with greedy samples,
    the ratio to the policy's own log-probs would be wrong by the probability that was cut off.

    Attributes:
      prompts: prompts of a step, P, over all devices.
      weights: weights that draw the samples: "compute" uses the policy's weights in ``model.dtype``, "int8" rounds the
        matrices to eight bits. ``cache_dtype: int8`` does the same with keys and values.
        Then the samples do not come from the policy that learns, and the objective must correct for it: set
        ``variant.importance`` or ``variant.ratio_denominator: sampler``, or else ``uncorrected``. Evaluations use the
        policy's own weights, and greedy completions use no eight-bit cache.
      uncorrected: treat samples of eight-bit weights or caches as the policy's own, without a correction. Only with
        ``weights: int8`` or ``cache_dtype: int8``.
      ahead: 1 draws the next rollout while this step learns. It uses the weights from before this step's updates, so
        its samples are one step older, and ``retire`` and ``curriculum`` react one rollout later. 0 draws each rollout
        with the newest weights.
      max_turn_tokens: most tokens of a turn of an episode; ``max_tokens`` are those of all its turns and answers. 0
        sets no limit besides that. Only with ``environment``.
      overlap: over 0, a rollout ends as soon as at most this share of each batch shard's samples is unfinished and one
        group is complete. Unfinished groups go on in the next rollout. They are learned from once they are complete,
        with tokens of several versions of the policy. Not with ``decode_slots``.
      retire: leave out prompts that are solved. None leaves that to the variant. Not with ``curriculum``.
      sample_allocation: how a variant that allocates samples (xrpo) does it. Any other variant refuses it.
      curriculum: draw problems by their level. Not with ``retire``.
      no_end: for a model without a token that ends a sample: every sample gets ``max_tokens``. Such a model is refused
        otherwise.
    """

    prompts: int = 8
    weights: Literal["compute", "int8"] = "compute"
    uncorrected: bool = False
    ahead: int = 0
    max_turn_tokens: int = 0
    overlap: float = 0.0
    retire: RetireConfig | None = None
    sample_allocation: AllocationConfig | None = None
    curriculum: CurriculumConfig | None = None
    no_end: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, prompts="[1, inf)", ahead="[0, 1]", overlap="[0, 1)", max_turn_tokens="[0, inf)")
        exclusions.check("rollout", self)
        if self.temperature == 0:
            raise UserError(
                "temperature=0.0: greedy samples of a prompt are all the same; train at a temperature over 0"
            )
        if self.truncates:
            raise UserError(
                "top_k, top_p and min_p cut off tokens, and the policy's log-probs would not be those of the samples; "
                "train with top_k=0, top_p=1, min_p=0"
            )

    @property
    def eight_bits(self) -> tuple[str, ...]:
        """The settings by which samples are not of the policy that learns."""
        return tuple(f"rollout.{name}=int8" for name in ("weights", "cache_dtype") if getattr(self, name) == "int8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop: its length, its updates, evaluations and checkpoints.

    Attributes:
      steps: length of the run in steps, each of which learns from one rollout. Give this or ``tokens``.
      tokens: length of the run in sampled tokens: it ends with the step that reaches this number. Every sampled token
        counts, also those of greedy completions and of groups that a filter drops. Schedules follow the share of the
        tokens that is used. This compares methods at equal cost if they draw more in a step, or longer samples.
      seed: seed of the data's order and of all sampling.
      ppo_epochs: passes over each rollout.
      minibatches: updates of a pass, each on its share of the prompts. Must divide ``rollout.prompts``.
      microbatches: parts of an update that are computed one after the other, to save memory; the gradient is the same.
      truncated: what happens with a sample that was cut at ``rollout.max_tokens``: "train" learns from it like from any
        other, "mask" gives it weight 0 in the loss (DAPO's overlong filtering, arXiv 2503.14476), "drop" also leaves it
        out of its group's statistics.
      skip_zero_advantage: leave samples whose advantages are all 0 out of an update. The gradient is the same but for
        rounding, and the update costs only the other samples' tokens. The update's metrics (entropy, ratios) are of
        these other samples. Not with an objective in which samples with advantage 0 have a gradient, nor where all
        samples are scored before the update.
      balance_coef: weight of the load-balance loss of a policy with experts.
      reference_every: steps between refreshes of the KL's reference; 0 keeps the model that the run started from.
        Needs ``variant.kl_coef`` over 0.
      reference_mix: a refresh sets the reference to ``mix * policy + (1 - mix) * reference``. Only with
        ``reference_every`` over 0.
      eval_every: steps between evaluations; 0 evaluates only before the first step and after the last one.
      eval_limit: most problems of an evaluation.
      eval_samples: completions of each problem. Over 1, there are also pass@n and maj@n, and accuracy is that of all
        samples. Needs ``eval_temperature`` over 0.
      eval_temperature: temperature of evaluations; 0 is greedy.
      checkpoint_every: steps between saves; 0 saves by ``checkpoint_minutes``, and at the end.
      checkpoint_minutes: most minutes between saves, by the clock of the first process; 0 saves by
        ``checkpoint_every``.
      hang_policy: what happens if a step takes ten times the median (`grpojax.host.watchdog`). Both print what each
        thread does. "warn" goes on; "stop" ends the run, which then resumes from its last save.
      keep: number of newest checkpoints that are kept. The best one by held-out reward and one from before an alarm are
        kept as well.
      log_every: steps between lines on the console.
      max_skipped: the run stops after this many updates in a row whose gradient is not finite. Such an update changes
        nothing.
      on_collapse: what an alarm (`grpojax.run.watch`) does: "warn" goes on, "stop" saves the state and ends the run.
        Either way the best checkpoint from before the alarm is kept, or else the newest one.
    """

    steps: int | None = None
    tokens: int | None = None
    seed: int = 0
    ppo_epochs: int = 1
    minibatches: int = 1
    microbatches: int = 1
    truncated: Literal["train", "mask", "drop"] = "train"
    skip_zero_advantage: bool = False
    balance_coef: float = 0.0
    reference_every: int = 0
    reference_mix: float = 0.6
    eval_every: int = 0
    eval_limit: int = 256
    eval_samples: int = 1
    eval_temperature: float = 0.0
    checkpoint_every: int = 0
    checkpoint_minutes: float = 10.0
    hang_policy: Literal["warn", "stop"] = "warn"
    keep: int = 2
    log_every: int = 1
    max_skipped: int = 5
    on_collapse: Literal["warn", "stop"] = "warn"

    def __post_init__(self) -> None:
        counts = (
            "steps",
            "tokens",
            "ppo_epochs",
            "minibatches",
            "microbatches",
            "eval_limit",
            "keep",
            "log_every",
            "max_skipped",
        )
        periods = (
            "balance_coef",
            "reference_every",
            "eval_every",
            "checkpoint_every",
            "checkpoint_minutes",
            "eval_temperature",
        )
        require(self, **dict.fromkeys(counts, "[1, inf)"), **dict.fromkeys(periods, "[0, inf)"))
        require(self, seed="[0, 2147483647]", reference_mix="(0, 1]", eval_samples="[1, 1000]")
        exclusions.check("train", self)

    @property
    def updates_a_rollout(self) -> int:
        """Optimiser updates of a step. With one, the ratio is exactly 1."""
        return self.ppo_epochs * self.minibatches

    @property
    def updates(self) -> int | None:
        """Optimiser updates in the whole run; None where it ends by tokens."""
        return None if self.steps is None else self.steps * self.updates_a_rollout

    def done(self, steps: int, tokens: int) -> float:
        """The share of the run that so many steps with so many sampled tokens are; 1 and over is the whole.

        Example:
          >>> TrainConfig(tokens=1000).done(3, 250), TrainConfig(steps=4).done(3, 250)
          (0.25, 0.75)
        """
        return steps / self.steps if self.steps is not None else tokens / (self.tokens or 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """Dynamic sampling (DAPO, arXiv 2503.14476): groups that teach nothing are dropped, and others sampled instead.

    Attributes:
      metric: name of the reward that decides; None takes the first with a weight. A group stays if its samples differ
        in this reward. A variant with a filter of its own may decide otherwise. Other rewards keep no group: a format
        bonus varies also in groups that are all wrong.
      max_rollouts: most rollouts of a step, the first included. If groups are missing after the last one, dropped
        groups with weight 0 take their place. None takes 3, or 1 for a variant that leaves groups out without drawing
        others (`grpojax.variants.Variant.resample`), such as scale_rl.
      success: a sample passes if its reward is at least this. Only for a variant with a filter of its own. None leaves
        a graded reward as it is, and takes 1 where a filter asks whether a sample passes.
    """

    metric: str | None = None
    max_rollouts: int | None = None
    success: float | None = None

    def __post_init__(self) -> None:
        require(self, max_rollouts="[1, inf)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run writes its files.

    Attributes:
      dir: the run directory: a folder, or ``gs://bucket/path``.
    """

    dir: str
