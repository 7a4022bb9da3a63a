"""The critic in a run: its networks, its loss for `grpojax.programs.update`, and the program that runs it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from grpojax import variants
from grpojax.extensions.methods import critic_model as models
from grpojax.models import decoder as dec
from grpojax.models.compute import Compute
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.weight import WeightTable
from grpojax.models.weight_table import check_mesh
from grpojax.programs import blocks
from grpojax.programs.adapter import Adapter, joined
from grpojax.programs.policy_state import BASE
from grpojax.programs.state import Network
from grpojax.programs.update import Metrics
from grpojax.types import PerPrompt, Rows, Samples, Scalar

# The roles: the part that learns, and the frozen trunk if only the head learns.
ROLE, TRUNK = "critic", "critic_trunk"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticModel:
    """A critic without its weights.

    Attributes:
      config: config of the trunk (`grpojax.extensions.methods.critic_model.trunk_config`).
      compute: how to run the critic.
      frozen: whether only the head learns. The trunk is then a role of its own with plain weights.
      adapter: if given, the trunk is the base of the policy's adapters. It has its own factors, unless it is frozen.
      at: which state of a token the head reads (`grpojax.extensions.methods.critic_model.token_outputs`).
      loss: the loss of `grpojax.variants.Critic`; None if nothing learns.
    """

    config: DecoderConfig
    compute: Compute
    frozen: bool = False
    adapter: Adapter | None = None
    at: models.Place = "before"
    loss: variants.BiasLoss | variants.ValueLoss | None = None

    @property
    def table(self) -> WeightTable:
        """The table of the weights that learn."""
        return models.CRITIC if self.adapter is None else {**models.CRITIC, **self.adapter.table}

    @property
    def passes(self) -> int:
        """Forward passes that an update counts as: a frozen trunk has no backward pass, frozen weights no gradients."""
        return 1 if self.frozen else 3 if self.adapter is None else 2

    def networks(self, optimizer: optax.GradientTransformation | None) -> dict[str, Network]:
        """The critic's networks by role; raises `UserError` if a weight does not divide over the mesh."""
        check_mesh(self.config, self.compute.mesh)
        learns = {"table": self.table, "loss": self.objective, "read": self.read, "flops": self.update_flops}
        head = jax.ShapeDtypeStruct((self.config.hidden_size,), "float32")
        if self.adapter is not None:
            factors = {} if self.frozen else self.adapter.abstract(self.config)
            params, others = {**factors, "token_head": head}, {}
        elif self.frozen:
            params, others = {"token_head": head}, {TRUNK: Network(params=dec.abstract(self.config)[1])}
        else:
            params, others = models.abstract(self.config)[1], {}
        return {ROLE: Network(params=params, optimizer=optimizer, **learns), **others}

    def weights(self, trunk: Any, head: Any) -> tuple[Any, dict[str, Any]]:
        """``(params, frozen)``: the weights that learn, and frozen weights by role. Takes both arguments over."""
        if self.frozen:
            return {"token_head": head}, {TRUNK: trunk}
        return models.joined(self.config, trunk, head), {}

    def parts(self, params: Any, frozen: Any) -> tuple[dec.Decoder, Any]:
        """The trunk and the head from `weights`. With an adapter ``frozen`` also has the policy's base."""
        if self.adapter is not None:
            base = nnx.State({name: w for name, w in frozen[BASE].items() if name != "head"})
            return nnx.merge(dec.abstract(self.config)[0], joined(base, params)), params["token_head"]
        if self.frozen:
            return nnx.merge(dec.abstract(self.config)[0], frozen[TRUNK]), params["token_head"]
        critic = nnx.merge(models.abstract(self.config)[0], params)
        return critic.trunk, critic.token_head[...]

    def outputs(self, params: Any, frozen: Any, rows: Any) -> Any:
        """The critic's outputs ``[B, R, S]`` float32, with weights from `weights`."""
        trunk, head = self.parts(params, frozen)
        if self.frozen:  # the gradient must not go back through the prompts
            rows = dataclasses.replace(rows, read=jax.lax.stop_gradient(rows.read))
        return models.token_outputs(trunk, head, rows, self.compute, at=self.at)

    def read(self, params: Any, frozen: Any, rows: Any) -> dec.PromptStates:
        """The forward of prompts whose result `outputs` uses (`grpojax.programs.update.Learner`)."""
        return dec.read_prompts(self.parts(params, frozen)[0], rows, self.compute)

    def objective(self, params: Any, frozen: Any, part: Rows) -> tuple[Scalar, Metrics]:
        """The loss for `grpojax.programs.update`."""
        assert self.loss is not None
        outputs = self.outputs(params, frozen, part.bare)
        with jax.named_scope("critic_loss"):
            return self.loss(outputs, part.arrays)

    def update_flops(self, prompts: PerPrompt, samples: Samples) -> float:
        """FLOPs of an update from prompts and samples with these numbers of tokens."""
        return models.forward_flops(self.config, prompts, samples) * self.passes


def make_critic_score(model: CriticModel) -> Callable[[Any, Any, Any], Any]:
    """The critic's outputs: ``(params, frozen, rows [M, ...]) -> [M, B, R, S]``, without gradient."""

    def score(params: Any, frozen: Any, rows: Any) -> Any:
        of_block, read = (functools.partial(f, params, frozen) for f in (model.outputs, model.read))
        return blocks.each(of_block, rows, read)

    return score
