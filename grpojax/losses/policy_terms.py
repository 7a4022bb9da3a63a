"""The loss of a batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpojax import masked, shapes
from grpojax.losses.corrections import IMPORTANCE_CAP, importance_correction, off_policy_mask
from grpojax.losses.covariance_masks import kl_cov_penalty
from grpojax.losses.divergence import kl
from grpojax.losses.llds import displacement
from grpojax.losses.objective import Objective, check_given
from grpojax.losses.ratios import log_difference, log_ratio
from grpojax.losses.surrogates import inputs_of, name_of
from grpojax.types import AnyTokens, Mean, Scalar, is_concrete

Metrics = dict[str, Any]  # name to Mean, or to [] for a term of the loss; what micro-batches give adds up


def policy_loss(
    logps: AnyTokens,
    *,
    objective: Objective,
    advantages: AnyTokens,
    weights: AnyTokens,
    old_logps: AnyTokens | None = None,
    ref_logps: AnyTokens | None = None,
    sampler_logps: AnyTokens | None = None,
    displacement_weights: AnyTokens | None = None,
    actions: AnyTokens | None = None,
    covariance_mask: AnyTokens | None = None,
    entropy: AnyTokens | None = None,
    entropy_coef: Scalar | None = None,
    segments: AnyTokens | None = None,
) -> tuple[Scalar, Metrics]:
    """The loss of one (micro-)batch and its metrics; both add up over micro-batches.

    ``sum(w * (kept * correction * surrogate + kl_coef * kl - entropy_coef * entropy))
    + llds_coef * sum(w' * displacement)`` with ``kept`` of `off_policy_mask`. A KL of kind "unbiased" is multiplied by
    the correction too: its ratio leads from the policy to the trainer's old policy, and the correction from there to
    the sampler that drew the tokens. The other kinds are not multiplied (`kl`).

    With one update a rollout and centred advantages the *value* of the policy term is about 0, as the ratio is 1. Its
    gradient, ``-Σ w A ∇ log π``, is not.

    The functions of the terms name their sources. `grpojax.variants` has the published objectives.

    Every array has the shape of ``logps``: flat ``[B, T]``, grouped ``[P, G, T]``, or any other ``[..., T]``. Entries
    where ``weights`` is 0 are never read. Log-probs are in nats.

    Args:
      logps: ``[..., T]`` log-probs of the completion tokens, differentiated.
      objective: the terms. `Objective.reads` says which of the arrays below they need; the others may be given too.
      advantages: ``[..., T]`` constant. For one number per sample give ``jnp.broadcast_to(a[..., None], logps.shape)``.
      weights: ``[..., T]`` of `loss_weights`, computed on all samples of the update; 0 on padding. One under 0 or NaN
        is an error where values can be seen; in a compiled program a token with such a weight is left out.
      old_logps: ``[..., T]`` log-probs of the policy before the step's first update, the ratio's denominator. None
        means the policy itself, as with one update per rollout: the ratio is 1.
      ref_logps: ``[..., T]`` log-probs of the frozen reference.
      sampler_logps: ``[..., T]`` log-probs that the sampler reported.
      displacement_weights: ``[..., T]`` from `displacement_weights`.
      actions: ``[..., T]`` int32 (`displacement`).
      covariance_mask: ``[..., T]`` bool from `covariance_mask`.
      entropy: ``[..., T]`` differentiated entropy of each token's distribution, nats. If the objective does not need
        it, it only gives a metric.
      entropy_coef: ``[]``, the weight of the entropy in this update, when there is an ``objective.entropy_target``
        (`adapt_entropy_coef`).
      segments: None where the last axis is one sample; ``[..., T]`` int32 where several share it
        (`grpojax.masked.sequence_total`). A sample is never cut in two.

    Returns:
      ``(loss [] float32, metrics)``: `grpojax.types.Mean` over tokens (``ratio``, ``log_ratio_square``, ``kl``,
      ``entropy``, ``clip_low``, ``clip_high``, ``dual_clip``, ``cap_hit``, ``clip_cov``, ``kl_cov``, ``importance``,
      ``importance_clipped``, ``off_policy``), and ``[]`` for the loss and its terms (``loss``, ``policy_loss``,
      ``kl_loss``, ``llds_loss``). Only the metrics of terms in the objective are there.

    Raises:
      ValueError: an array has another shape than ``logps``, or one that a term needs is missing.

    Example:
      >>> old = jnp.array([[-1.0, -2.0, -0.5, -1.5]])
      >>> loss, metrics = policy_loss(
      ...     old + jnp.array([0.3, -0.3, 0.1, -0.05]), objective=Objective(),
      ...     advantages=jnp.ones((1, 4)), weights=jnp.full((1, 4), 0.25), old_logps=old)
      >>> round(float(loss), 6), float(metrics["clip_high"].value)
      (-0.999305, 0.25)
    """
    if not isinstance(objective, Objective):
        raise ValueError(f"policy_loss: objective is a {type(objective).__name__}, wanted a losses.Objective")
    arrays: dict[str, Any] = {
        "advantages": advantages,
        "weights": weights,
        "old_logps": old_logps,
        "ref_logps": ref_logps,
        "sampler_logps": sampler_logps,
        "displacement_weights": displacement_weights,
        "actions": actions,
        "covariance_mask": covariance_mask,
        "entropy": entropy,
        "segments": segments,
    }
    shapes.check("policy_loss", "... T", logps=logps, **arrays)
    shapes.check("policy_loss", "", entropy_coef=entropy_coef)
    check_given("policy_loss", objective, arrays)
    if entropy_coef is not None and not objective.needs_entropy:
        raise ValueError("policy_loss: entropy_coef goes with an objective that has an entropy_target")
    if (entropy_coef is None) != (objective.entropy_target is None):
        raise ValueError(
            f"policy_loss: entropy_target={objective.entropy_target} with entropy_coef={entropy_coef}: it takes the "
            "coefficient of adapt_entropy_coef where there is a target, and only there"
        )
    weights = jnp.asarray(weights, jnp.float32)
    if is_concrete(weights) and not (np.asarray(weights) >= 0).all():
        raise ValueError(
            "policy_loss: weights has numbers under 0 or NaN; a token to be pushed down has a negative advantage"
        )
    mask = weights > 0
    weights = jnp.where(mask, weights, 0.0)
    advantages = jax.lax.stop_gradient(jnp.where(mask, advantages, 0.0)).astype(jnp.float32)
    logps = jnp.where(mask, logps, 0.0).astype(jnp.float32)
    behavior = sampler_logps if objective.ratio_denominator == "sampler" else old_logps
    ratios = log_ratio(logps, behavior, mask, objective.ratio, decay=objective.trace_decay, segments=segments)
    by_token = ratios if objective.ratio == "token" else log_ratio(logps, behavior, mask)
    apart = log_difference(logps, behavior, mask)
    token_losses, sums = _policy_term(
        ratios, apart, logps, advantages, mask, picked=covariance_mask, objective=objective, segments=segments
    )
    train = logps if old_logps is None else old_logps
    correction, kept, more = _corrections(
        logps, train, sampler_logps, advantages, mask, objective=objective, segments=segments
    )
    for factor in (correction, kept):
        token_losses = token_losses if factor is None else factor * token_losses
    sums |= more
    policy = (weights * token_losses).sum()
    loss = policy
    terms = {"policy_loss": policy}
    sums["ratio"] = masked.total(jax.lax.stop_gradient(jnp.exp(ratios)), mask)
    sums["log_ratio_square"] = masked.total(jax.lax.stop_gradient(jnp.square(ratios)), mask)
    # The KL, LLDS and KL-Cov are of tokens, whatever the ratio, and have a gradient however far a token has moved.
    if objective.needs_reference:
        ref = jnp.where(mask, arrays["ref_logps"], 0.0)
        # A KL in the rewards is in the advantages: a variant's chain begins with `grpojax.advantages.subtract_kl`.
        if objective.kl_in == "loss":
            estimate = kl(logps, ref, objective.kl_kind, log_ratios=by_token)
            if objective.kl_kind == "unbiased" and correction is not None:
                estimate = correction * estimate
            terms["kl_loss"] = (weights * estimate).sum()
            loss = loss + objective.kl_coef * terms["kl_loss"]
        sums["kl"] = jax.lax.stop_gradient(masked.total(kl(logps, ref, "k3"), mask))
    if objective.needs_displacement_weights:
        fallen = displacement(apart, mask, objective.llds_gate, actions=actions, segments=segments)
        share = jnp.where(mask, arrays["displacement_weights"], 0.0).astype(jnp.float32)
        terms["llds_loss"] = (share * fallen).sum()
        loss = loss + objective.llds_coef * terms["llds_loss"]
    if objective.needs_entropy:
        coef = objective.entropy_coef if entropy_coef is None else jnp.asarray(entropy_coef, jnp.float32)
        loss = loss - coef * (weights * jnp.where(mask, arrays["entropy"], 0.0).astype(jnp.float32)).sum()
    if entropy is not None:
        sums["entropy"] = jax.lax.stop_gradient(masked.total(entropy, mask))
    count = mask.sum().astype(jnp.float32)
    return loss, {"loss": loss, **terms, **{name: Mean(total=total, count=count) for name, total in sums.items()}}


def _policy_term(
    ratios: AnyTokens,
    apart: AnyTokens,
    logps: AnyTokens,
    advantages: AnyTokens,
    mask: AnyTokens,
    *,
    picked: AnyTokens | None,
    objective: Objective,
    segments: AnyTokens | None,
) -> tuple[AnyTokens, Metrics]:
    """``(token losses, sums over tokens of where a clip, a bound or a mask acts)``."""
    surrogate, marks = objective.surrogate, {}
    extra = inputs_of(surrogate, logps, mask, segments)
    losses = surrogate(ratios, advantages, **extra)
    if hasattr(surrogate, "marks"):
        marks = surrogate.marks(jax.lax.stop_gradient(ratios), advantages, **extra)
    sizes = shapes.check("policy_loss", "... T", log_ratios=ratios)
    shapes.check(f"surrogate {name_of(surrogate)}", "... T", sizes, **{"its result": losses, **marks})
    if objective.needs_covariance_mask:
        picked = mask & jnp.asarray(picked, bool)
        marks = marks | {f"{objective.covariance}_cov": picked}
        if objective.covariance == "clip":
            losses = jnp.where(picked, 0.0, losses)
        else:
            losses = losses + kl_cov_penalty(apart, picked, coef=objective.covariance_coef)
    return losses, {name: (mask & mark).sum().astype(jnp.float32) for name, mark in marks.items()}


def _corrections(
    logps: AnyTokens,
    train: AnyTokens,
    sampler: AnyTokens | None,
    advantages: AnyTokens,
    mask: AnyTokens,
    *,
    objective: Objective,
    segments: AnyTokens | None,
) -> tuple[AnyTokens | None, AnyTokens | None, Metrics]:
    """``(correction, kept, sums over tokens)``: constant factors of the token losses, None where there is none."""
    correction, kept, sums = None, None, {}
    if objective.importance != "none":
        given = {"low": objective.importance_low, "high": objective.importance_high}
        bounds = {name: x for name, x in given.items() if x is not None}
        correction = importance_correction(
            train,
            sampler,
            mask,
            objective.importance,
            level=objective.importance_level,
            segments=segments,
            **bounds,
        )
        sums["importance"] = correction.sum()
        cap = bounds.get("high", IMPORTANCE_CAP)
        clipped = correction >= cap if objective.importance == "truncate" else correction == 0
        sums["importance_clipped"] = (mask & clipped).sum().astype(jnp.float32)
    if objective.off_policy_limit is not None:
        kept = off_policy_mask(logps, sampler, advantages, mask, objective.off_policy_limit, segments=segments)
        sums["off_policy"] = masked.total(1.0 - kept, mask)
    return correction, kept, sums
