"""Clip-Cov and KL-Cov."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import loss_oracles
import numpy as np
import pytest
from loss_examples import NAN, P, arrays, covariance_mask, example
from oracles import close

from grpojax import losses as L

COV = {
    "advantages": np.array([1, 1, -1, -1], np.float32),
    "logps": np.array([-0.1, -2, -0.5, -3], np.float32),
}


def test_golden_covariance():
    """Not centred, it would be [-0.1, -2, 0.5, 3]."""
    mask = np.ones(4, bool)
    cov = L.covariance(COV["logps"], COV["advantages"], mask)
    close(cov, [1.3, -0.6, -0.9, 1.6])
    np.testing.assert_array_equal(L.kl_cov(cov, mask), [0, 0, 0, 1])
    np.testing.assert_array_equal(L.kl_cov(cov, mask, fraction=0.5), [1, 0, 0, 1])
    padded = L.covariance(
        *(np.append(COV[n], np.float32(NAN)) for n in ("logps", "advantages")), np.append(mask, False)
    )
    close(padded, [1.3, -0.6, -0.9, 1.6, 0])


def test_clip_cov_draws_from_its_range():
    mask = np.append(np.ones(4, bool), False)
    cov = jnp.array([1.3, 6.0, -0.9, 1.6, 2.0])
    dropped = [~np.asarray(L.clip_cov(jax.random.key(i), cov, mask)) for i in range(20)]
    assert {int(d.sum()) for d in dropped} == {1}
    np.testing.assert_array_equal(np.any(dropped, axis=0), [1, 0, 0, 1, 0])
    np.testing.assert_array_equal(L.clip_cov(jax.random.key(0), cov, mask, fraction=0.9), [0, 1, 1, 0, 1])
    skip = np.array([True, False, False, False, False])
    np.testing.assert_array_equal(L.clip_cov(jax.random.key(0), cov, mask, fraction=0.9, skip=skip), [1, 1, 1, 0, 1])
    assert np.asarray(L.clip_cov(jax.random.key(0), 0 * cov, mask)).all()


def test_clip_cov_draws_all_candidates_alike():
    """4 of 10 over 500 keys: each is drawn in 200 of them, give or take 11."""
    cov, mask = jnp.where(jnp.arange(13) < 10, 2.0, 0.5), jnp.ones(13, bool)
    draw = jax.jit(jax.vmap(lambda key: ~L.clip_cov(key, cov, mask, fraction=4.01 / 13)))
    times = np.asarray(draw(jax.random.split(jax.random.key(0), 500))).sum(0)
    assert times.sum() == 2000 and not times[10:].any()
    assert 155 < times[:10].min() and times[:10].max() < 245


def test_kl_cov_penalty():
    def penalty(drift):
        return L.kl_cov_penalty(drift, jnp.array([True, True, False]), coef=0.5).sum()

    value, gradient = jax.value_and_grad(penalty)(jnp.array([-0.2, 0.0, 0.3]))
    close(value, 0.1)
    close(gradient, [-0.5, 0, 0])


def batch_of(seed=0):
    """Ragged samples of one minibatch, with covariances on both sides of 1 and 5."""
    logps, batch, _ = example(seed)
    rng = np.random.default_rng(seed)
    logps = (logps * 3).astype(np.float32)
    advantages = np.where(np.asarray(batch.weights) > 0, rng.normal(size=logps.shape) * 2, NAN).astype(np.float32)
    behavior = logps + 0.5 * rng.normal(size=logps.shape).astype(np.float32)
    return logps, dataclasses.replace(batch, advantages=advantages, old_logps=behavior)


CLIP = L.Objective(covariance="clip", covariance_fraction=0.2)
KL = L.Objective(surrogate=L.unclipped(), covariance="kl", covariance_fraction=0.1, covariance_coef=0.5)


@pytest.mark.parametrize("seed", range(4))
def test_the_mask_of_a_minibatch(seed):
    logps, batch = batch_of(seed)
    mask = np.asarray(batch.weights) > 0
    cov = loss_oracles.covariance(logps, np.nan_to_num(batch.advantages), mask)
    ratio, a = np.exp(logps - batch.old_logps), np.nan_to_num(batch.advantages)
    stopped = ((a > 0) & (ratio > 1.2)) | ((a < 0) & (ratio < 0.8))
    assert (stopped & (cov > 1) & (cov < 5)).any()
    free, count = loss_oracles.picked(cov, mask, 0.2, low=1.0, high=5.0, skip=stopped)
    got = {tuple(i) for i in np.argwhere(covariance_mask(jax.random.key(seed), logps, batch, CLIP))}
    assert got <= free and len(got) == count > 0
    top, _ = loss_oracles.picked(cov, mask, 0.1)
    assert {tuple(i) for i in np.argwhere(covariance_mask(None, logps, batch, KL))} == top


def with_mask(logps, batch, objective):
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return types.SimpleNamespace(**fields, covariance_mask=covariance_mask(jax.random.key(1), logps, batch, objective))


def test_draws_follow_from_a_tokens_number_not_from_its_place():
    """By place, the same tokens in another order would be dropped elsewhere."""
    cov, mask = jnp.full(40, 2.0), jnp.ones(40, bool)
    order = np.random.default_rng(0).permutation(40)
    plain = np.asarray(L.clip_cov(jax.random.key(0), cov, mask, fraction=0.2, token_index=np.arange(40)))
    moved = np.asarray(L.clip_cov(jax.random.key(0), cov, mask, fraction=0.2, token_index=order))
    assert (~plain).sum() == 8
    np.testing.assert_array_equal(moved, plain[order])
    assert not np.array_equal(np.asarray(L.clip_cov(jax.random.key(0), cov, mask, fraction=0.2))[order], moved)


def test_clip_cov_in_the_loss():
    """A picked token's policy term is 0, and what the loss divides by stays."""
    logps, batch = batch_of()
    full = with_mask(logps, batch, CLIP)

    def value_and_grad(objective, batch):
        loss = functools.partial(L.policy_loss, objective=objective, **arrays(batch))
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(logps)

    (loss, metrics), gradient = value_and_grad(CLIP, full)
    _, plain = value_and_grad(L.Objective(), batch)
    picked = np.asarray(full.covariance_mask)
    close(gradient, np.where(picked, 0, plain))
    assert np.abs(np.asarray(plain)[picked]).min() > 1e-4
    used = np.asarray(batch.weights) > 0
    tokens = L.clipped()(logps - batch.old_logps, batch.advantages)
    close(loss, np.where(used & ~picked, batch.weights * tokens, 0).sum(), atol=1e-5)
    close(metrics["clip_cov"].value, picked.sum() / used.sum())


def test_kl_cov_in_the_loss():
    logps, batch = batch_of()
    full = with_mask(logps, batch, KL)
    loss, metrics = L.policy_loss(logps, objective=KL, **arrays(full))
    used, picked = np.asarray(batch.weights) > 0, np.asarray(full.covariance_mask)
    drift = logps - batch.old_logps
    tokens = -np.exp(drift) * batch.advantages + 0.5 * np.abs(drift) * picked
    close(loss, np.where(used, batch.weights * tokens, 0).sum(), atol=1e-5)
    close(metrics["kl_cov"].value, picked.sum() / used.sum())
    own = types.SimpleNamespace(**vars(full) | {"old_logps": None})
    gradient = jax.jit(jax.grad(lambda x: L.policy_loss(x, objective=KL, **arrays(own))[0]))(logps)
    close(gradient, -np.where(used, batch.weights * np.nan_to_num(batch.advantages), 0))  # nothing in the first update


@pytest.mark.parametrize("objective", [CLIP, KL], ids=["clip", "kl"])
def test_micro_batches_share_the_mask_of_their_minibatch(objective):
    """Made of each micro-batch by itself, the masks would be others: at least one token of each."""
    objective = dataclasses.replace(objective, covariance_fraction=0.05)
    logps, batch = batch_of(2)
    full = with_mask(logps, batch, objective)
    whole = L.policy_loss(logps, objective=objective, **arrays(full))[0]
    parts, apart = 0.0, 0
    for p in range(P):
        part = jax.tree.map(lambda x: x[p : p + 1], vars(full))  # noqa: B023
        parts += L.policy_loss(logps[p : p + 1], objective=objective, **arrays(types.SimpleNamespace(**part)))[0]
        mine = covariance_mask(jax.random.key(1), logps[p : p + 1], types.SimpleNamespace(**part), objective)
        apart += int((np.asarray(mine) != part["covariance_mask"]).sum())
    close(parts, whole, atol=1e-5)
    assert apart > 0


def test_a_missing_mask_is_named():
    logps, batch = batch_of()
    assert CLIP.needs_covariance_mask and KL.needs_covariance_mask and not L.Objective().needs_covariance_mask
    with pytest.raises(ValueError, match="covariance='kl' needs covariance_mask"):
        L.policy_loss(logps, objective=KL, **arrays(batch))
    with pytest.raises(ValueError, match="covariance='none'"):
        covariance_mask(None, logps, batch, L.Objective())


def test_masks_of_numbers_are_masks():
    cov, mask = jnp.array([1.3, -0.6, -0.9, 1.6]), jnp.array([True, True, True, False])
    numbers = mask.astype(jnp.float32)
    assert (L.kl_cov(cov, numbers, fraction=0.5) == L.kl_cov(cov, mask, fraction=0.5)).all()
    assert (
        L.clip_cov(jax.random.key(0), cov, numbers, skip=numbers) == L.clip_cov(jax.random.key(0), cov, mask, skip=mask)
    ).all()
    assert (L.displacement_weights(cov, numbers) == L.displacement_weights(cov, mask)).all()
    close(L.log_ratio(cov, 0 * cov, numbers, "trace", decay=0.5), L.log_ratio(cov, 0 * cov, mask, "trace", decay=0.5))
    close(L.covariance(cov, cov, numbers), L.covariance(cov, cov, mask))
