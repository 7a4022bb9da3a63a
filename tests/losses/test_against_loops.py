"""Losses against loops on random ragged input: all of one part in one program.

Samples are alone in their group or without a token; masks have holes.
"""

import functools

import jax
import jax.numpy as jnp
import loss_oracles
import numpy as np
from hypothesis import assume, given
from loss_examples import HOW
from oracles import close
from ragged import SEEDS, G, P, T, many, masks, on

from grpojax import losses as L

KINDS = ["k1", "k2", "k3", "unbiased"]
IMPORTANCE = [
    (mode, level, bounds)
    for level in ("token", "sequence", "geometric")
    for mode, bounds in (("truncate", {"high": 1.5}), ("mask", {"low": 0.6, "high": 1.7}), ("mask", {}))
]
FRACTIONS = [2e-4, 0.3]
WEIGHTS = [(normalise, answer) for normalise in ("preferred", "all") for answer in (False, True)]
GATES = ["token", "action", "response"]
SLOPES = np.arange(1.0, T + 1, dtype=np.float32)  # tell the tokens of a gradient apart


@jax.jit
def corrections(logps, other, advantages, mask, key, skip):
    cov = L.covariance(logps, advantages, mask)

    def joint(x):
        return L.log_ratio(x, other, mask, "joint")

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
            want[i] = loss_oracles.kl(float(logps[i]), float(other[i]), kind, float(advantages[i]))
        tell(values, want)

    for (mode, level, bounds), weights in zip(IMPORTANCE, got["importance"], strict=True):
        exact = loss_oracles.importance(logps, other, mask, "truncate", level, high=np.inf)
        edges = [bounds.get("low", 0.5), bounds.get("high", 2.0)]
        assume(all(np.abs(exact - edge).min() > 1e-5 for edge in edges))
        tell(weights, loss_oracles.importance(logps, other, mask, mode, level, **bounds))

    fallen = loss_oracles.falls(logps, other, mask)
    assume(np.abs(fallen - 0.1).min() > 1e-5)
    want = 1.0 - ((samples < 0) & (fallen > 0.1)[..., None])
    tell(got["off policy"][mask], np.broadcast_to(want, mask.shape)[mask])

    cov = loss_oracles.covariance(logps, advantages, mask)
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

    tell(got["joint"][0], loss_oracles.log_ratio(logps, other, mask, "joint"), atol=3e-5)
    tell(got["joint"][1], np.where(mask, np.where(mask, SLOPES, 0).sum(-1, keepdims=True), 0))


@jax.jit
def terms(x, y, advantages, mask, actions, answer, weights, sums, lengths):

    def value(v, **clip):
        return L.value_loss(v, y, weights, **clip)

    def rows(x):
        return x.reshape(P, G * T)  # the samples of a group share the last axis

    segments = jnp.broadcast_to(jnp.arange(1, G + 1, dtype=jnp.int32)[:, None], (P, G, T))
    return {
        "value": [
            jax.value_and_grad(value)(x),
            jax.value_and_grad(lambda v: value(v, old_values=advantages, clip=0.4))(x),
        ],
        "kl_cov": L.kl_cov_penalty(x, answer, coef=0.7),
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
    got = jax.tree.map(np.asarray, terms(x, y, advantages, mask, actions, answer, weights, sums, mask))
    tell = functools.partial(close, atol=1e-5, rtol=1e-4)

    for (loss, gradient), clip in zip(got["value"], ({}, {"old_values": advantages, "clip": 0.4}), strict=True):
        want = loss_oracles.value_loss(x, y, weights, **clip)
        tell(loss, want[0], atol=1e-4)
        tell(gradient, want[1])
    want = np.zeros(mask.shape)
    for i in zip(*np.nonzero(mask), strict=True):
        want[i] = 0.7 * abs(float(x[i])) * answer[i]
    tell(np.where(mask, got["kl_cov"], 0), want)
    for (normalise, cut), values in zip(WEIGHTS, got["weights"], strict=True):
        tell(
            values,
            loss_oracles.displacement_weights(advantages, mask, normalise, *((answer, 0.3) if cut else ())),
            atol=1e-7,
        )
    for gate, values in zip(GATES, got["gates"], strict=True):
        tell(values, loss_oracles.displacement(x, mask, gate, actions))
    tell(got["rows"], loss_oracles.displacement(x, mask, "response", actions))
    tell(got["dpo"], [loss_oracles.dpo_loss(*map(float, pair), 0.3) for pair in sums.T], atol=1e-4)
    if seed % 5 == 0:  # the oracle is slow
        for (how, options), values in zip(HOW.items(), got["aggregate"], strict=True):
            want = loss_oracles.loss_weights(mask, how, count_empty=False, **options)
            close(values, want, atol=1e-7)
