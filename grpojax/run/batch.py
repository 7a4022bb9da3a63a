"""The samples of a step as they go from the rollout to the updates: groups on the host, and their rewards."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from grpojax import data
from grpojax.evaluation.rewarded import read_turns, without_end
from grpojax.host.errors import UserError
from grpojax.programs.sampler import own_tokens, own_turns, sampled_tokens
from grpojax.types import Array, PerPrompt, Rollout, Samples, Tokens

_NONE = np.zeros((0, 0), np.float32)
# Waits for device arrays. In a run, all processes then agree whether it goes on.
Sync = Callable[[Any], object]
Fetch = Callable[[Sync], Rollout]  # waits for samples and brings them to the host


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Groups of samples on the host, as far as they are known: `arrived` waits for samples that the devices draw, and
    `with_rewards` for their rewards.

    Attributes:
      problems: the problems of the P prompts.
      number: number of the rollout in the run.
      fetches: functions that wait for what the devices draw: for the samples, and for what a source draws beside them.
      arrive: a function that waits for them and returns the batch with its samples.
      rollout: the samples, ``[P, G, ...]``. If a prompt got fewer samples than others, the missing ones have length 0
        and no reward. The same holds for all samples of a group that is not complete yet. The tokens of an episode are
        the policy's own and what its environment answered (`sampled`).
      pending: functions that wait for rewards, or for values that follow from them, and return the batch with them, in
        the order in which they are called; empty if all is there.
      dropped: ``[P]`` bool, groups that only fill up a step's batch and have weight 0.
      kept_share: the share of all groups drawn for the step that its filter kept.
      version: number of updates in the weights that draw, or that drew the oldest samples.
      versions: ``[P, G, T]`` int32, the same for each token; None if all are drawn by the newest weights.

      total: ``[P, G]``, the rewards that advantages are made of; NaN if a sample has none.
      reward: ``[P, G]``, the weighted sum of the rewards. It equals ``total``, unless each reward is normalised in its
        group first.
      by_name: each single reward, ``[P, G]``.
      invalid: number of samples without a reward, by reward and reason.
      signals: the variant's other inputs: fields of `grpojax.advantages.Signals` and what parts declare
        (`grpojax.run.parts.part.Part.signals`), ``[P, ...]`` each.
      known: what a part knows of each prompt ``[P]`` or sample ``[P, G]``, by name, for its metrics and its columns of
        the samples file.
      aided: ``[P]`` bool, prompts that show more than the problem, such as a solution of another one: that a sample is
        right says less of them. None if no prompt can be one.
      set_aside: samples that count as drawn and are in metrics, but which nothing is learned from; None for none.
      besides: ``[P, n, ...]`` each, completions that were drawn for the prompts too. Only their tokens count.
      drawn: the drawn samples, if ``rollout`` has another text in their place to learn from; otherwise None.
      passes: pass over the data that each problem belongs to, in a batch of one rollout.
      rollouts: the rollouts that the groups were chosen from, if a filter chose them; otherwise the batch is one.
      metrics: metrics of how its samples were drawn or replaced.
      minibatches: for each update of a pass the indices of its prompts, ``[p]``; empty until the batch is laid out.
      counted: ``[P, G]``, the rewards that count, NaN for samples that are in no statistic.
      advantages: ``[P, G, T]``, by the variant.
      live: ``[P, G, T]`` bool, the tokens that an update counts. Dropped groups and samples without a reward have none.
      taught: ``[P, G]``, tokens of each sample in the updates, 0 where one is left out.
    """

    problems: Sequence[data.Problem]
    number: int = 0
    fetches: Sequence[Fetch] = ()
    arrive: "Callable[[Batch], Batch] | None" = None
    rollout: Rollout = None  # pyrefly: ignore
    pending: "Sequence[Callable[[Batch], Batch]]" = ()
    dropped: PerPrompt = dataclasses.field(default_factory=lambda: np.zeros(0, bool))
    kept_share: float = 1.0
    version: int = 0
    versions: Tokens | None = None

    total: Samples = dataclasses.field(default_factory=lambda: _NONE)
    reward: Samples = dataclasses.field(default_factory=lambda: _NONE)
    by_name: Mapping[str, Samples] = dataclasses.field(default_factory=dict)
    invalid: Mapping[str, int] = dataclasses.field(default_factory=dict)
    signals: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    known: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    aided: PerPrompt | None = None
    set_aside: "Batch | None" = None
    besides: Sequence[Rollout] = ()
    drawn: Rollout | None = None
    passes: Sequence[int] = ()
    rollouts: "Sequence[Batch]" = ()
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    minibatches: Sequence[PerPrompt] = ()
    counted: Samples = dataclasses.field(default_factory=lambda: _NONE)
    advantages: Tokens = None
    live: Tokens = None
    taught: Samples = dataclasses.field(default_factory=lambda: _NONE)

    def arrived(self) -> "Batch":
        """The batch with its samples, once they are there; their rewards may be under way."""
        return self if self.arrive is None else self.arrive(self)

    def with_rewards(self) -> "Batch":
        """The batch with its rewards, once they are there."""
        batch = dataclasses.replace(self, pending=())
        for add in self.pending:
            batch = add(batch)
        return batch

    @property
    def as_drawn(self) -> "Sequence[Batch]":
        """The rollouts of the step, with the samples as they were drawn."""
        if self.rollouts:
            return self.rollouts
        return [self if self.drawn is None else dataclasses.replace(self, rollout=self.drawn, drawn=None)]

    @property
    def everything(self) -> "Sequence[Batch]":
        """All groups that were drawn for the step, including those that its filter dropped, and those set aside."""
        drawn = self.as_drawn
        return [*drawn, *(d.set_aside for d in drawn if d.set_aside is not None)]

    @property
    def sampled(self) -> Tokens:
        """``[P, G, T]`` bool: the policy's own tokens. The loss and all that it reads are of these."""
        return sampled_tokens(self.rollout)

    @property
    def own_lengths(self) -> Samples:
        """``[P, G]`` int32: number of the policy's own tokens."""
        return own_tokens(self.rollout).lengths

    @property
    def all_lengths(self) -> Samples:
        """``[P, G + n]`` int32: the policy's tokens in all completions that were drawn for the prompts."""
        return np.concatenate([self.own_lengths, *(x.lengths for x in self.besides)], 1)


def success_of(values: Samples, deciding: str, given: float | None, *, use: str, setting: str) -> float:
    """The reward from which on a sample passes: the given one, or 1 if rewards are 0 and 1.

    Args:
      values: ``[P, G]``, values of the reward called ``deciding``.
      deciding: the reward that says whether a sample succeeded.
      given: the setting; None if it is not set, which raises `UserError` if the reward is graded.
      use, setting: the purpose and the setting's name, for the error.
    """
    graded = values[np.isfinite(values) & (values != 0) & (values != 1)]
    if given is None and graded.size:
        raise UserError(
            f"{use} by the reward {deciding!r}, which gave {graded[0]:g}: say from where on a sample passes, with "
            f"{setting}"
        )
    return 1.0 if given is None else given


def take(drawn: Sequence[Batch], order: np.ndarray) -> Batch:
    """Groups of several rollouts as one batch: those at the indices ``order [P]`` of all."""

    def pick(*xs: Any) -> np.ndarray:
        return np.concatenate(xs)[order]

    everything, first = [p for d in drawn for p in d.problems], drawn[0]
    aided = [d.aided for d in drawn if d.aided is not None]
    return Batch(
        problems=[everything[i] for i in order],
        rollout=jax.tree.map(pick, *(d.rollout for d in drawn)),
        total=pick(*(d.total for d in drawn)),
        reward=pick(*(d.reward for d in drawn)),
        by_name={name: pick(*(d.by_name[name] for d in drawn)) for name in first.by_name},
        invalid=dict(sum((Counter(d.invalid) for d in drawn), Counter())),
        signals={name: pick(*(d.signals[name] for d in drawn)) for name in first.signals},
        aided=pick(*aided) if aided else None,
        known={name: pick(*(d.known[name] for d in drawn)) for name in first.known},
    )


def sample_rows(
    batch: Batch,
    texts: Callable[[Sequence[Sequence[int]]], list[str]],
    answer: Callable[[str], str | None],
    special: Callable[[Sequence[Sequence[int]]], list[str]] | None = None,
) -> list[dict[str, Any]]:
    """A row for each sample, for `grpojax.records.samples`: prompt, completion, rewards and advantage.

    ``learned`` is the text that was learned from in its place, if that differs. ``with_special_tokens`` is the result
    of ``special`` for the completion without its last token, if that differs from the text. Of an episode, the
    completion is what the policy wrote, each turn on a line of its own; ``turns`` adds what its environment answered
    (`turns_of`), and ``rendered_prompt`` is the prompt as the policy saw it, with the schemas of its tools.
    """
    learned, rollout = own_tokens(batch.rollout), own_tokens(batch.drawn or batch.rollout)
    of_episodes, group = own_turns(batch.drawn or batch.rollout), rollout.lengths.shape[1]
    mean = batch.advantages.sum(-1) / np.maximum(learned.lengths, 1)
    places = np.argwhere(rollout.lengths > 0).tolist()  # a prompt may have fewer samples than others
    drawn, taken = ([x.tokens[p, g, : x.lengths[p, g]].tolist() for p, g in places] for x in (rollout, learned))
    turns, rows = [of_episodes[p * group + g] for p, g in places], []
    for (p, g), ids, text in zip(places, drawn, read_turns(texts, turns), strict=True):
        problem = batch.problems[p]
        rows.append(
            {
                "uid": problem.uid,
                "sample": g,
                "prompt": problem.prompt,
                "completion": text,
                "reward": _finite(batch.reward[p, g]),
                "rewards": {name: _finite(x[p, g]) for name, x in batch.by_name.items()},
                "advantage": _finite(mean[p, g]),
                "length": len(ids),
                "stop": "eos" if rollout.stopped[p, g] else "length",
                "gold": problem.gold,
                "answer": answer(text),
            }
        )
    others = [i for i, (ids, instead) in enumerate(zip(drawn, taken, strict=True)) if ids != instead]
    for i, text in zip(others, texts([taken[i] for i in others]), strict=True):
        rows[i]["learned"] = text
    whole = [[*of[:-1], *without_end(of[-1:], [row["stop"] == "eos"])] for of, row in zip(turns, rows, strict=True)]
    for row, text in zip(rows, read_turns(special, whole), strict=True) if special is not None else ():
        if text != row["completion"]:
            row["with_special_tokens"] = text
    if batch.rollout.sampled is not None:
        rendered = (special or texts)([problem.ids for problem in batch.problems])
        for row, (p, g) in zip(rows, places, strict=True):
            row["rendered_prompt"] = rendered[p]
            row |= turns_of(batch.rollout, p, g, special or texts)
    return rows


def turns_of(rollout: Rollout, p: int, g: int, texts: Callable[[Sequence[Sequence[int]]], list[str]]) -> dict[str, Any]:
    """An episode with what its environment answered: its tokens ``ids``, the number of tokens in each stretch, those of
    the policy and those of the environment in turn (``sampled``), and the stretches' texts (``turns``).

    Example:
      >>> rollout = Rollout(tokens=np.array([[[7, 8, 9, 0]]]), logps=np.zeros((1, 1, 4)), lengths=np.array([[3]]),
      ...     stopped=np.array([[True]]), sampled=np.array([[[True, False, True, False]]]))
      >>> turns_of(rollout, 0, 0, lambda rows: [str(ids) for ids in rows])
      {'ids': [7, 8, 9], 'sampled': [1, 1, 1], 'turns': ['[7]', '[8]', '[9]']}
    """
    ids, own = rollout.tokens[p, g, : rollout.lengths[p, g]].tolist(), rollout.sampled[p, g, : rollout.lengths[p, g]]
    ends = [*(np.flatnonzero(own[1:] != own[:-1]) + 1).tolist(), len(ids)]
    stretches = [ids[start:end] for start, end in itertools.pairwise([0, *ends])]
    return {"ids": ids, "sampled": [len(x) for x in stretches], "turns": texts(stretches)}


def annotate(rows: Sequence[dict[str, Any]], rollout: Rollout, columns: Mapping[str, Array]) -> None:
    """Adds columns to samples (`sample_rows`), by name: a value for each prompt ``[P]``, sample ``[P, G]`` or token
    ``[P, G, T]``. With values of tokens come these themselves."""
    of_tokens = {name: np.round(x, 5) for name, x in columns.items() if x.ndim == 3}
    others = {name: x for name, x in columns.items() if name not in of_tokens}
    places = [(p, g, n) for p, group in enumerate(rollout.lengths.tolist()) for g, n in enumerate(group) if n]
    for row, (p, g, n) in zip(rows, places, strict=True):
        row |= {name: (x[p] if x.ndim == 1 else x[p, g]).item() for name, x in others.items()}
        if of_tokens:
            row["ids"] = rollout.tokens[p, g, :n].tolist()
            row |= {name: x[p, g, :n].tolist() for name, x in of_tokens.items()}


def _finite(x: Any) -> float | None:
    return float(x) if np.isfinite(x) else None
