"""LLDS: a loss on how much less likely right samples became (arXiv 2512.04220)."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from grpojax import masked, shapes
from grpojax.types import AnyTokens

Gate = Literal["token", "action", "response"]


def displacement_weights(
    advantages: AnyTokens,
    mask: AnyTokens,
    *,
    answer: AnyTokens | None = None,
    answer_weight: float = 1.0,
    normalise: Literal["preferred", "all"] = "preferred",
) -> AnyTokens:
    """Weights ``[..., T]`` of LLDS's token terms (arXiv 2512.04220), from the *global* batch.

    Samples with A >= 0 count, also those with A = 0.
    ``w = 1[A >= 0] / N``, N the number of such tokens, and ``answer_weight`` times that on tokens of the answer.

    Args:
      advantages: ``[..., T]``, flat or grouped, with one sign per sample.
      mask: ``[..., T]`` bool, the policy's own tokens: no tool outputs, and no sample without a reward, since its
        advantage is 0 too.
      answer: ``[..., T]`` bool, tokens of the answer; None for none.
      answer_weight: LLDS-MA's β, in [0, 1]: weight of the answer's tokens. The paper moves it with the number of valid
        searches, ``min(searches / 2, 1)``; its code caps their absolute weight, ``min(w, coef) / coef`` here.
      normalise: divide by the number of tokens of the samples that count (paper) or of all (the authors' code).

    Example:
      >>> advantages = jnp.array([[[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]]])
      >>> displacement_weights(advantages, jnp.ones((1, 3, 2), bool)).tolist()
      [[[0.25, 0.25], [0.0, 0.0], [0.25, 0.25]]]
    """
    if normalise not in ("preferred", "all"):
        raise ValueError(f"displacement_weights(normalise={normalise!r}): must be 'preferred' or 'all'")
    if not 0 <= answer_weight <= 1:
        raise ValueError(f"displacement_weights(answer_weight={answer_weight}): must be in [0, 1]")
    if answer is None and answer_weight != 1.0:
        raise ValueError(f"displacement_weights(answer_weight={answer_weight}) needs answer, which is missing")
    shapes.check("displacement_weights", "... T", advantages=advantages, mask=mask, answer=answer)
    mask = masked.as_mask(mask)
    preferred = mask & (jnp.asarray(advantages) >= 0)
    divisor = (preferred if normalise == "preferred" else mask).sum().astype(jnp.float32)
    weights = jnp.where(preferred, 1.0 / jnp.maximum(divisor, 1.0), 0.0)
    return weights if answer is None else jnp.where(answer, answer_weight * weights, weights)


def displacement(
    log_ratios: AnyTokens,
    mask: AnyTokens,
    gate: Gate = "action",
    *,
    actions: AnyTokens | None = None,
    segments: AnyTokens | None = None,
) -> AnyTokens:
    """LLDS's token terms ``gate max(0, Δ)``, ``Δ = log π_behavior - log π`` (arXiv 2512.04220), ``[..., T]``.

    The gate is constant: 1 where the sum of Δ over the token's action (or response) is over 0, else 0; for "token" it
    is always 1. At ratio 1 all terms and gradients are 0, so it acts from the second update of a rollout on.

    Args:
      log_ratios: ``[..., T]`` of `log_difference`: a token may have fallen far, and `log_ratio` has no gradient there.
      mask: ``[..., T]`` bool.
      gate: the unit that Δ is summed over for the gate.
      actions: ``[..., T]`` int32 in ``[0, T]``, a number for each action, that is each stretch of a response between
        tool outputs. None if a response is one action.
      segments: where samples share the last axis (`grpojax.masked.sequence_total`).

    Example:
      >>> log_ratios, actions = jnp.array([-0.2, 0.5, -0.5, 0.0]), jnp.array([1, 1, 2, 2])
      >>> displacement(log_ratios, jnp.ones(4, bool), actions=actions).tolist()
      [0.0, 0.0, 0.5, 0.0]
    """
    if gate not in get_args(Gate):
        raise ValueError(f"displacement(gate={gate!r}): must be one of {', '.join(get_args(Gate))}")
    shapes.check("displacement", "... T", log_ratios=log_ratios, mask=mask, actions=actions, segments=segments)
    fall = jnp.where(mask, -jnp.asarray(log_ratios, jnp.float32), 0.0)
    terms = jnp.where(fall > 0, fall, 0.0)  # jnp.maximum would have half a gradient at 0
    if gate == "token":
        return terms
    parts = actions if gate == "action" and actions is not None else segments
    return jnp.where(masked.sequence_total(jax.lax.stop_gradient(fall), mask, parts) > 0, terms, 0.0)
