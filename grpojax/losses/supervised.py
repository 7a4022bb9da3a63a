"""Losses on given pairs of answers."""

import jax

from grpojax import masked
from grpojax.types import Array


def dpo_loss(chosen: Array, rejected: Array, ref_chosen: Array, ref_rejected: Array, *, beta: float = 0.1) -> Array:
    """``-log σ(beta ((chosen - ref_chosen) - (rejected - ref_rejected)))`` of a pair (DPO, arXiv 2305.18290).

    Sums of log-probs over a sequence, ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> round(float(dpo_loss(*map(jnp.float32, (-10, -15, -12, -14)))), 6)
      0.554355
    """
    chosen, rejected = masked.float32(chosen, rejected)
    ref_chosen, ref_rejected = jax.lax.stop_gradient(masked.float32(ref_chosen, ref_rejected))
    margin = (chosen - ref_chosen) - (rejected - ref_rejected)
    return -jax.nn.log_sigmoid(beta * margin)
