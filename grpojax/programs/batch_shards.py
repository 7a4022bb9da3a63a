"""Splits a batch of groups into equal parts for the batch shards, and into minibatches; numpy on the host."""

import numpy as np

from grpojax.host.errors import UserError
from grpojax.types import Array, PerPrompt, Prompts


def spread_sizes(prompts: int, group: int, shards: int) -> tuple[int, int]:
    """The number of prompts, and of samples for each, that `spread` makes. Raises `UserError` if they do not divide.

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
    """Splits ``P`` prompts with ``group`` samples each into ``shards`` equal parts of a batch.

    If there are fewer prompts than shards, each prompt is in several shards, with a part of its group in each. The
    order of samples does not change, so a reshape to ``[P', G', ...]`` splits arrays ``[P, G, ...]`` in the same way.

    Returns:
      The prompts, and the number of samples that each of them now has. `gather_groups` undoes the split.
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
    """``prompts``, rounded up to a multiple of ``shards``.

    Example:
      >>> filled(5, 4), filled(8, 4)
      (8, 8)
    """
    return -(-prompts // shards) * shards


def gather_groups(x: Array, prompts: int) -> Array:
    """Turns ``[P', G', ...]`` of spread prompts back into ``[P, G, ...]``."""
    return x.reshape(prompts, -1, *x.shape[2:])


def minibatches(dropped: PerPrompt, count: int) -> list[np.ndarray]:
    """The prompts of each of ``count`` minibatches, in the global order. They are the same on any number of devices.

    Dropped groups are spread evenly over the minibatches. None has only dropped groups, unless there are fewer others
    than minibatches.

    Args:
      dropped: ``[P]`` bool, groups with weight 0.
      count: number of minibatches; must divide P.

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
