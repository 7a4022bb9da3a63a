"""Lays ragged groups out in the rows that a forward runs on, and takes results back; numpy on the host.

`pack` is for the updates and scores of a run that samples: it deals completions out to blocks of equal shape, of which
a program takes only as many as hold a token (`grpojax.programs.blocks`). `pack_groups` keeps groups whole. Both choose
which completions share a row by `first_fit`, and fill the rows by `lay_out`.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from grpojax.host.errors import UserError
from grpojax.types import Array, Prompts, Rollout, Rows, Tokens

NONE: Mapping[str, Array] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each token of samples ``[P, G, T]`` went: ``index [M, B, R, S]`` into the flat samples, -1 on padding.

    ``batch_shape`` is theirs. ``blocks``, if not 0, says how many micro-batches follow each reading of prompts. An
    update leaves out those after the last that holds a token (`grpojax.programs.blocks`).
    """

    index: np.ndarray
    batch_shape: tuple[int, int, int]
    blocks: int = 0

    def pack(self, x: Tokens, fill: float = 0) -> np.ndarray:
        """``[P, G, T, ...]`` to ``[M, B, R, S, ...]``."""
        x = np.asarray(x)
        packed = x.reshape(-1, *x.shape[3:])[self.index]
        packed[self.index < 0] = fill
        return packed

    def unpack(self, x: Array, fill: float = 0) -> np.ndarray:
        """``[M, B, R, S]`` to ``[P, G, T]``."""
        x = np.asarray(x)
        out = np.full(int(np.prod(self.batch_shape)), fill, x.dtype)
        used = self.index >= 0
        out[self.index[used]] = x[used]
        return out.reshape(self.batch_shape)

    @property
    def useful(self) -> float:
        """Share of the rows' positions that hold a token. Rows that are left out do not count."""
        used = self.index >= 0
        if not self.blocks:
            return float(used.mean())
        live = used.any((1, 2, 3)).reshape(-1, self.blocks)
        taken = (live * np.arange(1, self.blocks + 1)).max(1).sum()
        return float(used.sum() / (max(1, taken) * used[0].size))


def bucket(n: int, most: int, parts: int = 1, multiple: int = 8) -> int:
    """The smallest of ``parts`` evenly spaced sizes up to ``most`` (multiples of ``multiple``) that holds ``n``."""
    step = -(-max(1, -(-most // parts)) // multiple) * multiple
    return min(-(-max(n, 1) // step) * step, max(most, n))


def first_fit(lengths: Sequence[int], size: int, most: int | None = None) -> list[list[int]]:
    """Packs lengths into bins of ``size``, longest first. Returns the positions of each bin's items; a bin has at most
    ``most`` items."""
    bins: list[list[int]] = []
    room: dict[int, int] = {}
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        b = next((b for b, left in room.items() if lengths[i] <= left), len(bins))
        if b == len(bins):
            bins.append([])
            room[b] = size
        bins[b].append(i)
        room[b] -= lengths[i]
        if not room[b] or len(bins[b]) == most:
            del room[b]
    return bins


class PlacedCompletion(NamedTuple):
    """One completion in a row: its prompt's number in the micro-batch (``k``) and in the batch (``prompt``), and its
    number among the prompt's samples."""

    k: int
    prompt: int
    sample: int


class ShardRows(NamedTuple):
    """A shard's part of a micro-batch: the prompts' numbers in the batch, and the rows."""

    prompts: np.ndarray
    rows: list[list[PlacedCompletion]]


class _Cut(NamedTuple):
    """How a shard's ``per_shard`` prompts are cut into micro-batches. Each has ``prompts`` prompts with ``samples``
    samples each."""

    per_shard: int
    prompts: int
    samples: int
    splits: int  # number of micro-batches that a group is split over

    def first_prompt(self, shard: int, m: int) -> int:
        return shard * self.per_shard + (m // self.splits) * self.prompts

    def first_sample(self, m: int) -> int:
        return (m % self.splits) * self.samples


def check_cut(per_shard: int, group: int, microbatches: int) -> None:
    """Raises `UserError` if neither a shard's prompts nor their groups divide into the micro-batches."""
    cut(per_shard, group, microbatches)


def cut(per_shard: int, group: int, microbatches: int) -> _Cut:
    """How a shard's prompts are cut into equal micro-batches; raises like `check_cut`."""
    if per_shard % microbatches == 0:
        return _Cut(per_shard, per_shard // microbatches, group, 1)
    if microbatches % per_shard == 0 and group % (microbatches // per_shard) == 0:
        splits = microbatches // per_shard
        return _Cut(per_shard, 1, group // splits, splits)
    raise UserError(
        f"train.microbatches={microbatches} splits neither {per_shard} prompts a batch shard nor their groups of "
        f"{group} evenly"
    )


# ------------------------------------------------------------------------------------------- blocks

# The most completions in a row with gather indices. Each further one costs the attention of a quarter of a row.
GATHERED = 8
LEAST = {"cpu": 256, "tpu": 4096}  # positions of a shard: a block with fewer takes just as long
OVERHEAD = 1 / 16  # cost of adding a block's gradient, as a share of LEAST


class BlockShape(NamedTuple):
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
def block_shapes(
    prompts: int, group: int, most: int, longest: int, *, microbatches: int = 1, least: int = 1, gaps: bool = False
) -> list[BlockShape]:
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
      >>> for block in block_shapes(16, 8, 40, 48, least=512):
      ...     print(*block)
      16 1 128 1 False
      16 1 18 8 True
    """
    whole = cut(prompts, group, microbatches)
    full = BlockShape(whole.prompts, microbatches, whole.prompts * whole.samples, 1, shared=False)
    room = full.prompts * longest + full.rows * most
    there = _some(1, prompts, 4) if gaps else [prompts]

    def mean(block: BlockShape) -> float:
        costs = []
        for n in there:
            readings = -(-n // block.prompts) if block.shared else block.reads
            for rows in _some(1, min(block.prompts, n) * group, 48):
                costs.append(block.cost(most, longest, least, readings, readings * -(-rows // block.rows)))
        return float(np.mean(costs))

    best, cost = full, 0.95 * mean(full)
    for at_once in _some(1, prompts, 12)[::-1]:
        for rows in _some(1, min(full.rows, (room - at_once * longest) // most), 24):
            block = BlockShape(at_once, -(-prompts // at_once), rows, -(-at_once * group // rows), shared=True)
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
    """Lays samples out in the cheapest blocks of rows (`block_shapes`), for updates and scores of a run that samples.

    If nearly all of a batch is filled, prompts and rows are one stream of tokens, with one completion a row. Otherwise
    completions share rows, the longest first, and blocks follow a reading of their prompts. A run needs only these two
    programs; the lengths of a batch decide which of them it takes.

    Args:
      prompts, samples, arrays, shards, microbatches, gather: as in `pack_groups`.
      least, gaps: as in `block_shapes`.

    Returns:
      The rows ``[C M, B, ...]`` with prompts ``[C, B, ...]``, and the `Layout`. There are C readings, and M is
      the most blocks that may follow a reading.
    """
    full, *smaller = block_shapes_of(prompts, samples, shards=shards, microbatches=microbatches, least=least, gaps=gaps)
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
            return lay_out(prompts, samples, arrays, assigned, shape, gather=places, blocks=block.count)
    return pack_groups(prompts, samples, arrays, shards=shards, microbatches=microbatches, full=True)


def block_shapes_of(
    prompts: Prompts, samples: Rollout, *, shards: int, microbatches: int, least: int, gaps: bool = False
) -> list[BlockShape]:
    """`block_shapes` for samples ``[P, G, T]``; arguments as in `pack`."""
    (n, group, most), longest = np.asarray(samples.tokens).shape, np.asarray(prompts.tokens).shape[1]
    return block_shapes(n // shards, group, most, longest, microbatches=microbatches, least=least, gaps=gaps)


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
    blocks: list[list[list[list[PlacedCompletion]]]]


def _deal(lengths: np.ndarray, prompts: np.ndarray, *, most: int, block: BlockShape, gather: bool) -> _Dealt:
    """Assigns a shard's completions to rows and blocks. Prompts without a sample come last. With gather indices a row
    may hold completions of several prompts."""
    order = prompts[np.argsort(~lengths[prompts].any(1), kind="stable")]
    dealt = _Dealt([], [])
    for c in range(block.reads):
        mine = order[c * block.prompts : (c + 1) * block.prompts]
        groups = [[PlacedCompletion(k, int(p), int(g)) for g in np.flatnonzero(lengths[p])] for k, p in enumerate(mine)]
        rows = []
        for some in [sum(groups, [])] if gather else groups:
            sizes = [int(lengths[x.prompt, x.sample]) for x in some]
            rows += [[some[i] for i in b] for b in first_fit(sizes, most, GATHERED if gather else None)]
        dealt.prompts.append(np.resize(mine if len(mine) else order, block.prompts))
        dealt.blocks.append([rows[at : at + block.rows] for at in range(0, len(rows), block.rows)])
    return dealt


def _gathered(block: BlockShape, group: int) -> int:
    return min(block.prompts * group, GATHERED * block.rows)


def _parts(dealt: _Dealt, block: BlockShape) -> list[ShardRows]:
    """A shard's blocks, padded with empty ones to ``block.count`` for each reading."""
    return [
        ShardRows(prompts, blocks[m] if m < len(blocks) else [])
        for prompts, blocks in zip(*dealt, strict=True)
        for m in range(block.count)
    ]


# ------------------------------------------------------------------------------------ whole groups


def _assign(lengths: np.ndarray, size: int, cut: _Cut, shard: int, m: int) -> ShardRows:
    """One shard's part of one micro-batch."""
    rows: list[list[PlacedCompletion]] = []
    for k in range(cut.prompts):
        p, start = cut.first_prompt(shard, m) + k, cut.first_sample(m)
        mine = [int(n) for n in lengths[p, start : start + cut.samples]]
        live = [i for i, n in enumerate(mine) if n > 0]
        fitted = first_fit([mine[i] for i in live], size)
        rows += [[PlacedCompletion(k, p, start + live[i]) for i in b] for b in fitted]
    return ShardRows(cut.first_prompt(shard, m) + np.arange(cut.prompts), rows)


class _MicrobatchShape(NamedTuple):
    """Shape of one shard's micro-batch: rows, positions of a row, and whether completions share rows."""

    rows: int
    row: int
    shared: bool


def _microbatch_shapes(cut: _Cut, most: int) -> list[_MicrobatchShape]:
    """Shapes with a quarter of the positions that completions of up to ``most`` tokens may need, half, and all."""
    whole = cut.prompts * cut.samples
    part = max(cut.prompts, whole // 2)
    shared = [_MicrobatchShape(part, row, part < whole) for row in (bucket(1, most, parts=2), most)]
    return [*shared, *([_MicrobatchShape(whole, most, False)] if part < whole else [])]


def gather_sizes(completions: int, rows: int, positions: int) -> list[tuple[int, int]]:
    """``(count, length)`` of gather indices of whole, half and quarter length for the completions of these rows.

    A row has room for one completion of more than half its positions, and for three of more than a quarter.

    Args:
      completions: the most completions in all rows.
      rows: number of rows.
      positions: positions of a row.

    Example:
      >>> gather_sizes(32, rows=10, positions=1024)
      [(10, 1024), (20, 512), (2, 256)]
    """
    ends = [min(n, completions) for n in (rows, 3 * rows, completions)]
    counts = (ends[0], ends[1] - ends[0], ends[2] - ends[1])
    return [(n, positions // part) for n, part in zip(counts, (1, 2, 4), strict=True) if n and positions >= part]


def pack_groups(
    prompts: Prompts,
    samples: Rollout,
    arrays: Mapping[str, Tokens] = NONE,
    *,
    shards: int = 1,
    microbatches: int = 1,
    gather: bool = False,
    full: bool = False,
) -> tuple[Rows, Layout]:
    """Lays samples out in rows, with whole groups in a micro-batch: which one does not depend on lengths.

    This is for losses and signals that need a group's samples at once: pairs of answers, influences between samples.
    Rows have the smallest of three sizes that holds the samples: a quarter of the positions that completions of the
    greatest length would need, half of them, or all of them with one row for each completion.

    Args:
      prompts, samples: numpy arrays, already `grpojax.programs.batch_shards.spread` over the shards.
      arrays: `Rows.arrays`, ``[P, G, T]`` each; floats become float32.
      shards: number of equal parts of the batch, one for each batch shard.
      microbatches: number of parts that an update takes one after the other.
      gather: add the indices of each completion's tokens, unless every row holds just one (`Compute.needs_gather`).
      full: use the largest of the three sizes, whatever the lengths.

    Returns:
      The rows ``[M, B, ...]`` and the `Layout` that maps them to the samples.
    """
    lengths = np.asarray(samples.lengths)
    n_prompts, group = lengths.shape
    most = np.asarray(samples.tokens).shape[2]
    if n_prompts % shards or lengths.max() > most:
        raise ValueError(
            f"{n_prompts} prompts over {shards} shards, lengths up to {lengths.max()} of {most}: spread them first"
        )
    parts = cut(n_prompts // shards, group, microbatches)
    longest = int(lengths.max())

    def assign(size: int) -> tuple[list[list[ShardRows]], int]:
        rows = [[_assign(lengths, size, parts, shard, m) for shard in range(shards)] for m in range(microbatches)]
        return rows, max(1, *(len(mine.rows) for of_shards in rows for mine in of_shards))

    assigned = list[list[ShardRows]]()
    for shape in _microbatch_shapes(parts, most)[-1 if full else 0 :]:
        assigned, fullest = assign(shape.row if shape.shared else 0)
        if longest <= shape.row and fullest <= shape.rows:
            break
    places = parts.prompts * parts.samples if gather and shape.shared else 0
    return lay_out(prompts, samples, arrays, assigned, (shape.rows, shape.row), gather=places)


def lay_out(
    prompts: Prompts,
    samples: Rollout,
    arrays: Mapping[str, Tokens],
    assigned: Sequence[Sequence[ShardRows]],
    shape: tuple[int, int],
    *,
    gather: int = 0,
    blocks: int = 0,
) -> tuple[Rows, Layout]:
    """Makes the arrays of the rows.

    Args:
      prompts, samples, arrays: as in `pack`.
      assigned: ``[M][shards]``; all have the same number of prompts.
      shape: ``(R, S)``, rows of a shard in a micro-batch and positions of a row.
      gather: number of completions of a shard in a micro-batch that have gather indices; 0 for none.
      blocks: number of micro-batches that follow each reading of prompts and share these prompts. An update leaves out
        those after the last that holds a token. With 0 each micro-batch has its own prompts.
    """
    layout, rows = _fill(prompts, samples, assigned, (len(assigned), len(assigned[0]), *shape), gather, max(1, blocks))
    if blocks:
        layout = dataclasses.replace(layout, blocks=blocks)
        rows = dataclasses.replace(rows, live=(rows.segments > 0).any((2, 3)).astype(np.int32))
    return rows.with_arrays({name: layout.pack(_single(x)) for name, x in arrays.items()}), layout


def _single(x: Array) -> np.ndarray:
    """Casts floats to float32; leaves other dtypes as they are."""
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype.kind == "f" else x


def _fill(
    prompts: Prompts,
    samples: Rollout,
    assigned: Sequence[Sequence[ShardRows]],
    shape: tuple[int, int, int, int],
    gather: int,
    alike: int,
) -> tuple[Layout, Rows]:
    """The layout of the tokens, and the rows. The completions of a row are its segments 1, 2, ..., with 0 on padding:
    attention is within a segment. Each ``alike`` successive micro-batches have the same prompts."""
    lengths = np.asarray(samples.lengths)
    n_prompts, group = lengths.shape
    most, (microbatches, shards, _, size) = np.asarray(samples.tokens).shape[2], shape
    index = np.full(shape, -1, np.int32)
    segments, offsets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    token_prompt = np.zeros(shape, np.int32)
    prompt_index = np.array([[part.prompts for part in of_shards] for of_shards in assigned[::alike]], np.int32)
    sizes = gather_sizes(gather, shape[2], size)
    indices = tuple(np.full((microbatches, shards, *of_class), -1, np.int32) for of_class in sizes)
    places = [(of_class, c) for of_class, (n, _) in enumerate(sizes) for c in range(n)]
    for m, of_shards in enumerate(assigned):
        for shard, (_, rows) in enumerate(of_shards):
            stand = []  # for each completion, its number of tokens and the position of the first
            for r, row in enumerate(rows):
                at = 0
                for segment, (k, prompt, sample) in enumerate(row):
                    n = int(lengths[prompt, sample])
                    where = (m, shard, r, slice(at, at + n))
                    index[where] = (prompt * group + sample) * most + np.arange(n)
                    segments[where], token_prompt[where] = segment + 1, k
                    offsets[where] = np.arange(n)
                    stand.append((n, r * size + at))
                    at += n
            if gather:
                for (n, at), (of_class, c) in zip(sorted(stand, key=lambda x: -x[0]), places, strict=False):
                    indices[of_class][m, shard, c, :n] = at + np.arange(n)
    layout = Layout(index, (n_prompts, group, most))
    return layout, Rows(
        prompts=np.asarray(prompts.tokens)[prompt_index],
        prompt_lengths=np.asarray(prompts.lengths)[prompt_index],
        tokens=layout.pack(samples.tokens),
        segments=segments,
        offsets=offsets,
        token_prompt=token_prompt,
        gather=indices if gather else None,
        choices=None if samples.choices is None else layout.pack(samples.choices, np.iinfo(samples.choices.dtype).max),
        prompt_choices=None if samples.prompt_choices is None else samples.prompt_choices[:, 0][prompt_index],
    )
