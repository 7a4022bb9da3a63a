"""DPPO: tokens stop by how far their probability moved."""

import types

import jax
import jax.numpy as jnp
import loss_oracles
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_examples import arrays
from oracles import close
from ragged import prefix

from grpojax import losses as L

OLD = np.log(np.array([0.5, 0.05, 0.5, 0.9], np.float32))
NEW = np.log(np.array([0.75, 0.15, 0.25, 0.85], np.float32))
# Ratios 1.5, 3, 0.5 and 0.944: PPO's clip would stop the first two at A = 1 and the third at A = -1.
GOLDEN = [
    ("tv", 1, [0, -3, -0.5, -0.94444444]),
    ("tv", -1, [1.5, 3, 0, 0.94444444]),
    ("kl", 1, [0, 0, -0.5, -0.94444444]),
    ("kl", -1, [1.5, 3, 0, 0.94444444]),
]


def surrogate(kind, **options):
    return {"tv": L.dppo_tv, "kl": L.dppo_kl}[kind](**options)


@pytest.mark.parametrize(("kind", "advantage", "want"), GOLDEN)
def test_golden(kind, advantage, want):
    """At 0.2 and 0.05 nats; the KLs are 0.1438, 0.0518, 0.1438 and 0.0123."""

    def losses(new):
        return surrogate(kind)(new - OLD, jnp.full(4, float(advantage)), logps=new)

    close(losses(NEW), want)
    close(jax.grad(lambda x: losses(x).sum())(NEW), want)  # what is kept has a gradient of its own size


def test_golden_drift():
    """``(log ρ)²`` on every token, the dropped one too: 0.1644 and 1.2069."""
    tokens = L.dppo_tv(kl_coef=2.0)(NEW - OLD, jnp.ones(4), logps=NEW)
    close(tokens[:2], [2 * 0.16440195, -3 + 2 * 1.2069490])
    gradient = jax.grad(lambda x: L.dppo_tv(kl_coef=2.0)(x - OLD, jnp.ones(4), logps=x).sum())(NEW)
    close(gradient[0], 4 * 0.40546511)


def test_at_ratio_1_nothing_is_dropped():
    for kind in ("tv", "kl"):
        gradient = jax.grad(lambda x: surrogate(kind, low=0.0, high=0.0)(x - OLD, jnp.ones(4), logps=x).sum())(OLD)  # noqa: B023
        close(gradient, -1)


@pytest.mark.parametrize("kind", ["tv", "kl"])
@settings(max_examples=15)
@given(seed=st.integers(0, 999), coef=st.sampled_from([0.0, 0.3]))
@pytest.mark.slow
def test_oracle(kind, seed, coef):
    """Through `policy_loss`, against the sampler, on ragged samples."""
    rng = np.random.default_rng(seed)
    mask = prefix(rng.integers(0, 8, (3, 5)))
    old, new = (np.where(mask, np.log(rng.uniform(0.02, 0.98, mask.shape)), np.nan).astype(np.float32) for _ in "12")
    advantages = np.broadcast_to(rng.normal(size=(3, 5, 1)), mask.shape).astype(np.float32)
    batch = types.SimpleNamespace(
        weights=L.loss_weights(mask, "token_mean"), advantages=advantages, old_logps=None, sampler_logps=old
    )
    limits = {"low": 0.13, "high": 0.21} if kind == "tv" else {"low": 0.04, "high": 0.06}
    objective = L.Objective(surrogate=surrogate(kind, **limits, kl_coef=coef), ratio_denominator="sampler")
    (loss, metrics), gradient = jax.value_and_grad(L.policy_loss, has_aux=True)(
        new, objective=objective, **arrays(batch)
    )
    total, slopes, dropped = 0.0, np.zeros(mask.shape), 0
    for i in zip(*np.nonzero(mask), strict=True):
        value, slope = loss_oracles.dppo(
            kind, float(new[i]), float(old[i]), float(advantages[i]), **limits, kl_coef=coef
        )
        total += value / mask.sum()
        slopes[i] = slope / mask.sum()
        dropped += loss_oracles.dppo(kind, float(new[i]), float(old[i]), float(advantages[i]), **limits)[0] == 0
    close(loss, total, atol=1e-4)
    close(gradient, slopes, atol=1e-5, rtol=1e-4)
    assert metrics["clip_low"].total + metrics["clip_high"].total == dropped


def test_certain_tokens_stay_finite():
    """log(1 - π) of a probability that is 1 in float32."""
    new, old = jnp.array([0.0, 0.0, -1e-9, -30.0]), jnp.array([0.0, -1.0, 0.0, 0.0])
    for kind in ("tv", "kl"):
        for advantage in (1.0, -1.0):
            got = surrogate(kind, kl_coef=0.1)(new - old, jnp.full(4, advantage), logps=new)
            assert jnp.isfinite(got).all()


@pytest.mark.parametrize("options", [{"low": -0.1}, {"high": -0.1}, {"kl_coef": -1.0}])
def test_refuses(options):
    with pytest.raises(ValueError, match="0 or more"):
        L.dppo_kl(**options)
