"""The critic's loss."""

import jax
import jax.numpy as jnp

from grpojax import shapes
from grpojax.types import Array, Scalar


def value_loss(
    values: Array, returns: Array, weights: Array, *, old_values: Array | None = None, clip: float | None = None
) -> Scalar:
    """PPO's critic loss: ``½ Σ w max((V - R)², (clip(V, V_old ± clip) - R)²)`` (arXiv 1707.06347).

    Returns ``[]`` float32, in squared units of the reward.

    Args:
      values: ``[...]`` differentiated.
      returns: ``[...]`` constant (`grpojax.advantages.gae` plus the old values).
      weights: ``[...]`` of `loss_weights`.
      old_values: ``[...]``, with ``clip`` only.
      clip: how far values may move in one rollout; None for the plain square.

    Example:
      >>> v, r, old = jnp.array([0.9]), jnp.array([0.4]), jnp.array([0.5])
      >>> round(float(value_loss(v, r, jnp.ones(1), old_values=old, clip=0.2)), 4)
      0.125
    """
    if (clip is None) != (old_values is None):
        raise ValueError(f"value_loss(clip={clip}): clip and old_values go together")
    shapes.check("value_loss", "...", values=values, returns=returns, weights=weights, old_values=old_values)
    mask = jnp.asarray(weights) > 0

    def clean(x):
        return jnp.where(mask, x, 0.0).astype(jnp.float32)

    values, returns = clean(values), jax.lax.stop_gradient(clean(returns))
    squares = jnp.square(values - returns)
    if clip is not None:
        old = jax.lax.stop_gradient(clean(old_values))
        far = jnp.abs(values - old) > clip
        near = jnp.square(old + clip * jnp.sign(values - old) - returns)
        squares = jnp.where(far & (near > squares), near, squares)
    return 0.5 * (weights * squares).sum()
