"""Lays out some groups of a batch on the devices again, in rows of their own, for computations on only these groups."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from grpojax import data
from grpojax.device import ROWS
from grpojax.programs import batch_shards, packing
from grpojax.programs.packing import Layout
from grpojax.programs.policy import Policy
from grpojax.run.sections import TrainConfig
from grpojax.types import Array, Rollout, Rows, Samples, Tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regrouped:
    """``n`` groups, padded with empty groups to a size that a program is compiled for.

    Attributes:
      places: their indices among all groups.
      rows: the rows on the devices, ``[M, B, ...]``.
      layout: the positions of their tokens in the rows.
      filled: number of groups including the padding.
      copies: number of shards that a group is split over.
      policy: the policy that has these shards and devices.
    """

    places: slice
    rows: Rows
    layout: Layout
    filled: int
    copies: int
    policy: Policy

    def place(self, x: Tokens, fill: float = 0) -> Any:
        """Selects these groups from all groups ``[..., G, T]`` on the host, and puts them in rows on the devices."""
        x = np.asarray(x)[self.places]
        whole = np.full((self.filled, *x.shape[1:]), fill, x.dtype)
        whole[: len(x)] = x
        return self.policy.device.put(self.layout.pack(whole.reshape(self.layout.batch_shape), fill), ROWS)

    def place_groups(self, x: np.ndarray, fill: float = 0) -> Any:
        """Selects these groups from ``[..., W]`` on the host, with one row a group, and lays them out as ``[prompts of
        a shard, B, W]``."""
        x = x[self.places]
        whole = np.full((self.filled, *x.shape[1:]), fill, x.dtype)
        whole[: len(x)] = x
        whole = np.repeat(whole, self.copies, axis=0)
        by_shard = whole.reshape(self.policy.shards, -1, *x.shape[1:])
        return self.policy.device.put(np.ascontiguousarray(np.swapaxes(by_shard, 0, 1)), ROWS)

    def fetch(self, rows: Any) -> Tokens:
        """Rows of the devices back to the n groups ``[n, G, T]`` on the host."""
        return self.of_groups(self.layout.unpack(self.policy.device.get(rows)))

    def of_groups(self, x: Array) -> Array:
        """``[P', G', ...]`` of the shards back to the n groups ``[n, G, ...]``."""
        return batch_shards.gather_groups(x, self.filled)[: self.places.stop - self.places.start]


def regroup(
    policy: Policy,
    problems: Sequence[data.Problem],
    tokens: Tokens,
    lengths: Samples,
    *,
    most: int,
    longest_prompt: int,
    tokens_at_once: int,
    one_prompt: bool = False,
) -> Iterator[Regrouped]:
    """Lays groups out in rows, a quarter of a batch at a time, so that any number of groups has one of three shapes.

    Args:
      policy: its shards and compute.
      problems: problems of the n groups, at least one.
      tokens, lengths: ``[n, G, T]`` and ``[n, G]``.
      most: groups of a whole batch.
      longest_prompt: most tokens of a prompt in the run.
      tokens_at_once: about what a shard's micro-batch may hold.
      one_prompt: whether a micro-batch has at most one prompt of a shard.
    """
    n, group, size = tokens.shape
    filled, microbatches = part_sizes(most, group, size, policy.shards, tokens_at_once, one_prompt=one_prompt)
    for start in range(0, n, filled):
        places = slice(start, min(start + filled, n))
        empty = filled - (places.stop - start)
        mine = [*problems[places], *[problems[0]] * empty]
        prompts, part = batch_shards.spread(data.to_prompts(mine, longest_prompt), group, policy.shards)
        shape = len(prompts.lengths), part

        def fill(x: np.ndarray, empty: int = empty, shape: tuple[int, int] = shape) -> np.ndarray:
            whole = np.concatenate([x, np.zeros((empty, *x.shape[1:]), x.dtype)])
            return whole.reshape(*shape, *x.shape[2:])

        samples = Rollout(tokens=fill(tokens[places]), lengths=fill(lengths[places]))
        how = {"shards": policy.shards, "microbatches": microbatches, "gather": policy.compute.needs_gather}
        rows, layout = packing.pack_groups(prompts, samples, **how)
        yield Regrouped(
            places=places,
            rows=policy.device.put(rows, ROWS),
            layout=layout,
            filled=filled,
            copies=shape[0] // filled,
            policy=policy,
        )


def tokens_at_once(tokens: int, train: TrainConfig, shards: int) -> int:
    """Tokens of a shard in an update's micro-batch; ``tokens`` is the number that a batch has room for."""
    return max(1, tokens // (train.minibatches * train.microbatches * shards))


def part_sizes(
    most: int, group: int, tokens: int, parts: int, tokens_at_once: int, *, one_prompt: bool = False
) -> tuple[int, int]:
    """The number of groups that `regroup` takes at a time, and of micro-batches.

    Args:
      most: groups of a whole batch.
      group: samples of each.
      tokens: most of a sample.
      parts: shards of the mesh.
      tokens_at_once, one_prompt: as in `regroup`.

    Example:
      >>> part_sizes(32, 8, 64, 4, 256)
      (8, 4)
    """
    filled = packing.bucket(1, most, parts=4, multiple=parts if most >= parts else most)
    prompts, samples = batch_shards.spread_sizes(filled, group, parts)
    together, splits = _cut(prompts // parts, samples, tokens, tokens_at_once, one_prompt)
    return filled, prompts // parts // together * splits


def _cut(prompts: int, samples: int, row: int, tokens: int, one_prompt: bool) -> tuple[int, int]:
    """``(prompts, splits)``, by tokens: prompts of a shard in a micro-batch, or the number of parts that a group is cut
    into.

    Example:
      >>> _cut(6, 8, 16, 512, False), _cut(6, 8, 16, 64, False), _cut(6, 8, 16, 1, False)
      ((3, 1), (1, 2), (1, 8))
    """
    divisors = [s for s in range(1, samples + 1) if samples % s == 0]
    splits = next((s for s in divisors if samples // s * row <= tokens), samples)
    if splits > 1 or one_prompt:
        return 1, splits
    fits = [k for k in range(1, prompts + 1) if prompts % k == 0 and k * samples * row <= tokens]
    return max(fits, default=1), 1
