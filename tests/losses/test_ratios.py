"""Ratios of tokens, samples and traces; samples that share rows."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import loss_oracles
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_examples import (
    LENGTHS,
    LEVELS,
    NAN,
    SURROGATES,
    G,
    P,
    T,
    arrays,
    compiled,
    example,
)
from oracles import close
from ragged import on, prefix

from grpojax import losses as L


def test_log_ratio():
    mask = np.array([True, True, True, False])
    logps = np.array([-1, -90, -1, NAN], np.float32)
    old = np.array([-2, -1, -90, NAN], np.float32)
    value, gradient = jax.value_and_grad(lambda x: L.log_ratio(x, old, mask).sum())(logps)
    np.testing.assert_array_equal(L.log_ratio(logps, old, mask), [1, -20, 20, 0])
    np.testing.assert_array_equal(gradient, [1, 0, 0, 0])
    np.testing.assert_array_equal(L.log_ratio(logps, None, mask), [0, 0, 0, 0])
    gradient = jax.grad(lambda x: L.log_ratio(x, None, mask).sum())(logps)
    np.testing.assert_array_equal(gradient, [1, 1, 1, 0])
    assert L.log_ratio(jnp.zeros(4, jnp.bfloat16), None, mask).dtype == jnp.float32
    with pytest.raises(ValueError, match="'word'"):
        L.log_ratio(logps, old, mask, "word")


@pytest.mark.slow
def test_rows_of_several_samples_give_the_same_loss():
    """A mean over the row in place of the sample would change all of the sequence levels."""
    rng = np.random.default_rng(0)
    a, b = 4, 3  # two samples, alone and back to back; then two places of padding
    rows = {}
    for field, scale in (("logps", 1), ("old_logps", 1), ("sampler_logps", 1), ("advantages", 0)):
        x = np.full((2, T), NAN, np.float32)
        x[0, :a], x[1, :b] = (rng.normal(size=a), rng.normal(size=b)) if scale else (-1.0, 0.7)
        rows[field] = x
    mask = prefix([a, b])
    weights = np.asarray(L.loss_weights(mask[None], "sequence_mean"))[0]
    share = np.asarray(L.displacement_weights(np.nan_to_num(rows["advantages"]), mask))
    rows |= {
        "weights": weights,
        "displacement_weights": share,
        "actions": np.array([[1, 1, 2, 2, 0, 0, 0]] * 2),
    }
    packed = {name: np.concatenate([x[0, :a], x[1, :b], np.zeros(2, x.dtype)])[None] for name, x in rows.items()}
    packed["segments"] = np.array([[1] * a + [2] * b + [0] * 2], np.int32)
    packed["actions"] = np.array([[1, 1, 2, 2, 3, 3, 4, 0, 0]], np.int32)
    objectives = {level: L.Objective(ratio=level, trace_decay=decay) for level, decay in LEVELS.items()}
    objectives["gmpo"] = L.Objective(surrogate=SURROGATES["gmpo"])
    objectives["weights"] = L.Objective(importance="mask", importance_level="geometric", importance_high=5.0)
    objectives["joint"] = L.Objective(importance="truncate", importance_level="sequence", off_policy_limit=0.1)
    for gate in ("token", "action", "response"):
        objectives[gate] = L.Objective(llds_coef=1.0, llds_gate=gate)

    @jax.jit
    def losses(batch):
        batch = {"ref_logps": None} | batch
        logps, segments = batch.pop("logps"), batch.pop("segments", None)

        def loss(x, objective):
            return L.policy_loss(x, objective=objective, **arrays(types.SimpleNamespace(**batch)), segments=segments)[0]

        return {name: jax.value_and_grad(loss)(logps, o) for name, o in objectives.items()}

    apart, together = losses(rows), losses(packed)
    for name in objectives:
        close(together[name][0], apart[name][0]), name
        gradient = np.asarray(apart[name][1])
        close(together[name][1][0], np.concatenate([gradient[0, :a], gradient[1, :b], [0, 0]]))
        assert np.abs(gradient).sum() > 0.01 or name == "joint"


def test_golden_joint_ratio():
    """The product of a sample's ratios; GSPO's geometric mean of them is 1.0512711."""
    delta, mask = np.array([[0.1, -0.2, 0.3, 0.0]], np.float32), np.ones((1, 4), bool)
    zero = np.zeros_like(delta)
    close(np.exp(L.log_ratio(delta, zero, mask, "joint")), np.full((1, 4), 1.22140276), atol=1e-6)
    close(np.exp(L.log_ratio(delta, zero, mask, "sequence")), np.full((1, 4), 1.0512711), atol=1e-6)
    gradient = jax.grad(lambda x: (-0.25 * jnp.exp(L.log_ratio(x, zero, mask, "sequence"))).sum())(delta)
    close(-gradient, np.full((1, 4), 0.26281777), atol=1e-6)


@pytest.mark.parametrize(
    ("level", "decay", "traces"),
    [
        ("trace", 0.9, [0.1, -0.11, -0.049]),
        ("trace_both", 0.9, [0.1, -0.1, -0.03]),
        ("trace", 1.0, [0.1, -0.1, -0.05]),
        ("trace_both", 1.0, [0.1, -0.1, -0.05]),
        ("trace", 0.0, [0.1, -0.2, 0.05]),  # GRPO
    ],
)
def test_golden_traces(level, decay, traces):
    """Decayed by position in place of lag, the second would be -0.08."""
    ratio = jax.jit(lambda x: L.log_ratio(x, jnp.zeros(3), jnp.ones(3, bool), level, decay=decay))
    got = ratio(np.array([0.1, -0.2, 0.05], np.float32))
    close(got, traces)


@pytest.mark.parametrize("level", ["trace", "trace_both"])
@pytest.mark.slow
def test_what_a_policy_did_not_draw_takes_no_time_in_a_trace(level):
    """Holes of an episode, alone and in rows that samples share: as without them."""
    rng = np.random.default_rng(0)
    mask = rng.random((2, 3, 11)) < 0.6
    mask[0, 0] = False
    logps, old = (-rng.random((2, 3, 11)).astype(np.float32) for _ in range(2))
    want = loss_oracles.log_ratio(logps, old, mask, level, 0.7)
    close(L.log_ratio(logps, old, mask, level, decay=0.7), want)
    row = [x.reshape(2, -1) for x in (logps, old, mask)]
    segments = np.repeat(np.arange(1, 4, dtype=np.int32), 11)[None].repeat(2, 0)
    close(L.log_ratio(*row, level, decay=0.7, segments=segments), want.reshape(2, -1))


@pytest.mark.slow
def test_traces_weigh_early_tokens_more():
    """At ratio 1: (1 - 0.9^(T - j)) / (1 - 0.9) times."""
    mask = jnp.array([True] * 4 + [False])
    gradient = jax.grad(lambda x: L.log_ratio(x, None, mask, "trace", decay=0.9).sum())(jnp.zeros(5))
    close(gradient, [3.439, 2.71, 1.9, 1, 0])


@jax.jit
def all_levels(logps, behavior, mask):
    def ratio(level, logps):
        return L.log_ratio(logps, behavior, mask, level, decay=LEVELS[level])

    weights = jnp.arange(1.0, T + 1)  # tells the tokens of a gradient apart

    def gradient(level):
        return jax.grad(lambda x: (weights * ratio(level, x)).sum())(logps)

    return {level: (ratio(level, logps), gradient(level)) for level in LEVELS}


@settings(max_examples=20)
@given(lengths=LENGTHS, seed=st.integers(0, 999))
def test_log_ratio_oracle(lengths, seed):
    mask, rng = prefix(lengths), np.random.default_rng(seed)
    logps, behavior = (on(mask, rng.normal(scale=0.3, size=mask.shape)) for _ in range(2))
    got = all_levels(logps, behavior, mask)
    for level, decay in LEVELS.items():
        close(got[level][0], loss_oracles.log_ratio(logps, behavior, mask, level, decay), atol=1e-5)
        if level in ("token", "sequence_token", "own"):
            close(got[level][1], np.where(mask, np.arange(1.0, T + 1), 0))
        elif level == "sequence":
            totals = np.where(mask, np.arange(1.0, T + 1), 0).sum(-1, keepdims=True)
            close(got[level][1], np.where(mask, totals / np.maximum(mask.sum(-1, keepdims=True), 1), 0))


@pytest.mark.parametrize(
    ("advantage", "loss", "broken"),
    [(1, -1.0004, "the joint ratio is 1.22140276"), (-1, 1.0512711, "the joint ratio is 1.22140276")],
)
def test_golden_gspo(advantage, loss, broken):
    """Without 1/|y| the second loss would be the joint ratio, 1.2214."""
    delta = jnp.array([[0.1, -0.2, 0.3, 0.0]])
    ratios = jax.jit(lambda x: L.log_ratio(x, jnp.zeros((1, 4)), jnp.ones((1, 4), bool), "sequence"))(delta)
    close(jnp.exp(ratios), 1.0512711)
    close(L.clipped(low=3e-4, high=4e-4)(ratios, jnp.full((1, 4), float(advantage))), loss)


def test_ratio_1_is_exact():
    """Of ``lp - sg(lp) + s`` from left to right a rounding of s is left; and at ratio 1 all clips have one gradient."""
    logps, batch, _ = example()
    same = dataclasses.replace(batch, old_logps=logps)
    ratios = all_levels(logps, logps, np.ones((P, G, T), bool))
    for level in ("token", "sequence", "sequence_token", "own"):
        assert not np.asarray(ratios[level][0]).any()
    gradients = {
        name: compiled(L.Objective(surrogate=surrogate))(logps, same, None)[1][0]
        for name, surrogate in SURROGATES.items()
    }
    for name, gradient in gradients.items():
        close(gradient, -batch.weights * batch.advantages), name
