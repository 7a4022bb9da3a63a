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
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import close

from grpojax import advantages as A
from grpojax import allocation as X
from grpojax import credit as C
from grpojax import losses as L

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
        "alone, group, centred": oracles.keep_singletons(oracles.advantages(r, leave_one_out=True), r, "group"),
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
        of = advantages if ndim == 3 else advantages[..., 0]
        losses[bound, l2, normalise, ndim] = jax.value_and_grad(loss)(signals.token_bias, of, signals.mask)
    sign = A.signs(A.Signals(rewards=jnp.nan_to_num(rewards), valid=jnp.isfinite(rewards)))
    valid = signals.mask & jnp.isfinite(rewards)[..., None]
    nthr = [C.nthr_scores(signals.probs, signals.hidden, signals.columns, valid, sign, self_term=own) for own in SELF]
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
        of = advantages if ndim == 3 else np.repeat(advantages[..., :1], T, -1)
        want = oracles.token_bias_loss(bias, of, mask, bound, l2, normalise)
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


# --- losses

KINDS = ["k1", "k2", "k3", "unbiased"]
IMPORTANCE = [
    (mode, level, bounds)
    for level in ("token", "sequence", "geometric")
    for mode, bounds in (("truncate", {"high": 1.5}), ("mask", {"low": 0.6, "high": 1.7}), ("mask", {}))
]
FRACTIONS = [2e-4, 0.3]
WEIGHTS = [(normalise, answer) for normalise in ("preferred", "all") for answer in (False, True)]
GATES = ["token", "action", "response"]
HOW = {"token_mean": {}, "sequence_mean": {}, "prompt_mean": {}, "sequence_sum": {}, "constant": {"constant": 8.0}}  # fmt: skip
SLOPES = np.arange(1.0, T + 1, dtype=np.float32)  # tell the tokens of a gradient apart


@jax.jit
def corrections(logps, other, advantages, mask, key, skip):
    cov = L.covariance(logps, advantages, mask)
    joint = lambda x: L.log_ratio(x, other, mask, "joint")  # noqa: E731
    return {
        "kl": [L.kl(logps, other, kind, log_ratios=advantages, mask=mask) for kind in KINDS],
        "importance": [
            L.importance_correction(logps, other, mask, mode, level=level, **bounds)
            for mode, level, bounds in IMPORTANCE
        ],
        "off policy": L.off_policy_mask(logps, other, advantages, mask, 0.1),
        "covariance": cov,
        "kl_cov": [L.kl_cov(cov, mask, fraction=fraction) for fraction in FRACTIONS],
        "clip_cov": [
            L.clip_cov(key, cov, mask, fraction=fraction, low=0.1, high=0.8, skip=skip) for fraction in FRACTIONS
        ],
        "joint": (joint(logps), jax.grad(lambda x: (SLOPES * joint(x)).sum())(logps)),
    }


@many
@given(seed=SEEDS)
def test_corrections(seed):
    rng = np.random.default_rng(seed)
    mask, skip = masks(rng), rng.random((P, G, T)) < 0.3
    logps = on(mask, rng.normal(size=mask.shape, scale=0.5) - 1)
    other = on(mask, np.nan_to_num(logps) + rng.normal(size=mask.shape, scale=0.4))
    samples = rng.integers(-2, 3, (P, G, 1)) / 2
    advantages = on(mask, np.broadcast_to(samples, mask.shape))
    got = jax.tree.map(np.asarray, corrections(logps, other, advantages, mask, jax.random.key(seed), skip))
    places = [tuple(i) for i in np.argwhere(mask)]
    tell = functools.partial(close, atol=1e-5, rtol=1e-4)

    for kind, values in zip(KINDS, got["kl"], strict=True):
        want = np.zeros(mask.shape)
        for i in places:
            want[i] = oracles.kl(float(logps[i]), float(other[i]), kind, float(advantages[i]))
        tell(values, want)

    for (mode, level, bounds), weights in zip(IMPORTANCE, got["importance"], strict=True):
        exact = oracles.importance(logps, other, mask, "truncate", level, high=np.inf)
        edges = [bounds.get("low", 0.5), bounds.get("high", 2.0)]
        assume(all(np.abs(exact - edge).min() > 1e-5 for edge in edges))
        tell(weights, oracles.importance(logps, other, mask, mode, level, **bounds))

    fallen = oracles.falls(logps, other, mask)
    assume(np.abs(fallen - 0.1).min() > 1e-5)
    want = 1.0 - ((samples < 0) & (fallen > 0.1)[..., None])
    tell(got["off policy"][mask], np.broadcast_to(want, mask.shape)[mask])

    cov = oracles.covariance(logps, advantages, mask)
    tell(got["covariance"], cov)
    n = len(places)
    ranked = sorted(places, key=lambda i: -cov[i])
    for count, selected in zip((1, n * 3 // 10), got["kl_cov"], strict=True):
        count = max(count, 1)
        if count < n and cov[ranked[count - 1]] - cov[ranked[count]] < 1e-6:
            continue  # a tie, as where all advantages are equal
        assert {tuple(i) for i in np.argwhere(selected)} == set(ranked[:count])
    for count, kept in zip((1, n * 3 // 10), got["clip_cov"], strict=True):
        candidates = {i for i in places if 0.1 < cov[i] < 0.8 and not skip[i]}
        assume(all(min(abs(cov[i] - 0.1), abs(cov[i] - 0.8)) > 1e-5 for i in places))
        dropped = {tuple(i) for i in np.argwhere(~kept)}
        assert dropped <= candidates and len(dropped) == min(max(count, 1), len(candidates))

    tell(got["joint"][0], oracles.log_ratio(logps, other, mask, "joint"), atol=3e-5)
    tell(got["joint"][1], np.where(mask, np.where(mask, SLOPES, 0).sum(-1, keepdims=True), 0))


def test_clip_cov_draws_all_candidates_alike():
    """4 of 10 over 500 keys: each is drawn in 200 of them, give or take 11."""
    cov, mask = jnp.where(jnp.arange(13) < 10, 2.0, 0.5), jnp.ones(13, bool)
    draw = jax.jit(jax.vmap(lambda key: ~L.clip_cov(key, cov, mask, fraction=4.01 / 13)))
    times = np.asarray(draw(jax.random.split(jax.random.key(0), 500))).sum(0)
    assert times.sum() == 2000 and not times[10:].any()
    assert 155 < times[:10].min() and times[:10].max() < 245


@jax.jit
def terms(x, y, advantages, mask, actions, answer, weights, sums, logits, ref_logits, lengths):
    value = lambda v, **clip: L.value_loss(v, y, weights, **clip)  # noqa: E731
    rows = lambda x: x.reshape(P, G * T)  # noqa: E731  the samples of a group share the last axis
    segments = jnp.broadcast_to(jnp.arange(1, G + 1, dtype=jnp.int32)[:, None], (P, G, T))
    return {
        "value": [
            jax.value_and_grad(value)(x),
            jax.value_and_grad(lambda v: value(v, old_values=advantages, clip=0.4))(x),
        ],
        "kl_cov": L.kl_cov_loss(x, advantages, answer, coef=0.7),
        "weights": [
            L.displacement_weights(
                advantages, mask, normalise=normalise,
                **({"answer": answer, "answer_weight": 0.3} if cut else {}),
            )
            for normalise, cut in WEIGHTS
        ],
        "gates": [L.displacement(x, mask, gate, actions=actions) for gate in GATES],
        "rows": L.displacement(rows(x), rows(mask), "response", segments=rows(segments)).reshape(P, G, T),
        "dpo": L.dpo_loss(*sums, beta=0.3),
        "full_kl": jax.vmap(jax.vmap(jax.value_and_grad(L.full_kl)))(logits, ref_logits),
        "aggregate": [
            L.loss_weights(lengths, how, count_empty=False, **options) for how, options in HOW.items()
        ],
    }  # fmt: skip


@many
@given(seed=SEEDS)
def test_terms(seed):
    rng = np.random.default_rng(seed)
    mask = masks(rng)
    x, y = (on(mask, rng.normal(size=mask.shape, scale=0.7)) for _ in range(2))
    advantages, answer = on(mask, rng.integers(-2, 3, mask.shape) / 2), rng.random(mask.shape) < 0.4
    actions = rng.integers(0, 3, mask.shape).astype(np.int32)
    weights = np.where(mask, rng.random(mask.shape) + 0.1, 0).astype(np.float32)
    sums = rng.normal(size=(4, P), scale=20).astype(np.float32)
    logits, ref_logits = rng.normal(size=(2, P, G, V), scale=2).astype(np.float32)
    got = jax.tree.map(
        np.asarray, terms(x, y, advantages, mask, actions, answer, weights, sums, logits, ref_logits, mask)
    )
    tell = functools.partial(close, atol=1e-5, rtol=1e-4)

    for (loss, gradient), clip in zip(got["value"], ({}, {"old_values": advantages, "clip": 0.4}), strict=True):
        want = oracles.value_loss(x, y, weights, **clip)
        tell(loss, want[0], atol=1e-4)
        tell(gradient, want[1])
    want = np.zeros(mask.shape)
    for i in zip(*np.nonzero(mask), strict=True):
        want[i] = -np.exp(float(x[i])) * advantages[i] + 0.7 * abs(float(x[i])) * answer[i]
    tell(np.where(mask, got["kl_cov"], 0), want)
    for (normalise, cut), values in zip(WEIGHTS, got["weights"], strict=True):
        tell(
            values,
            oracles.displacement_weights(advantages, mask, normalise, *((answer, 0.3) if cut else ())),
            atol=1e-7,
        )
    for gate, values in zip(GATES, got["gates"], strict=True):
        tell(values, oracles.displacement(x, mask, gate, actions))
    tell(got["rows"], oracles.displacement(x, mask, "response", actions))
    tell(got["dpo"], [oracles.dpo_loss(*map(float, pair), 0.3) for pair in sums.T], atol=1e-4)
    for i in np.ndindex(P, G):
        kl, gradient = oracles.full_kl(logits[i], ref_logits[i])
        tell(got["full_kl"][0][i], kl)
        tell(got["full_kl"][1][i], gradient)
    if seed % 5 == 0:  # the oracle is slow
        for (how, options), values in zip(HOW.items(), got["aggregate"], strict=True):
            want = oracles.loss_weights(mask, how, count_empty=False, **options)
            close(values, want, atol=1e-7)


# --- allocation

KEEP = [(0.0, 1.0, 1.0), (None, 0.8, 0.5), (0.2, None, 0.75), (0.4, 0.6, 0.25), (None, None, 1.0)]


@jax.jit
def kept_and_paid(rewards, outcome, lengths):
    signals = A.Signals(lengths=lengths, outcome=outcome)
    return (
        [
            X.keep_prompts({"reward": rewards, "accuracy": outcome}, "accuracy", above=a, below=b, success=s)
            for a, b, s in KEEP
        ],
        [
            A.chain(reward=X.length_selected(0.4, share=share, success=0.75))(rewards, signals)
            for share in (0.2, 0.5, 1.0)
        ],
        A.chain(A.center("group"), reward=X.soft_overlong(6, 4))(rewards, signals),
    )


@many
@given(seed=SEEDS)
def test_kept_and_paid(seed):
    rng = np.random.default_rng(seed)
    rewards, outcome = scores(rng), scores(rng)
    lengths = rng.integers(0, T + 1, (P, G)).astype(np.int32)
    keep, selected, overlong = kept_and_paid(rewards, outcome, lengths)
    for options, got in zip(KEEP, keep, strict=True):
        np.testing.assert_array_equal(got, oracles.keep_prompts(outcome, *options))
    for share, got in zip((0.2, 0.5, 1.0), selected, strict=True):
        want = oracles.length_selected(rewards, lengths, 0.4, share, outcome, 0.75)
        close(got, np.nan_to_num(want), atol=1e-5)
    close(overlong, oracles.advantages(oracles.soft_overlong(rewards, lengths, 6, 4)))


cull = jax.jit(X.cull)
active = jax.jit(X.active, static_argnames="readmit_after")


@many
@given(seed=SEEDS, readmit_after=st.sampled_from([None, 1, 2, 3]))
def test_culling(seed, readmit_after):
    """Ten epochs, in some of which nothing or one prompt twice is drawn: whether it was left out or not."""
    rng, n, history = np.random.default_rng(seed), 7, []
    state = X.start_culling(n)
    for epoch in range(10):
        for _ in range(rng.integers(0, 3)):
            rows, rewards = rng.integers(0, n, P), scores(rng)
            rewards = np.where(rng.random((P, 1)) < 0.5, np.maximum(rewards, 1), rewards).astype(np.float32)
            history += [(epoch, int(row), group.tolist()) for row, group in zip(rows, rewards, strict=True)]
            state = cull(state, rows, rewards, epoch)
        for ahead in (0, 1):
            got = active(state, epoch + ahead, readmit_after=readmit_after)
            assert got.tolist() == oracles.active(n, history, epoch + ahead, readmit_after)


# --- gradients


@functools.cache
def gradient_of(how, ratio, surrogate):
    objective = L.Objective(surrogate=surrogate, ratio=ratio, aggregate=how, **HOW[how])

    @jax.jit
    def gradient(logps, behavior, advantages, mask):
        weights = L.loss_weights(mask, how, **HOW[how])
        batch = type("Batch", (), {"weights": weights, "advantages": advantages, "behavior_logps": behavior})
        return jax.grad(lambda x: L.policy_loss(x, batch, objective)[0])(logps)

    return gradient


@pytest.mark.parametrize("known", [True, False])
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_at_ratio_1_a_sequence_has_the_gradient_of_its_tokens(known, seed):
    """One advantage a sample and the mean over its tokens; of a joint ratio it is as many times that as there are."""
    rng = np.random.default_rng(seed)
    mask = masks(rng)
    logps = on(mask, -rng.exponential(size=mask.shape))
    advantages = on(mask, np.broadcast_to(rng.normal(size=(P, G, 1)), mask.shape))
    clip = L.clipped(0.2, 0.3)
    run = lambda ratio: gradient_of("sequence_mean", ratio, clip)(  # noqa: E731
        logps, logps if known else None, advantages, mask
    )
    lengths = mask.sum(-1, keepdims=True)
    want = np.where(mask, -advantages / np.maximum(lengths, 1) / (P * G), 0)
    for ratio in ("token", "sequence", "sequence_token"):
        close(run(ratio), want, atol=1e-7)
    close(run("joint"), want * lengths, atol=1e-7)


# The tabular policy: of three tokens the first ends the sequence; a second one is drawn given the first.
SEQUENCES = [(0,)] + [(a, b) for a in (1, 2) for b in range(3)]
PATHS = np.array([[s[0], 3 + 3 * (s[0] - 1) + s[1] if len(s) > 1 else 0] for s in SEQUENCES])
WRITTEN = np.array([[True, len(s) > 1] for s in SEQUENCES])[None]


def expected_reward(logits, rewards):
    """By loops over the sequences, float64; ``logits [3, 3]``: of the first token, and after 1 and after 2."""
    total = 0.0
    for s, r in zip(SEQUENCES, rewards, strict=True):
        p = 1.0
        for row, token in zip((0, s[0]), s, strict=False):
            p *= np.exp(logits[row][token]) / sum(np.exp(x) for x in logits[row])
        total += p * r
    return total


@functools.cache
def enumerated(how, ratio, surrogate):
    """The mean of the loss over all that ``drawn`` may draw, each as often as it does, and its gradient."""
    objective = L.Objective(surrogate=surrogate, ratio=ratio, aggregate=how)
    logps_of = lambda logits: jax.nn.log_softmax(logits).reshape(-1)[PATHS][None]  # noqa: E731

    @jax.jit
    def gradient(logits, drawn, advantages):
        behavior = logps_of(drawn)
        odds = jnp.exp(jnp.where(WRITTEN, behavior, 0.0).sum(-1, keepdims=True))
        weights = len(SEQUENCES) * odds * L.loss_weights(WRITTEN, how)
        batch = type("Batch", (), {"weights": weights, "advantages": jnp.broadcast_to(
            advantages[None, :, None], WRITTEN.shape), "behavior_logps": behavior})  # fmt: skip
        return jax.grad(lambda x: L.policy_loss(logps_of(x), batch, objective)[0])(logits)

    return gradient


@many
@given(seed=SEEDS)
def test_the_expected_gradient_is_that_of_the_expected_reward(seed):
    rng, h = np.random.default_rng(seed), 1e-5
    logits, other = rng.normal(size=(2, 3, 3)).astype(np.float32)
    rewards = rng.normal(size=len(SEQUENCES)).astype(np.float32)
    want = np.zeros((3, 3))
    for i in np.ndindex(3, 3):
        step = np.zeros((3, 3))
        step[i] = h
        up, down = (expected_reward(logits.astype(float) + sign * step, rewards) for sign in (1, -1))
        want[i] = -(up - down) / (2 * h)
    reinforce = enumerated("sequence_sum", "token", L.reinforce())
    close(reinforce(logits, logits, rewards), want, atol=1e-5)
    close(reinforce(logits, logits, rewards - np.float32(0.7)), want, atol=1e-5)  # a baseline changes nothing
    close(enumerated("sequence_sum", "own", L.unclipped())(logits, logits, rewards), want, atol=1e-5)
    # Off-policy, the joint ratio corrects exactly; its mean over tokens is itself, and so not their sum.
    close(enumerated("sequence_mean", "joint", L.unclipped())(logits, other, rewards), want, atol=3e-5)


def test_a_mean_over_tokens_is_not_that_gradient():
    logits, rewards = np.zeros((3, 3), np.float32), np.arange(7, dtype=np.float32)
    sums = enumerated("sequence_sum", "token", L.reinforce())(logits, logits, rewards)
    means = enumerated("sequence_mean", "token", L.reinforce())(logits, logits, rewards)
    assert np.abs(sums - means).max() > 0.1
