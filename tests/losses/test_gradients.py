"""Gradients of the whole loss: those of other ratios, and that of the expected reward by enumeration."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from loss_examples import HOW, arrays
from oracles import close
from ragged import SEEDS, G, P, many, masks, on
from tabular_policy import PATHS, SEQUENCES, WRITTEN, expected_reward

from grpojax import losses as L


@functools.cache
def gradient_of(how, ratio, surrogate):
    objective = L.Objective(surrogate=surrogate, ratio=ratio, aggregate=how, **HOW[how])

    @jax.jit
    def gradient(logps, behavior, advantages, mask):
        weights = L.loss_weights(mask, how, **HOW[how])
        batch = type("Batch", (), {"weights": weights, "advantages": advantages, "old_logps": behavior})
        return jax.grad(lambda x: L.policy_loss(x, objective=objective, **arrays(batch))[0])(logps)

    return gradient


@pytest.mark.parametrize("known", [True, False])
@settings(max_examples=10)
@given(seed=SEEDS)
def test_at_ratio_1_a_sequence_has_the_gradient_of_its_tokens(known, seed):
    """One advantage a sample and the mean over its tokens; of a joint ratio it is as many times that as there are."""
    rng = np.random.default_rng(seed)
    mask = masks(rng)
    logps = on(mask, -rng.exponential(size=mask.shape))
    advantages = on(mask, np.broadcast_to(rng.normal(size=(P, G, 1)), mask.shape))
    clip = L.clipped(0.2, 0.3)

    def run(ratio):
        return gradient_of("sequence_mean", ratio, clip)(logps, logps if known else None, advantages, mask)

    lengths = mask.sum(-1, keepdims=True)
    want = np.where(mask, -advantages / np.maximum(lengths, 1) / (P * G), 0)
    for ratio in ("token", "sequence", "sequence_token"):
        close(run(ratio), want, atol=1e-7)
    close(run("joint"), want * lengths, atol=1e-7)


@functools.cache
def enumerated(how, ratio, surrogate):
    """The mean of the loss over all that ``drawn`` may draw, each as often as it does, and its gradient."""
    objective = L.Objective(surrogate=surrogate, ratio=ratio, aggregate=how)

    def logps_of(logits):
        return jax.nn.log_softmax(logits).reshape(-1)[PATHS][None]

    @jax.jit
    def gradient(logits, drawn, advantages):
        behavior = logps_of(drawn)
        odds = jnp.exp(jnp.where(WRITTEN, behavior, 0.0).sum(-1, keepdims=True))
        weights = len(SEQUENCES) * odds * L.loss_weights(WRITTEN, how)
        batch = type("Batch", (), {"weights": weights, "advantages": jnp.broadcast_to(
            advantages[None, :, None], WRITTEN.shape), "old_logps": behavior})  # fmt: skip
        return jax.grad(lambda x: L.policy_loss(logps_of(x), objective=objective, **arrays(batch))[0])(logits)

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
