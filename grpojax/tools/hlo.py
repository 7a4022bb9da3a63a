"""What an optimised HLO module moves between chips: its collectives, how often they run, and their sizes."""

import collections
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

_GIB = 2**30

_KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
_HEAD = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.+?) ([a-z][\w-]*)\((.*)$")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply)=%([\w.\-]+)|branch_computations=\{([^}]*)\}")


class Traffic(NamedTuple):
    """Collectives of one kind: how many run, GiB of all their results on one chip, and GiB of the largest."""

    count: int = 0
    gib: float = 0.0
    largest: float = 0.0


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    rest: str  # operands and attributes


def collectives(hlo: str) -> tuple[dict[str, Traffic], dict[str, Traffic]]:
    """Counts the collectives of an optimised HLO module.

    Returns:
      By kind: those of one run of the program, loops of known length multiplied out; and those of one iteration of
      the loops of unknown length. A collective that is spread over several fusions to overlap with them counts once.
    """
    computations, entry = _parse(hlo)
    totals: tuple[dict[str, Traffic], ...] = (
        collections.defaultdict(Traffic),
        collections.defaultdict(Traffic),
    )
    seen = set()

    def walk(computation: str, loop: str, times: int, unknown: bool, fused: bool = False) -> None:
        for i in computations[computation]:
            kind = i.opcode.removesuffix("-start")
            if kind in _KINDS:
                size = _size(i) / _GIB
                piece = (loop, kind, size, *re.findall(r'(?:channel_id|op_name)=("[^"]*"|\d+)', i.rest))
                if not (fused and piece in seen):
                    before = totals[unknown][kind]
                    largest = max(before.largest, size)
                    totals[unknown][kind] = Traffic(before.count + times, before.gib + times * size, largest)
                if fused:
                    seen.add(piece)
            called = [
                name for one, many in _CALLED.findall(i.rest) for name in (one, *re.findall(r"%([\w.\-]+)", many))
            ]
            if i.opcode == "while":
                trips = _trips(computations, *called)
                for name in called:
                    walk(name, name, times * trips if trips else 1, unknown or not trips)
            else:
                for name in filter(None, called):
                    walk(name, loop, times, unknown, fused or i.opcode == "fusion")

    walk(entry, entry, 1, False)
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
            current.append(_Instruction(*found.groups()))
    return computations, entry


def _size(i: _Instruction) -> int:
    """Bytes of a collective's result; an asynchronous start's tuple holds its operand as well."""
    sizes = []
    for dtype, dims in re.findall(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]", i.shape):
        bits = 8 if dtype == "pred" else int(re.sub(r"^[a-z]+(\d+).*", r"\1", dtype))
        sizes.append(bits * math.prod(int(d) for d in dims.split(",") if d) // 8)
    return max(sizes) if i.opcode.endswith("-start") else sum(sizes)


def _trips(computations: Mapping[str, list[_Instruction]], condition: str, body: str) -> int:
    """Iterations of a loop whose counter runs from 0 in equal steps below a constant; 0: they depend on data."""
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
