import logging
import math
from pathlib import Path

import numpy as np
import pytest

from grpojax.evaluation import Judge
from grpojax.run.alarms import SAID, Limits
from grpojax.run.watch import KEY, Watch

LIMITS = Limits(window=4, recent=2, deviations=0.5)
RUN = Path("runs/x")
FAIL, RIGHT, SAME = "groups/all_fail", "groups/all_correct", "groups/zero_variance"


def rung(watch, **histories):
    """The alarms of a run with these metrics, step by step, each with its step; a / is written as __."""
    found = []
    for n, row in enumerate(zip(*histories.values(), strict=True), 1):
        names = [name.replace("__", "/") for name in histories]
        got = watch.note(n, {k: x for k, x in zip(names, row, strict=True) if x is not None})
        assert set(got.values()) <= {1.0} and all(name.startswith(KEY) for name in got)
        found += [(n, name.removeprefix(KEY)) for name in got]
    return found


@pytest.mark.parametrize(("metric", "values", "alarms"), [
    ("entropy", [1.0, 1.1, 0.9, 1.0, 1.1, 0.9], []),
    ("entropy", [1.0, 0.7, 0.4, 0.11, 0.1, 0.1], [(4, "entropy_falling")]),
    ("entropy", [0.021, 0.022, 0.021, 0.022, 0.02, 0.019], [(6, "entropy_collapse")]),
    ("entropy", [1.0, 2.0, 4.0, 6.0, 7.0], [(4, "entropy_explosion")]),
    ("entropy", [0.5, 0.12], [(2, "entropy_jump")]),
    ("entropy", [0.5, 0.13], []),  # less than fourfold
    ("entropy", [0.1, 0.5], [(2, "entropy_jump")]),  # up as well
    ("entropy", [0.06, 0.2, 0.04], []),  # not below all of the window
    ("entropy", [0.004, 0.05], []),  # twelvefold of hardly anything
    ("entropy", [math.nan], [(1, "not_finite")]),
    ("groups__all_fail", [1.0, 1.0, 0.9, 0.9, 1.0, 1.0], []),  # the rewards are not said to be the same
    ("completions__mean_length", [10, 10, 15, 16], [(4, "length_growing")]),
    ("completions__mean_length", [10, 10, 15, 15], []),
    ("completions__clipped_ratio", [0.0, 0.1, 0.2, 0.3], []),
    ("completions__clipped_ratio", [0.0, 0.1, 0.2, 0.4], [(4, "truncation")]),
    ("completions__clipped_ratio", [0.9, 0.9, 0.9, 0.9, 0.9], []),  # from the start: no trend
    ("completions__repetition", [0.0, 0.1, 0.2, 0.4], [(4, "repetition")]),
    ("completions__right_logp", [-0.1, -0.1, -0.3, -0.5], [(4, "displacement")]),
    ("completions__right_logp", [-0.5, -0.3, -0.1, -0.1], []),
    ("reward", [0.4, 0.4, 0.4, 0.3, 0.25], [(5, "reward_falling")]),
    ("reward", [0.4, 0.4, 0.4, 0.32, 0.3], []),
    ("reward", [-0.4, -0.4, -0.5, -0.6], [(4, "reward_falling")]),
    ("rewards__answer__mean", [0.4, 0.4, 0.3, 0.2], [(4, "reward_falling")]),
    ("rewards__format__mean", [0.4, 0.4, 0.3, 0.2], []),  # says nothing of what is right
    ("eval__reward", [0.4, 0.5, 0.5, 0.5, 0.5, 0.5, 0.2], [(7, "held_out_falling")]),
    ("eval__reward", [0.4, 0.5, 0.3], []),  # too few to know how it goes up and down
    ("eval__accuracy", [0.4, 0.5, 0.39], []),
    ("critic__bias_abs", [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4], [(5, "bias_growing")]),
    ("critic__bias_abs", [0.0, 1.2, 3.0], [(3, "bias_growing")]),
    ("critic__bias_abs", [0.1, 0.2, 0.4, 0.8, 0.9, 0.95], []),  # less than the advantages
    ("critic__bias_abs", [2.0, 2.5, 3.0, 3.2, 3.3, 3.5], []),  # has hardly grown
    ("critic__bias_abs", [0.9, 5.0, 4.0, 3.0, 2.5], []),  # comes back
])  # fmt: skip
def test_each_kind_of_trouble_is_named_once_with_its_remedy(metric, values, alarms, caplog):
    caplog.set_level(logging.WARNING, "grpojax")
    quiet = Watch(RUN, LIMITS, judge=Judge("answer", None), problems=1000)
    assert rung(quiet, **{metric: [*values, values[-1]] if alarms else values}) == alarms
    assert len(caplog.records) == len(alarms)
    for (step, name), record in zip(alarms, caplog.records, strict=True):
        what, remedy = SAID[name]
        assert record.getMessage().startswith(f"step {step}: {name}: {what}: ")
        assert record.getMessage().endswith(f"; {remedy}, or look at the samples: grpojax show runs/x")


@pytest.mark.parametrize(("metrics", "alarms"), [
    ({FAIL: [0.95] * 5, SAME: [1.0] * 5}, [(4, "groups_all_fail")]),
    ({FAIL: [0.94] * 5, SAME: [1.0] * 5}, []),
    ({FAIL: [1.0] * 5, SAME: [0.1] * 5}, []),  # rewards under 0 that differ
    ({RIGHT: [0.95] * 5, SAME: [1.0] * 5}, [(4, "groups_all_right")]),
    ({RIGHT: [1.0] * 5, SAME: [0.0] * 5}, []),  # rewards over 1 that differ
    ({RIGHT: [0.5, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0], SAME: [1.0] * 7}, []),  # that was learned
])  # fmt: skip
def test_groups_that_teach_nothing_are_told_apart(metrics, alarms):
    assert rung(Watch(RUN, LIMITS), **{k.replace("/", "__"): v for k, v in metrics.items()}) == alarms


@pytest.mark.parametrize(("metric", "values"), [
    ("entropy", [1.0, 0.7, 0.4, 0.1, 0.05, 0.01]),
    ("completions__mean_length", [10, 10, 20, 30, 40, 50]),
    ("completions__right_logp", [-0.1, -0.2, -0.4, -0.8, -1.6, -3.2]),
])  # fmt: skip
def test_while_the_reward_grows_that_is_what_learning_looks_like(metric, values):
    grows = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert not rung(Watch(RUN, LIMITS), **{metric: values}, reward=grows)
    assert rung(Watch(RUN, LIMITS), **{metric: values}, reward=[0.1] * 6)


@pytest.mark.parametrize("share", [0.5, 0.49])
def test_a_policy_that_is_nearly_always_right_need_not_vary(share):
    got = rung(Watch(RUN, LIMITS), entropy=[0.01] * 5, groups__all_correct=[share] * 5, groups__zero_variance=[1.0] * 5)
    assert got == ([] if share == 0.5 else [(4, "entropy_collapse")])


def test_where_the_problems_change_a_falling_reward_says_nothing():
    falls = [0.8, 0.8, 0.8, 0.4, 0.2]
    assert rung(Watch(RUN, LIMITS), reward=falls) == [(5, "reward_falling")]
    assert not rung(Watch(RUN, LIMITS, comparable=False), reward=falls)


@pytest.mark.parametrize(("problems", "rings"), [(8, False), (100, True)])
def test_a_few_held_out_problems_are_told_from_chance(problems, rings):
    got = rung(Watch(RUN, problems=problems), eval__accuracy=[0.625, 0.375])
    assert got == ([(2, "held_out_falling")] if rings else [])


def test_a_held_out_reward_of_any_scale_is_told_from_how_it_goes_up_and_down():
    steady = np.random.default_rng(0).normal(0.0, 0.06, 20)  # of rewards of 1 and -1, 256 at a time
    assert not rung(Watch(RUN, problems=256), eval__reward=steady)
    falls = [-0.1, 0.1, 0.2, 0.25, 0.28, 0.3, 0.29, -0.4]
    assert rung(Watch(RUN, problems=256), eval__reward=falls) == [(8, "held_out_falling")]


def test_where_groups_of_equal_rewards_teach_and_problems_change_less_is_said():
    fails = {FAIL.replace("/", "__"): [1.0] * 5, SAME.replace("/", "__"): [1.0] * 5}
    assert rung(Watch(RUN, LIMITS), **fails) and not rung(Watch(RUN, LIMITS, uniform=lambda: True), **fails)
    longer = {"completions__mean_length": [10, 10, 20, 30, 40], "reward": [0.5] * 5}
    assert rung(Watch(RUN, LIMITS), **longer) and not rung(Watch(RUN, LIMITS, comparable=False), **longer)


@pytest.mark.parametrize(("share", "rings"), [
    ([1.0] * 12, True),
    ([1.0] * 9, False),
    ([1.0] * 9 + [0.99] + [1.0] * 20, False),
    ([0.0] + [1.0] * 20, False),  # such a run has learned something
    ([None, None] + [1.0] * 10, True),  # of a step without groups nothing is known
])  # fmt: skip
def test_a_run_whose_groups_never_differ_says_so_after_ten_steps(share, rings):
    rewards = [0.5] * len(share)
    got = rung(Watch(RUN), frac_reward_zero_std=share, reward=rewards)
    assert got == ([(share.index(1.0) + 10, "groups_never_differ")] if rings else [])
    assert not rung(Watch(RUN, uniform=lambda: True), frac_reward_zero_std=share, reward=rewards)


def test_it_says_what_the_rewards_are():
    watch = Watch(RUN)
    assert rung(watch, frac_reward_zero_std=[1.0] * 10, reward=[0.5] * 10)
    assert "10 steps, reward 0.5" in watch.rings["groups_never_differ"]


@pytest.mark.parametrize(("share", "rings", "to_the_end"), [
    ([1.0] * 12, [(3, "rewards_invalid")], True),
    ([1.0] * 2, [], True),
    ([0.25] * 3, [(3, "rewards_invalid")], False),
    ([0.24] * 30, [], False),
    ([0.0, 0.5] * 5, [(4, "rewards_invalid")], False),
    ([0.0] * 9 + [1.0] * 6, [(11, "rewards_invalid")], False),  # fails for good
    ([0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0], [], False),  # a judge that was away for a step
    ([1.0] * 3 + [0.0], [(3, "rewards_invalid")], False),
    ([None] * 3, [], False),
])  # fmt: skip
def test_rewards_that_stay_invalid_are_said(share, rings, to_the_end):
    """And nothing is said of groups that never differ, whose remedies would not help."""
    watch = Watch(RUN, uniform=lambda: True)
    unknown = [1.0] * len(share), [None] * len(share)
    assert rung(watch, **{"rewards/invalid": share}, frac_reward_zero_std=unknown[0], reward=unknown[1]) == rings
    assert watch.all_invalid == to_the_end


def test_invalid_rewards_are_said_with_the_first_error_of_their_kind():
    errors = {"exact/none": "it returned None for a completion"}
    watch = Watch(RUN, errors=errors)
    errors["exact/error"] = "ValueError: no judge"  # they grow with the run
    kinds = {"rewards__invalid__exact__none": [1.0] * 3, "rewards__invalid__exact__error": [5.0] * 3}
    assert rung(watch, rewards__invalid=[0.75] * 3, **kinds) == [(3, "rewards_invalid")]
    assert ": 0.75 over 3 steps, exact raised: ValueError: no judge; mend" in watch.rings["rewards_invalid"]
    of_environment = {"rewards__invalid__environment__reset": [5.0] * 3}
    rung(watch := Watch(RUN, errors=errors), rewards__invalid=[0.75] * 3, **of_environment)
    assert "steps, environment: reset; mend" in watch.rings["rewards_invalid"]


def test_whether_equal_rewards_teach_is_asked_once_and_when_it_matters():
    asked = []
    watch = Watch(RUN, LIMITS, uniform=lambda: not asked.append(1))
    rung(watch, frac_reward_zero_std=[1.0] * 9)
    assert not asked
    rung(watch, frac_reward_zero_std=[1.0] * 30, groups__all_fail=[1.0] * 30, groups__zero_variance=[1.0] * 30)
    assert asked == [1]


@pytest.mark.parametrize(("metric", "values"), [
    ("reward", [0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0]),
    ("completions__right_logp", [-0.1, -2.1, -0.1, -2.1, -0.7, -2.1, -0.1, -0.3, -2.1, -1.9]),
])  # fmt: skip
def test_a_fall_that_noise_can_make_is_none(metric, values):
    assert rung(Watch(RUN, LIMITS), **{metric: values})
    assert not rung(Watch(RUN, Limits(window=4, recent=2)), **{metric: values})


def test_a_step_without_updates_says_nothing():
    assert not rung(Watch(RUN, LIMITS), entropy=[0.05, None, None, None, 0.05], reward=[0.0] * 5)


def noisy_run(seed, steps):
    """Metrics of a healthy run: it learns, more or less, in batches of 128 samples of 16 prompts."""
    rng = np.random.default_rng(seed)
    best = rng.uniform(0.2, 1.0)
    solves = 0.1 + (best - 0.1) * (1 - np.exp(-np.arange(steps) / rng.uniform(5, 60)))
    for n, p in enumerate(solves, 1):
        each = rng.binomial(8, np.clip(rng.normal(p, 0.2, 16), 0, 1)) / 8
        yield {
            "step": n,
            "reward": each.mean(),
            "entropy": (0.02 + 0.5 * (1 - p)) * rng.lognormal(0, 0.15),
            FAIL: (each == 0).mean(),
            RIGHT: (each == 1).mean(),
            SAME: ((each == 0) | (each == 1)).mean(),
            "completions/mean_length": (100 + 60 * p) * rng.lognormal(0, 0.1),
            "completions/clipped_ratio": rng.binomial(128, 0.05) / 128,
            "completions/repetition": 0.1 * rng.lognormal(0, 0.2),
            "completions/right_logp": -(0.02 + 0.5 * (1 - p)) * rng.lognormal(0, 0.15),
        }
        if n % 20 == 0:
            yield {"step": n, "eval/accuracy": rng.binomial(128, p) / 128}


def test_noise_alone_rings_nothing():
    for seed in range(20):
        quiet = Watch(RUN, problems=128)
        for line in noisy_run(seed, 120):
            assert not quiet.note(line["step"], line), (seed, line)


@pytest.mark.parametrize("at", [1, 3, 5, 8])
def test_a_run_that_goes_on_rings_as_one_that_never_stopped(at):
    entropy, reward = [1.0, 1.0, 1.0, 0.7, 0.3, 0.2, 0.1, 0.01, 0.01], [0.1, 0.8, 0.8, 0.8, 0.8, 0.7, 0.5, 0.3, 0.1]
    whole, lines = Watch(RUN, LIMITS), []
    for n, (e, r) in enumerate(zip(entropy, reward, strict=True), 1):
        values = {"entropy": e, "reward": r, "critic/bias_abs": math.nan}
        values |= whole.note(n, values)
        lines.append({"step": n} | {k: None if math.isnan(x) else x for k, x in values.items()})
    assert {k for line in lines for k in line if k.startswith(KEY)} == {
        f"{KEY}{name}" for name in ("entropy_falling", "entropy_collapse", "reward_falling", "entropy_jump")
    }
    again = Watch(RUN, LIMITS)
    again.replay(lines[:at])
    for line in lines[at:]:
        bare = {k: x for k, x in line.items() if not k.startswith(KEY) and x is not None}
        assert again.note(line["step"], bare) == {k: x for k, x in line.items() if k.startswith(KEY)}


def test_the_entropys_rules_on_random_runs():
    """Whose reward does not grow: the line through the window is numpy's."""
    rng, n, steps = np.random.default_rng(0), 101, np.arange(20)
    slopes, starts = rng.uniform(-1.5, 1.5, (n, 1)), 10 ** rng.uniform(-2.5, 1, (n, 1))
    entropy = starts * np.exp(slopes * np.linspace(0, 1, 20) + rng.normal(0, 0.1, (n, 20)))
    slope, start = np.polyfit(steps, entropy.T, 1)
    want = {
        "entropy_collapse": entropy[:, -1] < 0.02,
        "entropy_explosion": entropy[:, -1] > 5,
        "entropy_falling": -slope * 19 > 0.5 * np.maximum(start, 1e-30),
    }
    got = [{name for _, name in rung(Watch(RUN), entropy=history)} for history in entropy]
    for name, rings in want.items():
        assert 10 < sum(rings) < n - 10 and [name in alarms for alarms in got] == rings.tolist(), name


@pytest.mark.parametrize("options", [{"recent": 1}, {"window": 9, "recent": 5}])
def test_limits_that_compare_nothing_are_refused(options):
    with pytest.raises(ValueError, match="recent=.*at most half of window="):
        Limits(**options)
