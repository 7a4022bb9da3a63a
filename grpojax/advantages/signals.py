"""What a transform is, what it may read besides the values, and how transforms are joined."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpojax.types import Array, Hidden, PerPrompt, Samples, Tokens, pytree


@pytree
class Signals:
    """What transforms may read besides the values; a field that nobody reads may stay None.

    Numbers are float32 unless it says otherwise, log-probs nats. A pytree.

    Attributes:
      rewards: ``[P, G]`` raw rewards; `chain` fills it with its input.
      outcome: ``[P, G]`` what a sample's success is judged by, such as accuracy; `chain` fills it with its input. Where
        rewards are sums, a format bonus would otherwise make a wrong sample look as if it had not failed.
      valid: ``[P, G]`` bool, samples that have a reward; `chain` leaves those out whose reward is not finite.
      lengths: ``[P, G]`` int32 completion lengths.
      mask: ``[P, G, T]`` bool completion tokens.
      behavior_logps: ``[P, G, T]`` log-probs under the policy that drew the tokens.
      entropy: ``[P, G, T]`` entropy of the distributions that the tokens were drawn from, nats.
      tokens: ``[P, G, T]`` int32 token ids.
      token_bias: ``[P, G, T]`` a critic's output, added to advantages.
      step_rewards: ``[P, G, T]`` reward of the step that ends at a token, NaN elsewhere.
      ref_logps: ``[P, G, T]`` log-probs under the frozen reference.
      max_logps: ``[P, G, T]`` log-prob of the most likely token at each position.
      values: ``[P, G, T]`` a critic's estimate of the return before each token.
      greedy_rewards: ``[P]`` reward of each prompt's greedy completion.
      likelihood: ``[P, G]`` probability of the true answer after a sample's reasoning.
      hidden: ``[P, G, T, D]`` hidden states that the output head read.
      probs: ``[P, G, T, W]`` probabilities of the ``W`` vocabulary entries kept (`grpojax.credit.group_vocabulary`).
      columns: ``[P, G, T]`` int32, which entry of ``probs`` is the drawn token's.
      influence: ``[P, G, T]`` NTHR's score of each token, in place of the three above (`grpojax.credit.nthr_scores`).
      influence_means: ``[P, G]`` the mean of it over each sample's tokens.
      draws: ``[P, G, T]`` uniform random numbers in [0, 1).

    Example:
      >>> signals = Signals(lengths=jnp.array([[2, 4]]))
      >>> signals.lengths.shape, signals.mask
      ((1, 2), None)
    """

    rewards: Samples = None
    outcome: Samples = None
    valid: Samples = None
    lengths: Samples = None
    mask: Tokens = None
    behavior_logps: Tokens = None
    entropy: Tokens = None
    tokens: Tokens = None
    token_bias: Tokens = None
    step_rewards: Tokens = None
    ref_logps: Tokens = None
    max_logps: Tokens = None
    values: Tokens = None
    greedy_rewards: PerPrompt = None
    likelihood: Samples = None
    hidden: Hidden = None
    probs: Array = None
    columns: Tokens = None
    influence: Tokens = None
    influence_means: Samples = None
    draws: Tokens = None


# (values, signals) -> values
Transform = Callable[..., Array]


def need(signals: Signals, field: str, transform: str) -> Array:
    """A field of ``signals``; raises `ValueError` naming transform and field where it is missing.

    Example:
      >>> need(Signals(lengths=jnp.array([[3, 2]])), "lengths", "mine").tolist()
      [[3, 2]]
    """
    value = getattr(signals, field)
    if value is None:
        raise ValueError(f"{transform} needs signals.{field}, which is missing")
    return value


def per_sample(values: Samples, transform: str) -> Samples:
    """``values [P, G]``; raises `ValueError` naming the transform where they are on tokens already.

    Example:
      >>> per_sample(jnp.zeros((1, 2)), "mine").shape
      (1, 2)
    """
    if values.ndim != 2:
        raise ValueError(f"{transform} takes [P, G], got {values.shape}: put it before to_tokens()")
    return values


def per_token(values: Tokens, transform: str) -> Tokens:
    """``values [P, G, T]``; raises `ValueError` naming the transform where they are not on tokens yet.

    Example:
      >>> per_token(jnp.zeros((1, 2, 3)), "mine").shape
      (1, 2, 3)
    """
    if values.ndim != 3:
        raise ValueError(f"{transform} takes [P, G, T], got {values.shape}: put it after to_tokens()")
    return values


def judged(signals: Signals) -> tuple[Samples, Samples]:
    """``(outcome, valid)``, ``[P, G]``: what success is judged by, and of which samples it is known.

    The outcome is float32, ``valid`` bool: ``signals.valid``, less the outcomes that are not finite (`Signals`).

    Example:
      >>> signals = Signals(outcome=jnp.array([[1.0, jnp.nan]]), valid=jnp.ones((1, 2), bool))
      >>> judged(signals)[1].tolist()
      [[True, False]]
    """
    outcome = jnp.asarray(signals.outcome, jnp.float32)
    return outcome, signals.valid & jnp.isfinite(outcome)


def chain(*transforms: Transform, reward: Transform | None = None) -> Transform:
    """Applies transforms from left to right.

    The result takes ``rewards [P, G]`` and optionally `Signals`. A sample whose reward is not finite is invalid:
    it takes no part in any statistic, and its advantage is 0.
    Out come ``[P, G]`` or, after `to_tokens`, ``[P, G, T]``, float32. `grpojax.variants` has the published chains.

    Args:
      transforms: the steps.
      reward: ``(rewards, signals) -> rewards``, a change to the rewards themselves: later steps take its result
        for the raw rewards.

    Example:
      >>> from grpojax.advantages import center
      >>> chain(center("group"))(jnp.array([[1.0, 0.0, jnp.nan]])).tolist()
      [[0.5, -0.5, 0.0]]
    """

    def apply(rewards: Samples, signals: Signals | None = None) -> Array:
        signals = signals or Signals()
        values = jax.lax.stop_gradient(jnp.asarray(rewards, jnp.float32))
        signals = jax.tree.map(jax.lax.stop_gradient, signals)
        raw = values if signals.rewards is None else jnp.asarray(signals.rewards, jnp.float32)
        valid = jnp.isfinite(values) & jnp.isfinite(raw)
        if signals.valid is not None:
            valid = valid & signals.valid
        outcome = raw if signals.outcome is None else signals.outcome
        signals = dataclasses.replace(signals, rewards=raw, outcome=outcome, valid=valid)
        values = jnp.where(valid, values, 0.0)
        if reward is not None:
            values = jnp.where(signals.valid, reward(values, signals), 0.0)
            signals = dataclasses.replace(signals, rewards=values)
        for transform in transforms:
            values = transform(values, signals)
        return jnp.where(valid.reshape(valid.shape + (1,) * (values.ndim - 2)), values, 0.0)

    return apply
