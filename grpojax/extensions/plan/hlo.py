"""The data that an optimised HLO module moves: its collectives, the devices that take part and how often they run, and
the bytes of memory that its instructions read and write.
"""

import collections
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

_GIB = 2**30

_KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
_HEAD = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = (.+?) ([a-z][\w-]*)\((.*)$")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply)=%([\w.\-]+)|branch_computations=\{([^}]*)\}")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\](\{[^}]*\})?")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_BETWEEN = re.compile(r'_xla_megascale_transfer_type="(\w+)"')

# Instructions that move no bytes of their own, and those that read or write only a part of their operands.
_FREE = frozenset((
    "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "while", "call", "conditional", "after-all",
    "partition-id", "replica-id", "iota", "opt-barrier", "send", "recv",
    "async-start",
))  # fmt: skip
_CALLS = frozenset(("call", "conditional", "async-start"))
_SLICES = frozenset(("dynamic-slice", "slice", "gather", "slice-start"))
_RELABELS = "output_to_operand_aliasing={{}: (0, {})}"  # a fusion inside of a fusion: the same bytes in another tiling
_PUTS = {"dynamic-update-slice": 1, "scatter": 2}  # opcode -> the operand that is written into the first


class Traffic(NamedTuple):
    """Collectives of one kind: their number, GiB of all their results on one chip, and GiB of the largest."""

    count: int = 0
    gib: float = 0.0
    largest: float = 0.0


class Collective(NamedTuple):
    """One collective of a program.

    Attributes:
      kind: its name in HLO.
      size: bytes of its result on one chip.
      wire: bytes that each chip must receive for it.
      groups: devices that take part, by their place in the mesh; for a permutation, the pairs of source and target.
        None if it is between slices, which libtpu turns into messages of the hosts: then ``wire`` is its size.
      times: how often it runs in a run of the program or, if ``unknown``, in an iteration of its loop.
      unknown: whether it stands in a loop whose length depends on the data.
    """

    kind: str
    size: int
    wire: float
    groups: tuple[tuple[int, ...], ...]
    times: int
    unknown: bool


class Module(NamedTuple):
    """Collectives, and bytes of a chip's memory read or written: in all, and in an iteration of loops of unknown
    length. Each conditional takes its longest branch. ``optional`` bytes of an iteration are not moved if all
    conditionals take their shortest branch and loops of known scope do not run."""

    collectives: tuple[Collective, ...]
    once: float
    each: float
    optional: float


class _Instruction(NamedTuple):
    root: str
    name: str
    shape: str
    opcode: str
    rest: str  # operands and attributes


_Computations = Mapping[str, list[_Instruction]]


def analyse(hlo: str, most_trips: Mapping[str, int] | None = None) -> Module:
    """Reads an optimised HLO module.

    Args:
      hlo: its text.
      most_trips: the most iterations of a loop whose length depends on the data, by the scope (`jax.named_scope`) that
        contains it.

    Loops of known length are multiplied out. A collective that is spread over several fusions to overlap with them
    counts once. An instruction reads its operands and writes its result. For a slice or an update in place, only that
    part counts. Arrays in a chip's fast memory (``S(1)`` and above) do not count.
    """
    computations, entry = _parse(hlo)
    devices = re.search(r"(?:num_partitions|replica_count)=(\d+)", hlo)
    everyone = tuple(range(int(devices[1]) if devices else 1))
    found: list[Collective] = []
    moved, optional = [0.0, 0.0], 0.0
    seen = set()
    most_trips = most_trips or {}

    def walk(computation: str, loop: str, times: int, unknown: bool, fused: bool = False, runs: bool = True) -> None:
        nonlocal optional
        table = {i.name: i for i in computations[computation]}
        for i in computations[computation]:
            if runs:
                moved[unknown] += times * _moved(computations, table, i)
            kind = i.opcode.removesuffix("-start")
            if kind in _KINDS:
                one = _collective(i, kind, times, unknown, everyone)
                piece = (loop, kind, one.size, *re.findall(r'(?:channel_id|op_name)=("[^"]*"|\d+)', i.rest))
                if not (fused and piece in seen):
                    found.append(one)
                if fused:
                    seen.add(piece)
            elif i.opcode == "recv" and (between := _BETWEEN.search(i.rest)):
                size = max(_arrays(i.shape))
                found.append(Collective(between[1].lower().replace("_", "-"), size, size, (), times, unknown))
            called = list(_called(i))
            if i.opcode == "while":
                most = next((n for scope, n in most_trips.items() if f'/{scope}/while"' in i.rest), 0)
                trips, before = most or _trips(computations, i), moved[unknown]
                for name in called:
                    walk(name, name, times * trips if trips else 1, unknown or not trips)
                optional += (moved[unknown] - before) * (unknown and most > 0)
            else:
                inside, before, branches = fused or i.opcode == "fusion", moved[unknown], [0.0]
                for name in called:
                    walk(name, loop, times, unknown, inside, runs and i.opcode in _CALLS)
                    branches.append(moved[unknown] - before - sum(branches))
                if i.opcode == "conditional" and runs:
                    moved[unknown] = before + max(branches)
                    optional += (max(branches) - min(branches[1:])) * unknown

    walk(entry, entry, 1, False)
    return Module(tuple(found), moved[0], moved[1], optional)


def by_kind(collectives: tuple[Collective, ...]) -> tuple[dict[str, Traffic], dict[str, Traffic]]:
    """``(once, each)``: the collectives of one run by kind, and those of one iteration of loops of unknown length."""
    totals: tuple[dict[str, Traffic], ...] = (collections.defaultdict(Traffic), collections.defaultdict(Traffic))
    for c in collectives:
        size, before = c.size / _GIB, totals[c.unknown][c.kind]
        added = before.count + c.times, before.gib + c.times * size, max(before.largest, size)
        totals[c.unknown][c.kind] = Traffic(*added)
    return dict(totals[0]), dict(totals[1])


def _parse(hlo: str) -> tuple[dict[str, list[_Instruction]], str]:
    """``(computations, name of the entry)``."""
    computations: dict[str, list[_Instruction]] = {}
    entry, current = "", []
    for line in hlo.splitlines():
        if head := _HEAD.match(line):
            current = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif found := _INSTRUCTION.match(line):
            current.append(_Instruction(*(part or "" for part in found.groups())))
    return computations, entry


def _called(i: _Instruction) -> Iterator[str]:
    for one, many in _CALLED.findall(i.rest):
        yield from filter(None, (one, *re.findall(r"%([\w.\-]+)", many)))


def _arrays(shape: str, *, slow_only: bool = False) -> list[int]:
    """Bytes of each array of a shape; with ``slow_only``, 0 for arrays in fast memory."""
    sizes = []
    for dtype, dims, layout in _ARRAY.findall(shape):
        bits = 8 if dtype == "pred" else int(re.sub(r"^[a-z]+(\d+).*", r"\1", dtype))
        size = bits * math.prod(int(d) for d in dims.split(",") if d) // 8
        sizes.append(0 if slow_only and re.search(r"S\([1-9]", layout) else size)
    return sizes


# --------------------------------------------------------------------------------------------------- collectives


def _collective(i: _Instruction, kind: str, times: int, unknown: bool, everyone: tuple[int, ...]) -> Collective:
    sizes = _arrays(i.shape)
    if i.opcode.endswith("-start") and kind != "all-reduce":  # its tuple also holds the operand
        sizes = [min(s for s in sizes if s > 4) if kind == "reduce-scatter" else max(sizes)]
    size, groups = sum(sizes), _groups(i.rest, everyone)
    n = max(len(g) for g in groups)
    share = (n - 1) / n
    wire = {
        "all-reduce": 2 * share * size,
        "reduce-scatter": (n - 1) * size,
        "collective-permute": size,
        "collective-broadcast": size,
    }.get(kind, share * size)
    return Collective(kind, size, wire, groups, times, unknown)


def _groups(rest: str, everyone: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The devices that take part, from any of HLO's notations: lists, transposed ranges, axes of a mesh."""
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", rest):
        return tuple(tuple(int(n) for n in g.split(",")) for g in re.findall(r"\{([\d, ]+)\}", listed[1]))
    if ranged := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        ids = np.arange(int(ranged[1]) * int(ranged[2])).reshape([int(n) for n in ranged[3].split(",")])
        if ranged[4]:
            ids = ids.transpose([int(n) for n in ranged[4].split(",")])
        return tuple(map(tuple, ids.reshape(int(ranged[1]), int(ranged[2])).tolist()))
    if of_mesh := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^)]*\))? \{([^}]*)\}", rest):
        return _mesh_groups(of_mesh[1], of_mesh[2])
    return (everyone,)


def _mesh_groups(axes: str, taken: str) -> tuple[tuple[int, ...], ...]:
    """Groups along some axes ``'a'`` of a mesh ``'a'=4,'b'=2``, or along a part ``'a':(before)size`` of one."""
    sizes: list[int] = []
    mine: list[bool] = []
    parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", taken)
    for name, size in re.findall(r"'([^']+)'=(\d+)", axes):
        cut = [(int(before or 1), int(length or size)) for axis, before, length in parts if axis == name]
        done = 1
        for before, length in sorted(cut):
            sizes += [before // done, length]
            mine += [False, True]
            done = before * length
        sizes.append(int(size) // done)
        mine.append(False)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    order = [a for a, own in enumerate(mine) if not own] + [a for a, own in enumerate(mine) if own]
    members = math.prod(s for s, own in zip(sizes, mine, strict=True) if own)
    return tuple(map(tuple, ids.transpose(order).reshape(-1, members).tolist()))


# ------------------------------------------------------------------------------------------------ bytes of memory


def _moved(computations: _Computations, table: Mapping[str, _Instruction], i: _Instruction) -> float:
    """Bytes that an instruction reads and writes."""
    if i.opcode in _FREE or i.opcode.endswith(("-done", "-update")) or "AllocateBuffer" in i.rest:
        return 0.0
    operands = [table[name] for name in _operands(i) if name in table]
    body = next(iter(_called(i)), "") if i.opcode == "fusion" else ""
    if body:
        return _fusion_moves(computations, body)
    written = _arrays(i.shape, slow_only=True)
    if i.opcode in _PUTS:
        new = operands[_PUTS[i.opcode]] if len(operands) > _PUTS[i.opcode] else i
        here = bool(sum(written))
        return sum(_arrays(new.shape, slow_only=True)) + here * sum(_arrays(new.shape))
    if i.opcode.endswith("-start") and i.opcode != "all-reduce-start":
        written = written[:1] if i.opcode == "copy-start" else [max(written, default=0)]
    if i.opcode in _SLICES:
        slow = operands and sum(_arrays(operands[0].shape, slow_only=True))
        return sum(written) + bool(slow) * max(_arrays(i.shape)[:1], default=0)
    return sum(written) + sum(sum(_arrays(o.shape, slow_only=True)) for o in operands)


def _fusion_moves(computations: _Computations, body: str) -> float:
    """Bytes that a fusion moves: those read from each parameter, and those that its root writes."""
    inside = {i.name: i for i in computations[body]}
    read = sum(_read(computations, body, i.name) for i in computations[body] if i.opcode == "parameter")
    root = next(i for i in computations[body] if i.root)
    return read + _written(computations, inside, root, root.shape)


def _read(computations: _Computations, body: str, name: str) -> float:
    """Bytes read from a parameter of a fusion, or from an instruction that stands for the same bytes."""
    table = {i.name: i for i in computations[body]}
    whole, part = sum(_arrays(table[name].shape, slow_only=True)), 0.0
    if not whole or table[name].root:
        return whole
    for user in computations[body]:
        operands = _operands(user)
        if name not in operands:
            continue
        first = operands[0] == name
        if user.opcode in _SLICES and first:
            part += sum(_arrays(user.shape))
        elif user.opcode in _PUTS and first:
            continue
        elif user.opcode == "bitcast" or (user.opcode == "fusion" and _RELABELS in user.rest):
            part += _read(computations, body, user.name)
        elif user.opcode == "fusion" and (inner := next(_called(user), "")):
            named = [p for p in computations[inner] if p.opcode == "parameter"]
            at = [k for k, o in enumerate(operands) if o == name]
            part += sum(_read(computations, inner, p.name) for p in named if int(p.rest.split(")")[0]) in at)
        else:
            return whole
    return min(whole, part)


def _written(computations: _Computations, table: Mapping[str, _Instruction], i: _Instruction, shape: str) -> float:
    """Bytes that a fusion's root writes into arrays of this shape."""
    if i.opcode == "tuple":
        return sum(_written(computations, table, table[n], table[n].shape) for n in _operands(i) if n in table)
    if not sum(_arrays(shape, slow_only=True)):
        return 0.0
    operands = [table[name] for name in _operands(i) if name in table]
    if i.opcode in _PUTS and len(operands) > _PUTS[i.opcode]:
        return sum(_arrays(operands[_PUTS[i.opcode]].shape))
    if i.opcode == "bitcast" and operands and operands[0].opcode in (*_PUTS, "fusion"):
        return _written(computations, table, operands[0], shape)
    if i.opcode == "fusion" and (inner := next(_called(i), "")):
        root = next(j for j in computations[inner] if j.root)
        return _written(computations, {j.name: j for j in computations[inner]}, root, shape)
    return sum(_arrays(shape, slow_only=True))


# ---------------------------------------------------------------------------------------------------------- loops


def _trips(computations: _Computations, loop: _Instruction) -> int:
    """Iterations of a loop, if XLA knows them or the counter runs from 0 in equal steps below a constant; 0 if they
    depend on data."""
    if known := _KNOWN_TRIPS.search(loop.rest):
        return int(known[1])
    condition, body = _called(loop)
    test = {i.name: i for i in computations[condition]}
    compare = computations[condition][-1]
    if compare.opcode != "compare" or "direction=LT" not in compare.rest:
        return 0
    left, right = (test.get(name) for name in _operands(compare)[:2])
    index = left and re.search(r"index=(\d+)", left.rest)
    if not index or right is None or right.opcode != "constant":
        return 0
    made = {i.name: i for i in computations[body]}
    new = made.get(_operands(computations[body][-1])[int(index[1])])
    steps = [made[name] for name in _operands(new)[:2] if name in made] if new and new.opcode == "add" else []
    by = next((_constant(i) for i in steps if i.opcode == "constant"), 1)
    return -(-_constant(right) // by)


def _operands(i: _Instruction) -> list[str]:
    return re.findall(r"%([\w.\-]+)", i.rest.split("), ")[0])


def _constant(i: _Instruction) -> int:
    return int(re.split(r"\D", i.rest, maxsplit=1)[0])
