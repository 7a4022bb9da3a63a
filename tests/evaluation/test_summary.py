"""Metrics over problems, their intervals, and what people read of them."""

import dataclasses
import math
import re

import pytest

from grpojax.evaluation import (
    Attempt,
    EvalConfig,
    Judge,
    Sample,
    by_problem,
    headline,
    means,
    report,
    summarize,
    table,
    table_of_sets,
    verdict,
)
from grpojax.evaluation.summary import EpisodeRecord
from grpojax.host.errors import UserError
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.rewards import REWARDS

ANSWER = Judge("answer", REWARDS["answer"]())


def attempt(uid, *correct, tokens=5, stopped=True, rewards=None, unjudged=()):
    """Samples with these verdicts, which are their rewards where none are given."""
    given = correct if rewards is None else rewards
    return Attempt(uid=uid, prompt=f"q{uid}", gold="7", samples=tuple(
        Sample(completion="#### 7", answer="7", vote="7", correct=c, tokens=tokens, stopped=stopped,
               unjudged=i in unjudged, reward=None if r is None else float(r), rewards={"answer": r})
        for i, (c, r) in enumerate(zip(correct, given, strict=True))
    ))  # fmt: skip


def test_metrics_are_means_over_problems():
    done = [attempt(0, True, False), attempt(1, False, False, tokens=8, stopped=False)]
    settings = EvalConfig(sampler=SamplerConfig(group=2), ks=(1, 2))
    got = {name: m["value"] for name, m in summarize(done, settings, ANSWER).items()}
    assert got == {
        "reward": 0.25, "rewards/answer": 0.25, "accuracy": 0.25, "mean_length": 6.5, "clipped_ratio": 0.5,
        "pass@1": 0.25, "pass@2": 0.5, "maj@2": 0.25,
    }  # fmt: skip
    assert {f"eval/{name}": value for name, value in got.items()} == means(done, (1, 2), ANSWER)
    assert "avg@2" in table(summarize(done, settings, ANSWER), settings, 2)


def test_samples_without_a_reward_are_in_no_mean_and_those_without_a_verdict_are_wrong():
    done = [
        attempt(0, True, False, rewards=[3.0, None], unjudged={1}),
        attempt(1, False, False, rewards=[None, None], unjudged={0, 1}),
        attempt(2, True, True, rewards=[2.0, 0.0]),
    ]
    values = by_problem(done, (2,), ANSWER)
    assert values["reward"].tolist()[::2] == [3.0, 1.0] and math.isnan(values["reward"][1])
    got = means(done, (2,), ANSWER)
    assert got["eval/reward"] == 2.0 and got["eval/accuracy"] == 0.5 and got["eval/pass@2"] == pytest.approx(2 / 3)
    assert got["eval/invalid"] == got["eval/unjudged"] == 3.0 and got["eval/samples"] == 6.0
    drawing = EvalConfig(sampler=SamplerConfig(group=2))
    assert headline(got, drawing) == "held-out reward 2.000 (avg@2 50.0 %; 3 of 6 have a reward)"
    assert headline(got | {"eval/unjudged": 2.0}, drawing).endswith("3 of 6 have a reward; 4 of 6 are judged)")
    assert "samples" not in means(done[2:], (2,), ANSWER)


def test_a_report_says_what_was_and_what_became():
    greedy = EvalConfig(sampler=SamplerConfig(group=1, temperature=0.0))
    lines = [{"step": 0, "eval/reward": 0.1, "eval/accuracy": 0.05}, {"step": 1, "reward": 3.0},
             {"step": 9, "eval/reward": None, "eval/accuracy": 0.5}]  # fmt: skip
    assert report(lines, greedy) == ("held-out reward 0.100 (greedy accuracy 5.0 %) before (step 0), "
                                     "held-out reward - (greedy accuracy 50.0 %) after (step 9)")  # fmt: skip
    assert report(lines[1:2], greedy) is None


def test_a_sample_is_right_or_wrong_only_where_somebody_judges():
    right, wrong = attempt(0, True, False).samples
    (graded,) = attempt(0, None, rewards=[0.25]).samples
    (lost,) = attempt(0, None, rewards=[None]).samples
    said = [verdict(attempt(0, True), s) for s in (right, wrong, graded, lost)]
    assert said == ["right", "wrong, gold 7", "reward 0.25", "no reward"]


def test_a_sample_without_a_verdict_is_not_called_wrong():
    right, wrong = attempt(0, True, False, unjudged={1}).samples
    (lost,) = attempt(0, None, rewards=[None]).samples
    raised, other = {"exact": "error"}, {"length": "none"}
    gone = EpisodeRecord(turns=("a",), tokens=(1,), calls=0, failures=0, malformed=0, invalid="reset")
    said = [
        verdict(attempt(0, True), dataclasses.replace(sample, **changes))
        for sample, changes in (
            (wrong, {"missing": raised | other}),
            (dataclasses.replace(wrong, unjudged=False), {"episode": gone}),
            (right, {"missing": other}),
            (lost, {"missing": raised}),
        )
    ]
    assert said == [
        "not judged: exact raised, length returned None", "not judged: environment: reset",
        "right; length returned None", "no reward: exact raised",
    ]  # fmt: skip


def test_episodes_are_counted_by_problem():
    def played(uid, *each):
        samples = attempt(uid, *[True] * len(each)).samples
        return dataclasses.replace(attempt(uid, True), samples=tuple(
            dataclasses.replace(s, episode=EpisodeRecord(turns=tuple("abc")[:len(tokens)], tokens=tokens,
                                                         calls=calls, failures=failures, malformed=malformed,
                                                         invalid=invalid))
            for s, (tokens, calls, failures, malformed, invalid) in zip(samples, each, strict=True)))  # fmt: skip

    done = [played(0, ((3, 4, 5), 2, 1, 1, None), ((3,), 0, 0, 0, None)), played(1, ((2, 9), 2, 2, 1, "timeout")),
            played(2, ((3,), 0, 0, 0, None))]  # fmt: skip
    got = {n.removeprefix("episode/"): x for n, x in by_problem(done, (), ANSWER).items() if n.startswith("episode/")}
    want = {"turns": [1.5, 1, 1], "calls": [1, 2, 0], "calling": [0.5, 1, 0], "failures": [0.5, 1, math.nan],
            "malformed": [0.5, 0.5, math.nan], "answer_tokens": [2, 9, 0], "invalid": [0, 1, 0]}  # fmt: skip
    assert got.keys() == want.keys()
    for name, values in want.items():
        assert got[name].tolist() == pytest.approx(values, nan_ok=True)
    settings = EvalConfig(sampler=SamplerConfig(group=1))
    metrics = summarize(done, settings, ANSWER)
    assert re.search(r"episode/failures +75.0 %", table(metrics, settings, 3))
    assert "episode" not in table_of_sets({"test": {"problems": 3, "metrics": metrics}}, settings)
    assert means(done, (), ANSWER)["eval/episode/failures"] == 0.75  # over the problems with a call


@pytest.mark.parametrize(("options", "message"), [
    ({"seed": -1}, "seed=-1: must be at least 0"), ({"seed": 2**31}, "seed=2147483648: must be"),
    ({"batch": 0}, "batch=0: must be at least 1"), ({"limit": -1}, "limit=-1: must be at least 0"),
    ({"ks": (0,)}, "k=0: must be between 1 and samples=2"),
])  # fmt: skip
def test_settings_out_of_range(options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        EvalConfig(sampler=SamplerConfig(group=2), **options)
    drawing = EvalConfig.in_training(samples=3, temperature=0.5, limit=7, max_tokens=11, cache_dtype="float32")
    assert (drawing.ks, drawing.limit, drawing.seed, drawing.accuracy_name) == ((3,), 7, 0, "avg@3")
    assert (drawing.sampler.max_tokens, drawing.sampler.cache_dtype) == (11, "float32")
