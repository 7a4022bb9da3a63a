"""One update of one network, or of several at once, by any loss.

A loss is ``(params, frozen, micro) -> (value [], metrics)``: ``params`` learn, ``frozen`` is whatever else the loss
reads, and ``micro`` is a micro-batch. Losses and metrics that are bare arrays are summed over the micro-batches.
`grpojax.types.Mean` and `Max` define how they are combined. ``frozen["progress"]``, if present, is the share of the run
that is done. An optimiser whose learning rate follows a schedule over the run reads it. A loss of `Rows` finds
the sum of all loss weights of the update in ``frozen[TOTAL_WEIGHT]``, for a term that is a mean over its tokens.

Rows come in blocks. A *block* is a fixed number of rows. A *reading* is one forward of some prompts; the blocks after
it have rows that continue these prompts. Only blocks that hold a token run: these are *taken*. If a reading has only
one block, its prompts and rows run as one stream of tokens, which is a micro-batch. `grpojax.programs.packing.pack`
chooses the blocks of each batch, by the lengths of its samples.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from grpojax.device import Program, places, quick_options
from grpojax.models.compute import Compute
from grpojax.programs import blocks
from grpojax.types import Max, Rows, Scalar, TrainState

Metrics = dict[str, Any]
Loss = Callable[[Any, Any, Any], tuple[Scalar, Metrics]]
ReadPrompts = Callable[[Any, Any, Any], Any]
TOTAL_WEIGHT = "total_weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
    """How one of several networks learns.

    Attributes:
      loss: ``(params, frozen, micro) -> (value, metrics)``. ``frozen`` also has the other networks, by role.
      optimizer: the network's own optimiser.
      read: ``(params, frozen, rows) -> Rows.read``, one forward of the prompts that several blocks of rows continue
        (`grpojax.programs.blocks`). None if every micro-batch holds the prompts of its rows.
      flops: FLOPs of an update (`grpojax.device.Program`); None if they are not known.
    """

    loss: Loss
    optimizer: optax.GradientTransformation
    read: ReadPrompts | None = None
    flops: Callable[[Any, Any], float] | None = None


def update_program(
    name: str, update: Callable[..., Any], compute: Compute, flops: Callable[[Any, Any], float] | None = None
) -> Program:
    """The program of an update (`make_update`, `make_joint_update`). It takes the state over, which stays where it is
    on a mesh."""
    stays = None if compute.mesh is None else lambda state, *given: (places(state), None)
    return Program(name, update, donate=(0,), out=stays, options=quick_options(compute.platform), flops=flops)


def make_update(
    loss: Loss, optimizer: optax.GradientTransformation, *, read: ReadPrompts | None = None
) -> Callable[[TrainState, Any, Any], tuple[TrainState, Metrics]]:
    """One update: ``(state, frozen, microbatches) -> (state, metrics)``, for `update_program`.

    The gradient is the sum of the loss's gradients over the micro-batches, so it does not depend on their number.

    Args:
      loss: see the module.
      optimizer: an optax optimiser.
      read: as in `Learner`.

    Returns:
      The function. Every array of ``microbatches`` has the micro-batches ``M`` as its first axis. The function leaves
      out blocks after the last one that holds a token (`grpojax.programs.blocks.taken`).

      The update returns the state unchanged if the gradient is not finite, or if it is 0 everywhere. The gradient is 0
      if all loss weights are 0, or if no term of the loss has one, as for groups without variance. Adam would then
      still move by its moments, and decay the weights.

      The function adds to the loss's metrics ``grad_norm`` (before clipping) and ``skipped``, which is 1 if the
      gradient was not finite.

    Example:
      >>> update = make_update(lambda w, frozen, x: (((w * x) ** 2).sum(), {}), optax.sgd(0.1))
      >>> w = jnp.array([1.0])
      >>> state = TrainState(step=jnp.int32(0), params=w, opt_state=optax.sgd(0.1).init(w))
      >>> state, metrics = update(state, None, jnp.array([[1.0], [2.0]]))  # d/dw = 2 w (1 + 4)
      >>> state.params.tolist(), metrics["grad_norm"].item()
      ([0.0], 10.0)
    """
    learner = Learner(loss=loss, optimizer=optimizer, read=read)

    def update(state: TrainState, frozen: Any, microbatches: Any) -> tuple[TrainState, Metrics]:
        return _update(learner, state, frozen, microbatches)

    return update


def make_joint_update(
    learners: Mapping[str, Learner],
) -> Callable[[dict[str, TrainState], Mapping[str, Any], Any], tuple[dict[str, TrainState], Metrics]]:
    """One update of several networks in one program: ``(states, frozen, microbatches) -> (states, metrics)`` by role.

    Each loss finds the other networks in its ``frozen``, by role, as they were before the update. The metrics of the
    first role keep their names. Those of the other roles get the role as a prefix, as in ``critic/grad_norm``.

    Args:
      learners: how each role learns.
    """

    def update(
        states: dict[str, TrainState], frozen: Mapping[str, Any], microbatches: Any
    ) -> tuple[dict[str, TrainState], Metrics]:
        before = {role: jax.lax.stop_gradient(state.params) for role, state in states.items()}
        after: dict[str, TrainState] = {}
        metrics: Metrics = {}
        for n, (role, learner) in enumerate(learners.items()):
            others = {**frozen, **{name: params for name, params in before.items() if name != role}}
            after[role], own = _update(learner, states[role], others, microbatches)
            metrics |= {f"{role}/{name}" if n else name: value for name, value in own.items()}
        return after, metrics

    return update


def _update(learner: Learner, state: TrainState, frozen: Any, microbatches: Any) -> tuple[TrainState, Metrics]:
    grads, metrics = _accumulate(learner, state.params, frozen, microbatches)
    # Without the barrier XLA copies the optimiser's moments into other layouts before the backward pass and keeps both.
    grads, state = jax.lax.optimization_barrier((grads, state))
    # Optax raises a float to an integer power, which strict dtype promotion forbids.
    with jax.named_scope("optimizer"), jax.numpy_dtype_promotion("standard"):
        metrics["grad_norm"] = optax.tree.norm(grads)
        finite = jnp.isfinite(metrics["grad_norm"])
        metrics["skipped"] = 1.0 - finite.astype(jnp.float32)
        moves = finite & (metrics["grad_norm"] > 0)
        progress = {"progress": frozen["progress"]} if isinstance(frozen, Mapping) and "progress" in frozen else {}
        optimizer = optax.with_extra_args_support(learner.optimizer)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params, **progress)
        params = optax.apply_updates(state.params, updates)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(moves, new, old), (params, opt_state), (state.params, state.opt_state)
        )

    return TrainState(step=state.step + moves.astype(jnp.int32), params=params, opt_state=opt_state), metrics


def _accumulate(learner: Learner, params: Any, frozen: Any, microbatches: Any) -> tuple[Any, Metrics]:
    """Gradient and metrics, summed over the micro-batches or blocks that are taken.

    Where several blocks continue the prompts of a reading, these run forward once, and backward once, with the
    gradients of their keys and values summed over the blocks.
    """
    per_reading = blocks.after_reading(microbatches) if isinstance(microbatches, Rows) else 1
    count = jax.tree.leaves(microbatches)[0].shape[0]
    if isinstance(microbatches, Rows) and "weights" in microbatches.arrays:
        frozen = {**(frozen or {}), TOTAL_WEIGHT: microbatches.arrays["weights"].sum()}
    grad = jax.grad(learner.loss, has_aux=True)

    def of_part(m: Any) -> tuple[Any, Metrics]:
        return grad(params, frozen, jax.tree.map(lambda x: x[m], microbatches))

    def of_block(mine: Rows, i: Any, read: Any) -> tuple[Any, Metrics]:
        def loss(both: Any) -> tuple[Scalar, Metrics]:
            return learner.loss(both[0], frozen, blocks.block(mine, i, both[1]))

        return jax.grad(loss, has_aux=True)((params, read))

    def prompts(mine: Rows, params: Any) -> Any:
        assert learner.read is not None, "its rows come in blocks"
        return learner.read(params, frozen, blocks.block(mine, 0).bare)

    def of_reading(c: Any, total: Any) -> Any:
        if per_reading == 1:
            return _added(total, of_part(c))
        mine = blocks.reading(microbatches, c)
        read, back = jax.vjp(functools.partial(prompts, mine), params)

        def add(i: Any, total: Any) -> Any:
            return _added(total, of_block(mine, i, read))

        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), read)
        (grads, sums), metrics = blocks.loop(per_reading, blocks.taken(mine), add, ((total[0], sums), total[1]))
        (more,) = back(jax.tree.map(lambda s, x: s.astype(x.dtype), sums, read))
        return jax.tree.map(jnp.add, grads, more), metrics

    def first() -> tuple[Any, Metrics]:
        if per_reading == 1:
            return of_part(0)
        mine = blocks.reading(microbatches, 0)
        (grads, _), metrics = of_block(mine, 0, prompts(mine, params))
        return grads, metrics

    if count == per_reading == 1:
        return first()
    taken = blocks.readings(microbatches) if isinstance(microbatches, Rows) else count
    return blocks.loop(count, taken, of_reading, _nothing(jax.eval_shape(first)))


def _added(total: tuple[Any, Metrics], more: tuple[Any, Metrics]) -> tuple[Any, Metrics]:
    grads = jax.tree.map(lambda a, b: a + b.astype(a.dtype), total[0], more[0])
    return grads, {k: total[1][k] + v for k, v in more[1].items()}


def _nothing(shapes: Any) -> Any:
    """Values that change nothing when others are added to them: 0, or minus infinity for a maximum."""

    def of(x: Any) -> Any:
        return Max(value=jnp.full_like(x.value, -jnp.inf)) if isinstance(x, Max) else jnp.zeros_like(x)

    return jax.tree.map(of, shapes, is_leaf=lambda x: isinstance(x, Max))
