"""From rewards to advantages: stateless transforms ``(values, signals) -> values``, joined by `chain`.

Values are ``[P, G]`` (a number a sample) until `to_tokens`, and ``[P, G, T]`` after it. All of it is float32 and
constant for the gradient. This module imports jax only.

Example:
  >>> import jax.numpy as jnp
  >>> grpo = chain(center("group"), scale("group", ddof=1, eps=1e-4))
  >>> [round(float(a), 4) for a in grpo(jnp.array([[1.0, 0.0, 0.0, 0.0]]))[0]]
  [1.4997, -0.4999, -0.4999, -0.4999]
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from grpojax import masked
from grpojax.types import pytree


@pytree
class Signals:
    """What transforms may read besides the values; a field that nobody reads may stay None.

    Attributes:
      rewards: ``[P, G]`` raw rewards; `chain` fills it with its input.
      valid: ``[P, G]`` bool, samples that have a reward; `chain` fills it: those whose reward is finite.
      lengths: ``[P, G]`` int32 completion lengths.
      mask: ``[P, G, T]`` bool completion tokens.
      behavior_logps: ``[P, G, T]`` log-probs under the policy that drew the tokens.
      entropy: ``[P, G, T]`` entropy of the distributions that the tokens were drawn from, nats.
      tokens: ``[P, G, T]`` int32 token ids.
      token_bias: ``[P, G, T]`` a critic's output.
      step_rewards: ``[P, G, T]`` reward of the step that ends at a token, NaN elsewhere.
    """

    rewards: Any = None
    valid: Any = None
    lengths: Any = None
    mask: Any = None
    behavior_logps: Any = None
    entropy: Any = None
    tokens: Any = None
    token_bias: Any = None
    step_rewards: Any = None


Transform = Callable[..., Any]


def need(signals: Signals, field: str, transform: str):
    """A field of ``signals``; raises `ValueError` naming transform and field where it is missing."""
    value = getattr(signals, field)
    if value is None:
        raise ValueError(f"{transform} needs signals.{field}, which is missing")
    return value


def chain(*transforms: Transform) -> Transform:
    """Applies transforms from left to right.

    The result takes ``rewards [P, G]`` and optionally `Signals`. A sample whose reward is not finite is invalid:
    it takes no part in any statistic, and its advantage is 0.
    """

    def apply(rewards, signals: Signals | None = None):
        signals = signals or Signals()
        values = jax.lax.stop_gradient(jnp.asarray(rewards, jnp.float32))
        signals = jax.tree.map(jax.lax.stop_gradient, signals)
        if signals.rewards is None:
            signals = dataclasses.replace(signals, rewards=values)
        if signals.valid is None:
            signals = dataclasses.replace(signals, valid=jnp.isfinite(signals.rewards))
        values = jnp.where(signals.valid, values, 0.0)
        for transform in transforms:
            values = transform(values, signals)
        valid = signals.valid.reshape(signals.valid.shape + (1,) * (values.ndim - 2))
        return jnp.where(valid, values, 0.0)

    return apply


def _axis(by: str, name: str) -> int | None:
    """The axis of a statistic over ``[P, G]``, its dimensions kept."""
    if by not in ("group", "batch"):
        raise ValueError(f"{name}(by={by!r}): must be 'group', 'batch' or 'none'")
    return 1 if by == "group" else None


def center(by: Literal["group", "batch", "none"] = "group", *, leave_one_out: bool = False) -> Transform:
    """Subtracts the mean reward: ``A_i = r_i - mean_j r_j`` (DeepSeekMath, arXiv 2402.03300; Dr. GRPO, 2503.20783).

    Args:
      by: over which samples the mean is taken.
      leave_one_out: the mean of the *other* samples, ``r_i - mean_{j != i} r_j`` (RLOO, arXiv 2402.14740);
        equals the plain form times ``n / (n - 1)``.

    A group whose valid rewards are all equal gives exactly 0, and so does a group of one.
    """
    if by == "none":
        return lambda values, signals: values
    axis = _axis(by, "center")

    def transform(values, signals: Signals):
        valid = signals.valid
        n = valid.sum(axis, keepdims=True).astype(jnp.float32)
        centred = values - masked.mean(values, valid, axis, keepdims=True)
        if leave_one_out:
            centred = centred * n / jnp.maximum(n - 1.0, 1.0)
        dead = masked.all_equal(values, valid, axis, keepdims=True)
        return jnp.where(valid & ~dead, centred, 0.0)

    return transform


def scale(
    by: Literal["group", "batch", "none"] = "group",
    *,
    of: Literal["rewards", "advantages"] = "rewards",
    ddof: int = 1,
    eps: float = 1e-4,
) -> Transform:
    """Divides by a standard deviation: ``A_i / (std + eps)``.

    No GRPO paper states ddof or eps; libraries differ (TRL: 1 and 1e-4, verl: 1 and 1e-6, papers' algebra: 0).

    Args:
      by: over which samples the deviation is taken.
      of: raw rewards, or the values as they come in. By batch the two differ: raw rewards also vary between
        prompts (Lite PPO, arXiv 2508.08221, prints the first; REINFORCE++-baseline and ScaleRL use the second).
      ddof: 1 divides the squares by n - 1, 0 by n.
      eps: added to the deviation.

    Where the numbers under the deviation are all equal the result is exactly 0.
    """
    if by == "none":
        return lambda values, signals: values
    axis = _axis(by, "scale")
    if of not in ("rewards", "advantages"):
        raise ValueError(f"scale(of={of!r}): must be 'rewards' or 'advantages'")

    def transform(values, signals: Signals):
        valid = signals.valid
        base = signals.rewards if of == "rewards" else values
        std = jnp.sqrt(masked.variance(base, valid, axis, keepdims=True, ddof=ddof))
        dead = masked.all_equal(base, valid, axis, keepdims=True)
        return jnp.where(valid & ~dead, values / jnp.where(dead, 1.0, std + eps), 0.0)

    return transform


def to_tokens() -> Transform:
    """Gives every token of a sample the sample's value: ``[P, G]`` to ``[P, G, T]``, 0 on padding."""

    def transform(values, signals: Signals):
        return jnp.where(need(signals, "mask", "to_tokens"), values[..., None], 0.0)

    return transform
