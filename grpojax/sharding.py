"""Meshes and the one table from logical to mesh axes.

Four mesh axes: ``data`` (weights replicated), ``fsdp`` (weights cut, gathered layer by layer), ``expert``, and
``tensor`` (heads, MLP and vocabulary cut).

``expert`` is for mixtures of experts. It cuts a layer's experts into groups, and each of its devices keeps its own
group: no expert is gathered over it, and tokens travel to their experts and back. The
devices would have nothing else to do with the same tokens, so the axis cuts the batch as well. All other weights are
small in a mixture. For them it is a second ``fsdp``: they are cut over both axes and gathered layer by layer.

A batch is cut into *shards* over ``data``, ``fsdp`` and ``expert`` together.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from grpojax import extension
from grpojax.host.errors import UserError
from grpojax.types import Array

AXES = ("data", "fsdp", "expert", "tensor")

Rules = Mapping[str, tuple[str, ...]]

# Logical axis -> mesh axes. "embed" and "hidden" are both the hidden size: "embed" for matrices, "hidden" for norms and
# biases, which are small and stay whole. TRAIN also cuts weights over fsdp. ROLLOUT keeps whole weights on each fsdp
# shard, so that decoding never moves a weight; what is cut over ``expert`` stays so, and each device reads its own.
_BROUGHT: Rules = extension.axes()
TRAIN: Rules = {
    "shard": ("data", "fsdp", "expert"),
    "embed": ("fsdp", "expert"),
    "heads": ("tensor",),
    "head_count": ("tensor",),
    "kv_heads": ("tensor",),
    "gated_heads": ("tensor",),
    "mlp": ("tensor",),
    "one": (),
    "vocab": ("tensor",),
    "hidden": (),
    "head_dim": (),
    "rank": (),
    "layers": (),
    **_BROUGHT,
}
_WHOLE = {name: tuple(axis for axis in axes if axis != "fsdp") for name, axes in _BROUGHT.items()}
ROLLOUT: Rules = {**TRAIN, "embed": (), **_WHOLE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Number of devices along each axis of the mesh. One of the first four may be -1, which takes all that remain.

    Attributes:
      data: copies of the weights, each with its own share of the batch.
      fsdp: devices over which weights, optimiser state and the batch are sharded.
      expert: devices over which the experts of a mixture are sharded, and the batch. Tokens move to their experts.
      tensor: devices over which each matrix product is sharded.
      rollout: devices, the last ones, that only sample; a multiple of ``expert`` times ``tensor``. The axes above then
        divide the other devices, which learn. Devices that sample shard the weights by ``expert`` and ``tensor`` only.
        0 samples and learns on all devices.
    """

    data: int = 1
    fsdp: int = -1
    expert: int = 1
    tensor: int = 1
    rollout: int = 0

    def __post_init__(self):
        if self.rollout < 0 or self.rollout % (max(self.tensor, 1) * max(self.expert, 1)):
            raise UserError(
                f"rollout={self.rollout}: must be 0, or a multiple of tensor={self.tensor} times expert={self.expert}"
            )
        sizes = self.sizes
        if any(s < 1 and s != -1 for s in sizes) or sizes.count(-1) > 1:
            raise UserError(
                f"data={self.data}, fsdp={self.fsdp}, expert={self.expert}, tensor={self.tensor}: each must be at "
                "least 1, and one of them may be -1 (the rest)"
            )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Devices along `AXES`."""
        return self.data, self.fsdp, self.expert, self.tensor


def disaggregate(config: MeshConfig, devices: Sequence[jax.Device]) -> tuple[list[jax.Device], list[jax.Device]]:
    """``(learning, sampling)`` devices. No devices sample only if ``config.rollout`` is 0.

    Raises:
      UserError: no devices are left to learn, or there are several processes. Each process has its own devices, and
        the weights move between the two sets of devices without a network.

    Example:
      >>> disaggregate(MeshConfig(rollout=3), "abcdefgh")
      (['a', 'b', 'c', 'd', 'e'], ['f', 'g', 'h'])
    """
    learning, sampling = list(devices[: len(devices) - config.rollout]), list(devices[len(devices) - config.rollout :])
    if config.rollout >= len(devices):
        raise UserError(f"mesh.rollout={config.rollout} of {len(devices)} devices leaves none to learn on; lower it")
    if sampling and jax.process_count() > 1:
        raise UserError(
            f"mesh.rollout={config.rollout} with {jax.process_count()} processes: devices are reserved for sampling "
            "on one machine only; set it to 0"
        )
    return learning, sampling


def sampling_mesh(learning: Mesh, devices: int) -> MeshConfig:
    """The mesh of ``devices`` that only sample: their axes ``expert`` and ``tensor`` are those of the ones that learn,
    so that a device's part of a weight has the same shape on both sides."""
    expert, tensor = learning.shape["expert"], learning.shape["tensor"]
    return MeshConfig(data=devices // expert // tensor, fsdp=1, expert=expert, tensor=tensor)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds the mesh. With several TPU slices, ``data`` is cut over the slices; the other axes stay inside of a slice.

    Args:
      config: the sizes.
      devices: the devices to lay out, without those that only sample; None takes all.

    Raises:
      UserError: the sizes do not multiply to the number of devices, ``data`` does not divide over the slices, or the
        wiring of the chips does not allow this mesh. The message names possible meshes.
    """
    devices = list(devices if devices is not None else jax.devices())
    sizes = [*config.sizes]
    known = math.prod(s for s in sizes if s != -1)
    if -1 in sizes:
        sizes[sizes.index(-1)] = max(len(devices) // known, 1)
    laid_out = _lay_out(sizes, devices)
    if isinstance(laid_out, str):
        raise UserError(f"mesh {shown(sizes)} {laid_out}\npossible: {_possible(sizes, devices)}")
    return Mesh(laid_out, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _lay_out(sizes: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray | str:
    """The devices in a mesh of ``sizes``, with neighbours in the mesh close to each other; or why it is impossible."""
    data, *inside = sizes
    # For GPUs a slice is a host. Their devices only need the order of the hosts, which the plain layout keeps.
    slices = len({getattr(d, "slice_index", 0) for d in devices}) if devices[0].platform == "tpu" else 1
    if math.prod(sizes) != len(devices):
        return f"needs {math.prod(sizes)} devices, but there are {len(devices)}"
    if data % slices:
        return f"does not divide data over the {slices} slices; fsdp and tensor stay inside of a slice"
    make = functools.partial(mesh_utils.create_device_mesh, sizes)
    if slices > 1:
        across = (slices, *(1 for _ in inside))
        make = functools.partial(mesh_utils.create_hybrid_device_mesh, (data // slices, *inside), across)
    try:
        return make(devices, allow_split_physical_axes=False)
    except NotImplementedError:  # an axis of the chips must serve two of the mesh
        pass
    except ValueError as e:
        return f"cannot be laid out: {e}"
    except AssertionError:  # from jax; its text names all devices, so it is not shown
        return f"cannot be laid out: these {len(devices)} chips make no rectangle"
    try:
        return make(devices, allow_split_physical_axes=True)
    except (NotImplementedError, ValueError) as e:
        return f"cannot be laid out over these chips: {e}"


def shown(sizes: Sequence[int]) -> str:
    """The sizes as text. Few meshes have an axis of experts, so it is left out where it is 1."""
    return " x ".join(f"{a}={s}" for a, s in zip(AXES, sizes, strict=True) if a != "expert" or s != 1)


def _possible(wanted: Sequence[int], devices: Sequence[jax.Device], most: int = 4) -> str:
    """Possible meshes of these devices; those nearest to the wanted sizes come first."""
    expert = wanted[AXES.index("expert")]
    expert = expert if len(devices) % expert == 0 else 1
    n = len(devices) // expert
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    every = [(data, fsdp, expert, n // data // fsdp) for data in divisors for fsdp in divisors if n // data % fsdp == 0]
    every.sort(key=lambda sizes: sum(abs(math.log(a / b)) for a, b in zip(sizes, wanted, strict=True)))
    found = (sizes for sizes in every if not isinstance(_lay_out(sizes, devices), str))
    return ", ".join("(" + shown(sizes) + ")" for sizes in itertools.islice(found, most)) or "none"


def spec(logical: Sequence[str | None], rules: Rules) -> PartitionSpec:
    """Maps logical axes to a `PartitionSpec`. Raises `ValueError` if two dimensions need the same mesh axis."""
    dims = [None if a is None else rules[a] for a in logical]
    used = [m for d in dims if d for m in d]
    if len(used) != len(set(used)):
        raise ValueError(f"logical axes {tuple(logical)} put two dimensions on one mesh axis")
    return PartitionSpec(*[(d[0] if len(d) == 1 else d) if d else None for d in dims])


def named(mesh: Mesh | None, logical: Sequence[str | None], rules: Rules = TRAIN) -> NamedSharding | None:
    """The sharding of an array with these logical axes; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, spec(logical, rules))


def shards(mesh: Mesh | None) -> int:
    """Number of batch shards of a mesh, the equal parts that a batch is cut into."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in TRAIN["shard"])


def constrain(x: Array, mesh: Mesh | None, *logical: str | None, rules: Rules = TRAIN) -> Array:
    """``with_sharding_constraint`` by logical axes; the identity without a mesh."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(logical, rules)))


def check_divides(mesh: Mesh | None, what: str, size: int, axes: Sequence[str]) -> None:
    """Raises `UserError` if ``size`` does not divide over the mesh axes, instead of replicating silently."""
    if mesh is None:
        return
    shards = math.prod(mesh.shape[a] for a in axes)
    if size % shards:
        raise UserError(f"{what} {size} does not divide over {shards} shards (mesh axes {'*'.join(axes)})")


def gather_weight(w: Array, mesh: Mesh | None, dtype: DTypeLike, *logical: str | None) -> Array:
    """Casts a weight to the compute dtype and gathers it over ``fsdp``, and over ``expert`` if it is no expert. Its
    gradient is scattered back over these axes.

    The cast comes first, so that the gather moves the compute dtype.
    """
    if mesh is None:
        return w.astype(dtype)
    return _gather(w.astype(dtype), mesh, logical)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(w, mesh, logical):
    return constrain(w, mesh, *logical, rules=ROLLOUT)


def _gather_fwd(w, mesh, logical):
    return _gather(w, mesh, logical), None


def _gather_bwd(mesh, logical, _, g):
    return (constrain(g, mesh, *logical, rules=TRAIN),)


_gather.defvjp(_gather_fwd, _gather_bwd)
