"""Attempts are rewarded as in training, batch by batch, and what hangs costs its sample."""

import dataclasses
import re

import numpy as np
import pytest

from grpojax.data import Problem
from grpojax.evaluation import EvalConfig, EvaluateConfig, Evaluator, columns_of, submit, summarize, table
from grpojax.evaluation.attempts import Drawn
from grpojax.evaluation.summary import EpisodeRecord
from grpojax.host.errors import UserError
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.rewards import RewardConfig, Rewards, RewardsConfig
from grpojax.types import Rollout

ONE = EvalConfig(sampler=SamplerConfig(group=1))


def problem(uid, gold="7", **columns):
    return Problem(uid, (1, 2), f"q{uid}", gold, columns)


def rollout(lengths):
    """Samples of these lengths ``[P, G]``; a token is its sample's place in the batch plus one."""
    lengths = np.array(lengths, np.int32)
    ids = np.arange(lengths.size, dtype=np.int32).reshape(*lengths.shape, 1) + 1
    tokens = np.where(np.arange(lengths.max()) < lengths[..., None], ids, 0)
    return Rollout(tokens=tokens, logps=tokens * 0.0, lengths=lengths, stopped=lengths < lengths.max())


def run_of(*terms, **config):
    return Rewards(RewardsConfig(terms=tuple(RewardConfig(**t) for t in terms), workers=1, **config))


def spelled(rows):
    return [str(row) for row in rows]


def attempts(rewards, problems, lengths, texts=spelled, judge=None):
    """One batch of them."""
    evaluator = Evaluator(rewards, EvaluateConfig(judge=judge))
    (done,) = evaluator.attempts(
        problems, lambda *_: Drawn(rollout(lengths)), texts, size=len(problems), max_prompt_tokens=8
    )
    return evaluator, done


def test_batches_are_the_same_wherever_an_evaluation_goes_on():
    problems, seen = [problem(i) for i in range(10)], []

    def sample(batch, _):
        seen.append([p.uid for p in batch])
        return Drawn(rollout(np.ones((len(batch), 1), int)))

    with run_of({"name": "answer"}) as rewards:

        def uids(start):
            seen.clear()
            batches = Evaluator(rewards).attempts(problems, sample, spelled, size=4, max_prompt_tokens=8, start=start)
            return [[a.uid for a in batch] for batch in batches]

        assert uids(0) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] and seen[2] == [8, 9, 8, 9]
        assert uids(6) == [[6, 7], [8, 9]] and seen == [[4, 5, 6, 7], [8, 9, 8, 9]]
        assert uids(8) == [[8, 9]] and seen == [[8, 9, 8, 9]]


def test_a_batch_is_judged_while_the_next_is_drawn():
    order, problems = [], [problem(i) for i in range(4)]

    class Slow(Rewards):
        def submit(self, *args, **kwargs):
            order.append("submit")
            pending = super().submit(*args, **kwargs)
            plain = pending.result
            pending.result = lambda: order.append("wait") or plain()
            return pending

    def sample(*_):
        order.append("draw")
        return Drawn(rollout([[1], [1]]))

    with Slow([RewardConfig(name="answer_format")]) as rewards:
        assert len(list(Evaluator(rewards).attempts(problems, sample, spelled, size=2, max_prompt_tokens=8))) == 2
    assert order == ["draw", "submit", "draw", "submit", "wait", "wait"]


def test_what_was_added_to_a_prompt_is_in_the_attempts():
    def play(batch, _):
        asked = [dataclasses.replace(p, prompt=f"{p.prompt} of {p.uid}") for p in batch]
        return Drawn(rollout([[1]] * len(batch)), problems=asked)

    with run_of({"name": "answer"}) as rewards:
        batches = Evaluator(rewards).attempts(
            [problem(i) for i in range(3)], play, spelled, size=2, max_prompt_tokens=8
        )
        assert [a.prompt for batch in batches for a in batch] == ["q0 of 0", "q1 of 1", "q2 of 2"]


def test_each_process_keeps_its_rows_wherever_an_evaluation_goes_on(monkeypatch):
    """Of two processes each knows the columns of every other row of a batch as it is drawn."""
    seen = []

    class Sees(Evaluator):
        def _judging(self, problems, rollout, texts, columns, more, episodes):
            seen.append(([p.uid for p in problems], more["mine"]))
            return lambda: [p.uid for p in problems]

    def play(batch, _):
        return Drawn(rollout([[1]] * len(batch)), {"mine": [None if i % 2 else p.uid for i, p in enumerate(batch)]})

    monkeypatch.setattr("jax.process_count", lambda: 2)
    with run_of({"name": "answer"}) as rewards:
        batches = Sees(rewards).attempts(
            [problem(i) for i in range(9)], play, spelled, size=4, max_prompt_tokens=8, start=3, more=["mine"]
        )
        assert list(batches) == [[3], [4, 5, 6, 7], [8]]
    assert all(known == [None if i % 2 else uid for i, uid in enumerate(uids)] for uids, known in seen)


def test_without_a_judge_there_is_the_rewards_mean_and_no_accuracy():
    """A function of the user's alone: what is reported is its mean, and nobody speaks of right and wrong."""
    lengths = [[3, 5], [2, 7], [1, 4]]
    texts = {i + 1: f"#### {7 if i % 2 else 8}" for i in range(6)}  # half are the gold answer, which nobody asked for
    with run_of({"name": "tiny_run:length"}) as rewards:
        evaluator, done = attempts(
            rewards, [problem(i) for i in range(3)], lengths, lambda rows: [texts[ids[0]] for ids in rows]
        )
    values = evaluator.metrics(done, (1, 2))
    assert values["eval/reward"] == values["eval/rewards/tiny_run:length"] == np.mean(lengths)
    assert set(values) == {"eval/reward", "eval/rewards/tiny_run:length", "eval/mean_length", "eval/clipped_ratio"}
    assert all(s.correct is None and s.vote is None and not s.unjudged for a in done for s in a.samples)
    assert "no accuracy" in evaluator.about() and done[0].samples[1].rewards == {"tiny_run:length": 5.0}
    config = EvalConfig(sampler=SamplerConfig(group=2))
    shown = table(summarize(done, config, evaluator.judge), config, 3)
    assert "reward" in shown and "avg@" not in shown and "pass@" not in shown and "maj@" not in shown


def test_a_function_that_is_named_judges():
    lengths = [[1, 2], [2, 2]]  # the ids have the sums 1, 4 and 6, 8
    with run_of({"name": "tiny_run:parity", "label": "odd"}, {"name": "tiny_run:length"}) as rewards:
        evaluator, done = attempts(rewards, [problem(i) for i in range(2)], lengths, judge="odd")
        assert [[s.correct for s in a.samples] for a in done] == [[True, False], [False, False]]
        values = evaluator.metrics(done, (1, 2))
        assert values["eval/accuracy"] == 0.25 and values["eval/pass@2"] == 0.5 and "eval/maj@2" not in values
        assert values["eval/reward"] == 2.0 and values["eval/rewards/odd"] == 0.25
        with pytest.raises(UserError, match="evaluate.judge: 'tiny_run:length' gave 2, but a judge gives 1"):
            attempts(rewards, [problem(i) for i in range(2)], lengths, judge="tiny_run:length")


def test_the_total_is_the_weighted_sum_also_where_training_normalises():
    """Normalised by group the mean would be 0 whatever the samples are."""
    terms = {"name": "tiny_run:length", "weight": 0.5}, {"name": "answer", "weight": 2.0}
    for combine in ("sum", "normalize"):
        with run_of(*terms, combine=combine) as rewards:
            _, done = attempts(rewards, [problem(0)], [[3, 5]], lambda rows: [f"#### {ids[0] + 6}" for ids in rows])
        assert [s.reward for s in done[0].samples] == [3.5, 2.5]


@pytest.mark.slow
def test_a_worker_that_hangs_costs_its_sample():
    problems = [problem(i, k=i) for i in range(5)]
    with run_of({"name": "reward_functions:hangs", "label": "mine"}, timeout_s=0.5) as rewards:
        evaluator, done = attempts(rewards, problems, [[1]] * 5, judge="mine")
    assert [a.samples[0].reward for a in done] == [1.0, 1.0, 1.0, None, 1.0]
    assert [(a.samples[0].correct, a.samples[0].unjudged) for a in done] == [(i != 3, i == 3) for i in range(5)]
    values = evaluator.metrics(done)
    assert values["eval/reward"] == 1.0 and values["eval/accuracy"] == 0.8
    assert values["eval/invalid"] == values["eval/unjudged"] == 1
    assert [a.samples[0].missing for a in done] == [{}, {}, {}, {"mine": "timeout"}, {}]
    metrics = summarize(done, ONE, evaluator.judge)
    assert metrics["invalid"] == {"value": 1} and metrics["reward"] == {"value": 1.0, "low": None, "high": None}
    shown = table(metrics, ONE, 5)
    assert "samples, counted as wrong" in shown and "samples, in no mean reward" in shown
    assert "1.000   all the same" in shown and "1.000 to" not in shown


def test_an_episode_that_its_environment_made_invalid_is_wrong_and_has_no_vote():
    def play(batch, _):
        episodes = [
            EpisodeRecord(turns=("#### 7",), tokens=(1,), calls=0, failures=0, malformed=0, invalid=why)
            for _ in batch
            for why in (None, "timeout", "timeout")
        ]
        return Drawn(rollout([[1] * 3] * len(batch)), episodes=episodes)

    def texts(rows):
        return ["#### 7"] * len(rows)

    with run_of({"name": "answer"}) as rewards:
        evaluator = Evaluator(rewards)
        batches = evaluator.attempts([problem(0)], play, texts, size=1, max_prompt_tokens=8)
        (attempt,) = next(batches)
    right, *invalid = [(s.correct, s.vote, s.unjudged) for s in attempt.samples]
    assert right == (True, "7", False) and invalid == [(False, None, False)] * 2
    values = evaluator.metrics([attempt], (3,))
    assert values["eval/maj@3"] == 1.0 and values["eval/accuracy"] == 1 / 3
    assert values["eval/invalid"] == 2 and "eval/unjudged" not in values


def test_where_nothing_is_valid_the_mean_is_unknown():
    with run_of({"name": "tiny_run:nothing"}) as rewards:
        evaluator, done = attempts(rewards, [problem(0)], [[1]])
    assert np.isnan(evaluator.metrics(done)["eval/reward"])
    metrics = summarize(done, ONE, None)
    assert metrics["reward"] == {"value": None, "low": None, "high": None}
    assert re.search(r"^reward +- +-$", table(metrics, ONE, 1), re.M)


def test_functions_get_the_columns_of_the_data_as_in_training():
    problems = [problem(0, level=2.0), problem(1), problem(2, level=4.0)]
    assert columns_of(problems) == ["level"]
    with run_of({"name": "tiny_run:level"}) as rewards:
        _, done = attempts(rewards, problems, [[1]] * 3)
    assert [a.samples[0].reward for a in done] == [2.0, None, 4.0]


@pytest.mark.parametrize("n", [1, 2, 5])
def test_each_process_judges_its_rows_and_all_get_the_whole(n, monkeypatch):
    """Three processes, one after the other: what they hand to the gathering is every row once."""
    from grpojax.host import processes

    lengths, group = np.arange(2 * n).reshape(n, 2) + 1, 2
    handed = []
    monkeypatch.setattr(processes, "gather_rows", lambda mine, n: handed.append(mine) or np.zeros((n, group)))
    monkeypatch.setattr(processes, "total", lambda counts: counts)
    with run_of({"name": "tiny_run:length"}) as rewards:
        for index in range(3):
            monkeypatch.setattr(processes, "rows", lambda n, index=index: np.arange(index, n, 3))
            scores = submit(rewards, [problem(i) for i in range(n)], rollout(lengths), spelled, [])()
            assert scores.total.shape == (n * group,)
    totals = handed[::3]  # the total, then the one reward, then why it is invalid
    together = np.concatenate([totals[i % 3][i // 3 : i // 3 + 1] for i in range(n)])
    np.testing.assert_array_equal(together, lengths)
