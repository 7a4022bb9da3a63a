"""Losses on given answers: on a right one, or on a better and a worse one."""

import jax

from grpojax import masked, shapes
from grpojax.types import AnyTokens, Array, Scalar


def sft_loss(logps: AnyTokens, weights: AnyTokens) -> Scalar:
    """``-Σ w log π(token)``: the cross-entropy of given completions, in nats; a scalar.

    The answers may come from a teacher (R1's distillation, arXiv 2501.12948), or be the model's own right ones
    (rejection sampling, STaR, arXiv 2203.14465).

    Args:
      logps: ``[..., T]``, flat, grouped or in rows, log-probs of the tokens of the completions.
      weights: of the same shape (`grpojax.losses.loss_weights`), 0 on padding. Log-probs there, also NaN, change
        neither value nor gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> from grpojax.losses import loss_weights
      >>> mask = jnp.array([[[True, True, False], [True, False, False]]])
      >>> logps = jnp.array([[[-1.0, -2.0, 9.0], [-6.0, 9.0, 9.0]]])
      >>> [float(sft_loss(logps, loss_weights(mask, how))) for how in ("token_mean", "sequence_mean")]
      [3.0, 3.75]
    """
    shapes.check("sft_loss", "... T", logps=logps, weights=weights)
    logps, weights = masked.float32(logps, weights)
    return -masked.total(weights * logps, weights > 0)


def dpo_loss(chosen: Array, rejected: Array, ref_chosen: Array, ref_rejected: Array, *, beta: float = 0.1) -> Array:
    """``-log σ(beta ((chosen - ref_chosen) - (rejected - ref_rejected)))`` of a pair (DPO, arXiv 2305.18290).

    Sums of log-probs over a sequence, ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> round(float(dpo_loss(*map(jnp.float32, (-10, -15, -12, -14)))), 6)
      0.554355
    """
    pairs = {"chosen": chosen, "rejected": rejected, "ref_chosen": ref_chosen, "ref_rejected": ref_rejected}
    shapes.check("dpo_loss", "...", **pairs)
    chosen, rejected = masked.float32(chosen, rejected)
    ref_chosen, ref_rejected = jax.lax.stop_gradient(masked.float32(ref_chosen, ref_rejected))
    margin = (chosen - ref_chosen) - (rejected - ref_rejected)
    return -jax.nn.log_sigmoid(beta * margin)
