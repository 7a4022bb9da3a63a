"""What is done about the sampler."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import loss_oracles
import numpy as np
import pytest
from loss_examples import (
    NAN,
    arrays,
    example,
)
from oracles import close

from grpojax import losses as L

TRAIN, SAMPLER = (np.log(np.array(x, np.float32)) for x in ([0.5, 0.3, 0.2, 0.1], [0.4, 0.5, 0.05, 0.1]))


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [1.25, 0.6, 2, 1]),
        ({"mode": "truncate", "high": 5.0}, [1.25, 0.6, 4, 1]),
        ({"mode": "mask"}, [1.25, 0.6, 0, 1]),  # clamped instead it would be [1.25, 0.6, 2, 1]
        ({"mode": "mask", "low": 0.7}, [1.25, 0, 0, 1]),
        ({"level": "sequence"}, [2.0] * 4),
        ({"level": "sequence", "high": 9.0}, [3.0] * 4),
        ({"level": "sequence", "mode": "mask"}, [0.0] * 4),
        ({"level": "geometric", "mode": "mask"}, [1.31607401] * 4),
    ],
)
def test_golden_importance(options, want):
    close(L.importance_correction(TRAIN, SAMPLER, np.ones(4, bool), **options), want)
    gradient = jax.grad(lambda x: L.importance_correction(x, SAMPLER, np.ones(4, bool), **options).sum())(TRAIN)
    assert not np.asarray(gradient).any()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_importance_oracle(mode, level):
    logps, batch, _ = example(5)
    mask = np.asarray(batch.weights) > 0
    train, sampler = (np.where(mask, x, np.float32(200)) for x in (logps, batch.ref_logps))
    got = L.importance_correction(train, sampler, mask, mode, level=level)
    close(got, loss_oracles.importance(logps, batch.ref_logps, mask, mode, level), atol=1e-4)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"mode": "clip"}, "'clip'.*truncate"),
        ({"level": "word"}, "'word'.*geometric"),
        ({"mode": "truncate", "low": 0.5}, "low=0.5.*'mask'"),
    ],
)
def test_importance_refuses(options, names):
    with pytest.raises(ValueError, match=names):
        L.importance_correction(TRAIN, SAMPLER, np.ones(4, bool), **options)


def test_importance_in_the_loss():
    """It multiplies the policy's term, not the KL, and is between behaviour (or the policy itself) and the sampler."""
    logps, batch, _ = example(2)
    mask = np.asarray(batch.weights) > 0
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    sampler = logps + np.random.default_rng(1).normal(scale=0.3, size=logps.shape).astype(np.float32)
    objective = L.Objective(surrogate=L.unclipped(), kl_coef=0.5, importance="truncate", importance_high=1.1)
    assert objective.needs_sampler_logps and not L.Objective().needs_sampler_logps
    for own in (True, False):
        behavior = None if own else batch.old_logps
        with_sampler = types.SimpleNamespace(**fields | {"old_logps": behavior, "sampler_logps": sampler})
        loss, metrics = L.policy_loss(logps, objective=objective, **arrays(with_sampler))
        weight = np.minimum(np.exp((logps if own else behavior) - sampler), 1.1)
        ratio = 1.0 if own else np.exp(logps - behavior)
        want = -(np.where(mask, batch.weights * weight * ratio * batch.advantages, 0)).sum()
        close(metrics["policy_loss"], want)
        close(metrics["importance"].value, weight[mask].mean(), atol=1e-5)
        close(loss, want + 0.5 * metrics["kl_loss"])
    with pytest.raises(ValueError, match="importance='truncate'.*sampler_logps"):
        L.policy_loss(logps, objective=objective, **arrays(batch))
    with pytest.raises(ValueError, match="off_policy_limit=0.5.*sampler_logps"):
        L.policy_loss(logps, objective=L.Objective(off_policy_limit=0.5), **arrays(batch))


@pytest.mark.parametrize(("advantage", "limit", "kept"), [(-1, 0.7, 0), (-1, 0.9, 1), (1, 0.7, 1), (0, 0.7, 1)])
def test_golden_off_policy_mask(advantage, limit, kept):
    """The mean fall is 0.8; the sum, 1.6, would mask at a limit of 0.9 too. Right samples stay."""
    new, old = jnp.array([-1.2, -1.4, NAN]), jnp.array([-0.5, -0.5, NAN])
    mask = jnp.array([True, True, False])
    close(L.off_policy_mask(new, old, jnp.full(3, float(advantage)), mask, limit)[:2], kept)
    batch = types.SimpleNamespace(
        weights=jnp.array([0.5, 0.5, 0]),
        advantages=jnp.full(3, float(advantage)),
        old_logps=None,
        sampler_logps=old,
    )
    loss, metrics = L.policy_loss(new, objective=L.Objective(off_policy_limit=limit), **arrays(batch))
    close(loss, -advantage * kept)
    close(metrics["off_policy"].total, 2.0 * (1 - kept))


def test_trl_as_it_is():
    """TRL 1.16: whole samples, out over 3, no floor; the product here is 3, a little more of it leaves."""
    trl = {"mode": "mask", "level": "sequence", "low": 0.0, "high": 3.0}
    more = TRAIN + np.array([1e-3, 0, 0, 0], np.float32)
    less = TRAIN - np.float32(1e-3)
    close(L.importance_correction(less, SAMPLER, np.ones(4, bool), **trl), 3 * np.exp(-4e-3), atol=1e-5)
    close(L.importance_correction(more, SAMPLER, np.ones(4, bool), **trl), 0)
    close(L.importance_correction(TRAIN - 2, SAMPLER, np.ones(4, bool), **trl), 3 * np.exp(-8.0))  # "mask" alone: 0
