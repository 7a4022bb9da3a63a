"""A batch of groups to the equal parts that the batch shards take, and to minibatches; numpy on the host."""

import numpy as np

from grpojax.host.errors import UserError
from grpojax.types import Array, PerPrompt, Prompts


def spread_sizes(prompts: int, group: int, shards: int) -> tuple[int, int]:
    """How many prompts with how many samples each `spread` makes; raises `UserError` where they do not divide.

    Example:
      >>> spread_sizes(2, 6, 4)
      (4, 3)
    """
    if prompts % shards == 0:
        return prompts, group
    if shards % prompts or group % (shards // prompts):
        raise UserError(
            f"{prompts} prompts of a batch with rollout.group={group} do not divide over {shards} batch shards: make "
            f"rollout.prompts (over train.minibatches) a multiple of {shards}, or a divisor of it whose quotient "
            "divides group"
        )
    return shards, group // (shards // prompts)


def spread(prompts: Prompts, group: int, shards: int) -> tuple[Prompts, int]:
    """Lays ``P`` prompts with ``group`` samples each over ``shards`` equal parts of a batch.

    Prompts are split first; with fewer prompts than shards, each prompt stands in several shards, with a part of its
    group in each. Arrays ``[P, G, ...]`` follow by a reshape to ``[P', G', ...]``: the order of samples stays.

    Returns:
      The prompts, and how many samples each of them has now. `gather_groups` undoes it.
    """
    n = len(prompts.lengths)
    rows, part = spread_sizes(n, group, shards)
    if rows == n:
        return prompts, group
    copies = rows // n
    first = np.repeat(np.asarray(prompts.first_sample), copies) + np.tile(np.arange(copies, dtype=np.int32) * part, n)
    return Prompts(
        tokens=np.repeat(np.asarray(prompts.tokens), copies, axis=0),
        lengths=np.repeat(np.asarray(prompts.lengths), copies),
        uids=np.repeat(np.asarray(prompts.uids), copies),
        first_sample=first.astype(np.int32),
    ), part


def filled(prompts: int, shards: int) -> int:
    """``prompts`` with those that fill up the last of ``shards`` equal parts.

    Example:
      >>> filled(5, 4), filled(8, 4)
      (8, 8)
    """
    return -(-prompts // shards) * shards


def gather_groups(x: Array, prompts: int) -> Array:
    """``[P', G', ...]`` of spread prompts back to ``[P, G, ...]``."""
    return x.reshape(prompts, -1, *x.shape[2:])


def minibatches(dropped: PerPrompt, count: int) -> list[np.ndarray]:
    """Which prompts each of ``count`` minibatches takes, from the global order: the same on any number of devices.

    Groups that were dropped are dealt out evenly, so that no minibatch is left without any that teaches.

    Args:
      dropped: ``[P]`` bool, groups that weigh nothing.
      count: must divide P.

    Returns:
      ``count`` arrays of P / count places in ``[0, P)``, in order.

    Example:
      >>> [m.tolist() for m in minibatches(np.array([False, False, False, True, False, True]), 3)]
      [[0, 1], [2, 3], [4, 5]]
    """
    each = len(dropped) // count
    live = np.array_split(np.flatnonzero(~dropped), count)
    rest = iter(np.flatnonzero(dropped).tolist())
    return [np.sort([*m.tolist(), *(next(rest) for _ in range(each - len(m)))]).astype(np.intp) for m in live]
