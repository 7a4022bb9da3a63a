"""The loss of a batch."""

from typing import Any

import jax
import jax.numpy as jnp

from grpojax import masked
from grpojax.losses.corrections import IMPORTANCE_CAP, importance_correction, off_policy_mask
from grpojax.losses.covariance_masks import kl_cov_penalty
from grpojax.losses.divergence import kl
from grpojax.losses.llds import displacement
from grpojax.losses.objective import Objective, behavior_of, need
from grpojax.losses.ratios import log_ratio
from grpojax.losses.surrogates import inputs_of
from grpojax.types import AnyTokens, Mean, Scalar

Metrics = dict[str, Any]  # name to Mean, or to [] for a term of the loss; what micro-batches give adds up


def policy_loss(
    logps: AnyTokens,
    batch: Any,
    objective: Objective,
    *,
    entropy: AnyTokens | None = None,
    entropy_coef: Scalar | None = None,
    segments: AnyTokens | None = None,
) -> tuple[Scalar, Metrics]:
    """The loss of one (micro-)batch and its metrics; both add up over micro-batches.

    ``sum(w * (kept * correction * surrogate + kl_coef * kl - entropy_coef * entropy))
    + llds_coef * sum(w' * displacement)`` with ``kept`` of `off_policy_mask`.

    With one update a rollout and centred advantages the *value* of the policy term is about 0 (the ratio is 1);
    its gradient is ``-Σ w A ∇ log π`` and is not.

    The functions that give the terms name their sources; `grpojax.variants` has the published objectives.

    Args:
      logps: ``[..., T]`` differentiated log-probs of the completion tokens.
      batch: anything with ``weights``, ``advantages``, ``behavior_logps``, and, where the objective reads them,
        ``ref_logps``, ``sampler_logps``, ``displacement_weights``, ``covariance_mask`` (of the functions so called)
        and ``actions`` (`displacement`), of that shape, such as `grpojax.types.PerToken`. ``weights`` is 0 on padding;
        what stands there in the other arrays is never read.
      objective: the terms.
      entropy: ``[..., T]`` differentiated entropy, when ``objective.needs_entropy``; else a metric.
      entropy_coef: ``[]``, the weight of the entropy in this update, when there is an ``objective.entropy_target``
        (`adapt_entropy_coef`).
      segments: None where the last axis is one sample; ``[..., T]`` int32 where several share it
        (`grpojax.masked.sequence_total`). A sample is never cut in two.

    Returns:
      ``(loss [] float32, metrics)``: `grpojax.types.Mean` over tokens (``ratio``, ``kl``, ``entropy``, ``clip_low``,
      ``clip_high``, ``dual_clip``, ``cap_hit``, ``clip_cov``, ``kl_cov``, ``importance``,
      ``importance_clipped``, ``off_policy``), and ``[]`` for the loss and its terms (``loss``, ``policy_loss``,
      ``kl_loss``, ``llds_loss``); those that there are.

    Example:
      >>> from types import SimpleNamespace
      >>> old = jnp.array([-1.0, -2.0, -0.5, -1.5])
      >>> batch = SimpleNamespace(weights=jnp.full(4, 0.25), advantages=jnp.ones(4), behavior_logps=old)
      >>> loss, metrics = policy_loss(old + jnp.array([0.3, -0.3, 0.1, -0.05]), batch, Objective())
      >>> round(float(loss), 6), float(metrics["clip_high"].value)
      (-0.999305, 0.25)
    """
    weights = jnp.asarray(batch.weights, jnp.float32)
    mask = weights > 0
    advantages = jax.lax.stop_gradient(jnp.where(mask, batch.advantages, 0.0)).astype(jnp.float32)
    logps = jnp.where(mask, logps, 0.0).astype(jnp.float32)
    behavior = behavior_of(batch, objective)
    ratios = log_ratio(logps, behavior, mask, objective.ratio, decay=objective.trace_decay, segments=segments)
    by_token = ratios if objective.ratio == "token" else log_ratio(logps, behavior, mask)
    token_losses, sums = _policy_term(ratios, by_token, logps, advantages, mask, batch, objective, segments)
    factor, more = _corrections(logps, advantages, mask, batch, objective, segments)
    for each in factor:
        token_losses = each * token_losses
    sums |= more
    policy = (weights * token_losses).sum()
    loss = policy
    terms = {"policy_loss": policy}
    sums["ratio"] = masked.total(jax.lax.stop_gradient(jnp.exp(ratios)), mask)
    # The KL and LLDS are of tokens, whatever the ratio.
    if objective.needs_reference:
        ref = jnp.where(mask, need(batch, "ref_logps", f"kl_coef={objective.kl_coef}"), 0.0)
        if objective.kl_in == "loss":
            terms["kl_loss"] = (weights * kl(logps, ref, objective.kl_kind, log_ratios=by_token)).sum()
            loss = loss + objective.kl_coef * terms["kl_loss"]
        sums["kl"] = jax.lax.stop_gradient(masked.total(kl(logps, ref, "k3"), mask))
    if objective.needs_displacement_weights:
        terms["llds_loss"] = _llds_term(by_token, mask, batch, objective, segments)
        loss = loss + objective.llds_coef * terms["llds_loss"]
    if objective.needs_entropy:
        loss = loss - _entropy_term(weights, mask, objective, entropy, entropy_coef)
    elif entropy_coef is not None:
        raise ValueError("entropy_coef goes with an objective that has an entropy_target")
    if entropy is not None:
        sums["entropy"] = jax.lax.stop_gradient(masked.total(entropy, mask))
    count = mask.sum().astype(jnp.float32)
    return loss, {"loss": loss, **terms, **{name: Mean(total=total, count=count) for name, total in sums.items()}}


def _policy_term(
    ratios: AnyTokens,
    by_token: AnyTokens,
    logps: AnyTokens,
    advantages: AnyTokens,
    mask: AnyTokens,
    batch: Any,
    objective: Objective,
    segments: AnyTokens | None,
) -> tuple[AnyTokens, Metrics]:
    """``(token losses, sums over tokens of where a clip, a bound or a mask acts)``."""
    surrogate, marks = objective.surrogate, {}
    extra = inputs_of(surrogate, logps, mask, segments)
    losses = surrogate(ratios, advantages, **extra)
    if hasattr(surrogate, "marks"):
        marks = surrogate.marks(jax.lax.stop_gradient(ratios), advantages, **extra)
    if objective.needs_covariance_mask:
        picked = need(batch, "covariance_mask", f"covariance={objective.covariance!r}")
        picked = mask & jnp.asarray(picked, bool)
        marks = marks | {f"{objective.covariance}_cov": picked}
        if objective.covariance == "clip":
            losses = jnp.where(picked, 0.0, losses)
        else:
            losses = losses + kl_cov_penalty(by_token, picked, coef=objective.covariance_coef)
    return losses, {name: (mask & mark).sum().astype(jnp.float32) for name, mark in marks.items()}


def _corrections(
    logps: AnyTokens,
    advantages: AnyTokens,
    mask: AnyTokens,
    batch: Any,
    objective: Objective,
    segments: AnyTokens | None,
) -> tuple[list[AnyTokens], Metrics]:
    """``(constant factors of the token losses, their sums over tokens)``."""
    factors, sums = [], {}
    if objective.importance != "none":
        sampler = need(batch, "sampler_logps", f"importance={objective.importance!r}")
        train = logps if batch.behavior_logps is None else batch.behavior_logps
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
        factors.append(correction)
        sums["importance"] = correction.sum()
        cap = bounds.get("high", IMPORTANCE_CAP)
        clipped = correction >= cap if objective.importance == "truncate" else correction == 0
        sums["importance_clipped"] = (mask & clipped).sum().astype(jnp.float32)
    if objective.off_policy_limit is not None:
        sampler = need(batch, "sampler_logps", f"off_policy_limit={objective.off_policy_limit}")
        kept = off_policy_mask(logps, sampler, advantages, mask, objective.off_policy_limit, segments=segments)
        factors.append(kept)
        sums["off_policy"] = masked.total(1.0 - kept, mask)
    return factors, sums


def _llds_term(
    by_token: AnyTokens, mask: AnyTokens, batch: Any, objective: Objective, segments: AnyTokens | None
) -> Scalar:
    share = need(batch, "displacement_weights", f"llds_coef={objective.llds_coef}")
    actions = getattr(batch, "actions", None)
    fallen = displacement(by_token, mask, objective.llds_gate, actions=actions, segments=segments)
    return (jnp.where(mask, share, 0.0).astype(jnp.float32) * fallen).sum()


def _entropy_term(
    weights: AnyTokens, mask: AnyTokens, objective: Objective, entropy: AnyTokens | None, given: Scalar | None
) -> Scalar:
    """The entropy bonus; raises where the entropy, or its weight, is missing."""
    if entropy is None:
        raise ValueError(
            f"entropy_coef={objective.entropy_coef}, entropy_target={objective.entropy_target} needs entropy, which is "
            "missing"
        )
    if (given is None) != (objective.entropy_target is None):
        raise ValueError(
            f"entropy_target={objective.entropy_target} with entropy_coef={given}: policy_loss takes the coefficient "
            "of adapt_entropy_coef where there is a target, and only there"
        )
    coef = objective.entropy_coef if given is None else jnp.asarray(given, jnp.float32)
    return coef * (weights * jnp.where(mask, entropy, 0.0).astype(jnp.float32)).sum()
