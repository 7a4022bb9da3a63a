"""The optax transformation for the optimiser of a recipe."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpojax.models.weight import WeightTable
from grpojax.models.weight_table import DECODER, multiplies
from grpojax.programs.optimizer_config import OptimizerConfig


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


class ByProgress(NamedTuple):
    """State of `by_progress`."""

    count: Any


def by_progress(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """Scales updates by the learning rate at ``progress`` in [0, 1] of a run, an extra argument of each update.

    The rate is that of `learning_rate` without a warm-up at update ``progress * updates``, times the warm-up's share of
    the peak.
    """
    after = learning_rate(dataclasses.replace(config, warmup_steps=0), 1)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, ByProgress]:
        rate = jnp.asarray(after(extra["progress"]))
        if config.warmup_steps:
            rate = rate * jnp.minimum(1.0, (state.count + 1) / config.warmup_steps)
        return jax.tree.map(lambda x: x * rate.astype(x.dtype), updates), ByProgress(state.count + 1)

    return optax.GradientTransformationExtraArgs(lambda params: ByProgress(jnp.zeros([], jnp.int32)), update)


def decayed(params: Any, table: WeightTable = DECODER) -> Any:
    """True for the weights that decay: matrices, but not norms and biases."""
    return jax.tree_util.tree_map_with_path(functools.partial(multiplies, table=table), params)


def make_optimizer(
    config: OptimizerConfig, updates: int | None, table: WeightTable = DECODER
) -> optax.GradientTransformation:
    """The optax optimiser for a run of ``updates`` updates; None if that number is not known (`by_progress`)."""
    constant = config.schedule == "constant"
    rate = 1.0 if updates is None and not constant else learning_rate(config, updates or 1)
    decay = functools.partial(decayed, table=table)
    if config.name == "adamw":
        core = optax.adamw(rate, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=decay)
    else:
        core = optax.sgd(rate, momentum=config.b1 or None)
    if updates is None and not constant:
        core = optax.chain(core, by_progress(config))
    return optax.chain(optax.clip_by_global_norm(config.grad_clip), core) if config.grad_clip else core
