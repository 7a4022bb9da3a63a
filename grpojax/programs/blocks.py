"""A ragged batch in blocks of equal shape, of which a program takes as many as hold a token.

A loop over blocks has a length that is known only as it runs, so one program serves batches of any lengths and still
costs what their tokens cost. Where nearly all of a batch is filled a second program is cheaper, which computes each
prompt once for its whole group. These two are all that a run needs, and lengths alone say which of them a batch takes.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from grpojax.programs import packing
from grpojax.programs.packing import Layout, Packed
from grpojax.types import Rows, Scalar, TrainBatch

PARTS = 16  # into which a batch is cut at most, unless micro-batches ask for more
LEAST = {"cpu": 512, "tpu": 4096}  # positions of a lane that keep it busy while a block adds its gradient


class Block(NamedTuple):
    """Of a lane: prompts and rows of a block, how many blocks there may be, and whether completions share rows."""

    prompts: int
    rows: int
    count: int
    shared: bool


@functools.lru_cache(maxsize=64)
def sizes(
    prompts: int, group: int, most: int, longest: int, *, microbatches: int = 1, least: int = 1, gaps: bool = False
) -> list[Block]:
    """The blocks that batches of a run come in: one for groups of full length and, if it saves anything, a smaller one.

    Of some 100 smaller ones it is the one with which a lane computes the fewest positions, as a mean over uneven groups
    that fill from one row to ``group`` rows on average; with ``gaps`` also over groups of ``group`` rows, and over how
    many groups there are. It is never larger than a micro-batch.

    Args:
      prompts: of a lane.
      group: samples of each.
      most: tokens of the longest sample.
      longest: tokens of the longest prompt.
      microbatches: parts that an update takes one after the other at full length.
      least: positions that are worth a block.
      gaps: any number of groups may have no samples (``train.skip_zero_advantage``).

    Raises:
      UserError: prompts and groups do not divide into the micro-batches.

    Example:
      >>> for block in sizes(16, 8, 40, 48, least=512):
      ...     print(*block)
      16 128 1 False
      4 10 9 True
    """
    cut = packing.cut(prompts, group, microbatches)
    full = Block(cut.prompts, cut.prompts * cut.samples, microbatches, shared=False)
    whole = microbatches * (full.prompts * longest + full.rows * most)
    least = max(least, whole // PARTS)
    averages = _some(1, group, 8)
    spread = np.random.default_rng(0).uniform(0.5, 1.5, (len(averages), prompts)) * np.array(averages)[:, None]
    examples = np.clip(np.rint(spread), 1, group).astype(int)
    if gaps:
        examples = np.concatenate([examples, np.full_like(examples, group)])
        examples = np.concatenate([examples * (np.arange(prompts) < n) for n in _some(1, prompts, 4)])
    best, cost, room = full, 0.95 * whole, min(2 * least, whole // microbatches)
    for k in _some(1, cut.prompts, 12):
        fewest = max(k, -(-(least - k * longest) // most))
        for rows in _some(fewest, min(k * cut.samples, (room - k * longest) // most), 12):
            positions = k * longest + rows * most
            block = Block(k, rows, whole // positions, shared=True)
            taken = [min(whole, positions * len(_deal(counts, block))) for counts in examples.tolist()]
            if np.mean(taken) < cost:
                best, cost = block, float(np.mean(taken))
    return [full] if best is full else [full, best]


def _some(first: int, last: int, most: int) -> list[int]:
    """All numbers from ``first`` to ``last``, or so many of them, evenly spaced."""
    return np.unique(np.linspace(first, last, min(most, max(0, last - first + 1))).round().astype(int)).tolist()


def _deal(counts: Sequence[int], block: Block) -> list[list[tuple[int, int]]]:
    """Groups of so many rows each into as few blocks as it finds: the pieces ``(group, rows)`` of each block.

    Those with most rows come first, each into the block with most room. Where none has room for a whole group, as many
    of its rows as fill that block; the rest opens another.
    """
    pieces = [(p, block.rows) for p, n in enumerate(counts) for _ in range(n // block.rows)]
    pieces += [(p, n % block.rows) for p, n in enumerate(counts) if n % block.rows]
    pieces.sort(key=lambda piece: -piece[1])
    dealt: list[list[tuple[int, int]]] = []
    room: list[int] = []
    for _ in range(max(-(-len(pieces) // block.prompts), -(-sum(counts) // block.rows))):
        dealt.append([])
        room.append(block.rows)
    for p, n in pieces:
        while n:
            free = [m for m, of_block in enumerate(dealt) if room[m] and len(of_block) < block.prompts]
            if not free:
                free = [len(dealt)]
                dealt.append([])
                room.append(block.rows)
            m = max(free, key=room.__getitem__)
            now = min(n, room[m])
            dealt[m].append((p, now))
            room[m] -= now
            n -= now
    return dealt


def pack(
    batch: TrainBatch,
    *,
    lanes: int = 1,
    microbatches: int = 1,
    seats: bool = False,
    least: int = 1,
    gaps: bool = False,
) -> tuple[Packed, Layout]:
    """Lays a batch out in rows, as `grpojax.programs.packing.pack` does, in the cheapest of its blocks (`sizes`).

    Args:
      batch, lanes, microbatches, seats: as there.
      least, gaps: as in `sizes`.

    Returns:
      The batch in rows ``[M, B, ...]``, M the most blocks that there may be, and the `Layout`.
    """
    blocks = sizes_of(batch, lanes=lanes, microbatches=microbatches, least=least, gaps=gaps)
    lengths = np.asarray(batch.lengths)
    most, per_lane = np.asarray(batch.tokens).shape[2], len(lengths) // lanes
    rows = [_rows(of_prompt, most) for of_prompt in lengths]
    for block in blocks[1:]:
        dealt = [_deal([*map(len, rows[at : at + per_lane])], block) for at in range(0, len(rows), per_lane)]
        if max(map(len, dealt)) <= block.count:
            parts = [_parts(of_lane, rows, at * per_lane, block) for at, of_lane in enumerate(dealt)]
            places = block.prompts * lengths.shape[1] if seats else 0
            return packing.lay_out(batch, [*zip(*parts, strict=True)], (block.rows, most), seats=places, blocks=True)
    return packing.pack(batch, lanes=lanes, microbatches=microbatches, full=True)


def sizes_of(batch: TrainBatch, *, lanes: int, microbatches: int, least: int, gaps: bool = False) -> list[Block]:
    """`sizes` of a batch ``[P, G, T]``; arguments as in `pack`."""
    (n, group, most), longest = np.asarray(batch.tokens).shape, np.asarray(batch.prompts.tokens).shape[1]
    return sizes(n // lanes, group, most, longest, microbatches=microbatches, least=least, gaps=gaps)


def _rows(lengths: np.ndarray, most: int) -> list[list[int]]:
    """The samples of each row of a group."""
    live = np.flatnonzero(lengths).tolist()
    return [[live[i] for i in b] for b in packing.first_fit([int(lengths[i]) for i in live], most)]


def _parts(
    dealt: Sequence[Sequence[tuple[int, int]]], rows: Sequence[list[list[int]]], first: int, block: Block
) -> list[packing.Part]:
    """Of a lane: its blocks, empty ones behind them; prompts stand once more where there are too few.

    Args:
      dealt: of `_deal`; its groups count from ``first`` in the batch.
      rows: of all prompts, the samples of each row.
      block: which.
    """
    left = [iter(of_prompt) for of_prompt in rows]
    out = []
    for m in range(block.count):
        pieces = dealt[m] if m < len(dealt) else ()
        here = [
            packing.Row(k, first + p, samples)
            for k, (p, n) in enumerate(pieces)
            for samples in itertools.islice(left[first + p], n)
        ]
        prompts = np.resize([first + p for p, _ in pieces] or [first], block.prompts)
        out.append(packing.Part(prompts, here))
    return out


def taken(rows: Rows) -> int | Scalar:
    """How many of the ``M`` micro-batches of rows ``[M, ...]`` are to be taken: all, or by ``live`` at least one.

    Example:
      >>> import types
      >>> taken(types.SimpleNamespace(live=jnp.array([[0, 1], [0, 0], [1, 0], [0, 0]]))).item()
      3
    """
    if rows.live is None:
        return rows.tokens.shape[0]
    live = (rows.live > 0).any(1)
    return jnp.where(live, jnp.arange(1, len(live) + 1, dtype=jnp.int32), 1).max()


def each(function: Callable[[Any], Any], rows: Rows) -> Any:
    """``function`` of every micro-batch that is `taken`, ``[M, ...]``; 0 for the others."""
    first = jax.tree.map(lambda x: x[0], rows)
    count = rows.segments.shape[0]
    if count == 1:
        return jax.tree.map(lambda x: x[None], function(first))

    def put(i: Any, out: Any) -> Any:
        new = function(jax.tree.map(lambda x: x[i], rows))
        return jax.tree.map(lambda o, x: jax.lax.dynamic_update_index_in_dim(o, x, i, 0), out, new)

    nothing = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), jax.eval_shape(function, first))
    return jax.lax.fori_loop(0, taken(rows), put, nothing)


def others(blocks: Sequence[Block], seats: int, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The arguments of a program with rows of the run's other blocks: shapes in place of arrays.

    Args:
      blocks: of `sizes`.
      seats: completions of a prompt where they are told apart by seats; 0 where no seats are needed.
      args: of a call; without rows in one of ``blocks`` there are no others.
    """
    nodes = jax.tree.leaves(args, is_leaf=_has_rows)
    shapes = {(x.rows if isinstance(x, Packed) else x).tokens.shape for x in nodes if _has_rows(x)}
    if len(shapes) != 1:
        return []
    (shape,) = shapes
    mine = [b for b in blocks if (b.count, b.rows) == (shape[0], shape[2])]
    return [
        jax.tree.map(functools.partial(_with, block, seats), args, is_leaf=_has_rows)
        for block in blocks
        if mine and block not in mine
    ]


def _has_rows(x: Any) -> bool:
    return isinstance(x, Rows | Packed)


def _with(block: Block, seats: int, x: Any) -> Any:
    """Rows, or what is packed in them, as shapes in another block; anything else as it is."""
    if isinstance(x, Packed):
        per_token = jax.tree.map(lambda y: _shape(y, block.count, block.rows, y.shape[3]), x.per_token)
        return Packed(rows=_with(block, seats, x.rows), per_token=per_token)
    if not isinstance(x, Rows):
        return x
    row = x.tokens.shape[3]
    prompts = {name: getattr(x, name) for name in ("prompts", "prompt_lengths")}
    new = {name: _shape(y, block.count, block.prompts, *y.shape[3:]) for name, y in prompts.items()}
    for name in ("tokens", "segments", "offsets", "row_prompt"):
        y = getattr(x, name)
        new[name] = _shape(y, block.count, block.rows, *y.shape[3:])
    sizes = packing.seat_sizes(block.prompts * seats, block.rows, row) if block.shared else ()
    told = tuple(_shape(x.tokens, block.count, *size) for size in sizes) or None
    live = _shape(x.tokens, block.count) if block.shared else None
    return dataclasses.replace(x, **new, seats=told, live=live)


def _shape(x: Any, count: int, *rest: int) -> jax.ShapeDtypeStruct:
    shape, sharding = (count, x.shape[1], *rest), x.sharding if getattr(x, "committed", False) else None
    if isinstance(sharding, NamedSharding):  # which names every axis of ``x``
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: len(shape)]))
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)
