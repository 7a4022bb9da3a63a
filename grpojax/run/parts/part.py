"""The protocol of a part: one thing that a run needs beyond samples, rewards and log-probs.

A part is made of shapes. From these come its state and its programs, also in a run that computes nothing
(`grpojax.run.dry`). A real run then calls `load`, which reads from disk. Both pass it the programs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from grpojax import data
from grpojax.device import Program
from grpojax.models import DecoderConfig, hf
from grpojax.models.weight import Weight, zeros
from grpojax.programs.policy import Policy, PolicyShape
from grpojax.programs.state import Network, init_state
from grpojax.run import minibatch
from grpojax.run.batch import Batch
from grpojax.run.make_programs import ProgramInputs, Programs
from grpojax.run.minibatch import Minibatch
from grpojax.run.recipe import Config
from grpojax.run.run_state import State
from grpojax.types import Array, Declared, Samples, Tokens
from grpojax.variants import Variant

__all__ = ["Declared", "InRows", "Network", "Networks", "Part", "Program", "Weight", "mean", "read_shape", "zeros"]

Networks = Mapping[str, Any]  # of a run, by role (`grpojax.run.run_state.State.networks`)
InRows = Mapping[str, Sequence[Array]]  # by name, arrays [M, B, R, S] of the devices, one for each minibatch


def read_shape(path: str) -> DecoderConfig:
    """The shape of the model in a folder, or of a built-in one; raises `UserError` if there is none."""
    return hf.read_config(data.locate(path))


class Part:
    """One thing that a variant or a setting needs. Its methods stand in about the order in which they are called; most
    do nothing here.

    Args:
      config: the recipe.
      shape: the policy's.
      read_shape: the shape of a model that the recipe names by its path.

    Raises:
      UserError: something that the part needs is missing.

    Attributes:
      options: options that the variant must have (`grpojax.variants.Variant.options`).
      signals: the signals that it gives the variant, by name. The variant reads those that are no fields of
        `grpojax.advantages.Signals` in ``signals.extra``.
      arrays: the arrays of tokens that only its own loss reads in the rows, by name.
      reads_gold: whether every problem must have its true answer.
      longer_prompts: whether it puts more before the samples than the problem, up to ``data.max_prompt_tokens``.
      draws: the class of the run's source, a subclass of `grpojax.run.source.Plain`, if samples are drawn in a way of
        the part's own; None for the usual way. Of a run's parts one may have such a class.
      learns: the role of a network that learns with the policy, in one program with it
        (`grpojax.programs.update.make_joint_update`); empty for none. `networks` has its loss. Of a variant's parts one
        may have such a network.
      scorings: how often the part scores a batch before its updates.
    """

    options: ClassVar[tuple[str, ...]] = ()
    signals: ClassVar[Mapping[str, Declared]] = {}
    arrays: ClassVar[Mapping[str, Declared]] = {}
    reads_gold: ClassVar[bool] = False
    longer_prompts: ClassVar[bool] = False
    draws: ClassVar[Any] = None
    learns: ClassVar[str] = ""
    scorings = 0

    # From a recipe, before there is a model.

    @classmethod
    def needs_policy_logps(cls, variant: Variant) -> bool:
        """Whether its signals are compared with the policy's own log-probs. The policy then scores its samples before
        the updates, and a variant finds these log-probs in ``behavior_logps``, in place of the sampler's."""
        return False

    @classmethod
    def made_up(cls, some: Callable[[str], Array]) -> dict[str, Array]:
        """Its signals for made-up samples, on which a variant's advantages are tried before a run.

        Args:
          some: ``some(axes)`` are numbers between 0.1 and 0.9, for axes as in `Declared`.
        """
        return {name: some(declared.axes) for name, declared in cls.signals.items() if declared.dtype == "float32"}

    @classmethod
    def fills(cls, variant: Variant) -> tuple[str, ...]:
        """The arrays that it fills in the rows, in `before` or `weigh`: some of ``arrays``, or of those that the
        policy's loss reads (`grpojax.programs.policy_update.ARRAYS`)."""
        return ()

    @classmethod
    def warmup_steps(cls, config: Config) -> int:
        """Number of steps at the start of a run in which only its network learns, and the policy does not."""
        return 0

    @classmethod
    def check(cls, problems: data.Problems) -> None:
        """Raises `UserError` if the run's problems lack something that the part needs."""

    # From shapes, without weights and data.

    def __init__(self, config: Config, shape: PolicyShape, read_shape: Callable[[str], DecoderConfig] = read_shape):
        self.config, self.shape, self.read_shape = config, shape, read_shape
        self.method, self.variant = config.method, config.method.variant

    def networks(self) -> dict[str, Network]:
        """The networks that it adds to the run's state, by role."""
        return {}

    def make(self, inputs: ProgramInputs) -> Mapping[str, Program]:
        """The programs that it adds, by name.

        Args:
          inputs: what the run's own programs are made from.
        """
        return {}

    def key(self) -> Any:
        """What its programs and networks follow from besides the `ProgramInputs`. They are made once for equal keys."""
        told = ("model", "variant", "critic", "rollout", "train")
        return type(self), self.shape, *(repr(getattr(self.config, section)) for section in told)

    # Once a run.

    def load(self, policy: Policy) -> None:
        """Reads the part's files; raises `UserError` if these are wrong, or do not go with the policy."""

    def open(self, policy: Policy, programs: Programs, *, longest_prompt: int) -> None:
        """Gets the model and the run's programs.

        Args:
          policy: the model, whose ``device`` runs the programs; the part must not keep its weights.
          programs: of the run.
          longest_prompt: most tokens of a prompt in the run.
        """
        self.policy, self.programs, self.longest_prompt = policy, programs, longest_prompt

    def source(self, source: Any) -> Any:
        """The run's source (`grpojax.run.source.Source`), made from the one without this part."""
        return source

    def saved(self) -> tuple[str, ...]:
        """The roles of `networks` that a checkpoint has."""
        return tuple(self.networks())

    def start(self, params: Any, restored: Networks | None) -> dict[str, Any]:
        """The state that it adds, by role, without the restored part: by default networks with weights of their own
        (`grpojax.programs.state.Network.first`).

        Args:
          params: the policy's weights.
          restored: the state of a checkpoint; None in a new run.
        """
        started = dict[str, Any]()
        for role, network in self.networks().items():
            if network.first is None or role in (restored or {}):
                continue
            started[role] = network.first()
            if network.optimizer is not None:
                device = self.policy.device
                started[role] = init_state(started[role], network.optimizer, device, network.table)
        return started

    # Once a step.

    def on_rows(self, program: Program, minis: Sequence[Minibatch], *weights: Any) -> list[Any]:
        """Runs ``program(*weights, rows)`` on the rows of every minibatch. The results stay on the devices."""
        return [self.policy.device.call(program, *weights, m.rows.bare) for m in minis]

    def whole(self, minis: Sequence[Minibatch], rows: Sequence[Any]) -> Tokens:
        """Results ``[M, B, R, S]`` of every minibatch as ``[P, G, T]`` on the host."""
        return minibatch.whole(self.policy.device, minis, rows)

    def frozen(self, networks: Networks) -> dict[str, Any]:
        """What its loss reads of the state and does not change, by role."""
        return {}

    def replace(self, networks: Networks, batch: Batch) -> Batch:
        """The samples as they are learned from."""
        return batch

    def before(self, networks: Networks, minis: Sequence[Minibatch]) -> tuple[dict[str, Tokens], InRows]:
        """What needs no rewards: signals ``[P, G, T]`` on the host, and arrays of the rows that stay on the devices."""
        return {}, {}

    def after(self, networks: Networks, batch: Batch, counted: Samples) -> tuple[dict[str, Array], dict[str, float]]:
        """Signals that need the rewards, and metrics of the step.

        Args:
          networks: before the step's first update, by role.
          batch: with its rewards.
          counted: ``[P, G]`` the rewards, NaN where a sample does not count.
        """
        return {}, {}

    def weigh(self, batch: Batch) -> tuple[dict[str, Tokens], dict[str, float]]:
        """Arrays ``[P, G, T]`` for the rows, by name, and metrics of the step. Runs on the host.

        Args:
          batch: with its advantages, and the signals of all parts.
        """
        return {}, {}

    def end_step(self, networks: Networks, number: int) -> dict[str, Any]:
        """The part of the state that changes after the step, by role."""
        return {}

    def metrics(self, drawn: Sequence[Batch]) -> dict[str, float]:
        """Metrics of the step.

        Args:
          drawn: all that was drawn for it, rollout by rollout, also what a filter dropped.
        """
        return {}

    def columns(self, batch: Batch) -> dict[str, Array]:
        """Columns of the samples file: a value for each prompt ``[P]``, sample ``[P, G]`` or token ``[P, G, T]``.

        Args:
          batch: with its advantages, and the signals of all parts.
        """
        return {}

    def flops(self, batch: Batch) -> dict[str, float]:
        """Useful FLOPs of the step, by phase (`grpojax.run.work.step_flops`)."""
        return {}

    # At the end.

    def warning(self, state: State) -> str | None:
        """A warning for the user of a run that has ended, from its last state; None for none."""
        return None


def mean(values: np.ndarray) -> float:
    """The mean in float64; NaN if there are no values."""
    return float(values.astype(np.float64).mean()) if values.size else float("nan")
