"""The protocol of a part: one thing that a variant needs beyond samples, rewards and log-probs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from grpojax.programs.policy import Policy
from grpojax.programs.state import Network
from grpojax.run.batch import RolloutBatch
from grpojax.run.packed_batch import PackedBatch
from grpojax.run.programs import Programs
from grpojax.run.recipe import Config
from grpojax.types import Array, PerPrompt, Samples, Tokens

State = Mapping[str, Any]  # of a run, by role (`grpojax.run.learner.Learner`)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weighed:
    """A step's samples once they have advantages.

    Attributes:
      batch: with its rewards.
      counted: ``[P, G]`` the rewards, NaN where a sample does not count.
      mask: ``[P, G, T]`` bool, the tokens.
      live: ``[P, G, T]`` bool, those that an update counts.
      signals: fields of `grpojax.advantages.Signals`, of all parts.
      advantages: ``[P, G, T]``.
      places: of each minibatch's prompts in the batch, ``[p]``.
    """

    batch: RolloutBatch
    counted: Samples
    mask: Tokens
    live: Tokens
    signals: Mapping[str, Array]
    advantages: Tokens
    places: Sequence[PerPrompt]

    @property
    def learned(self) -> Tokens:
        """``[P, G, T]`` bool: the live tokens of groups that do not merely fill up the batch."""
        return self.live & ~self.batch.dropped[:, None, None]


class Part:
    """One thing that a variant needs. Its methods stand in the order in which they are called, and do nothing here.

    Args:
      config: the recipe.
      policy: the model; its weights are not to be kept.
      longest_prompt: most tokens of a prompt in the run.

    Raises:
      UserError: what the part needs is not there.

    Attributes:
      options: of the variant, which it must have (`grpojax.variants.Variant.options`).
      extra: what it signals that is no field of `grpojax.advantages.Signals`, by name, and the axes: "P", "P G" or
        "P G T". The variant reads it in ``signals.extra``.
      reads_gold: whether every problem must have its true answer.
      passes: how often the part scores a batch before its updates.
      compares: whether what it signals is compared with the policy's own log-probs, which are then a signal too.
    """

    options: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[Mapping[str, str]] = {}
    reads_gold: ClassVar[bool] = False
    passes = 0
    compares = False

    def __init__(self, config: Config, policy: Policy, *, longest_prompt: int):
        self.config, self.policy, self.longest_prompt = config, policy, longest_prompt
        self.method, self.variant = config.method, config.method.variant

    # Once a run.

    def learning(self) -> Mapping[str, Any]:
        """Fields of `grpojax.run.programs.Learning`: what the programs that it runs follow from."""
        return {}

    def open(self, programs: Programs, run: Callable[..., Any]) -> None:
        """Takes the run's programs.

        Args:
          programs: of the run.
          run: ``run(program, *args)`` calls one whose arguments are rows of minibatches; the first call compiles it for
            both of their sizes.
        """
        self.programs, self.run = programs, run

    def networks(self) -> dict[str, Network]:
        """What it adds to a checkpoint, by role."""
        return {}

    def start(self, params: Any, restored: State | None) -> dict[str, Any]:
        """The state that it adds, by role, but for what is restored.

        Args:
          params: the policy's weights.
          restored: the state of a checkpoint; None in a new run.
        """
        return {}

    # Once a step.

    def replace(self, state: State, batch: RolloutBatch) -> RolloutBatch:
        """The samples as they are learned from."""
        return batch

    def before(self, state: State, minis: Sequence[PackedBatch]) -> dict[str, Tokens]:
        """What needs no rewards: fields of `grpojax.advantages.Signals`. Arrays may be put into the rows."""
        return {}

    def after(self, state: State, batch: RolloutBatch, counted: Samples) -> tuple[dict[str, Array], dict[str, float]]:
        """What needs the rewards: fields of `grpojax.advantages.Signals`, and metrics of the step.

        Args:
          state: before the step's first update.
          batch: with its rewards.
          counted: ``[P, G]`` the rewards, NaN where a sample does not count.
        """
        return {}, {}

    def weigh(self, weighed: Weighed) -> tuple[Sequence[dict[str, Tokens]], dict[str, float]]:
        """Arrays ``[p, G, T]`` that go into the rows, by field of `grpojax.types.PerToken`, for each minibatch; and
        metrics of the step. Runs on the host."""
        return [{} for _ in weighed.places], {}

    def end_step(self, state: State, number: int) -> dict[str, Any]:
        """What of the state is another after the step, by role."""
        return {}

    def columns(self, signals: Mapping[str, Tokens]) -> dict[str, Tokens]:
        """Columns of the samples file, a number for each token: ``[P, G, T]`` by name, made of what `before` gave."""
        return {}

    def flops(self, batch: RolloutBatch) -> dict[str, float]:
        """Useful FLOPs of the step, by phase (`grpojax.run.work.step_flops`)."""
        return {}

    # At the end.

    def warning(self, done: int) -> str | None:
        """What a user should know of a run that ended after ``done`` steps."""
        return None


class LearningPart(Part):
    """A part with a network that learns beside the policy, in one program with it (`make_joint_update`).

    Attributes:
      role: of the network in the run's state.
      update: ``(state, frozen, packed) -> (state, metrics)``, in which it learns alone; set by `open`.
    """

    role: ClassVar[str]
    update: Callable[..., Any]

    def frozen(self, state: State) -> dict[str, Any]:
        """What its loss reads of the state and nothing changes, by role."""
        return {}

    def learns_alone(self, number: int) -> bool:
        """Whether the policy is left as it is in the step of that number."""
        return False


def mean(values: np.ndarray) -> float:
    """In float64; NaN of none."""
    return float(values.astype(np.float64).mean()) if values.size else float("nan")
