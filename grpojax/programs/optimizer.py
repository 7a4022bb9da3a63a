"""The optimiser of a network: its config in a recipe, and the optax transformation for that config."""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpojax.host.errors import UserError, require
from grpojax.models.weight_table import DECODER, WeightTable, multiplies


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW or SGD with warm-up, a schedule and clipping.

    Attributes:
      name: the optimiser: "adamw" or "sgd".
      learning_rate: the rate after the warm-up, the highest one.
      schedule: the rate after the warm-up. "constant" keeps it; "linear" and "cosine" lower it to ``final_fraction`` of
        the peak at the last step. In a run whose length is ``train.tokens``, the rate falls over all of these tokens,
        those of the policy's and the critic's warm-up included.
      final_fraction: share of the peak rate that "linear" and "cosine" end at.
      warmup_steps: updates over which the rate rises from 0. The first update has 1 / warmup_steps of the peak.
      b1: Adam's decay of the first moment, or SGD's momentum; 0 for none.
      b2: Adam's decay of the second moment.
      eps: Adam's epsilon, which is added to the root of the second moment.
      weight_decay: decoupled weight decay of matrices; norms and biases do not decay. AdamW only.
      grad_clip: largest global norm of the gradient; 0 for none.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_fraction: float = 0.0
    warmup_steps: int = 0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0

    def __post_init__(self) -> None:
        require(
            self,
            learning_rate="(0, inf)",
            final_fraction="[0, 1]",
            warmup_steps="[0, inf)",
            b1="[0, 1)",
            b2="[0, 1)",
            eps="(0, inf)",
            weight_decay="[0, inf)",
            grad_clip="[0, inf)",
        )
        if self.name == "sgd":
            for field in ("b2", "eps", "weight_decay"):
                if getattr(self, field) != getattr(type(self), field):
                    raise UserError(f"{field}={getattr(self, field)!r}: is AdamW's, and sgd has none; leave it out")
        if self.schedule == "constant" and self.final_fraction:
            raise UserError(f"final_fraction={self.final_fraction!r}: goes with schedule: linear or cosine")


def learning_rate(config: OptimizerConfig, updates: int) -> optax.Schedule:
    """The learning rate of update n = 0, 1, ...; ``updates`` is the number of updates in the run."""
    peak, rest = config.learning_rate, max(updates - config.warmup_steps, 1)
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, peak * config.final_fraction, rest)
    else:
        after = optax.cosine_decay_schedule(peak, rest, config.final_fraction)
    if not config.warmup_steps:
        return after

    def warmup(n: Any) -> Any:
        return peak * (n + 1) / config.warmup_steps

    return optax.join_schedules([warmup, after], [config.warmup_steps])


class ByShare(NamedTuple):
    """State of `by_share`."""

    count: Any


def by_share(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """Scales updates by the learning rate at ``share`` in [0, 1] of a run, an extra argument of each update.

    The rate is that of `learning_rate` without a warm-up at update ``share * updates``, times the warm-up's share of
    the peak.
    """
    after = learning_rate(dataclasses.replace(config, warmup_steps=0), 1)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, ByShare]:
        rate = jnp.asarray(after(extra["share"]))
        if config.warmup_steps:
            rate = rate * jnp.minimum(1.0, (state.count + 1) / config.warmup_steps)
        return jax.tree.map(lambda x: x * rate.astype(x.dtype), updates), ByShare(state.count + 1)

    return optax.GradientTransformationExtraArgs(lambda params: ByShare(jnp.zeros([], jnp.int32)), update)


def decayed(params: Any, table: WeightTable = DECODER) -> Any:
    """True for the weights that decay: matrices, but not norms and biases."""
    return jax.tree_util.tree_map_with_path(functools.partial(multiplies, table=table), params)


def make_optimizer(
    config: OptimizerConfig, updates: int | None, table: WeightTable = DECODER
) -> optax.GradientTransformation:
    """The optax optimiser for a run of ``updates`` updates; None if that number is not known (`by_share`)."""
    constant = config.schedule == "constant"
    rate = 1.0 if updates is None and not constant else learning_rate(config, updates or 1)
    decay = functools.partial(decayed, table=table)
    if config.name == "adamw":
        core = optax.adamw(rate, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=decay)
    else:
        core = optax.sgd(rate, momentum=config.b1 or None)
    if updates is None and not constant:
        core = optax.chain(core, by_share(config))
    return optax.chain(optax.clip_by_global_norm(config.grad_clip), core) if config.grad_clip else core
