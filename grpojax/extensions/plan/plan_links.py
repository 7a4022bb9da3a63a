"""The links that a collective uses, and how long they are busy with it at the data sheet's rates."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpojax import sharding
from grpojax.extensions.plan.hlo import Collective
from grpojax.extensions.plan.plan_chips import PlanTarget
from grpojax.models import flops
from grpojax.models.flops import Chip
from grpojax.sharding import MeshConfig

LINKS = ("ICI", "DCN")


@dataclasses.dataclass(frozen=True)
class LinkLoad:
    """The work of a link in one run of a program, or in one iteration of its loop.

    Attributes:
      seconds: the least time that it is busy.
      received: bytes that each chip receives over it, by kind of collective.
    """

    seconds: float = 0.0
    received: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def total(self) -> float:
        """Bytes of all collectives."""
        return sum(self.received.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """How the work of a run is split over chips, and on each over time. What the run learns does not depend on it.

    Attributes:
      data: copies of the weights, each with its own share of the batch.
      fsdp: chips over which weights and batch are sharded.
      expert: chips over which the experts of a mixture are sharded, and the batch.
      tensor: chips over which each matrix product is sharded.
      microbatches: parts that an update takes one after the other (``train.microbatches``).
    """

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1
    microbatches: int = 1


@functools.lru_cache(maxsize=1024)
def rates(target: PlanTarget, split: Split) -> dict[str, float]:
    """Bytes/s that a chip receives from the others along ``fsdp``, ``expert``, ``tensor``, and "all", which is ``fsdp``
    and ``expert`` together; and by an "exchange", an all-to-all along ``expert``. 0 if no data sheet has it.

    A slice is laid out as `grpojax.sharding.make_mesh` does it.

    Raises:
      UserError: the wiring of the chips does not allow this mesh.
    """
    mesh = MeshConfig(data=split.data, fsdp=split.fsdp, expert=split.expert, tensor=split.tensor)
    first = sharding.make_mesh(mesh, target.places).devices[0]
    lines = {"fsdp": first[:, 0, 0], "expert": first[0, :, 0], "tensor": first[0, 0], "all": first[:, :, 0]}
    sides: dict[str, float] = dict.fromkeys((*lines, "exchange"), 1)  # a GPU's figure is of all its links
    if not target.by_sheet:
        sides = {axis: directions([*line.flat], target.places) for axis, line in lines.items()}
        sides["exchange"] = crossing([*lines["expert"]], target.places)
    return {axis: n * target.chip.link for axis, n in sides.items()}


def loads(collectives: Iterable[Collective], devices: Sequence[Any], *, unknown: bool = False) -> dict[str, LinkLoad]:
    """The load of each link from the collectives of a run or, with ``unknown``, of an iteration of the unknown loop.

    Inside a slice, a chip receives over the links along which its partners lie. It is fed from one side on a line and
    from both sides on a ring. Between slices, every slice must receive the data of the others. Its chips share that,
    and each has its part of the host's network.

    Args:
      collectives: those that `grpojax.extensions.plan.hlo.analyse` found.
      devices: the devices of the mesh, in its order.
      unknown: whether to take the collectives in loops of unknown length, or the others.
    """
    chip = flops.CHIPS.get(devices[0].device_kind)
    seconds, received = dict.fromkeys(LINKS, 0.0), {link: {} for link in LINKS}
    for c in collectives:
        if c.unknown != unknown:
            continue
        for link, wire, rate in _parts(c, devices, chip):
            seconds[link] += c.times * wire / rate if rate else 0.0
            received[link][c.kind] = received[link].get(c.kind, 0.0) + c.times * wire
    return {link: LinkLoad(seconds[link], received[link]) for link in LINKS if received[link]}


def _parts(c: Collective, devices: Sequence[Any], chip: Chip | None) -> Iterable[tuple[str, float, float]]:
    """``(link, bytes that a chip receives, bytes/s)`` of one collective; 0 bytes/s if no data sheet has the rate."""
    link, network = (chip.link, chip.network) if chip else (0.0, 0.0)
    if not c.groups:
        share = 1 - 1 / len({_slice(d) for d in devices})
        yield "DCN", c.wire * share * (2 if c.kind == "all-reduce" else 1), network
        return
    if c.kind == "collective-permute":
        between = any(len({_slice(devices[d]) for d in pair}) > 1 for pair in c.groups)
        yield ("DCN", c.wire, network) if between else ("ICI", c.wire, link)
        return
    group = [devices[d] for d in c.groups[0]]
    n, slices = len(group), len({_slice(d) for d in group})
    if n == 1:
        return
    here = n // slices
    if here > 1:
        one = [d for d in group if _slice(d) == _slice(group[0])]
        sides = crossing if c.kind in ("all-to-all", "ragged-all-to-all") else directions
        yield "ICI", c.wire * (here - 1) / here * n / (n - 1), link * sides(one, devices)
    if slices > 1:
        yield "DCN", c.wire * (slices - 1) / slices * n / (n - 1) / here, network


def directions(group: Sequence[Any], devices: Sequence[Any]) -> int:
    """The number of sides from which the worst placed chip of a group is fed: one for each axis along which its
    partners lie, or two if that axis closes to a ring.

    TPU v4 and v5p close an axis of a slice that is made of whole cubes of 4x4x4, v5e and v6e one of 16 chips.
    """
    return max(1, sum(2 if ring else 1 for _, ring in _axes(group, devices)))


def crossing(group: Sequence[Any], devices: Sequence[Any]) -> float:
    """As `directions`, for an all-to-all: the links that carry it at once, as a number of sides.

    A chip sends something else to each of the others, and most of that passes by chips in between. So the middle of the
    longest axis binds: half of what the chips of one half of it send crosses one link of a line, or two of a ring.
    """
    n = len(group)
    halves = [(8 if ring else 4) / size * (n - 1) / n for size, ring in _axes(group, devices)]
    return min([directions(group, devices), *halves])


def _axes(group: Sequence[Any], devices: Sequence[Any]) -> list[tuple[int, bool]]:
    """``(chips, whether they are a ring)`` of each axis of the interconnect along which a group lies."""
    shape = _extent([d for d in devices if _slice(d) == _slice(group[0])])
    flat = "lite" in devices[0].device_kind
    rings = [size == 16 if flat else all(s % 4 == 0 for s in shape) for size in shape]
    return [(size, ring) for size, ring in zip(_extent(group), rings, strict=True) if size > 1]


def _extent(group: Sequence[Any]) -> list[int]:
    """The number of a group's chips along each axis of the interconnect."""
    axes = zip(*(getattr(d, "coords", (0,)) for d in group), strict=True)
    return [len(set(axis)) for axis in axes]


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", 0) or 0
