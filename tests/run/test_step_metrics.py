import dataclasses

import numpy as np
import pytest

from grpojax import diagnostics
from grpojax import losses as L
from grpojax.run import step_metrics
from grpojax.run.batch import Batch
from grpojax.types import Max, Mean, Rollout

NAN = float("nan")


class Problem:
    ids = (1, 2, 3)


def judged(total, lengths, stopped, width=4):
    shape = np.shape(total)
    rollout = Rollout(
        tokens=np.zeros((*shape, width), np.int32),
        logps=np.zeros((*shape, width), np.float32),
        lengths=np.array(lengths),
        stopped=np.array(stopped),
    )
    total = np.array(total, np.float32)
    return Batch(
        problems=[Problem()] * shape[0],
        rollout=rollout,
        total=total,
        reward=total,
        by_name={"acc": total},
        invalid={"acc/timeout": 1},
    )


@pytest.mark.slow
def test_golden_numbers_of_all_that_was_drawn():
    drawn = [judged([[1, 0], [1, 1]], [[1, 2], [3, 4]], [[True, True], [True, False]]),
             judged([[0, 0], [NAN, 1]], [[4, 4], [4, 2]], [[False, False], [False, True]])]  # fmt: skip
    got = step_metrics.of_drawn(drawn, "acc")
    assert got["reward"] == pytest.approx(4 / 7) and got["rewards/invalid"] == 1 / 8
    assert got["reward_std"] == pytest.approx(np.sqrt(0.5) / 4) and got["frac_reward_zero_std"] == 0.75
    assert (got["groups/all_fail"], got["groups/all_correct"]) == (0.25, 0.25)  # [NAN, 1] is not known to be
    assert got["completions/mean_length"] == 3.0 and got["completions/mean_terminated_length"] == 2.0
    assert got["completions/clipped_ratio"] == 0.5 and got["rewards/invalid/acc/timeout"] == 2
    assert step_metrics.tokens(drawn) == (3 * 8, 24)


@pytest.mark.slow
def test_golden_numbers_of_repetition_and_of_the_likelihood_of_right_samples():
    """Per token, of right samples alone: over all the sums of log-probs it would be -3.9 / 4."""
    drawn = [judged([[1, 0], [1, NAN]], [[6, 4], [2, 0]], [[True, True], [True, False]], width=6)]
    rollout = drawn[0].rollout
    rollout.tokens[0, 0], rollout.tokens[0, 1, :4] = 5, [1, 2, 3, 4]
    rollout.logps[0, 0], rollout.logps[0, 1], rollout.logps[1, 0, :2] = -0.5, -9.0, [-0.1, -0.3]
    rollout.logps[1, :, 2:] = NAN
    got = step_metrics.of_drawn(drawn, "acc")
    assert got["completions/repetition"] == pytest.approx((2 / 3 + 0) / 2)  # two samples have four tokens
    assert got["completions/right_logp"] == pytest.approx((-0.5 - 0.2) / 2)
    wrong = step_metrics.of_drawn([judged([[0, 0]], [[1, 2]], [[True, True]])], "acc")
    assert np.isnan(wrong["completions/right_logp"]) and np.isnan(wrong["completions/repetition"])


def test_golden_numbers_of_what_was_kept():
    kept = judged([[1, 0], [0, 0]], [[1, 2], [4, 4]], [[True, True], [True, True]])
    got = step_metrics.of_kept(dataclasses.replace(kept, dropped=np.array([False, True])))
    assert got["kept/reward"] == 0.5 and got["kept/frac_reward_zero_std"] == 0 and got["kept/mean_length"] == 1.5
    assert got["groups/missing"] == 0.5
    nothing = step_metrics.of_kept(dataclasses.replace(kept, dropped=np.array([True, True])))
    assert np.isnan(nothing["kept/reward"]) and nothing["groups/missing"] == 1


def test_golden_numbers_of_updates():
    """Means over tokens, not over updates: the second has three times the tokens."""
    updates = [
        {"loss": 1.0, "skipped": 0.0, "grad_norm": 2.0, "entropy": Mean(total=1.0, count=1.0),
         "clip_low": Mean(total=0.0, count=1.0), "clip_high": Mean(total=1.0, count=1.0),
         "logp_difference": Mean(total=0.5, count=1.0), "logp_difference_max": Max(value=0.5)},
        {"loss": 3.0, "skipped": 1.0, "grad_norm": 4.0, "entropy": Mean(total=9.0, count=3.0),
         "clip_low": Mean(total=3.0, count=3.0), "clip_high": Mean(total=0.0, count=3.0),
         "logp_difference": Mean(total=9.0, count=3.0), "logp_difference_max": Max(value=7.0)},
    ]  # fmt: skip
    assert step_metrics.of_updates(updates) == {
        "loss": 2.0, "grad_norm": 3.0, "entropy": 2.5, "clip_ratio/low_mean": 0.75, "clip_ratio/high_mean": 0.25,
        "clip_ratio/region_mean": 1.0, "sampling/logp_difference_mean": 0.5, "sampling/logp_difference_max": 0.5,
    }  # fmt: skip
    counts = [{"router_counts": np.array(x)} for x in ([[2, 0], [1, 1]], [[1, 1], [0, 2]])]  # 3 of 4, and 3 of 4
    assert step_metrics.of_updates(counts) == {"router/busiest_share": 0.75}
    assert step_metrics.of_updates([]) == {}


@pytest.mark.slow
def test_every_name_that_an_update_may_give_is_known_or_logged_as_it_is():
    """What is renamed is given by a loss or by the mismatch; nothing that was renamed is left behind."""
    ones = np.ones((1, 1, 2), np.float32)
    logps = dict.fromkeys(("old_logps", "ref_logps", "sampler_logps"), ones - 2)
    tokens = dict(advantages=ones, weights=ones, displacement_weights=ones, covariance_mask=ones > 0, **logps)
    given = set(diagnostics.mismatch(ones, ones, ones > 0))
    for objective in (
        L.Objective(kl_coef=0.1, llds_coef=0.1, surrogate=L.clipped(dual=3.0), importance="mask", off_policy_limit=1.0),
        L.Objective(surrogate=L.cispo(), covariance="clip", entropy_coef=0.1),
        L.Objective(surrogate=L.unclipped(), covariance="kl"),
    ):
        given |= set(L.policy_loss(ones - 2, objective=objective, **tokens, entropy=ones)[1])
    assert {*step_metrics.MEANS, *step_metrics.FIRST} <= given | {"router_entropy"}
    as_they_are = {"loss", "policy_loss", "kl_loss", "llds_loss"}
    assert given - {*step_metrics.MEANS, *step_metrics.FIRST} == as_they_are | {"log_ratio_square"}
