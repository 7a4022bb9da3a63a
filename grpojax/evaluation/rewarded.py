"""The rewards of a rollout on all processes: each computes its own rows, and all get the whole."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from grpojax.data import Problem
from grpojax.host import processes
from grpojax.host.errors import UserError
from grpojax.host.on_host import on_host
from grpojax.programs.sampler import own_turns
from grpojax.rewards import Rewards, RewardScores
from grpojax.types import Rollout


def columns_of(problems: Iterable[Problem]) -> list[str]:
    """The columns that reward functions get: all columns of any problem, with None for problems that lack one."""
    return sorted(set().union(*(p.columns for p in problems)))


def without_end(ids: Sequence[Sequence[int]], stopped: Iterable[Any]) -> list[Sequence[int]]:
    """Completions ``[N]`` without the token that ended those which are ``stopped``.

    Example:
      >>> without_end([[5, 1], [5, 6]], [True, False])
      [[5], [5, 6]]
    """
    return [row[:-1] if end else row for row, end in zip(ids, stopped, strict=True)]


def read_turns(
    read: Callable[[Sequence[Sequence[int]]], list[str]], samples: Sequence[Sequence[Sequence[int]]]
) -> list[str]:
    """Samples' texts, each turn on a line of its own.

    Args:
      read: token ids, turn by turn, to texts.
      samples: ``[N][turns]`` lists of token ids.

    Example:
      >>> read_turns(lambda rows: ["".join(map(str, ids)) for ids in rows], [[[1, 2], [3, 4]], [[5]]])
      ['12\\n34', '5']
    """
    texts = iter(read([ids for turns in samples for ids in turns]))
    return ["\n".join(next(texts) for _ in turns) for turns in samples]


def forms_of(
    rewards: Rewards,
    prompts: Sequence[Sequence[int]],
    samples: Sequence[Sequence[Sequence[int]]],
    stopped: Iterable[Any],
) -> dict[str, list[str]]:
    """Samples' texts as the rewards ask for them (`grpojax.rewards.Rewards.texts`), each turn on a line of its own.

    Args:
      rewards: of the run.
      prompts: ``[N]``, the ids of each one's prompt.
      samples: ``[N][turns]`` lists of token ids.
      stopped: ``[N]``, whether the last token of all ended the sample.
    """
    rows = [[*turns[:-1], *without_end(turns[-1:], [end])] for turns, end in zip(samples, stopped, strict=True)]
    # Only the first turn comes right behind the prompt's text.
    before = [p if i == 0 else () for p, turns in zip(prompts, rows, strict=True) for i in range(len(turns))]
    forms = rewards.texts(before, [ids for turns in rows for ids in turns])
    return {form: read_turns(lambda _, texts=texts: texts, rows) for form, texts in forms.items()}


def submit(
    rewards: Rewards,
    problems: Sequence[Problem],
    rollout: Rollout,
    texts: Callable[[Sequence[Sequence[int]]], list[str]],
    columns: Sequence[str],
    *,
    more: Mapping[str, Sequence[Any]] | None = None,
) -> Callable[[], RewardScores]:
    """Starts the rewards of a rollout; workers compute them while the caller does something else.

    Every process must call it with the same rollout, and then call what it returns.

    Args:
      rewards: of the run.
      problems: ``[P]``, those of the rollout.
      rollout: ``[P, G, T]`` on the host. Rewards get the policy's own tokens, and texts with each turn on its own line.
      texts: token ids, sample by sample, to texts.
      columns: columns of the data, as from `columns_of`; ``gold`` is added, and ``pieces`` if a reward asks for it.
      more: further columns by name, ``[P * G]`` each.

    Returns:
      A function that waits for them: `RewardScores` with arrays ``[P * G]``.
    """
    n, group, longest = rollout.tokens.shape
    mine = processes.rows(n).tolist()
    every = own_turns(rollout)
    turns = [every[p * group + g] for p in mine for g in range(group)]
    ids = [[token for turn in of_sample for token in turn] for of_sample in turns]
    each = [problems[p] for p in mine for _ in range(group)]
    values = {c: [p.columns.get(c) for p in each] for c in columns}
    values["gold"] = [p.gold for p in each]
    values |= {c: [x[p * group + g] for p in mine for g in range(group)] for c, x in (more or {}).items()}
    if rewards.needs_pieces:
        if "pieces" in values:
            raise UserError(
                "column 'pieces' has the name of a column that rewards get; list the columns they need in data.columns"
            )
        known = sorted({token for row in ids for token in row})
        piece = dict(zip(known, texts([[token] for token in known]), strict=True))
        values["pieces"] = [[piece[token] for token in row] for row in ids]
    with on_host():
        forms = forms_of(rewards, [p.ids for p in each], turns, rollout.stopped[mine].reshape(-1))
        read = read_turns(texts, turns)
        pending = rewards.submit([p.prompt for p in each], read, ids, values, group=group, texts=forms)

    @functools.cache
    def wait() -> RewardScores:
        with on_host():
            return _gathered(pending.result(), n, group, longest)

    return wait


def _gathered(scores: RewardScores, n: int, group: int, longest: int) -> RewardScores:
    """The rewards of this process's groups with those of all others."""

    def whole(x: np.ndarray) -> np.ndarray:
        return processes.gather_rows(x.reshape(-1, group, *x.shape[1:]), n).reshape(-1, *x.shape[1:])

    names = list(scores.by_name)
    counts = processes.total([int(name in scores.stepped) for name in names])
    stepped = tuple(name for name, n in zip(names, counts, strict=True) if n)
    steps = None
    if stepped:
        steps = np.full((scores.total.size, longest), np.nan, np.float32)
        if scores.step_rewards is not None:
            steps[:, : scores.step_rewards.shape[1]] = scores.step_rewards
        steps = whole(steps)
    return RewardScores(
        total=whole(scores.total),
        by_name={name: whole(x) for name, x in scores.by_name.items()},
        reasons={name: whole(x) for name, x in scores.reasons.items()},
        step_rewards=steps,
        stepped=stepped,
    )
