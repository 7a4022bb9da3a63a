"""The chips that ``--topology`` and ``--devices`` name: a TPU slice, or a number of GPUs by their data sheet."""

import dataclasses
import importlib.util
import itertools
import math
import os
import re
from typing import Any, Literal, NamedTuple

from jax.sharding import Mesh

from grpojax import sharding
from grpojax.host.errors import UserError
from grpojax.models import flops
from grpojax.models.flops import Chip
from grpojax.sharding import MeshConfig

_TPUS = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5p", "v6e": "TPU v6 lite"}
# Shapes of slices by their number of chips, as Google's names of slices have them.
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")
_CORES = {"v4": 2, "v5p": 2}  # of a chip, which their names count
_GPUS = {
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "a100": "NVIDIA A100-SXM4-80GB",
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "l4": "NVIDIA L4",
    "t4": "Tesla T4",
    "rtx4070": "NVIDIA GeForce RTX 4070",
    "rtx4080": "NVIDIA GeForce RTX 4080",
    "rtx4090": "NVIDIA GeForce RTX 4090",
    "rtx5090": "NVIDIA GeForce RTX 5090",
}


@dataclasses.dataclass(frozen=True)
class Place:
    """A chip that is not there, with what a mesh is laid out by (`grpojax.sharding.make_mesh`)."""

    id: int
    platform: str
    device_kind: str
    coords: tuple[int, int, int]
    slice_index: int = 0
    core_on_chip: int = 0
    process_index: int = 0


@dataclasses.dataclass(frozen=True)
class PlanTarget:
    """The chips that a run is planned for.

    Attributes:
      name: our name for them, such as "v5e".
      kind: jax's name for them.
      shape: chips along each axis of a slice.
      slices: how many of them.
      by_sheet: whether there is no compiler for them here.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    slices: int = 1
    by_sheet: bool = False

    @property
    def chip(self) -> Chip:
        """The chip's data sheet."""
        return flops.CHIPS[self.kind]

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return self.slices * math.prod(self.shape)

    @property
    def topology(self) -> str:
        """A slice as libtpu writes it, such as "v5e:4x4"; "h100:8" for GPUs."""
        return f"{self.name}:{'x'.join(map(str, self.shape))}"

    @property
    def places(self) -> list[Place]:
        """The chips of all slices, without libtpu."""
        platform, (x, y, z) = "gpu" if self.by_sheet else "tpu", (*self.shape, 1, 1)[:3]
        grid = itertools.product(range(self.slices), range(z), range(y), range(x))
        return [Place(i, platform, self.kind, (a, b, c), s) for i, (s, c, b, a) in enumerate(grid)]


def parse(topology: str, slices: int = 1) -> PlanTarget:
    """Reads a topology.

    Args:
      topology: such as "v5e:4x4" or, by Google's name of that slice, "v5e-16"; "h100:8" for eight GPUs, "h100" for one.
      slices: how many of them.

    Raises:
      UserError: there is no such chip or slice, or the shape is not valid.

    Example:
      >>> parse("v5p:2x2x4").chips, parse("v5p-32").shape, parse("h100:8").by_sheet
      (16, (2, 2, 4), True)
    """
    name, colon, shape = topology.partition(":")
    gpu = name in _GPUS
    if not colon:
        name, shape = (name, "1") if gpu else _slice(topology)
    if name not in _TPUS and not gpu:
        known = ", ".join((*_TPUS, *_GPUS))
        raise UserError(f"no topology {topology!r}: known are {known}; write v5e:4x4 or v5e-16, h100:8 or h100")
    if not re.fullmatch(r"[1-9]\d*" if gpu else r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
        how = f"{name}:8 for eight of them" if gpu else f"{name}:4x4" if "e" in name else f"{name}:2x2x4"
        raise UserError(f"no topology {topology!r}: write {how}")
    if gpu and slices > 1:
        raise UserError(f"--slices {slices}: is for TPUs; a GPU's plan is of one machine")
    return PlanTarget(name, (_GPUS if gpu else _TPUS)[name], tuple(int(n) for n in shape.split("x")), slices, gpu)


def _slice(text: str) -> tuple[str, str]:
    """``(name, shape)`` of a slice by its name, such as "v5e-16"; v4 and v5p count cores, of which a chip has two.

    Raises:
      UserError: it is the name of a TPU with another number.
    """
    name, _, number = text.partition("-")
    shapes = _CUBES if name in _CORES else _FLAT
    known = {math.prod(map(int, s.split("x"))) * _CORES.get(name, 1): s for s in shapes}
    if name in _TPUS and (not number.isdecimal() or int(number) not in known):
        names = ", ".join(f"{name}-{n}" for n in known)
        raise UserError(f"no slice {text!r}: write one of {names}, or {name}:{shapes[3]}")
    return name, known.get(int(number), "") if number.isdecimal() else ""


class Chips(NamedTuple):
    """The mesh of the chips that learn, that of the chips that only sample (None if there are none), and the platform
    that programs are lowered for."""

    mesh: Mesh
    sampling: Mesh | None = None
    platform: Literal["cpu", "gpu", "tpu"] = "tpu"


def topology_meshes(topology: str, mesh: MeshConfig, slices: int = 1) -> Chips:
    """The chips of a slice as a run lays them out. The last ``mesh.rollout`` are for sampling
    (`grpojax.programs.policy`).

    Raises:
      UserError: as `topology_mesh`, or chips of several machines with ``mesh.rollout``.
    """
    devices = topology_devices(topology, slices)
    machine = 8 if "lite" in devices[0].device_kind else 4
    if mesh.rollout and len(devices) > machine:
        raise UserError(
            f"mesh.rollout={mesh.rollout} with {topology}: chips are reserved on one machine only, which has no more "
            f"than {machine} of these; set it to 0"
        )
    learning, sampling = sharding.disaggregate(mesh, devices)
    laid_out = sharding.make_mesh(mesh, learning)
    if not sampling:
        return Chips(laid_out)
    return Chips(laid_out, sharding.make_mesh(sharding.sampling_mesh(laid_out, len(sampling)), sampling))


def topology_mesh(topology: str, mesh: MeshConfig, slices: int = 1) -> Mesh:
    """The mesh of a slice such as "v5e:4x4" or "v5p:2x2x4", or of several slices with the data axis across them.

    Raises:
      UserError: libtpu does not know the topology, or the mesh does not fit it.
    """
    return sharding.make_mesh(mesh, topology_devices(topology, slices))


def topology_devices(topology: str, slices: int = 1) -> list[Any]:
    """The chips of one or several slices; raises `UserError` if libtpu does not know the topology."""
    from jax.experimental import topologies

    # Outside of a TPU VM there is no metadata and no device to share. libtpu uses neither of the last two, but
    # complains without them.
    variables = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    variables |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    options: dict[str, Any] = {"chip_config_name": "megacore"} if topology.startswith("v4") else {}  # one per chip
    options |= {"num_slices": slices} if slices > 1 else {}
    try:
        return list(topologies.get_topology_desc(topology, platform="tpu", **options).devices)
    except Exception as e:  # libtpu may raise any type
        if importlib.util.find_spec("libtpu") is None:
            raise UserError(
                f"--topology {topology} is a TPU's, whose compiler is missing: pip install libtpu (Linux, x86-64)\n"
                "a GPU's, such as --topology h100, needs nothing"
            ) from None
        raise UserError(f"no TPU topology {topology!r}: {' '.join(str(e).split())[:300]}") from e
