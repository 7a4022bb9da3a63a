"""What the other files leave to worked examples, against loops on random ragged input: all of one module in one program.

Samples are missing (NaN), alone in their group, without a token, or of a group of equal rewards; masks have holes.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import close

from grpojax import advantages as A
from grpojax import credit as C

P, G, T, D, W, V = 3, 5, 7, 2, 11, 13
NAN = float("nan")
SEEDS = st.integers(0, 99999)
many = settings(max_examples=25, deadline=None)


def scores(rng):
    """``[P, G]`` quarters, with groups of equal ones, of fails, of one sample and of none; seldom a batch of one."""
    out = rng.integers(0, 6, (P, G)).astype(np.float32) / 4
    out[rng.random((P, G)) < 0.15] = NAN
    for p in range(P):
        match rng.integers(0, 8):
            case 0:
                out[p] = np.where(np.isfinite(out[p]), np.float32(0.1), np.float32(NAN))
            case 1:
                out[p] = np.minimum(out[p], 0.25)
            case 2:
                out[p, np.arange(G) != rng.integers(G)] = NAN
            case 3:
                out[p] = NAN
    if rng.random() < 0.1:
        out[np.arange(P * G).reshape(P, G) != rng.integers(P * G)] = NAN
    return out


def masks(rng, holes=True):
    mask = np.arange(T) < rng.integers(0, T + 1, (P, G))[..., None]
    return mask & (rng.random(mask.shape) < 0.75) if holes else mask


def on(mask, x):
    """Float32, NaN where there is no token."""
    return np.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, NAN).astype(np.float32)


# --- sequence level

SEQUENCE = {
    "greedy": A.chain(A.subtract_greedy()),
    "fail": A.chain(A.center(), A.scale(ddof=0, eps=1e-2), A.penalize_all_fail(0.7, 0.25)),
    "likelihood": A.chain(A.center(), reward=A.likelihood_of_all_fail(0.25)),
    "floor": A.chain(A.center(), A.floor(-0.2)),
    "floor of tokens": A.chain(A.center(), A.to_tokens(), A.floor(-0.2)),
    "margin": A.chain(A.best_margin(scaled=True, eps=1e-2)),
    "alone, group": A.chain(A.center(singleton="reward"), A.scale(singleton="reward", eps=1e-2)),
    "alone, group, centred": A.chain(A.center(leave_one_out=True, singleton="reward")),
    "alone, group, scaled": A.chain(A.center("none"), A.scale(singleton="reward", eps=1e-2)),
    "alone, batch": A.chain(
        A.center("batch", singleton="reward"), A.scale("batch", singleton="reward", eps=1e-2)
    ),
    "live rewards": A.chain(A.center("none"), A.scale("batch", live_only=True, eps=1e-2)),
    "live advantages": A.chain(
        A.center(), A.scale("batch", of="advantages", live_only=True, ddof=0, eps=1e-2)
    ),
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
    scaled = functools.partial(oracles.advantages, scale="group", eps=1e-2)
    tokens = lambda x: np.where(mask, x[..., None], 0)  # noqa: E731
    centred = oracles.advantages(r)
    from_kl = oracles.subtract_kl(r, k1, mask, 0.3)
    want = {
        "greedy": oracles.subtract_greedy(r, greedy),
        "fail": oracles.penalize_all_fail(scaled(r, ddof=0), r, outcome, 0.7, 0.25),
        "likelihood": oracles.advantages(oracles.likelihood_of_all_fail(r, outcome, likelihood, 0.25)),
        "floor": np.maximum(centred, -0.2),
        "floor of tokens": tokens(np.maximum(centred, -0.2)),
        "margin": oracles.best_margin(r, scaled=True, eps=1e-2),
        "alone, group": oracles.keep_singletons(scaled(r), r, "group"),
        "alone, group, centred": oracles.keep_singletons(
            oracles.advantages(r, leave_one_out=True), r, "group"
        ),
        "alone, group, scaled": oracles.keep_singletons(scaled(r, center="none"), r, "group"),
        "alone, batch": oracles.keep_singletons(
            oracles.advantages(r, center="batch", scale="batch", eps=1e-2), r, "batch"
        ),
        "live rewards": oracles.scale_by_live(np.nan_to_num(r), r, "rewards", 1, 1e-2),
        "live advantages": oracles.scale_by_live(centred, r, "advantages", 0, 1e-2),
        "white": tokens(oracles.whiten(r, there, 1, 1e-2)),
        "kl": scaled(from_kl),
        "token rewards": oracles.token_rewards(r, mask, k1, 0.3),
        "plain token rewards": oracles.token_rewards(r, mask, np.zeros(mask.shape), 0.0),
        "returns": oracles.token_returns(r, mask, k1, 0.3, 0.9),
        "whole returns": oracles.token_returns(r, mask, k1, 0.3),
        "gae": oracles.token_returns(r, mask, gamma=0.9, values=values, lam=0.8),
        "td": oracles.token_returns(r, mask, gamma=0.9, values=values, lam=0.0),
    }
    assert got.keys() == want.keys()
    for name in want:
        close(got[name], want[name], atol=1e-5, rtol=1e-4)
        assert not np.asarray(got[name])[~there].any()


# --- token level

BOUNDS = [None, 0.7]
BIAS_LOSSES = list(itertools.product(BOUNDS, [0.0, 0.3], ["sum", "mean"], [2, 3]))
SELF = [True, False]
CREDIT = {
    **{
        f"bias {bound}": A.chain(A.center(), A.to_tokens(), C.add_token_bias(bound=bound, center=True))
        for bound in BOUNDS
    },
    "conflicts": A.chain(A.center(), A.to_tokens(), C.conflict_weights(1.5, count_norm=True)),
    "penalty": A.chain(A.center(), C.entropy_penalty(0.2, everywhere=True)),
    "filter": A.chain(A.center(), C.entropy_filter(0.9, initial=0.8)),
    "no filter": A.chain(A.center(), C.entropy_filter(0.9, initial=1.0)),
    "rare": A.chain(A.center(), A.to_tokens(), C.compensate_rare_tokens(positive_only=False)),
    "rare of all": A.chain(
        A.center(), A.to_tokens(), C.compensate_rare_tokens(1.1, relative_to="vocabulary", positive_only=False)
    ),
    **{f"nthr {own}": A.chain(A.center(), A.to_tokens(), C.nthr(beta=0.5, self_term=own)) for own in SELF},
}  # fmt: skip


@jax.jit
def token_level(rewards, signals, advantages):
    losses = {}
    for bound, l2, normalise, ndim in BIAS_LOSSES:
        loss = functools.partial(C.token_bias_loss, bound=bound, l2=l2, normalise=normalise)
        given = advantages if ndim == 3 else advantages[..., 0]
        losses[bound, l2, normalise, ndim] = jax.value_and_grad(loss)(signals.token_bias, given, signals.mask)
    sign = A.signs(A.Signals(rewards=jnp.nan_to_num(rewards), valid=jnp.isfinite(rewards)))
    valid = signals.mask & jnp.isfinite(rewards)[..., None]
    nthr = [
        C.nthr_scores(signals.probs, signals.hidden, signals.columns, valid, sign, self_term=own)
        for own in SELF
    ]
    return {name: chain(rewards, signals) for name, chain in CREDIT.items()}, list(losses.values()), nthr


@many
@given(seed=SEEDS)
def test_token_level(seed):
    rng = np.random.default_rng(seed)
    r, mask = scores(rng), masks(rng, holes=False)
    bias, advantages = on(mask, rng.normal(size=mask.shape)), on(mask, rng.normal(size=mask.shape))
    advantages[..., 0] = rng.normal(size=(P, G))  # read alone where advantages are of samples
    s = A.Signals(
        mask=mask, token_bias=bias, behavior_logps=on(mask, -rng.exponential(size=mask.shape)),
        entropy=on(mask, rng.exponential(size=mask.shape)), max_logps=on(mask, -0.1 * rng.random(mask.shape)),
        tokens=rng.integers(0, 2, mask.shape).astype(np.int32),
        probs=on(mask, rng.dirichlet(np.ones(W + 1), (P, G, T))[..., :W]),
        hidden=on(mask, rng.normal(size=(P, G, T, D))), columns=rng.integers(-1, W, mask.shape).astype(np.int32),
    )  # fmt: skip
    got, losses, nthr = token_level(r, s, advantages)
    centred, there = oracles.advantages(r), np.isfinite(r)
    sign, valid = np.sign(centred), mask & there[..., None]
    flat = np.where(valid, centred[..., None], 0)
    tell = functools.partial(close, atol=1e-5, rtol=1e-4)

    for bound in BOUNDS:
        tell(got[f"bias {bound}"], oracles.add_token_bias(centred, bias, valid, bound, True))
    for (bound, l2, normalise, ndim), (value, gradient) in zip(BIAS_LOSSES, losses, strict=True):
        given = advantages if ndim == 3 else np.repeat(advantages[..., :1], T, -1)
        want = oracles.token_bias_loss(bias, given, mask, bound, l2, normalise)
        tell(value, want[0], atol=1e-4)
        tell(gradient, want[1], atol=1e-4)

    weights = oracles.conflict_weights(s.tokens, valid, sign, 1.5)
    tell(got["conflicts"], flat * weights / oracles.conflict_counts(s.tokens, valid, sign)[..., None])
    entropy = oracles.sample_means(s.entropy, mask)
    tell(got["penalty"], np.where(there, centred - 0.2 * entropy, 0))
    tell(got["filter"], np.where(entropy <= 0.9, centred, 0))
    tell(got["no filter"], centred)
    rare = functools.partial(oracles.compensate_rare_tokens, centred, s.behavior_logps, valid)
    tell(got["rare"], rare(positive_only=False))
    tell(got["rare of all"], rare(limit=1.1, positive_only=False, max_logps=s.max_logps))

    for own, (all_scores, means) in zip(SELF, nthr, strict=True):
        want, apart, want_scores, want_means = oracles.nthr(
            flat, r, s.probs, s.hidden, s.columns, valid, sign, 0.5, None, own
        )
        tell(np.where(valid, all_scores, 0), want_scores, atol=1e-4)
        tell(means, want_means, atol=1e-4)
        tell(np.where(apart < 1e-4, 0, got[f"nthr {own}"]), np.where(apart < 1e-4, 0, want))
