"""The protocol of a part: one thing that a variant needs beyond samples, rewards and log-probs.

A part is made of shapes. With these `grpojax plan` lists its programs and its state; a run then has it `load` what it
reads from disk, and hands it the programs.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from grpojax import data
from grpojax.models import DecoderConfig, flops, hf
from grpojax.programs.calls import Call
from grpojax.programs.packing import Packed
from grpojax.programs.policy import Policy, PolicyShape
from grpojax.programs.state import Network
from grpojax.run.batch import RolloutBatch
from grpojax.run.packed_batch import PackedBatch
from grpojax.run.programs import Programs, Spec
from grpojax.run.recipe import Config
from grpojax.types import Array, PerPrompt, Samples, Tokens
from grpojax.variants import Variant

State = Mapping[str, Any]  # of a run, by role (`grpojax.run.learner.Learner`)


def read_shape(path: str) -> DecoderConfig:
    """The shape of the model in a folder, or of a built-in one; raises `UserError` where there is none."""
    return hf.read_config(data.locate(path))


class Longest(NamedTuple):
    """The largest arguments of a run's programs: shapes in place of arrays, on the devices.

    Attributes:
      programs: of the run.
      state: of the run, by role.
      packed: what an update learns from, every prompt and completion at its longest.
      sizes: tokens of its prompts and of its samples.
    """

    programs: Programs
    state: State
    packed: Packed
    sizes: tuple[np.ndarray, np.ndarray]

    def scored(self, program: Any, params: Any, model: DecoderConfig) -> Call:
        """``program(params, rows)``, a forward of a decoder over the samples of an update."""
        work = flops.forward_flops(model, *self.sizes)
        return Call(program, (params, self.packed.rows), params, flops=work, ragged=True)


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
      shape: the policy's.
      read_shape: the shape of a model that the recipe names by its path.

    Raises:
      UserError: what the part needs is not there.

    Attributes:
      options: of the variant, which it must have (`grpojax.variants.Variant.options`).
      extra: what it signals that is no field of `grpojax.advantages.Signals`, by name, and the axes: "P", "P G" or
        "P G T". The variant reads it in ``signals.extra``.
      reads_gold: whether every problem must have its true answer.
      passes: how often the part scores a batch before its updates.
    """

    options: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[Mapping[str, str]] = {}
    reads_gold: ClassVar[bool] = False
    passes = 0

    # Of a recipe, before there is a model.

    @classmethod
    def compares(cls, variant: Variant) -> bool:
        """Whether what it signals is compared with the policy's own log-probs, which are then a signal too."""
        return False

    @classmethod
    def made_up(cls, some: Callable[[str], Array]) -> dict[str, Array]:
        """What it signals of made-up samples, on which a variant's advantages are tried before a run.

        Args:
          some: ``some(axes)`` are numbers between 0.1 and 0.9, for axes as in ``extra``.
        """
        return {name: some(axes) for name, axes in cls.extra.items()}

    @classmethod
    def rows(cls, variant: Variant) -> tuple[str, ...]:
        """Fields of `grpojax.types.PerToken` that it puts into the rows, in `before` or `weigh`."""
        return ()

    @classmethod
    def times(cls, config: Config) -> dict[str, int]:
        """How often a step runs its programs, by name as in `calls`, and "score", which is the run's own. What only
        some steps run is left out."""
        return {}

    # Of shapes, without weights and without data.

    def __init__(self, config: Config, shape: PolicyShape, read_shape: Callable[[str], DecoderConfig] = read_shape):
        self.config, self.shape, self.read_shape = config, shape, read_shape
        self.method, self.variant = config.method, config.method.variant

    def spec(self) -> Spec:
        """What the programs that it adds follow from, and how they are made."""
        return Spec()

    def networks(self) -> dict[str, Network]:
        """What it adds to the run's state, by role."""
        return {}

    def calls(self, longest: Longest) -> dict[str, Call]:
        """Its programs by name, each with what it is called with at most (`grpojax.programs.calls`)."""
        return {}

    # Once a run.

    def load(self, policy: Policy, *, longest_prompt: int) -> None:
        """Takes the model, and reads what the part needs of disks; raises `UserError` where that is not right.

        Args:
          policy: its weights are not to be kept.
          longest_prompt: most tokens of a prompt in the run.
        """
        self.policy, self.longest_prompt = policy, longest_prompt

    def open(self, programs: Programs, run: Callable[..., Any]) -> None:
        """Takes the run's programs.

        Args:
          programs: of the run.
          run: ``run(program, *args)`` calls one whose arguments are rows of minibatches; the first call compiles it for
            both of their sizes.
        """
        self.programs, self.run = programs, run

    def saved(self) -> tuple[str, ...]:
        """The roles of `networks` that a checkpoint has."""
        return tuple(self.networks())

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
    """A part with a network that learns with the policy, in one program with it (`make_joint_update`). A variant has
    one at most.

    Its `spec` has the network in ``learners``, under the role; `networks` has it with the same optimizer. In the first
    `warmup_steps` it learns by itself.

    Attributes:
      role: of the network in the run's state.
    """

    role: ClassVar[str]

    @classmethod
    def warmup_steps(cls, config: Config) -> int:
        """The first steps of a run, in which the policy is left as it is."""
        return 0

    def frozen(self, state: State) -> dict[str, Any]:
        """What its loss reads of the state and nothing changes, by role."""
        return {}

    def update_flops(self, sizes: tuple[np.ndarray, np.ndarray]) -> float:
        """FLOPs of an update of the network from prompts and samples of so many tokens; 0 where that is not known."""
        return 0.0


def mean(values: np.ndarray) -> float:
    """In float64; NaN of none."""
    return float(values.astype(np.float64).mean()) if values.size else float("nan")
