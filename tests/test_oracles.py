"""Losses and their gradients against loops on random ragged input: all of one part in one program.

Samples are alone in their group or without a token; masks have holes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import assume, given, settings
from oracles import close
from ragged import SEEDS, G, P, T, V, many, masks, on

from grpojax import losses as L

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
HOW = {name: {} for name in ("token_mean", "sequence_mean", "prompt_mean", "sequence_sum")}
HOW |= {"constant": {"constant": 8.0}}
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
