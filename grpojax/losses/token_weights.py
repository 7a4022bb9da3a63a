"""Aggregation as an array: how token losses become one number."""

import math
from typing import Literal, get_args

import jax.numpy as jnp

from grpojax import shapes
from grpojax.types import AnyTokens

Aggregation = Literal["token_mean", "sequence_mean", "prompt_mean", "sequence_sum", "constant"]
NO_CONSTANT = "{}='constant' needs constant=, the tokens to divide by, such as the longest completion"


def loss_weights(
    mask: AnyTokens, how: Aggregation, *, constant: float | None = None, count_empty: bool = True
) -> AnyTokens:
    """Weights ``w [..., T]`` such that ``sum(w * l)`` aggregates token losses ``l``.

    ================  ==========================================================  =====================
    how               formula                                                     used by
    ================  ==========================================================  =====================
    token_mean        Σ m l / Σ m over the batch                                  DAPO as coded, CISPO
    sequence_mean     mean over samples of (Σ m l / length)                       GRPO, GSPO
    prompt_mean       mean over prompts of (Σ m l / Σ m of the group)             DAPO as printed
    sequence_sum      mean over samples of Σ m l                                  RLOO, REINFORCE
    constant          mean over samples of (Σ m l / constant)                     Dr. GRPO
    ================  ==========================================================  =====================

    verl's "seq-mean-token-sum-norm", Σ m l / L without the mean over samples, is ``constant = L / (P G)``.

    Sources: GRPO, arXiv 2402.03300; DAPO, 2503.14476; Dr. GRPO, 2503.20783; RLOO, 2402.14740; GSPO, 2507.18071; CISPO,
    2506.13585.

    Args:
      mask: ``[..., T]`` bool, the tokens that count: flat ``[B, T]`` or grouped ``[P, G, T]``. All axes but the last
        are samples; "prompt_mean" needs the groups. Must be the *global* batch.
      how: a row of the table.
      constant: the divisor of "constant", usually the longest completion allowed, tokens.
      count_empty: whether samples without any token count in the means over samples (prompts).

    Returns:
      ``[..., T]`` float32, 0 where ``mask`` is not set; all 0 if it is set nowhere.

    Example:
      >>> from grpojax import masked
      >>> mask = masked.from_lengths(jnp.array([[4, 2]]), 4)
      >>> loss = jnp.array([[[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 0.0, 0.0]]])
      >>> float((loss_weights(mask, "sequence_mean") * loss).sum())
      8.75
    """
    if how not in get_args(Aggregation):
        raise ValueError(f"loss_weights(how={how!r}): give one of {', '.join(get_args(Aggregation))}")
    if how == "constant" and constant is None:
        raise ValueError(f"loss_weights: {NO_CONSTANT.format('how')}")
    if how != "constant" and constant is not None:
        raise ValueError(f"loss_weights(how={how!r}, constant={constant!r}): a constant goes with how='constant' only")
    if constant is not None and constant <= 0:
        raise ValueError(f"loss_weights(constant={constant}): must be over 0")
    mask = jnp.asarray(mask)
    shapes.check("loss_weights", "... T", mask=mask)
    tokens = mask.sum(-1, keepdims=True).astype(jnp.float32)  # [..., 1]
    if how == "token_mean":
        weights = 1.0 / jnp.maximum(tokens.sum(), 1.0)
    elif how == "prompt_mean":
        shapes.check("loss_weights(how='prompt_mean')", "P G T", mask=mask)
        group = tokens.sum(1, keepdims=True)
        prompts = jnp.float32(mask.shape[0]) if count_empty else (group > 0).sum().astype(jnp.float32)
        weights = 1.0 / (jnp.maximum(group, 1.0) * jnp.maximum(prompts, 1.0))
    else:
        samples = jnp.float32(math.prod(mask.shape[:-1])) if count_empty else (tokens > 0).sum().astype(jnp.float32)
        each = {"sequence_mean": jnp.maximum(tokens, 1.0), "sequence_sum": 1.0, "constant": constant or 1.0}[how]
        weights = 1.0 / (each * jnp.maximum(samples, 1.0))
    return jnp.where(mask, weights, 0.0)
