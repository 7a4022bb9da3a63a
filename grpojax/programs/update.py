"""The jitted programs of a training step: scoring, update, cast-and-reshard; and the state they work on."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from grpojax.host import processes as hosts
from grpojax.host.errors import UserError
from grpojax.losses import Objective, policy_loss
from grpojax.models import decoder as dec
from grpojax.models import sharding
from grpojax.models.decoder import Compute
from grpojax.models.decoder_config import DecoderConfig
from grpojax.programs.packing import Packed
from grpojax.types import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW or SGD with warm-up, a schedule and clipping.

    Attributes:
      name: "adamw" or "sgd".
      learning_rate: the peak.
      schedule: after the warm-up, "constant", or "linear" or "cosine" down to ``final_fraction`` of the peak at the
        last step.
      warmup_steps: updates over which the rate rises from 0 (the first update has 1 / warmup_steps of it).
      b1, b2, eps: Adam's (b1 is SGD's momentum; 0 for none).
      weight_decay: decoupled, on matrices only: norms and biases are left alone. AdamW only.
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

    def __post_init__(self):
        def check(ok, name, what):
            if not ok:
                raise UserError(f"{name}={getattr(self, name)!r}: must be {what}")

        check(self.learning_rate > 0, "learning_rate", "over 0")
        check(0 <= self.final_fraction <= 1, "final_fraction", "between 0 and 1")
        check(self.warmup_steps >= 0, "warmup_steps", "0 or more")
        check(0 <= self.b1 < 1, "b1", "at least 0 and under 1")
        check(0 <= self.b2 < 1, "b2", "at least 0 and under 1")
        check(self.eps > 0, "eps", "over 0")
        check(self.weight_decay >= 0, "weight_decay", "0 or more")
        check(self.grad_clip >= 0, "grad_clip", "0 (off) or more")
        check(self.name == "adamw" or self.weight_decay == 0, "weight_decay", "0 with sgd")


def learning_rate(config: OptimizerConfig, updates: int) -> optax.Schedule:
    """The rate of update n = 0, 1, ...; ``updates`` is the number of the whole run."""
    peak, rest = config.learning_rate, max(updates - config.warmup_steps, 1)
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, peak * config.final_fraction, rest)
    else:
        after = optax.cosine_decay_schedule(peak, rest, config.final_fraction)
    if not config.warmup_steps:
        return after
    warmup = lambda n: peak * (n + 1) / config.warmup_steps  # noqa: E731
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def decayed(params):
    """True for the weights that decay: matrices, that is neither norms nor biases."""
    matrix = lambda path, leaf: len([a for a in dec.axes_of(path, leaf) if a != "layers"]) == 2  # noqa: E731
    return jax.tree_util.tree_map_with_path(matrix, params)


def make_optimizer(config: OptimizerConfig, updates: int) -> optax.GradientTransformation:
    """The optax optimiser of a run of ``updates`` updates."""
    rate = learning_rate(config, updates)
    if config.name == "adamw":
        core = optax.adamw(rate, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=decayed)
    else:
        core = optax.sgd(rate, momentum=config.b1 or None)
    return optax.chain(optax.clip_by_global_norm(config.grad_clip), core) if config.grad_clip else core


def shardings(tree, mesh: Mesh | None, rules=sharding.TRAIN):
    """The sharding of every array of a tree of weights or of an optimiser's state (None without a mesh)."""
    return jax.tree_util.tree_map_with_path(lambda p, x: sharding.named(mesh, dec.axes_of(p, x), rules), tree)


def abstract_state(config: DecoderConfig, optimizer: optax.GradientTransformation, mesh: Mesh | None = None):
    """Shapes, dtypes and shardings of the run's state: for init, restore and ahead-of-time compiles.

    Returns:
      ``(graph, state)``: the graph definition of the decoder, and a `TrainState` of `jax.ShapeDtypeStruct`.
    """
    graph, params = dec.abstract(config)

    def init(params):
        return TrainState(step=jnp.int32(0), params=params, opt_state=optimizer.init(params))

    state = jax.eval_shape(init, params)
    if mesh is None:
        return graph, state
    check_mesh(config, mesh)
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    return graph, jax.tree.map(place, state, shardings(state, mesh))


def check_mesh(config: DecoderConfig, mesh: Mesh) -> None:
    """Raises `UserError` when a weight does not divide over the mesh."""
    sharding.check_divides(mesh, "num_attention_heads", config.num_heads, ("tensor",))
    sharding.check_divides(mesh, "num_key_value_heads", config.num_kv_heads, ("tensor",))
    sharding.check_divides(mesh, "intermediate_size", config.intermediate_size, ("tensor",))
    sharding.check_divides(mesh, "vocab_size", config.vocab_size, ("tensor",))
    sharding.check_divides(mesh, "hidden_size", config.hidden_size, ("fsdp",))


def init_state(params, optimizer: optax.GradientTransformation, mesh: Mesh | None = None) -> TrainState:
    """A fresh state around loaded weights; takes ``params`` over."""
    opt_state = jax.eval_shape(optimizer.init, params)
    init = jax.jit(optimizer.init, out_shardings=None if mesh is None else shardings(opt_state, mesh))
    step = hosts.place(np.int32(0), sharding.named(mesh, ()))
    return TrainState(step=step, params=params, opt_state=init(params))


def place_rows(tree, mesh: Mesh | None):
    """Host arrays ``[M, B, ...]`` onto the devices, lanes over the batch axes."""
    return jax.tree.map(lambda x: hosts.place(x, sharding.named(mesh, (None, "lane", *(None,) * (x.ndim - 2)))), tree)


def make_train_step(
    graph,
    objective: Objective,
    optimizer,
    compute: Compute,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
):
    """One update: ``(state, packed) -> (state, metrics)``, jitted, the state donated.

    The gradient is the sum over micro-batches of ``Σ weights * terms``, so it does not depend on how many there are.

    Args:
      graph: the decoder's graph definition.
      objective: the loss; a reference or an entropy that it does not need is not computed.
      optimizer: an optax optimiser.
      compute: how to run the decoder.
      temperature: the one that the samples were drawn at.
      entropy: compute the entropy as a metric even if the objective does not need it.

    Returns:
      The jitted function. Where the gradient is not finite it changes nothing. Its metrics are float32 scalars: those
      of `policy_loss`, ``grad_norm``, ``skipped`` (1 if it changed nothing), and, when the batch has
      ``sampler_logps``, how far the policy's log-probs are from them (``logp_difference_sum``, ``_max``).
    """
    wanted = True if objective.needs_entropy else "value" if entropy else False

    def loss(params, part: Packed):
        scores = dec.score(graph, params, part.rows, compute, temperature=temperature, entropy=wanted)
        with jax.named_scope("loss"):
            value, metrics = policy_loss(scores.logps, part, objective, entropy=scores.entropy)
        if part.sampler_logps is not None:
            mask = part.weights > 0
            apart = jnp.where(mask, jnp.abs(jax.lax.stop_gradient(scores.logps) - part.sampler_logps), 0.0)
            metrics |= {"logp_difference_sum": apart.sum(), "logp_difference_max": apart.max()}
        return value, metrics

    grad = jax.grad(loss, has_aux=True)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, packed: Packed) -> tuple[TrainState, dict[str, Any]]:
        take = lambda i: jax.tree.map(lambda x: x[i], packed)  # noqa: E731
        if packed.weights.shape[0] == 1:
            grads, metrics = grad(state.params, take(0))
        else:
            zero = jax.tree.map(jnp.zeros_like, jax.eval_shape(lambda: grad(state.params, take(0))))

            def add(total, part):
                grads, metrics = grad(state.params, part)
                merged = {
                    k: (jnp.maximum if k.endswith("_max") else jnp.add)(total[1][k], v) for k, v in metrics.items()
                }
                return (jax.tree.map(jnp.add, total[0], grads), merged), None

            (grads, metrics), _ = jax.lax.scan(add, zero, packed)
        # Optax raises a float to an integer power, which strict dtype promotion forbids.
        with jax.named_scope("optimizer"), jax.numpy_dtype_promotion("standard"):
            metrics["grad_norm"] = optax.tree.norm(grads)
            finite = jnp.isfinite(metrics["grad_norm"])
            metrics["skipped"] = 1.0 - finite.astype(jnp.float32)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            params, opt_state = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old),
                (params, opt_state),
                (state.params, state.opt_state),
            )
        if compute.mesh is not None:
            keep = lambda x: jax.lax.with_sharding_constraint(x, shardings(x, compute.mesh))  # noqa: E731
            params, opt_state = keep(params), keep(opt_state)
        return TrainState(step=state.step + finite.astype(jnp.int32), params=params, opt_state=opt_state), metrics

    return train_step


def make_score(graph, compute: Compute, *, temperature: float = 1.0, entropy: bool = False):
    """Scores under given weights: ``(params, rows [M, ...]) -> Scores`` of ``[M, B, R, S]``, jitted; without gradient.

    Args:
      graph, compute, temperature: as in `make_train_step`.
      entropy: the entropy of each token's distribution too.
    """
    wanted = "value" if entropy else False

    @jax.jit
    def score(params, rows):
        return jax.lax.map(
            lambda part: dec.score(graph, params, part, compute, temperature=temperature, entropy=wanted),
            rows,
        )

    return score


def make_reshard(graph, compute: Compute):
    """Training weights to the rollout's: ``params -> params`` in the compute dtype, whole on every fsdp shard.

    One jitted program a rollout; decoding then moves no weight between devices. On one device in float32 there is
    nothing to do, and the weights are handed through.
    """
    dtype = jnp.dtype(compute.dtype)
    if compute.mesh is None and dtype == jnp.float32:
        return lambda params: params

    def place(path, x):
        axes = dec.axes_of(path, x)
        whole = lambda w, axes: sharding.constrain(w.astype(dtype), compute.mesh, *axes, rules=sharding.ROLLOUT)  # noqa: E731
        if compute.mesh is None or axes[0] != "layers":
            return whole(x, axes)
        # One layer after the other: to gather all at once takes their size again in temporaries.
        return jax.lax.map(lambda w: whole(w, axes[1:]), x)

    @jax.jit
    def reshard(params):
        return jax.tree_util.tree_map_with_path(place, params)

    return reshard


def params_of(model) -> tuple[Any, Any]:
    """``(graph, params)`` of a `Decoder`."""
    return nnx.split(model)
