"""A bias for each token that a critic learns: the first of the experiments in `grpojax.variants`."""

import jax
import jax.numpy as jnp

from grpojax import masked, shapes
from grpojax.advantages.signals import Signals, Transform, described, need, per_token
from grpojax.types import Array, Scalar, Tokens


def bounded_bias(bias: Array, bound: float | None = None) -> Array:
    """``bound tanh(b / bound)``, or ``b`` itself where ``bound`` is None; ``[...]``.

    For the learned bias, the first of the experiments in `grpojax.variants`; in units of the advantage.

    Example:
      >>> [round(float(b), 4) for b in bounded_bias(jnp.array([0.2, -0.1, 0.4]), 0.5)]
      [0.19, -0.0987, 0.332]
    """
    if bound is not None and bound <= 0:
        raise ValueError(f"bounded_bias(bound={bound}): must be over 0")
    bias = jnp.asarray(bias, jnp.float32)
    return bias if bound is None else bound * jnp.tanh(bias / bound)


@described
def add_token_bias(*, bound: float | None = None, center: bool = False) -> Transform:
    """``A_t = A_i + b_t`` on ``[P, G, T]``: a critic's output per token, from ``signals.token_bias``.

    Every token gets its bias, also in groups without variance: the method says so.

    The first of the experiments in `grpojax.variants`.

    Args:
      bound: largest bias by `bounded_bias`; None for none.
      center: subtract the bias's mean over the sample, so that the sum of its advantages does not change.
        `token_bias_loss` has no such option, since it would make the loss 0 for any bias.

    Example:
      >>> signals = Signals(mask=jnp.ones((1, 1, 3), bool), token_bias=jnp.array([[[0.2, -0.1, 0.4]]]))
      >>> [round(float(a), 4) for a in add_token_bias()(jnp.full((1, 1, 3), 1.5), signals)[0, 0]]
      [1.7, 1.4, 1.9]
    """

    def transform(values: Tokens, signals: Signals | None = None) -> Tokens:
        values, signals = per_token(values, signals, "add_token_bias")
        mask = need(signals, "mask", "add_token_bias")
        bias = bounded_bias(need(signals, "token_bias", "add_token_bias"), bound)
        if center:
            bias = bias - masked.mean(bias, mask, -1, keepdims=True)
        return jnp.where(mask, values + bias, 0.0)

    return transform


def token_bias_loss(
    bias: Array, advantages: Array, weights: Array, *, bound: float | None = None, l2: float = 0.0
) -> Scalar:
    """The critic's loss: ``Σ w (l2 b² - A b)``, differentiated by ``bias``; ``advantages`` are constant.

    It *raises* the correlation of bias and advantage. It is linear in ``bias`` without ``l2`` and so unbounded below;
    with it the best bias is ``A / (2 l2)``.

    The first of the experiments in `grpojax.variants`. Returns ``[]`` float32.

    Args:
      bias: ``[...]`` the critic's output.
      advantages: ``[...]``, or without its last axis, one number per sample.
      weights: ``[...]``, 0 on padding: a mask for the plain sum over tokens, or `grpojax.losses.loss_weights`.
      bound: as in `add_token_bias`; None for none.
      l2: the penalty's weight.

    Example:
      >>> bias = jnp.array([[[0.2, -0.1, 0.4]]])
      >>> round(float(token_bias_loss(bias, jnp.array([[1.5]]), bias != 0)), 4)
      -0.75
    """
    sizes = shapes.check("token_bias_loss", "... T", bias=bias, weights=weights)
    per_sample = len(shapes.shape_of(advantages)) < len(shapes.shape_of(bias))
    shapes.check("token_bias_loss", "..." if per_sample else "... T", sizes, advantages=advantages)
    weights = jnp.asarray(weights, jnp.float32)
    mask = weights > 0
    advantages = jax.lax.stop_gradient(jnp.asarray(advantages, jnp.float32))
    advantages = advantages[..., None] if per_sample else advantages
    bias = bounded_bias(jnp.where(mask, bias, 0.0), bound)
    return (weights * (l2 * jnp.square(bias) - jnp.where(mask, advantages, 0.0) * bias)).sum()
