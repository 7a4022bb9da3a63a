"""The rewards of a rollout on all processes: each judges its own rows, and all get the whole."""

import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from grpojax.data.problems import Problem
from grpojax.host import processes
from grpojax.rewards import Rewards, Scores
from grpojax.rewards.worker import REASONS
from grpojax.types import Rollout


def columns_of(problems: Iterable[Problem]) -> list[str]:
    """The columns that reward functions get: all that any of the problems has. Those without one give None there."""
    return sorted(set().union(*(p.columns for p in problems)))


def submit(
    rewards: Rewards,
    problems: Sequence[Problem],
    rollout: Rollout,
    decode: Callable[[Sequence[int]], str],
    columns: Sequence[str],
) -> Callable[[], Scores]:
    """Starts the rewards of a rollout; workers go on with them while the caller does something else.

    Every process must call it with the same rollout, and then call what it returns.

    Args:
      rewards: of the run.
      problems: ``[P]``, those of the rollout.
      rollout: ``[P, G, T]`` on the host.
      decode: token ids to text.
      columns: of the data, as from `columns_of`; ``gold`` comes by itself.

    Returns:
      A function that waits for them: `Scores` with arrays ``[P * G]``.
    """
    n, group = rollout.lengths.shape
    mine = processes.rows(n).tolist()
    ids = [rollout.tokens[p, g, : rollout.lengths[p, g]].tolist() for p in mine for g in range(group)]
    each = [problems[p] for p in mine for _ in range(group)]
    values = {c: [p.columns.get(c) for p in each] for c in columns}
    values["gold"] = [p.gold for p in each]
    pending = rewards.submit([p.prompt for p in each], [decode(i) for i in ids], ids, values, group=group)
    return functools.cache(lambda: _gathered(pending.result(), n, group))


def _gathered(scores: Scores, n: int, group: int) -> Scores:
    """The rewards of this process's groups with those of all others."""

    def whole(x: np.ndarray) -> np.ndarray:
        return processes.gather_rows(x.reshape(-1, group), n).reshape(-1)

    kinds = [f"{name}/{reason}" for name in scores.by_name for reason in REASONS]
    counts = processes.total([scores.invalid.get(kind, 0) for kind in kinds])
    return Scores(
        total=whole(scores.total),
        by_name={name: whole(x) for name, x in scores.by_name.items()},
        invalid={kind: n for kind, n in zip(kinds, counts, strict=True) if n},
    )
