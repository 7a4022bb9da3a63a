"""The sections of a recipe that these needs and ways to draw have."""

import dataclasses
from typing import Literal

from grpojax.host.errors import UserError, require
from grpojax.programs.optimizer_config import OptimizerConfig
from grpojax.run import exclusions


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """Problems are drawn by level, and levels that are solved about half the time most often.

    Attributes:
      floor: share of the prompts that is spread evenly over all levels, so that every level is drawn.
      memory: weight of a level's earlier solve rate against its rate in the newest rollout. A run starts at a rate of
        1/2.
      success: a sample passes if its reward is at least this; None is for rewards of 0 and 1.
    """

    floor: float = 0.2
    memory: float = 0.8
    success: float | None = None

    def __post_init__(self) -> None:
        require(self, floor="(0, 1]", memory="[0, 1)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllocationConfig:
    """XRPO's allocation (arXiv 2510.06672): some samples for every prompt, then more where they tell most.

    A step draws ``prompts`` times ``group`` samples, as without it, but prompts get different numbers of them
    (`grpojax.allocation.xrpo_allocate`).

    With ``exemplars``, a prompt whose first samples all fail gets its other samples with solved problems in context.
    The paper shows 2, which it finds by another model's embeddings. Here they are found by the tokens that prompts
    share, and the default is 0.

    Attributes:
      probe: samples that every prompt gets first; 0 takes half of the group.
      phases: number of times that the remaining samples are planned, each time an equal part of them.
      most: most samples of a prompt; 0 takes twice the group.
      bonus: weight of exploration.
      confidence: confidence level of the interval of a prompt's mean reward, such as 0.95.
      exemplars: most solved problems that are shown before a prompt; 0 for none.
      pool: number of solved problems, the newest ones, that exemplars are chosen from. Only with ``exemplars``.
      success: a sample passes if its reward is at least this; None is for rewards of 0 and 1. Only with ``exemplars``.
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

    def resolved(self, prompts: int, group: int) -> "AllocationConfig":
        """With every value that follows from a rollout's prompts and group; raises `UserError` where they do not go
        together."""
        plan = dataclasses.replace(self, probe=self.probe or group // 2, most=self.most or 2 * group)
        if not 1 <= plan.probe < group:
            raise UserError(
                f"rollout.sample_allocation.probe={plan.probe}: must be at least 1 and under rollout.group={group}"
            )
        if plan.most < group:
            raise UserError(
                f"rollout.sample_allocation.most={plan.most}: must be at least rollout.group={group}, or some "
                "samples have no prompt"
            )
        rest = prompts * (group - plan.probe)
        if rest % plan.phases:
            raise UserError(
                f"rollout.sample_allocation.phases={plan.phases} does not divide the {rest} samples that are left "
                "after the probe"
            )
        return plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticOptimizer(OptimizerConfig):
    """`OptimizerConfig` with a higher default rate, since a head that starts at 0 has farther to go than a policy."""

    learning_rate: float = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic of a variant that has one. It runs as the policy does (``model.dtype``, ``model.remat``).

    Attributes:
      path: folder with the weights that the trunk starts from. It must have the policy's tokenizer. If
        ``grpojax export`` wrote it, the head is read too. None starts from the policy's weights at the start of the
        run. Not with ``layers``.
      layers: number of layers of a trunk with random weights and the policy's other sizes; None for no such trunk.
        Not with ``path``.
      seed: seed of the random weights. Only with ``layers``.
      trunk: "trained" trains trunk and head, "frozen" only the head. Random weights cannot be frozen.
      optimizer: the critic's own optimiser.
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
