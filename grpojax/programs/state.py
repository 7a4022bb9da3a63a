"""The state of a run, by role: a network that learns has a `TrainState`, a frozen one has plain weights.

One description of a network (`Network`) serves init, restore, sharding and ahead-of-time compiles.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from grpojax import sharding
from grpojax.device import WHOLE, Device, Program, Real, cut, places
from grpojax.models import decoder as dec
from grpojax.models import kv_heads, matrix
from grpojax.models.compute import Compute
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.number_formats import NumberFormat, format_of
from grpojax.models.weight import WeightTable
from grpojax.models.weight_table import DECODER, axes_of, check_mesh, leaf_name, multiplies, shardings
from grpojax.programs.update import Loss, ReadPrompts
from grpojax.types import Array, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """A network of a run, without its weights.

    Attributes:
      params: shapes and dtypes of the weights, any pytree of `jax.ShapeDtypeStruct`.
      optimizer: the network's optimiser; None if the network is frozen.
      table: describes each weight; its moments are laid out in the same way.
      loss, read, flops: of a network that learns with the policy, as of `grpojax.programs.update.Learner`. The loss
        finds what the policy learns in ``frozen["policy"]``, all weights or its adapter's factors. They get no gradient
        from it. ``read`` of a network that reads no prompts returns ``()``.
      first: makes the weights of a new run; None if these come from elsewhere.
    """

    params: Any
    optimizer: optax.GradientTransformation | None = None
    table: WeightTable = dataclasses.field(default_factory=lambda: DECODER)
    loss: Loss | None = None
    read: ReadPrompts | None = None
    flops: Callable[[Any, Any], float] | None = None
    first: Callable[[], Any] | None = None


def decoder_network(
    config: DecoderConfig, optimizer: optax.GradientTransformation | None, mesh: Mesh | None = None
) -> tuple[Any, Network]:
    """``(graph, network)`` of a decoder; raises `UserError` if a weight does not divide over the mesh."""
    graph, params = dec.abstract(config)
    check_mesh(config, mesh)
    return graph, Network(params=params, optimizer=optimizer)


def abstract_state(networks: Mapping[str, Network], mesh: Mesh | None = None) -> dict[str, Any]:
    """Shapes, dtypes and shardings of the run's state: for init, restore and ahead-of-time compiles.

    Args:
      networks: the networks by role.
      mesh: None for one device.

    Returns:
      By role, a `TrainState` of `jax.ShapeDtypeStruct` if the network learns, or plain weights if it is frozen.
    """
    return {role: _abstract(network, mesh) for role, network in networks.items()}


def _abstract(network: Network, mesh: Mesh | None) -> Any:
    def init(params: Any) -> Any:
        if network.optimizer is None:
            return params
        return TrainState(step=jnp.int32(0), params=params, opt_state=network.optimizer.init(params))

    state = jax.eval_shape(init, network.params)
    if mesh is None:
        return state
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        state,
        shardings(state, mesh, table=network.table),
    )


def bound(state: Any, device: Device) -> Any:
    """The state bound to the one device; on a mesh the state as it is.

    Arrays from a checkpoint are bound to their device, and new weights are not. Without this, programs would be
    compiled once for each of the two.
    """
    return state if device.mesh is not None else device.put(state)


def init_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    device: Device | None = None,
    table: WeightTable = DECODER,
) -> TrainState:
    """A new state with these weights, which it takes over, on some devices; None is the first of this process."""
    device = device or Real()
    if device.mesh is not None:  # most weights lie there already
        params = jax.device_put(params, shardings(params, device.mesh, table=table))

    def placed(params: Any) -> Any:
        return shardings(jax.eval_shape(optimizer.init, params), device.mesh, table=table)

    init = Program("optimizer_init", optimizer.init, out=None if device.mesh is None else placed)
    return TrainState(step=device.put(np.int32(0), WHOLE), params=params, opt_state=device.call(init, params))


def make_reshard(
    config: DecoderConfig,
    compute: Compute,
    weights: str = "compute",
    *,
    adapted: bool = False,
) -> Program | None:
    """Turns training weights into the rollout's: ``params -> params`` in the compute dtype, whole on every fsdp
    shard. Weights that are exact keep their own dtype.

    It runs once for each rollout; decoding then moves no weight between devices. On one device in float32 there is
    nothing to do: None.

    With another format as ``weights``, such as "int8", every weight that multiplies becomes a
    `grpojax.models.matrix.Matrix` in that format, also the embeddings and the output projection. This happens before
    the gather, so that the wire carries fewer bytes for each weight. Norms and biases are cast, unless they
    are exact.

    With ``adapted`` some weights are a `grpojax.models.matrix.Matrix`, which is merged here, in float32.
    """
    dtype, mesh = jnp.dtype(compute.dtype), compute.mesh
    if mesh is None and dtype == jnp.float32 and weights == "compute" and not adapted:
        return None

    def gathered(w: Any, *axes: str) -> Any:
        if axes[-1] == "kv_heads":
            w = kv_heads.repeated(w, config, mesh)
        return sharding.constrain(w, mesh, *axes, rules=sharding.ROLLOUT)

    form = None if weights == "compute" else format_of(weights, "rollout.weights")

    def rounded(form: NumberFormat, w: Any, axes: tuple[str, ...], summed: int) -> Any:
        # Cut like the weight, so that each device rounds its part.
        made = form.matrix(w, summed, lambda values: sharding.constrain(values, mesh, *axes))
        return made.map(lambda x, of, _: gathered(x, *of), axes, None)

    def place(path: Any, x: Any) -> Any:
        axes, weight = axes_of(path, x), DECODER[leaf_name(path)]
        own = form if multiplies(path, x) and not weight.exact else None

        def cast(w: Any) -> Any:
            return w if weight.exact else w.astype(dtype)

        if axes[0] != "layers":
            return gathered(cast(x), *axes) if own is None else rounded(own, x, axes, weight.summed)

        def whole(w: Any) -> Any:
            w = matrix.merged(w)
            if own is None:
                return gathered(cast(w), *axes[1:])
            return rounded(own, w, axes[1:], weight.summed - 1)

        # One layer after the other: gathering all at once needs temporaries of the size of all weights.
        return jax.lax.map(whole, x) if mesh is not None else jax.vmap(whole)(x)

    def reshard(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(place, params, is_leaf=matrix.is_matrix)

    def placed(params: Any) -> Any:
        return shardings(jax.eval_shape(reshard, params), mesh, sharding.ROLLOUT)

    return Program("reshard", reshard, out=None if mesh is None else placed)


def merged(params: Any, dtype: DTypeLike, mesh: Mesh | None = None) -> Any:
    """A decoder's weights as arrays of ``dtype``, each `grpojax.models.matrix.Matrix` merged, with the training
    shardings."""

    def one(x: Any) -> Array:
        return matrix.merged(x).astype(dtype)

    def whole(path: Any, x: Any) -> Any:
        # One layer after the other: all layers in float32 would take twice the memory of the weights.
        each = (lambda x: jax.lax.map(one, x)) if matrix.is_matrix(x) else one
        return Program("", each, out=cut(mesh, DECODER[leaf_name(path)].axes))(x)

    return jax.tree_util.tree_map_with_path(whole, params, is_leaf=matrix.is_matrix)


def make_frozen_copy(compute: Compute, *, averaged: bool = False) -> Program:
    """Copies a decoder's weights to score with, in the compute dtype. Scores are the same as with the originals.

    A forward casts each weight to that dtype before it reads it, except the last norm and weights that are `exact`.
    These stay in float32 here as well.

    Args:
      compute: has the dtype.
      averaged: keep float32, since other weights will be averaged in and 16 bits would lose small changes.
    """
    dtype = jnp.dtype(jnp.float32 if averaged else compute.dtype)

    def copy(params: Any) -> Any:
        def one(path: Any, x: Any) -> Any:
            name = leaf_name(path)
            return jnp.copy(x) if name == "norm" or DECODER[name].exact else jnp.copy(x).astype(dtype)

        return jax.tree_util.tree_map_with_path(one, params)

    return Program("reference", copy, out=None if compute.mesh is None else places)


def refreshed(reference: Any, params: Any, mix: float) -> Any:
    """The next reference: ``mix * params + (1 - mix) * reference``."""
    return jax.tree.map(lambda r, p: mix * p + (1 - mix) * r, reference, params)


def split(model: nnx.Module) -> tuple[Any, Any]:
    """``(graph, params)`` of a model."""
    return nnx.split(model)
