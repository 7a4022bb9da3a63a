"""A model's attempts at problems: completions are drawn, rewarded as in training, and judged right or wrong."""

import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from grpojax import data
from grpojax.evaluation.judge import EvaluateConfig, Judge, judge_of, marker_of
from grpojax.evaluation.rewarded import columns_of, forms_of, read_turns, submit
from grpojax.evaluation.summary import Attempt, EpisodeRecord, EvalConfig, Sample, means
from grpojax.programs import batch_shards, packing
from grpojax.programs.sampler import own_tokens, own_turns
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.rewards import Rewards, answers
from grpojax.rewards.scoring import weighted_sum
from grpojax.rewards.worker import REASONS
from grpojax.types import Prompts, Rollout


class Shards(Protocol):
    """The devices that sample."""

    @property
    def shards(self) -> int:
        """Equal parts that a batch of prompts is cut into."""
        ...


class SamplingPolicy(Protocol):
    """What an evaluation needs from a model on its devices."""

    @property
    def sampling(self) -> Shards:
        """Those that sample."""
        ...

    def sample(self, params: Any, prompts: Prompts, key: jax.Array, config: SamplerConfig) -> Rollout:
        """Starts a rollout of host prompts."""
        ...

    def fetch(self, rollout: Rollout, n_prompts: int) -> Rollout:
        """A rollout on the host, ``[P, G, ...]``."""
        ...

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Token ids, sample by sample, to texts."""
        ...


class Drawn(NamedTuple):
    """Samples of some problems on the host, ``[P, n, T]``.

    Attributes:
      rollout: the samples.
      columns: further columns for the rewards, ``[P * n]`` each; of each process only those of its own rows are read.
      problems: ``[P]``, with what was added to their prompts; empty where nothing was.
      episodes: ``[P * n]``, what is kept of samples of several turns; empty where they have one. A sample whose episode
        is invalid has no reward, whatever the rewards say.
    """

    rollout: Rollout
    columns: Mapping[str, Sequence[Any]] = types.MappingProxyType({})
    problems: Sequence[data.Problem] = ()
    episodes: Sequence[EpisodeRecord] = ()


Draw = Callable[[Sequence[data.Problem], int], Drawn]


class Evaluator:
    """A run's own rewards on held-out problems, and the reward among them that says which samples are right.

    Args:
      rewards: the run's rewards, with the workers and limits of training.
      config: which reward is the judge.

    Raises:
      UserError: the judge that the config names cannot be one.
    """

    def __init__(self, rewards: Rewards, config: EvaluateConfig = EvaluateConfig()):  # noqa: B008  frozen
        self.rewards = rewards
        self.judge: Judge | None = judge_of(rewards.config, config.judge)
        self._marker = marker_of(rewards.config, self.judge)

    def about(self) -> str:
        """A line for the console: what is measured, and by which reward."""
        names = ", ".join(t.metric for t in self.rewards.config.terms)
        if self.judge is None:
            return f"judged by {names}; no accuracy, since none of them says what is right (evaluate.judge names one)"
        votes = "" if self.judge.votes else "; majority votes are not reported, since this reward names no answers"
        return f"judged by {names}; a sample is right if {self.judge.metric} gives 1{votes}"

    def metrics(self, done: Sequence[Attempt], ks: Sequence[int] = ()) -> dict[str, float]:
        """The metrics that a run logs: ``eval/reward``, ``eval/rewards/NAME``, ... (`summary.means`)."""
        return means(done, ks, self.judge)

    def answer(self, completion: str) -> str | None:
        """The answer that a completion marks."""
        return answers.extract_answer(completion, self._marker)

    def attempts(
        self,
        problems: Sequence[data.Problem],
        draw: Draw,
        texts: Callable[[Sequence[Sequence[int]]], list[str]],
        *,
        size: int,
        max_prompt_tokens: int,
        start: int = 0,
        more: Sequence[str] = (),
    ) -> Iterator[list[Attempt]]:
        """Tries the problems; yields the attempts batch by batch. A batch is judged while the next one is drawn.

        Args:
          problems: what to try.
          draw: problems, and the tokens that their prompts are padded to, to samples ``[size, n, T]``.
          texts: token ids, sample by sample, to texts.
          size: problems at a time.
          max_prompt_tokens: as in the data's config.
          start: number of problems to leave out at the beginning. The batches do not depend on it, so that rounding
            gives the same draws.
          more: names of the columns that ``draw`` adds for the rewards.
        """
        longest = packing.bucket(max(len(p.ids) for p in problems), max_prompt_tokens, parts=4)
        columns = columns_of(problems)
        self.rewards.check_columns([*columns, *more])
        first = start // size * size
        judging: Callable[[], list[Attempt]] | None = None
        for number, (batch, real) in enumerate(data.in_order(list(problems[first:]), size)):
            rollout, added, asked, played = draw(batch, longest)
            skip = max(0, start - first - number * size)
            again = skip % jax.process_count()  # judged again, so that each process keeps its own rows
            begin, group = skip - again, rollout.lengths.shape[1]
            added = {name: x[begin * group : real * group] for name, x in added.items()}
            problems_of = (asked or batch)[begin:real]
            played = played[begin * group : real * group]
            wait = self._judging(problems_of, _rows(rollout, begin, real), texts, columns, added, played)
            before, judging = judging, functools.partial(_without, wait, again)
            if before:
                yield before()
        if judging:
            yield judging()

    def _judging(
        self,
        problems: Sequence[data.Problem],
        rollout: Rollout,
        texts: Callable[[Sequence[Sequence[int]]], list[str]],
        columns: Sequence[str],
        more: Mapping[str, Sequence[Any]],
        episodes: Sequence[EpisodeRecord],
    ) -> Callable[[], list[Attempt]]:
        """Starts the rewards of a batch; the function waits for them and puts the attempts together."""
        wait = submit(self.rewards, problems, rollout, texts, columns, more=more)
        turns, rollout = own_turns(rollout), own_tokens(rollout)

        def attempts() -> list[Attempt]:
            scores, shape = wait(), rollout.lengths.shape
            # Plain, also where training normalises rewards by group: that has no mean to report.
            total = weighted_sum(self.rewards.config.terms, scores.by_name).reshape(shape)
            by_name = {name: np.array(x).reshape(shape) for name, x in scores.by_name.items()}
            reasons = {name: x.reshape(shape) for name, x in scores.reasons.items()}
            played = np.array([*episodes] or [None] * total.size, object).reshape(shape)
            invalid = np.array([e is not None and e.invalid is not None for e in played.flat], bool).reshape(shape)
            for x in (total, *by_name.values()):
                x[invalid] = math.nan
            completed = np.array(read_turns(texts, turns), object).reshape(shape)
            read = completed
            if self.judge is not None and self.judge.text != "completion":  # answers are where the judge finds them
                each = [p.ids for p in problems for _ in range(shape[1])]
                forms = forms_of(self.rewards, each, turns, rollout.stopped.flat)
                read = np.array(forms[self.judge.text], object).reshape(shape)
            return [
                self._attempt(
                    problem,
                    rollout,
                    i,
                    completed=completed[i],
                    read=read[i],
                    total=total[i],
                    by_name={name: x[i] for name, x in by_name.items()},
                    reasons={name: x[i] for name, x in reasons.items()},
                    episodes=played[i],
                )
                for i, problem in enumerate(problems)
            ]

        return attempts

    def _attempt(
        self,
        problem: data.Problem,
        rollout: Rollout,
        i: int,
        *,
        completed: Sequence[str],
        read: Sequence[str],
        total: np.ndarray,
        by_name: Mapping[str, np.ndarray],
        reasons: Mapping[str, np.ndarray],
        episodes: Sequence[EpisodeRecord | None],
    ) -> Attempt:
        """Problem i of a batch, with its samples' texts, what the judge reads of them, and rewards ``[n]`` or their
        reasons."""
        samples = []
        for g, n in enumerate(rollout.lengths[i].tolist()):
            text, episode = completed[g], episodes[g]
            failed = episode is not None and episode.invalid is not None
            right = None if self.judge is None else self.judge.verdict(float(by_name[self.judge.metric][g]))
            samples.append(
                Sample(
                    completion=text,
                    answer=self.answer(read[g]),
                    vote=None if self.judge is None or failed else self.judge.vote(read[g]),
                    correct=None if self.judge is None else right is True,
                    unjudged=self.judge is not None and right is None and not failed,
                    reward=_number(total[g]),
                    rewards={name: _number(x[g]) for name, x in by_name.items()},
                    missing={name: REASONS[x[g]] for name, x in reasons.items() if x[g] >= 0},
                    tokens=n,
                    stopped=bool(rollout.stopped[i, g]),
                    episode=episode,
                )
            )
        return Attempt(uid=problem.uid, prompt=problem.prompt, gold=problem.gold, samples=tuple(samples))


def evaluate(
    policy: SamplingPolicy,
    params: Any,
    problems: Sequence[data.Problem],
    config: EvalConfig,
    evaluator: Evaluator,
    *,
    max_prompt_tokens: int,
    start: int = 0,
    sync: Callable[[Any], object] = jax.block_until_ready,
    play: Callable[[Sequence[data.Problem]], Drawn] | None = None,
    more: Sequence[str] = (),
) -> Iterator[list[Attempt]]:
    """Tries the problems from ``start`` on, batch by batch.

    Args:
      policy, problems, config, evaluator, max_prompt_tokens, start: as in `Evaluator.attempts`.
      params: the rollout's weights.
      sync: waits for the samples on the devices.
      play: plays episodes of several turns; None where samples have one turn.
      more: names of the columns that ``play`` adds for the rewards.
    """
    size = problems_at_once(config, len(problems), policy.sampling.shards)

    def draw(batch: Sequence[data.Problem], longest: int) -> Drawn:
        if play is not None:
            return play(batch)
        prompts = data.to_prompts(batch, longest)
        rollout = policy.sample(params, prompts, jax.random.key(config.seed), config.sampler)
        sync(rollout)
        return Drawn(policy.fetch(rollout, size))

    return evaluator.attempts(
        problems, draw, policy.texts, size=size, max_prompt_tokens=max_prompt_tokens, start=start, more=more
    )


def problems_at_once(config: EvalConfig, problems: int, shards: int) -> int:
    """How many of ``problems`` are tried at a time, over so many batch shards.

    Example:
      >>> problems_at_once(EvalConfig(sampler=SamplerConfig(group=8), batch=48), 100, 4)
      8
    """
    return batch_shards.filled(min(max(1, config.batch // config.sampler.group), problems), shards)


def _without(wait: Callable[[], list[Attempt]], count: int) -> list[Attempt]:
    """The attempts without the first ones."""
    return wait()[count:]


def _rows(rollout: Rollout, start: int, stop: int) -> Rollout:
    return jax.tree.map(lambda x: np.asarray(x)[start:stop], rollout)


def _number(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
