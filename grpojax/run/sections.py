"""The sections of a recipe that are the loop's own; the others are their modules'."""

import dataclasses
from typing import Literal

from grpojax.host.errors import UserError, require
from grpojax.programs.optimizer import OptimizerConfig
from grpojax.programs.sampler import SamplerConfig
from grpojax.run import exclusions


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetireConfig:
    """Prompts that are solved are left out of the passes over the data that begin later (`grpojax.run.curriculum`).

    The third of the experiments in `grpojax.variants` ("culling"), and no-positive resampling (ScaleRL, arXiv
    2510.13786).

    Attributes:
      share: of a prompt's samples that must pass. None is the variant's own: 1 for culling, 0.9 for ScaleRL.
      success: the reward from which on a sample passes; None takes ``filter.success``, or for a reward of 0 and 1 that
        of 1. A graded one is refused without.
      readmit_after: passes that a solved prompt is left out of; None for all.
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
class CurriculumConfig:
    """Problems are drawn by their levels, more of those that are solved about half the time (`grpojax.data.shares`).

    Attributes:
      floor: share of the prompts that is spread evenly over all levels, so that none is lost sight of.
      memory: weight of a level's solve rate so far against that of its samples in a rollout. A run begins with 1/2.
      success: the reward from which on a sample passes; None is for a reward of 0 and 1.
    """

    floor: float = 0.2
    memory: float = 0.8
    success: float | None = None

    def __post_init__(self) -> None:
        require(self, floor="(0, 1]", memory="[0, 1)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllocationConfig:
    """XRPO's plan of a rollout (arXiv 2510.06672): some samples of every prompt, then more where they tell most.

    A step draws as many samples as without it, ``prompts`` times ``group``; how many a prompt gets differs
    (`grpojax.allocation.xrpo_allocate`).

    With ``exemplars``, a prompt whose probe fails as a whole gets the rest of its samples with solved problems in
    context (`grpojax.run.sources.allocated`). The paper has 2, found by another model's embeddings; it is off unless
    asked for, since here they are found by the tokens that prompts share.

    Attributes:
      probe: samples that every prompt gets first; 0 takes half of the group.
      phases: how often the rest is planned, each time for an equal part of it.
      most: samples that a prompt gets at most; 0 takes twice the group.
      bonus: weight of exploration.
      confidence: of the interval of a prompt's mean reward.
      exemplars: solved problems shown before a prompt at most; 0 for none.
      pool: solved problems to choose them from, the newest ones.
      success: the reward from which on a sample passes, for ``exemplars``; None is for a reward of 0 and 1.
    """

    probe: int = 0
    phases: int = 2
    most: int = 0
    bonus: float = 1.0
    confidence: float = 0.95
    exemplars: int = 0
    pool: int = 512
    success: float | None = None

    def __post_init__(self) -> None:
        require(self, probe="[0, inf)", phases="[1, inf)", most="[0, inf)", bonus="[0, inf)", confidence="(0, 1)")
        require(self, exemplars="[0, inf)", pool="[1, inf)")
        for name in ("pool", "success"):
            if not self.exemplars and getattr(self, name) != getattr(type(self), name):
                raise UserError(f"{name}={getattr(self, name)}: goes with exemplars over 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig(SamplerConfig):
    """What a step samples: ``prompts`` prompts with ``group`` samples each (`SamplerConfig` for the rest).

    ``ahead`` of 1 draws the next rollout while a step learns from the one before it: under the weights as they are
    before the step's updates, so that its samples are a step old when they are learned from
    (`grpojax.run.sources.ahead`). What follows from results (``retire``, ``curriculum``) then follows one rollout
    later. 0 draws each under the newest weights.

    ``overlap`` over 0 ends a rollout as soon as in every batch shard at most this share of its samples want another
    token, and one group is whole. Groups with such samples go on in the next rollout and are learned from once they are
    whole, their samples' tokens then of several versions of the policy (`grpojax.run.sources.partial`).

    ``retire`` has any variant leave out prompts that are solved, or changes how one does; None leaves that to the
    variant. ``sample_allocation`` is for a variant that allocates its samples (xrpo). ``curriculum`` draws problems by
    their levels, and so does not go with ``retire``.

    ``weights`` are those that samples are drawn with: "compute" the policy's in ``model.dtype``, "int8" with matrices
    in eight bits (`grpojax.models.quantised`); ``cache_dtype: int8`` has keys and values so. Samples are then not of
    the policy that learns, and the objective must correct for it, by ``variant.importance`` or
    ``variant.ratio_denominator: sampler``, unless ``uncorrected`` has it take them for the policy's own. Evaluation is
    of the policy itself, and no greedy completion reads keys and values of eight bits.

    ``no_end`` is for a model without a token that ends a sample: every sample then has ``max_tokens``. Without it such
    a model is refused.

    Training samples from the whole distribution at a temperature over 0: with tokens cut off, or a point mass, the
    ratio to the policy's own log-probs would be off by the mass that was cut.
    """

    prompts: int = 8
    weights: Literal["compute", "int8"] = "compute"
    uncorrected: bool = False
    ahead: int = 0
    overlap: float = 0.0
    retire: RetireConfig | None = None
    sample_allocation: AllocationConfig | None = None
    curriculum: CurriculumConfig | None = None
    no_end: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, prompts="[1, inf)", ahead="[0, 1]", overlap="[0, 1)")
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
    """The loop.

    Attributes:
      steps: rollouts of the whole run; give these or tokens.
      tokens: the run ends with the step that reaches so many sampled tokens: of all that was drawn, what a filter drops
        and greedy completions included. Schedules then follow the share of them that is used. Methods that draw more a
        step, or longer samples, so are compared at equal cost.
      seed: of the data's order and of all draws.
      ppo_epochs: passes over each rollout.
      minibatches: updates in a pass, each on its share of the prompts.
      microbatches: parts that an update takes one after the other, to save memory; the gradient is the same.
      truncated: what a sample that was cut at ``rollout.max_tokens`` does: "train" like any other, "mask" for weight 0
        in the loss (DAPO's overlong filtering, arXiv 2503.14476), "drop" to be in no statistic of its group either.
      skip_zero_advantage: leave samples whose advantages are all 0 out of an update: the gradient is the same but
        for rounding, and costs what the others' tokens cost. The update's metrics (entropy, ratios) are only of these.
        For objectives by which they have no gradient, where nothing is scored before the update.
      reference_every: steps between refreshes of the KL's reference; 0 leaves it what the run started from.
      reference_mix: a refresh makes it ``mix * policy + (1 - mix) * reference``.
      eval_every: steps between evaluations; 0 evaluates only before and after.
      eval_limit: problems evaluated at most.
      eval_samples: completions of each; over 1, metrics have pass@n and maj@n too, and accuracy is that of all samples.
      eval_temperature: 0 is greedy.
      checkpoint_every: steps between saves; 0 leaves it to the clock, and to the end.
      checkpoint_minutes: most minutes between saves, by the clock of the first process; 0 leaves it to the steps.
      hang_policy: what is done about a step that takes ten times the median (`grpojax.host.watchdog`), besides
        printing what each thread does: "warn", or "stop" the run, which goes on from its last save.
      keep: newest checkpoints kept (the best by held-out reward stays too, and one from before an alarm).
      log_every: steps between lines on the console.
      max_skipped: updates in a row whose gradient is not finite, and that so change nothing, before the run stops.
      on_collapse: what an alarm (`grpojax.run.watch`) does: "warn", or "stop" the run with its state saved. Either way
        the best checkpoint from before it stays, or else the newest.
    """

    steps: int | None = None
    tokens: int | None = None
    seed: int = 0
    ppo_epochs: int = 1
    minibatches: int = 1
    microbatches: int = 1
    truncated: Literal["train", "mask", "drop"] = "train"
    skip_zero_advantage: bool = False
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
        periods = ("reference_every", "eval_every", "checkpoint_every", "checkpoint_minutes", "eval_temperature")
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
class CriticOptimizer(OptimizerConfig):
    """`OptimizerConfig` with another default: a head that starts at 0 has farther to go than a policy."""

    learning_rate: float = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic of a variant that has one. It runs as the policy does (``model.dtype``, ``model.remat``).

    Attributes:
      path: the folder that its trunk starts from, with the policy's tokenizer and, if it was exported by
        ``grpojax export``, its head; None for the policy's own weights at the start of the run.
      layers: a trunk with random weights and so many layers of the policy's shape, in place of either; None for none.
      seed: of the random weights.
      trunk: "trained" with the head, or "frozen": its weights stay as they are, and only the head learns.
      optimizer: its own.
      warmup_steps: steps at the start in which only the critic learns.
    """

    path: str | None = None
    layers: int | None = None
    seed: int = 0
    trunk: Literal["trained", "frozen"] = "trained"
    optimizer: CriticOptimizer = CriticOptimizer()
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        require(self, layers="[1, inf)", seed="[0, 2147483647]", warmup_steps="[0, inf)")
        exclusions.check("critic", self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """Dynamic sampling (DAPO, arXiv 2503.14476): groups that teach nothing are dropped, and others sampled instead.

    Attributes:
      metric: the reward that decides; None takes the first of the list. A group stays if its samples differ in it, or
        as the variant says if it has a filter of its own. Other rewards keep no group: a format bonus varies in
        groups that are all wrong.
      max_rollouts: rollouts of a step at most. What is missing after the last is filled up with dropped groups, which
        then weigh nothing. None takes 3, or 1 for a variant that leaves groups out without drawing others
        (`grpojax.variants.Variant.resample`), such as scale_rl.
      success: the reward from which on a sample passes, for a variant with a filter of its own; None leaves a graded
        reward graded, and for what asks for a pass it is 1.
    """

    metric: str | None = None
    max_rollouts: int | None = None
    success: float | None = None

    def __post_init__(self) -> None:
        require(self, max_rollouts="[1, inf)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run keeps what it writes."""

    dir: str
