"""Surrogates beyond PPO, and the exact gradients that they stand for."""

import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import loss_oracles
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_examples import (
    DELTA,
    LOGITS,
    OLD,
    OTHER,
    SURROGATES,
    WIDE,
    Batch,
    G,
    P,
    arrays,
    compiled,
    example,
    four_tokens,
)
from oracles import close

from grpojax import losses as L
from grpojax.losses.surrogates import acts_without_advantage


# One sample of four tokens, log-ratios `DELTA`: objective, advantage, loss, gradient. A broken version gives the row of
# a neighbour: joint for geometric mean, an inverted side, a weight that is differentiated.
@pytest.mark.parametrize(
    ("options", "advantage", "loss", "gradient"),
    [
        ({"surrogate": SURROGATES["dual"]}, 1, -0.99930464, [0, -0.18520456, -0.27629273, -0.23780736]),
        ({"surrogate": SURROGATES["dual"]}, -1, 1.01410009, [0, 0, 0.27629273, 0.23780736]),
        ({"surrogate": SURROGATES["cispo"]}, 1, 1.12908897, [-0.32, -0.18520456, -0.27629273, -0.23780736]),
        ({"surrogate": SURROGATES["cispo"]}, -1, -1.12908897, [0.32, 0.18520456, 0.27629273, 0.23780736]),
        (
            {"surrogate": SURROGATES["cispo capped"]},
            1,
            1.14131426,
            [-0.3374647, -0.18520456, -0.27629273, -0.23780736],
        ),
        ({"surrogate": SURROGATES["reinforce"]}, 1, 1.2375, [-0.25] * 4),
        ({"surrogate": SURROGATES["reinforce"]}, -1, -1.2375, [0.25] * 4),
        ({"surrogate": WIDE, "ratio": "sequence"}, 1, -1.01257845, [-0.25314461] * 4),
        ({"surrogate": WIDE, "ratio": "sequence_token"}, 1, -1.01257845, [-0.25314461] * 4),
        ({"surrogate": WIDE, "ratio": "sequence_token"}, -1, 1.01257845, [0.25314461] * 4),
        ({"surrogate": L.clipped(low=3e-4, high=4e-4), "ratio": "sequence"}, 1, -1.0004, [0] * 4),
        (
            {"surrogate": L.clipped(low=3e-4, high=4e-4), "ratio": "sequence"},
            -1,
            1.01257845,
            [0.25314461] * 4,
        ),
        (
            {"surrogate": SURROGATES["gmpo"], "aggregate": "sequence_mean"},
            1,
            -0.9875778,
            [0, -0.24689445, -0.24689445, -0.24689445],
        ),
        (
            {"surrogate": SURROGATES["gmpo"], "aggregate": "sequence_mean"},
            -1,
            1.038212,
            [0.259553, 0, 0.259553, 0.259553],
        ),
        (
            {"surrogate": SURROGATES["sapo"]},
            1,
            -2.03622649,
            [-0.32734525, -0.18212876, -0.27553012, -0.237666],
        ),
        ({"surrogate": SURROGATES["sapo"]}, -1, 1.94093368, [0.32633097, 0.18181735, 0.27545211, 0.23765152]),
        ({"surrogate": L.unclipped(), "ratio": "own"}, 1, -1, [-0.25] * 4),
        ({"surrogate": L.unclipped(), "ratio": "own"}, -1, 1, [0.25] * 4),
        (
            {"ratio": "trace", "trace_decay": 0.9},
            1,
            -1.06549999,
            [-0.62131958, -0.69035509, -0.49749301, -0.25395597],
        ),
        (
            {"ratio": "trace", "trace_decay": 0.9},
            -1,
            1.10296469,
            [0.95878429, 0.69035509, 0.49749301, 0.25395597],
        ),
    ],
)
def test_golden_objectives(options, advantage, loss, gradient):
    options, batch = {"aggregate": "token_mean"} | options, four_tokens(advantage)
    (value, _), (got, _) = compiled(L.Objective(**options))((OLD + DELTA)[None, None], batch, None)
    close(value, loss)
    close(got[0, 0], gradient)


def test_golden_gmpo():
    for advantage, loss in ((1.0, -0.95122942), (-1.0, 1.16183424)):
        got = L.geometric()(jnp.array([0.9, -0.1, 0.2, -0.7]), advantage, sequence_mean=jnp.mean)
        close(got, loss)


@pytest.mark.parametrize(
    ("tau", "ratio", "value", "weight"),
    [
        (1.0, 0.5, 1.51016268, 0.94001485),
        (1.0, 2.0, 2.92424341, 0.78644773),
        (1.05, 2.0, 2.82199962, 0.76810979),
    ],
)
def test_golden_sapo(tau, ratio, value, weight):
    """The weight is on the log-prob's gradient: times the ratio."""
    f = L.soft_adaptive(tau_positive=tau, tau_negative=9.0)
    loss, gradient = jax.value_and_grad(f)(jnp.log(ratio), 1.0)
    close(loss, -value)
    close(gradient, -weight * ratio)


def test_golden_dual_clip():
    close(L.clipped(dual=3.0)(jnp.log(5.0), -1.0), 3.0)  # 5 without
    close(L.clipped(dual=3.0)(jnp.log(5.0), 1.0), -1.2)
    with pytest.raises(ValueError, match="dual=1.0"):
        L.clipped(dual=1.0)


@pytest.mark.parametrize("name", [n for n in SURROGATES if n != "gmpo"])
@settings(max_examples=10)
@given(seed=st.integers(0, 999))
def test_surrogate_oracle(name, seed):
    surrogate = SURROGATES[name]
    logps, batch, _ = example(seed)
    (loss, _), _ = compiled(L.Objective(surrogate=surrogate))(logps, batch, None)
    options = dataclasses.asdict(surrogate)
    want = sum(
        float(batch.weights[i])
        * loss_oracles.token_loss(type(surrogate).__name__, float(logps[i]) - float(batch.old_logps[i]),
                             float(batch.advantages[i]), float(logps[i]), **options)
        for i in zip(*np.nonzero(batch.weights), strict=True)
    )  # fmt: skip
    close(loss, want, atol=2e-5)


@settings(max_examples=10)
@given(seed=st.integers(0, 999))
def test_geometric_oracle(seed):
    logps, batch, _ = example(seed)
    (loss, _), _ = compiled(L.Objective(surrogate=SURROGATES["gmpo"]))(logps, batch, None)
    mask, want = np.asarray(batch.weights) > 0, 0.0
    for p, g in np.argwhere(mask.any(-1)):
        deltas = (logps - batch.old_logps)[p, g][mask[p, g]].astype(float)
        want += loss_oracles.geometric(deltas, float(batch.advantages[p, g, 0]), 0.2, 0.2) / (P * G)
    close(loss, want, atol=2e-5)


def test_kl_and_llds_are_of_tokens_whatever_the_ratio():
    """With the sample's ratio the unbiased KL would no longer be one."""
    logps, batch, _ = example(4)
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    share = L.displacement_weights(np.where(batch.weights > 0, batch.advantages, -1), batch.weights > 0)
    batch = types.SimpleNamespace(**fields, displacement_weights=share)
    terms = {"kl_coef": 0.3, "kl_kind": "unbiased", "llds_coef": 0.2}
    levels = [L.Objective(**terms), L.Objective(ratio="sequence", **terms), L.Objective(ratio="own", **terms)]
    token, *others = (L.policy_loss(logps, objective=objective, **arrays(batch))[1] for objective in levels)
    for other in others:
        assert abs(other["policy_loss"] - token["policy_loss"]) > 1e-4
        for name in ("kl_loss", "llds_loss"):
            close(other[name], token[name])
            assert token[name] > 1e-3


def test_wide_cispo_is_reinforce_with_a_weight():
    logps, batch, _ = example()
    _, (got, _) = compiled(L.Objective(surrogate=L.cispo(weight_max=1e9)))(logps, batch, None)
    used = np.asarray(batch.weights) > 0
    ratio = np.where(used, np.exp(logps - batch.old_logps), 0)
    close(got, -batch.weights * batch.advantages * ratio)


@pytest.mark.parametrize("off", [False, True])
@pytest.mark.parametrize("name", ["clipped", "unclipped", "reinforce", "cispo"])
def test_policy_gradient_is_exact(name, off):
    """Enumerated over the three tokens: the gradient of Σ π A. The clips are too wide to matter, and off-policy the
    ratio corrects exactly; REINFORCE, which has none, is off there."""
    surrogate = {"clipped": WIDE, "cispo": L.cispo(weight_max=99.0)}.get(name, SURROGATES[name])
    drawn = OTHER if off else jax.nn.log_softmax(LOGITS)
    a = jnp.array([1.0, -0.5, 0.25])
    batch = Batch(weights=jnp.exp(drawn), advantages=a, old_logps=drawn)
    objective = L.Objective(surrogate=surrogate)
    got = jax.jit(jax.grad(lambda x: L.policy_loss(jax.nn.log_softmax(x), objective=objective, **arrays(batch))[0]))(
        LOGITS
    )
    want = -jax.grad(lambda x: (jax.nn.softmax(x) * a).sum())(LOGITS)
    if name == "reinforce" and off:
        assert np.abs(got - want).max() > 0.01
    else:
        close(got, want)


@pytest.mark.parametrize("surrogate", [L.clipped(), L.unclipped(), L.soft_adaptive()], ids=lambda s: type(s).__name__)
def test_surrogates_are_float32_inside(surrogate):
    x = jnp.array([0.1, -0.3], jnp.bfloat16)
    assert surrogate(x, x).dtype == jnp.float32


def test_surrogates_take_their_bounds_by_position():
    assert L.clipped(0.2, 0.28) == L.clipped(low=0.2, high=0.28) and L.cispo(4.0) == L.cispo(weight_max=4.0)
    for make in (lambda: L.clipped(-0.2), lambda: L.clipped(0.2, -3.0), lambda: L.geometric(low=-0.1)):
        with pytest.raises(ValueError, match="low="):
            make()


def test_golden_vespo():
    """φ at a joint ratio of 0.5, 1 and 2; with the (k, λ) of the other sign 1.1204 and 0.3398 change places."""
    w, logps = jnp.log(jnp.array([0.5, 1.0, 2.0])), jnp.array([-1.0, -2.0, -0.5])
    close(L.vespo()(w, jnp.ones(3), logps=logps), [1.12042227, 2, 0.5 * 0.19914827])
    close(L.vespo()(w, -jnp.ones(3), logps=logps), [-0.33978523, -2, -0.5 * 1.08268227])
    gradient = jax.grad(lambda x: L.vespo()(w + x, jnp.ones(3), logps=logps + x).sum())(0.0)
    close(gradient, -1.12042227 - 1 - 0.19914827)  # φ is constant
    far = L.vespo()(jnp.array([-400.0, 400.0]), jnp.ones(2), logps=jnp.array([-1.0, -1.0]))
    close(far, [math.exp(3 + 2 * math.log(1e-8)), 0], atol=1e-12)


@settings(max_examples=15)
@given(seed=st.integers(0, 999))
def test_vespo_oracle(seed):
    logps, batch, _ = example(seed)
    (loss, _), (gradient, _) = compiled(L.Objective(surrogate=L.vespo(), ratio="joint"))(logps, batch, None)
    mask, want, slopes = np.asarray(batch.weights) > 0, 0.0, np.zeros(logps.shape)
    for p, g in np.argwhere(mask.any(-1)):
        used = mask[p, g]
        drifts = (logps - batch.old_logps)[p, g][used].astype(float)
        losses, slope = loss_oracles.vespo(drifts, float(batch.advantages[p, g, 0]), logps[p, g][used].astype(float))
        want += sum(losses) / len(losses) / (P * G)
        slopes[p, g][used] = np.array(slope) / len(slope) / (P * G)
    close(loss, want, atol=2e-5)
    close(gradient, slopes, atol=1e-5)


def test_the_cap_of_cispo_is_counted():
    logps, batch, _ = example()
    used = np.asarray(batch.weights) > 0
    ratio = np.exp(logps - batch.old_logps)[used]
    for bounds in ({"weight_max": 1.2}, {"weight_max": 1.2, "weight_min": 0.9}):
        _, metrics = L.policy_loss(logps, objective=L.Objective(surrogate=L.cispo(**bounds)), **arrays(batch))
        close(metrics["cap_hit"].total, ((ratio > 1.2) | (ratio < bounds.get("weight_min", 0))).sum())
        assert int(metrics["cap_hit"].count) == used.sum() and "clip_high" not in metrics


@pytest.mark.parametrize("name", SURROGATES)
def test_which_surrogates_act_without_an_advantage(name):
    assert not acts_without_advantage(SURROGATES[name])


@pytest.mark.parametrize("own", [
    L.dppo_tv(kl_coef=0.1), L.dppo_kl(kl_coef=0.1),
    lambda log_ratios, advantages: jnp.where(jnp.abs(log_ratios) > 2.0, log_ratios**2, -advantages * log_ratios),
    lambda log_ratios, advantages: -jnp.exp(log_ratios) * jnp.where(advantages >= 0, 1.0, -1.0),
])  # fmt: skip
def test_a_surrogate_of_ones_own_that_acts_without_an_advantage_is_seen(own):
    assert acts_without_advantage(own)
