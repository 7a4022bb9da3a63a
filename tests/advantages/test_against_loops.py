"""Advantages, against loops on random ragged input: all of it in one program."""

import functools

import advantage_oracles as oracle
import jax
import numpy as np
import pytest
from advantage_examples import REWARD
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp
from oracles import close
from ragged import NAN, SEEDS, G, P, many, masks, on, prefix, scores

from grpojax import advantages as A

LENGTHS = np.array([[7, 2, 5, 1, 3], [1, 1, 4, 0, 7], [2, 6, 3, 5, 4]])

MASK = prefix(LENGTHS)

RNG = np.random.default_rng(7)

LOGPS = -RNG.exponential(size=MASK.shape).astype(np.float32)

REF = -RNG.exponential(size=MASK.shape).astype(np.float32)

VALUES = RNG.normal(size=MASK.shape).astype(np.float32)

SPARSE = np.where(RNG.random(MASK.shape) < 0.4, RNG.random(MASK.shape), NAN).astype(np.float32)

ALL = A.Signals(lengths=LENGTHS, mask=MASK, behavior_logps=LOGPS, ref_logps=REF, values=VALUES, step_rewards=SPARSE)

ORACLES = {
    "center_by_length": (A.chain(A.center_by_length()), lambda r: oracle.center_by_length(r, LENGTHS)),
    "gpg": (A.chain(A.center(), A.rescale_live()), oracle.gpg),
    "virtual_best": (A.chain(A.virtual_best(2.0, 2)), lambda r: oracle.virtual_best(r, 2.0, 2)),
    "pass_at_k": (A.chain(A.pass_at_k(3, success=0.5)), lambda r: oracle.pass_at_k(r, 3, success=0.5)),
    "best_margin": (A.chain(A.best_margin()), oracle.best_margin),
    "process_rewards": (A.chain(A.process_rewards()), lambda r: oracle.process_rewards(r, SPARSE, MASK)),
    "returns": (
        A.chain(A.token_rewards(kl_coef=0.1), A.token_returns(gamma=0.9)),
        lambda r: oracle.token_returns(r, MASK, LOGPS - REF, 0.1, 0.9),
    ),
    "gae": (
        A.chain(A.token_rewards(), A.gae(gamma=0.99, lam=0.9)),
        lambda r: oracle.token_returns(r, MASK, gamma=0.99, values=VALUES, lam=0.9),
    ),
    "whiten": (
        A.chain(A.to_tokens(), A.whiten(ddof=1, eps=1e-4)),
        lambda r: oracle.whiten(
            np.where(MASK, np.nan_to_num(r)[..., None], 0), MASK & np.isfinite(r)[..., None], 1, 1e-4
        ),
    ),
}


@functools.cache
def compiled_chain(name):
    return jax.jit(ORACLES[name][0])


@pytest.mark.parametrize("name", ORACLES)
@settings(max_examples=12)
@given(rewards=hnp.arrays(np.float32, (P, G), elements=REWARD.map(np.float32)))
def test_further_oracles(name, rewards):
    close(compiled_chain(name)(rewards, ALL), ORACLES[name][1](rewards), atol=3e-4, rtol=3e-4)


SEQUENCE = {
    "greedy": A.chain(A.subtract_greedy()),
    "fail": A.chain(A.center(), A.scale(ddof=0, eps=1e-2), A.penalize_all_fail(0.7, 0.25)),
    "likelihood": A.chain(A.center(), reward=A.likelihood_of_all_fail(0.25)),
    "signs": A.chain(A.weigh_signs(0.3, 0.8, success=0.25)),
    "max_rl": A.chain(A.max_rl()),
    "floor": A.chain(A.center(), A.floor(-0.2)),
    "floor of tokens": A.chain(A.center(), A.to_tokens(), A.floor(-0.2)),
    "margin": A.chain(A.best_margin(scaled=True, eps=1e-2)),
    "alone, group": A.chain(A.center(singleton="reward"), A.scale(singleton="reward", eps=1e-2)),
    "alone, group, centred": A.chain(A.center(leave_one_out=True, singleton="reward")),
    "alone, group, scaled": A.chain(A.center("none"), A.scale(singleton="reward", eps=1e-2)),
    "alone, batch": A.chain(A.center("batch", singleton="reward"), A.scale("batch", singleton="reward", eps=1e-2)),
    "live rewards": A.chain(A.center("none"), A.scale("batch", live_only=True, eps=1e-2)),
    "live advantages": A.chain(A.center(), A.scale("batch", of="advantages", live_only=True, ddof=0, eps=1e-2)),
    "white": A.chain(A.center("none"), A.whiten(ddof=1, eps=1e-2), A.to_tokens()),
    "kl": A.chain(A.center(), A.scale(eps=1e-2), reward=A.subtract_kl(0.3)),
    "token rewards": A.chain(A.token_rewards(kl_coef=0.3)),
    "plain token rewards": A.chain(A.token_rewards()),
    "returns": A.chain(A.token_rewards(kl_coef=0.3), A.token_returns(gamma=0.9)),
    "whole returns": A.chain(A.token_rewards(kl_coef=0.3), A.token_returns()),
    "gae": A.chain(A.token_rewards(), A.gae(gamma=0.9, lam=0.8)),
    "td": A.chain(A.token_rewards(), A.gae(gamma=0.9, lam=0.0)),
}


@jax.jit
def sequence_level(rewards, signals):
    return {name: chain(rewards, signals) for name, chain in SEQUENCE.items()}


@pytest.mark.parametrize("judge", ["outcome", "reward"])
@many
@given(seed=SEEDS)
@pytest.mark.slow
def test_sequence_level(judge, seed):
    rng = np.random.default_rng(seed)
    r, mask = scores(rng), masks(rng)
    outcome = scores(rng) if judge == "outcome" else r
    greedy, likelihood = rng.random(P).astype(np.float32), rng.random((P, G)).astype(np.float32)
    greedy[rng.random(P) < 0.3] = NAN
    likelihood[rng.random((P, G)) < 0.2] = NAN
    logps, ref, values = (on(mask, rng.normal(size=mask.shape)) for _ in range(3))
    k1 = logps.astype(float) - ref
    signals = A.Signals(
        mask=mask, behavior_logps=logps, ref_logps=ref, values=values, greedy_rewards=greedy, likelihood=likelihood,
        outcome=None if judge == "reward" else outcome,
    )  # fmt: skip
    got = sequence_level(r, signals)
    there = np.isfinite(r)
    scaled = functools.partial(oracle.advantages, scale="group", eps=1e-2)

    def tokens(x):
        return np.where(mask, x[..., None], 0)

    centred = oracle.advantages(r)
    from_kl = oracle.subtract_kl(r, k1, mask, 0.3)
    want = {
        "greedy": oracle.subtract_greedy(r, greedy),
        "fail": oracle.penalize_all_fail(scaled(r, ddof=0), r, outcome, 0.7, 0.25),
        "signs": oracle.weigh_signs(r, outcome, 0.3, 0.8, 0.25),
        "likelihood": oracle.advantages(oracle.likelihood_of_all_fail(r, outcome, likelihood, 0.25)),
        "max_rl": oracle.max_rl(r),
        "floor": np.maximum(centred, -0.2),
        "floor of tokens": tokens(np.maximum(centred, -0.2)),
        "margin": oracle.best_margin(r, scaled=True, eps=1e-2),
        "alone, group": oracle.keep_singletons(scaled(r), r, "group"),
        "alone, group, centred": oracle.keep_singletons(oracle.advantages(r, leave_one_out=True), r, "group"),
        "alone, group, scaled": oracle.keep_singletons(scaled(r, center="none"), r, "group"),
        "alone, batch": oracle.keep_singletons(
            oracle.advantages(r, center="batch", scale="batch", eps=1e-2), r, "batch"
        ),
        "live rewards": oracle.scale_by_live(np.nan_to_num(r), r, "rewards", 1, 1e-2),
        "live advantages": oracle.scale_by_live(centred, r, "advantages", 0, 1e-2),
        "white": tokens(oracle.whiten(r, there, 1, 1e-2)),
        "kl": scaled(from_kl),
        "token rewards": oracle.token_rewards(r, mask, k1, 0.3),
        "plain token rewards": oracle.token_rewards(r, mask, np.zeros(mask.shape), 0.0),
        "returns": oracle.token_returns(r, mask, k1, 0.3, 0.9),
        "whole returns": oracle.token_returns(r, mask, k1, 0.3),
        "gae": oracle.token_returns(r, mask, gamma=0.9, values=values, lam=0.8),
        "td": oracle.token_returns(r, mask, gamma=0.9, values=values, lam=0.0),
    }
    assert got.keys() == want.keys()
    for name in want:
        close(got[name], want[name], atol=1e-5, rtol=1e-4)
        assert not np.asarray(got[name])[~there].any()
