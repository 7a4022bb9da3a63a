"""Cuts a ragged batch into blocks of equal shape. A program takes only as many blocks as hold a token.

A program reads the prompts once. Then a loop takes the rows that continue them, block by block. The number of
iterations is a value and not a shape, so one program serves batches of any lengths, and its cost follows their tokens.
If nearly all of a batch is filled, a second program is cheaper, in which prompts and rows are one stream of tokens. A
run needs only these two programs. The lengths of a batch decide which of them it takes.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpojax.programs import packing
from grpojax.programs.packing import NONE, Layout
from grpojax.types import Prompts, Rollout, Rows, Scalar, Tokens

# The most completions in a row with gather indices. Each further one costs the attention of a quarter of a row.
GATHERED = 8
LEAST = {"cpu": 256, "tpu": 4096}  # positions of a shard: a block with fewer takes just as long
OVERHEAD = 1 / 16  # cost of adding a block's gradient, as a share of LEAST


class Block(NamedTuple):
    """The shape of a shard's blocks: how many prompts are read at once, how many readings there are, the rows of a
    block, how many blocks may follow each reading, and whether completions share rows."""

    prompts: int
    reads: int
    rows: int
    count: int
    shared: bool

    def cost(self, most: int, longest: int, least: int, readings: int, taken: int) -> float:
        """Cost of ``readings`` readings, followed by ``taken`` blocks in all, in positions of a shard."""
        prompts, rows = self.prompts * longest, self.rows * most
        if self.count == 1:
            return readings * (max(prompts + rows, least) + OVERHEAD * least)
        return readings * max(prompts, least) + taken * (max(rows, least) + OVERHEAD * least)


@functools.lru_cache(maxsize=64)
def sizes(
    prompts: int, group: int, most: int, longest: int, *, microbatches: int = 1, least: int = 1, gaps: bool = False
) -> list[Block]:
    """The blocks that a run's batches use: one for groups of full length and, if it saves anything, a smaller one.

    A smaller block, together with the prompts before it, must not be larger than a micro-batch. Of the blocks that fit,
    the one with the least cost for a shard is chosen. The cost is a mean over groups that fill from one to all of their
    rows, and with ``gaps`` also over the number of groups.

    Args:
      prompts: prompts of a shard.
      group: samples of each prompt.
      most: tokens of the longest sample.
      longest: tokens of the longest prompt.
      microbatches: number of parts that an update takes one after the other at full length.
      least: positions of a block below which it does not get faster.
      gaps: any number of groups may have no samples (``train.skip_zero_advantage``).

    Raises:
      UserError: prompts and groups do not divide into the micro-batches.

    Example:
      >>> for block in sizes(16, 8, 40, 48, least=512):
      ...     print(*block)
      16 1 128 1 False
      16 1 18 8 True
    """
    cut = packing.cut(prompts, group, microbatches)
    full = Block(cut.prompts, microbatches, cut.prompts * cut.samples, 1, shared=False)
    room = full.prompts * longest + full.rows * most
    there = _some(1, prompts, 4) if gaps else [prompts]

    def mean(block: Block) -> float:
        costs = []
        for n in there:
            readings = -(-n // block.prompts) if block.shared else block.reads
            for rows in _some(1, min(block.prompts, n) * group, 48):
                costs.append(block.cost(most, longest, least, readings, readings * -(-rows // block.rows)))
        return float(np.mean(costs))

    best, cost = full, 0.95 * mean(full)
    for at_once in _some(1, prompts, 12)[::-1]:
        for rows in _some(1, min(full.rows, (room - at_once * longest) // most), 24):
            block = Block(at_once, -(-prompts // at_once), rows, -(-at_once * group // rows), shared=True)
            if (it := mean(block)) < cost:
                best, cost = block, it
    return [full] if best is full else [full, best]


def _some(first: int, last: int, most: int) -> list[int]:
    """All numbers from ``first`` to ``last``, or ``most`` evenly spaced ones if there are more."""
    return np.unique(np.linspace(first, last, min(most, max(0, last - first + 1))).round().astype(int)).tolist()


def pack(
    prompts: Prompts,
    samples: Rollout,
    arrays: Mapping[str, Tokens] = NONE,
    *,
    shards: int = 1,
    microbatches: int = 1,
    gather: bool = False,
    least: int = 1,
    gaps: bool = False,
) -> tuple[Rows, Layout]:
    """Lays samples out in rows, like `grpojax.programs.packing.pack`, with the cheapest of its blocks (`sizes`).

    Args:
      prompts, samples, arrays, shards, microbatches, gather: as in `grpojax.programs.packing.pack`.
      least, gaps: as in `sizes`.

    Returns:
      The rows ``[C M, B, ...]`` with prompts ``[C, B, ...]``, and the `Layout`. There are C readings, and M is
      the most blocks that may follow a reading.
    """
    full, *smaller = sizes_of(prompts, samples, shards=shards, microbatches=microbatches, least=least, gaps=gaps)
    lengths = np.asarray(samples.lengths)
    most, longest = np.asarray(samples.tokens).shape[2], np.asarray(prompts.tokens).shape[1]
    whole = full.cost(most, longest, least, full.reads, full.reads)
    for block in smaller:
        dealt = [_deal(lengths, mine, most=most, block=block, gather=gather) for mine in _even(lengths.sum(1), shards)]
        taken = [max(map(len, after)) for after in zip(*(of_shard.blocks for of_shard in dealt), strict=True)]
        reads = max((c for c, n in enumerate(taken, 1) if n), default=1)
        if block.cost(most, longest, least, reads, sum(taken)) <= 0.95 * whole:
            parts = [_parts(of_shard, block) for of_shard in dealt]
            places = _gathered(block, lengths.shape[1]) if gather else 0
            assigned = [*zip(*parts, strict=True)]
            shape = block.rows, most
            return packing.lay_out(prompts, samples, arrays, assigned, shape, gather=places, blocks=block.count)
    return packing.pack(prompts, samples, arrays, shards=shards, microbatches=microbatches, full=True)


def sizes_of(
    prompts: Prompts, samples: Rollout, *, shards: int, microbatches: int, least: int, gaps: bool = False
) -> list[Block]:
    """`sizes` for samples ``[P, G, T]``; arguments as in `pack`."""
    (n, group, most), longest = np.asarray(samples.tokens).shape, np.asarray(prompts.tokens).shape[1]
    return sizes(n // shards, group, most, longest, microbatches=microbatches, least=least, gaps=gaps)


def _even(tokens: np.ndarray, shards: int) -> np.ndarray:
    """Numbers of the prompts of each shard, ``[shards, P / shards]``.

    Prompts are assigned in the order of their tokens, the most first. Each goes to the shard with the fewest tokens so
    far, so that all shards have about the same work."""
    mine: list[list[int]] = [[] for _ in range(shards)]
    load = [0] * shards
    for p in np.argsort(-tokens, kind="stable").tolist():
        free = [shard for shard in range(shards) if len(mine[shard]) < len(tokens) // shards]
        shard = min(free, key=load.__getitem__)
        mine[shard].append(p)
        load[shard] += int(tokens[p])
    return np.sort(mine, axis=1)


class _Dealt(NamedTuple):
    """A shard's prompts for each reading, and the blocks of rows after each reading."""

    prompts: list[np.ndarray]
    blocks: list[list[list[list[packing.Completion]]]]


def _deal(lengths: np.ndarray, prompts: np.ndarray, *, most: int, block: Block, gather: bool) -> _Dealt:
    """Assigns a shard's completions to rows and blocks. Prompts without a sample come last. With gather indices a row
    may hold completions of several prompts."""
    order = prompts[np.argsort(~lengths[prompts].any(1), kind="stable")]
    dealt = _Dealt([], [])
    for c in range(block.reads):
        mine = order[c * block.prompts : (c + 1) * block.prompts]
        groups = [
            [packing.Completion(k, int(p), int(g)) for g in np.flatnonzero(lengths[p])] for k, p in enumerate(mine)
        ]
        rows = []
        for some in [sum(groups, [])] if gather else groups:
            sizes = [int(lengths[x.prompt, x.sample]) for x in some]
            rows += [[some[i] for i in b] for b in packing.first_fit(sizes, most, GATHERED if gather else None)]
        dealt.prompts.append(np.resize(mine if len(mine) else order, block.prompts))
        dealt.blocks.append([rows[at : at + block.rows] for at in range(0, len(rows), block.rows)])
    return dealt


def _gathered(block: Block, group: int) -> int:
    return min(block.prompts * group, GATHERED * block.rows)


def _parts(dealt: _Dealt, block: Block) -> list[packing.ShardRows]:
    """A shard's blocks, padded with empty ones to ``block.count`` for each reading."""
    return [
        packing.ShardRows(prompts, blocks[m] if m < len(blocks) else [])
        for prompts, blocks in zip(*dealt, strict=True)
        for m in range(block.count)
    ]


def after_reading(rows: Rows) -> int:
    """M for rows ``[C M, ...]``: how many blocks may follow each of C readings; 1 if there is no separate reading."""
    return rows.tokens.shape[0] // rows.prompts.shape[0]


def reading(rows: Rows, c: Any) -> Rows:
    """The part ``[M, ...]`` of rows ``[C M, ...]`` that belongs to reading ``c``."""
    n = after_reading(rows)
    prompts, rest = _prompts(rows)
    mine = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, c * n, n), rest)
    return dataclasses.replace(mine, **jax.tree.map(lambda x: x[c], prompts))


def block(rows: Rows, i: Any, read: Any = None) -> Rows:
    """Block ``i`` of one `reading`; ``read`` is the result of its prompts' forward."""
    prompts, rest = _prompts(rows)
    return dataclasses.replace(jax.tree.map(lambda x: x[i], rest), **prompts, read=read)


_OF_PROMPTS = ("prompts", "prompt_lengths", "prompt_choices")


def _prompts(rows: Rows) -> tuple[dict[str, Any], Rows]:
    """What rows say of their prompts, and the rows without it."""
    rest = dataclasses.replace(rows, prompts=None, prompt_lengths=None, prompt_choices=None)
    return {name: getattr(rows, name) for name in _OF_PROMPTS}, rest


def taken(rows: Rows) -> int | Scalar:
    """How many blocks of a `reading`, or micro-batches of rows ``[M, ...]``, to take. All if there is no ``live``;
    otherwise those up to the last live one, and at least one.

    Example:
      >>> import types
      >>> taken(types.SimpleNamespace(live=jnp.array([[0, 1], [0, 0], [1, 0], [0, 0]]))).item()
      3
    """
    return rows.tokens.shape[0] if rows.live is None else _last(rows.live.any(1))


def readings(rows: Rows) -> int | Scalar:
    """How many readings of rows ``[C M, ...]`` to take: those up to the last with a live block, and at least one."""
    if rows.live is None:
        return rows.prompts.shape[0]
    return _last(rows.live.reshape(rows.prompts.shape[0], -1).any(1))


def _last(live: Any) -> Scalar:
    return jnp.where(live, jnp.arange(1, len(live) + 1, dtype=jnp.int32), 1).max()


def loop(count: int, n: int | Scalar, body: Callable[[Any, Any], Any], start: Any) -> Any:
    """Applies ``body`` ``n`` times, at most ``count`` times. There is no loop if ``count`` is 1."""
    return body(0, start) if count == 1 else jax.lax.fori_loop(0, n, body, start)


def each(function: Callable[[Rows], Any], rows: Rows, read: Callable[[Rows], Any]) -> Any:
    """Results ``[C M, ...]`` of ``function`` on every block that is `taken`; 0 for the other blocks.

    Args:
      function: takes a block's rows.
      rows: ``[C M, ...]``.
      read: takes rows with a reading's prompts and returns the ``read`` of its blocks; called once for each reading.
    """
    count, n = rows.tokens.shape[0], after_reading(rows)

    def known(mine: Rows) -> Any:
        return read(block(mine, 0)) if n > 1 else None

    def of_reading(c: Any, out: Any) -> Any:
        mine = reading(rows, c)
        prompts = known(mine)

        def put(i: Any, out: Any) -> Any:
            new = function(block(mine, i, prompts))
            return jax.tree.map(lambda o, x: jax.lax.dynamic_update_index_in_dim(o, x, c * n + i, 0), out, new)

        return loop(n, taken(mine), put, out)

    first = jax.eval_shape(lambda rows: function(block(mine := reading(rows, 0), 0, known(mine))), rows)
    nothing = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), first)
    return loop(count // n, readings(rows), of_reading, nothing)
