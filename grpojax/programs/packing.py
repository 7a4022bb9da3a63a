"""Ragged groups to the rows that a forward runs on, and back; numpy on the host.

Completions of a prompt share rows as tightly as first-fit-decreasing puts them, so that an update costs what its
tokens cost. Shapes come from a short list (`row_shapes`), so the number of compiled programs is bounded.
"""

import dataclasses
from typing import Any

import numpy as np

from grpojax.host.errors import UserError
from grpojax.types import Prompts, Rows, TrainBatch, pytree


@pytree
class Packed:
    """A `TrainBatch` in rows: all of one update, cut into M micro-batches.

    Attributes:
      rows: `Rows` with M in front.
      advantages, weights, and the others: ``[M, B, R, S]``, as in `TrainBatch`.
    """

    rows: Rows
    advantages: Any
    weights: Any
    behavior_logps: Any = None
    ref_logps: Any = None
    sampler_logps: Any = None
    displacement_weights: Any = None

    @property
    def segments(self):
        """Which tokens of a row are one completion's, for losses that look at whole samples."""
        return self.rows.segments


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each token of a batch ``[P, G, T]`` went: ``index [M, B, R, S]`` into the flat batch, -1 on padding."""

    index: np.ndarray
    batch_shape: tuple[int, int, int]

    def pack(self, x, fill=0):
        """``[P, G, T]`` to ``[M, B, R, S]``."""
        flat = np.asarray(x).reshape(-1)
        return np.where(self.index >= 0, flat[self.index], np.asarray(fill, flat.dtype))

    def unpack(self, x, fill=0):
        """``[M, B, R, S]`` to ``[P, G, T]``."""
        x = np.asarray(x)
        out = np.full(int(np.prod(self.batch_shape)), fill, x.dtype)
        used = self.index >= 0
        out[self.index[used]] = x[used]
        return out.reshape(self.batch_shape)

    @property
    def useful(self) -> float:
        """Share of the rows' positions that hold a token."""
        return float((self.index >= 0).mean())


def spread(prompts: Prompts, group: int, lanes: int) -> tuple[Prompts, int]:
    """Lays ``P`` prompts with ``group`` samples each over ``lanes`` equal parts of a batch.

    Prompts are split first; with fewer prompts than lanes, each prompt stands in several lanes, with a part of its
    group in each.

    Returns:
      The prompts, and how many samples each of them has now. `gather_groups` undoes it.
    """
    n = len(prompts.lengths)
    if n % lanes == 0:
        return prompts, group
    if lanes % n or group % (lanes // n):
        raise UserError(
            f"rollout.prompts={n} with rollout.group={group} does not divide over {lanes} batch shards: "
            f"make prompts a multiple of {lanes}, or a divisor of it whose quotient divides group"
        )
    copies = lanes // n
    many = lambda x: np.repeat(np.asarray(x), copies, axis=0)  # noqa: E731
    part = group // copies
    first = many(prompts.first_sample) + np.tile(np.arange(copies, dtype=np.int32) * part, n)
    return Prompts(
        tokens=many(prompts.tokens), lengths=many(prompts.lengths), uids=many(prompts.uids),
        first_sample=first.astype(np.int32),
    ), part  # fmt: skip


def gather_groups(x, prompts: int):
    """``[P', G', ...]`` of spread prompts back to ``[P, G, ...]``."""
    return x.reshape(prompts, -1, *x.shape[2:])


def bucket(n: int, most: int, parts: int = 4, multiple: int = 8) -> int:
    """The smallest of ``parts`` evenly spaced sizes up to ``most`` (multiples of ``multiple``) that holds ``n``."""
    step = -(-max(1, -(-most // parts)) // multiple) * multiple
    return min(-(-max(n, 1) // step) * step, max(most, n))


def first_fit(lengths, size: int) -> list[list[int]]:
    """Packs lengths into bins of ``size``, longest first; returns the positions of each bin's items."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for b, left in enumerate(room):
            if lengths[i] <= left:
                bins[b].append(i)
                room[b] -= lengths[i]
                break
        else:
            bins.append([i])
            room.append(size - lengths[i])
    return bins


def pack(batch: TrainBatch, *, lanes: int = 1, microbatches: int = 1, seats: bool = False) -> tuple[Packed, Layout]:
    """Lays a batch out in rows.

    Args:
      batch: numpy arrays, already `spread` over the lanes.
      lanes: equal parts of the batch, one a batch shard.
      microbatches: parts that an update takes one after the other.
      seats: say where each completion stands, unless every row holds just one (`Compute.needs_seats`).

    Returns:
      The batch in rows, and the `Layout` that maps rows to the batch.
    """
    lengths = np.asarray(batch.lengths)
    n_prompts, group = lengths.shape
    most = np.asarray(batch.tokens).shape[2]
    if n_prompts % lanes or lengths.max() > most:
        raise ValueError(
            f"{n_prompts} prompts over {lanes} lanes, lengths up to {lengths.max()} of {most}: spread them first"
        )
    per_lane = n_prompts // lanes
    if per_lane % microbatches == 0:
        prompts_each, samples_each, splits = per_lane // microbatches, group, 1
    elif microbatches % per_lane == 0 and group % (microbatches // per_lane) == 0:
        splits = microbatches // per_lane
        prompts_each, samples_each = 1, group // splits
    else:
        raise UserError(
            f"train.microbatches={microbatches} splits neither {per_lane} prompts a batch shard nor their groups of "
            f"{group} evenly"
        )

    size = bucket(int(lengths.max()), most, parts=2)
    assigned: list[list[list[tuple[int, int, list[int]]]]] = []  # [M][B] rows of (prompt in lane, prompt, samples)
    for m in range(microbatches):
        assigned.append([])
        for lane in range(lanes):
            rows = []
            for k in range(prompts_each):
                p = lane * per_lane + (m // splits) * prompts_each + k
                start = (m % splits) * samples_each
                mine = [int(n) for n in lengths[p, start : start + samples_each]]
                live = [i for i, n in enumerate(mine) if n > 0]
                rows += [(k, p, [start + live[i] for i in b]) for b in first_fit([mine[i] for i in live], size)]
            assigned[-1].append(rows)
    fullest = max(1, *(len(rows) for lane_rows in assigned for rows in lane_rows))
    n_rows = bucket(fullest, prompts_each * samples_each, parts=8, multiple=1)

    shape = (microbatches, lanes, n_rows, size)
    index = np.full(shape, -1, np.int32)
    segments, offsets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    row_prompt = np.zeros(shape[:3], np.int32)
    prompt_index = np.zeros((microbatches, lanes, prompts_each), np.int32)
    seat = np.full((microbatches, lanes, prompts_each * samples_each, size), -1, np.int32)
    for m, lane_rows in enumerate(assigned):
        for lane, rows in enumerate(lane_rows):
            start = lane * per_lane + (m // splits) * prompts_each
            prompt_index[m, lane] = np.arange(start, start + prompts_each)
            completions = iter(seat[m, lane])
            for r, (k, p, samples) in enumerate(rows):
                row_prompt[m, lane, r] = k
                at = 0
                for segment, g in enumerate(samples):
                    n = int(lengths[p, g])
                    where = (m, lane, r, slice(at, at + n))
                    index[where] = (p * group + g) * most + np.arange(n)
                    segments[where] = segment + 1
                    offsets[where] = np.arange(n)
                    next(completions)[:n] = r * size + at + np.arange(n)
                    at += n
    layout = Layout(index, (n_prompts, group, most))
    rows = Rows(
        prompts=np.asarray(batch.prompts.tokens)[prompt_index], prompt_lengths=np.asarray(batch.prompts.lengths)[prompt_index],
        tokens=layout.pack(batch.tokens), segments=segments, offsets=offsets, row_prompt=row_prompt,
        seats=seat if seats and segments.max() > 1 else None,
    )  # fmt: skip
    f32 = lambda x: None if x is None else layout.pack(np.asarray(x, np.float32))  # noqa: E731
    return Packed(
        rows=rows, advantages=f32(batch.advantages), weights=f32(batch.weights),
        behavior_logps=f32(batch.behavior_logps), ref_logps=f32(batch.ref_logps), sampler_logps=f32(batch.sampler_logps),
        displacement_weights=f32(batch.displacement_weights),
    ), layout  # fmt: skip
