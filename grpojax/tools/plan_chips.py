"""The chips that ``--topology`` names: a TPU slice that libtpu knows, or a number of GPUs by their data sheet."""

import dataclasses
import math
import os
import re
from typing import Any, Literal, NamedTuple

from jax.sharding import Mesh

from grpojax.host.errors import UserError
from grpojax.models import flops, sharding
from grpojax.models.flops import Chip
from grpojax.models.sharding import MeshConfig

_TPUS = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5p", "v6e": "TPU v6 lite"}
_GPUS = {
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "a100": "NVIDIA A100-SXM4-80GB",
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "l4": "NVIDIA L4",
    "rtx4090": "NVIDIA GeForce RTX 4090",
}


@dataclasses.dataclass(frozen=True)
class Target:
    """The chips that a run is planned for.

    Attributes:
      kind: jax's name for them.
      shape: chips along each axis of a slice.
      slices: how many of them.
      by_sheet: whether there is no compiler for them here.
    """

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


def parse(topology: str, slices: int = 1) -> Target:
    """Reads a topology.

    Args:
      topology: such as "v5e:4x4", or "h100:8".
      slices: how many of them.

    Raises:
      UserError: there is no such chip, or the shape is not valid.

    Example:
      >>> parse("v5p:2x2x4").chips, parse("h100:8").by_sheet
      (16, True)
    """
    name, _, shape = topology.partition(":")
    if name not in _TPUS and name not in _GPUS:
        raise UserError(f"no topology {topology!r}: known are {', '.join((*_TPUS, *_GPUS))}; write v5e:4x4, or h100:8")
    gpu = name in _GPUS
    if not re.fullmatch(r"[1-9]\d*" if gpu else r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
        how = f"{name}:8 for eight of them" if gpu else f"{name}:4x4" if "e" in name else f"{name}:2x2x4"
        raise UserError(f"no topology {topology!r}: write {how}")
    if gpu and slices > 1:
        raise UserError(f"--slices {slices}: is for TPUs; a GPU's plan is of one machine")
    return Target((_GPUS if gpu else _TPUS)[name], tuple(int(n) for n in shape.split("x")), slices, gpu)


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
    tensor = laid_out.shape["tensor"]
    aside = MeshConfig(data=len(sampling) // tensor, fsdp=1, tensor=tensor)
    return Chips(laid_out, sharding.make_mesh(aside, sampling))


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
        raise UserError(f"no TPU topology {topology!r}: {e} (needs libtpu: pip install libtpu)") from e
