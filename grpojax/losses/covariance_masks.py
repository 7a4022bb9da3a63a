"""Clip-Cov and KL-Cov: masks of the few tokens whose advantage and log-prob rise together, which lowers the entropy."""

import functools
import operator

import jax
import jax.numpy as jnp

from grpojax import masked, shapes
from grpojax.losses.objective import Objective, check_given
from grpojax.losses.ratios import log_ratio
from grpojax.losses.surrogates import STOPPING, inputs_of
from grpojax.types import AnyTokens, Array


def covariance(logps: Array, advantages: Array, mask: Array) -> Array:
    """``(A - mean A) (log π - mean log π)`` over the batch's tokens ``[...]``, constant, 0 on padding
    (arXiv 2505.22617).

    Example:
      >>> logps, advantages = jnp.array([-0.1, -2.0, -0.5, -3.0]), jnp.array([1.0, 1.0, -1.0, -1.0])
      >>> [round(float(x), 4) for x in covariance(logps, advantages, logps < 0)]
      [1.3, -0.6, -0.9, 1.6]
    """
    shapes.check("covariance", "...", logps=logps, advantages=advantages, mask=mask)
    logps = jax.lax.stop_gradient(jnp.asarray(logps, jnp.float32))
    advantages = jnp.asarray(advantages, jnp.float32)
    product = (advantages - masked.mean(advantages, mask)) * (logps - masked.mean(logps, mask))
    return jnp.where(mask, product, 0.0)


def clip_cov(
    key: Array,
    cov: Array,
    mask: Array,
    *,
    fraction: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    skip: Array | bool = False,
    token_index: Array | None = None,
) -> Array:
    """Clip-Cov's mask (arXiv 2505.22617): False on ``max(floor(fraction N), 1)`` tokens with ``low < cov < high``.

    They are drawn at random; N counts ``mask``. Set the *advantages* of these tokens to 0: the loss's divisor, KL and
    entropy then do not change. Needs the whole batch.

    Args:
      key: jax PRNG key of the draw.
      cov: ``[...]`` of `covariance`.
      mask: ``[...]`` bool.
      fraction: share of the tokens dropped.
      low, high: the range.
      skip: ``[...]`` bool, tokens that are never drawn, since they are clipped already.
      token_index: ``[...]`` int32, a number for each token. The draw then depends on this number and the key, not on
        the layout. None draws by position.

    Example:
      >>> cov = jnp.array([1.3, -0.6, -0.9, 1.6])
      >>> clip_cov(jax.random.key(0), cov, jnp.ones(4, bool), fraction=0.5).tolist()
      [False, True, True, False]
    """
    sizes = shapes.check("clip_cov", "...", cov=cov, mask=mask, token_index=token_index)
    if shapes.shape_of(skip):
        shapes.check("clip_cov", "...", sizes, skip=skip)
    mask = masked.as_mask(mask)
    candidates = mask & (cov > low) & (cov < high) & ~masked.as_mask(skip)
    if token_index is None:
        draws = jax.random.uniform(key, cov.shape)
    else:
        each = jax.vmap(lambda n: jax.random.uniform(jax.random.fold_in(key, n)))
        draws = each(jnp.asarray(token_index).reshape(-1)).reshape(cov.shape)
    draws = jnp.where(candidates, draws, jnp.inf)
    return ~(candidates & (draws <= _smallest(draws, _count(mask, fraction))))


def kl_cov(cov: Array, mask: Array, *, fraction: float = 2e-4) -> Array:
    """KL-Cov's mask (arXiv 2505.22617): True on the ``max(floor(fraction N), 1)`` tokens of largest `covariance`.

    Ties with the last of them are True as well.

    They get `kl_cov_penalty`. Needs the whole batch. ``cov`` and ``mask`` are ``[...]``.

    Example:
      >>> kl_cov(jnp.array([1.3, -0.6, -0.9, 1.6]), jnp.ones(4, bool), fraction=0.25).tolist()
      [False, False, False, True]
    """
    shapes.check("kl_cov", "...", cov=cov, mask=mask)
    mask = masked.as_mask(mask)
    negative = jnp.where(mask, -cov, jnp.inf)
    return mask & (negative <= _smallest(negative, _count(mask, fraction)))


def kl_cov_penalty(log_ratios: Array, selected: Array, *, coef: float = 1.0) -> Array:
    """``coef |log ρ|`` on the ``selected`` tokens, 0 elsewhere: what KL-Cov adds (arXiv 2505.22617); ``[...]``.

    coef is 1 in the official run, 0.1 in verl's.

    Example:
      >>> [round(float(x), 4) for x in kl_cov_penalty(jnp.log(jnp.array([0.5, 0.5])), jnp.array([True, False]))]
      [0.6931, 0.0]
    """
    shapes.check("kl_cov_penalty", "...", log_ratios=log_ratios, selected=selected)
    (log_ratios,) = masked.float32(log_ratios)
    sign = jax.lax.stop_gradient(jnp.sign(log_ratios))  # jnp.abs would have a gradient of 1 at 0
    return coef * jnp.where(selected, sign * log_ratios, 0.0)


def covariance_mask(
    key: Array,
    logps: AnyTokens,
    *,
    objective: Objective,
    advantages: AnyTokens,
    weights: AnyTokens,
    old_logps: AnyTokens | None = None,
    sampler_logps: AnyTokens | None = None,
    segments: AnyTokens | None = None,
    token_index: AnyTokens | None = None,
) -> AnyTokens:
    """``[..., T]`` bool, the tokens of Clip-Cov or KL-Cov (arXiv 2505.22617), for `policy_loss`.

    With ``objective.covariance="clip"`` these are the tokens that `clip_cov` drops, none of which is clipped already;
    with "kl" those of `kl_cov`. Both need all tokens of an update: call it once for the whole minibatch, not for each
    micro-batch.

    Args:
      key: jax PRNG key of the draw; KL-Cov draws nothing.
      logps: ``[..., T]`` the policy's log-probs before the update.
      objective: with ``covariance`` not "none".
      advantages, weights, old_logps, sampler_logps: ``[..., T]`` of the minibatch, as `policy_loss` takes them.
      segments: where samples share the last axis (`grpojax.masked.sequence_total`).
      token_index: as in `clip_cov`.

    Example:
      >>> batch = {"advantages": jnp.array([1.0, 1.0, -1.0, -1.0]), "weights": jnp.full(4, 0.25)}
      >>> objective = Objective(covariance="clip", covariance_fraction=0.5)
      >>> logps = jnp.array([-0.1, -2.0, -0.5, -3.0])
      >>> covariance_mask(jax.random.key(0), logps, objective=objective, **batch).tolist()
      [True, False, False, True]
    """
    if objective.covariance == "none":
        raise ValueError("covariance_mask with covariance='none': the objective asks for none")
    arrays = {"advantages": advantages, "weights": weights, "old_logps": old_logps, "sampler_logps": sampler_logps}
    shapes.check("covariance_mask", "... T", logps=logps, **arrays, segments=segments, token_index=token_index)
    sampler = {"sampler_logps": sampler_logps} if objective.ratio_denominator == "sampler" else {}
    check_given("covariance_mask", objective, sampler)
    mask = jnp.asarray(weights) > 0
    logps, advantages = (jnp.where(mask, x, 0.0).astype(jnp.float32) for x in (logps, advantages))
    cov = covariance(logps, advantages, mask)
    if objective.covariance == "kl":
        return kl_cov(cov, mask, fraction=objective.covariance_fraction)
    surrogate = objective.surrogate
    behavior = sampler_logps if objective.ratio_denominator == "sampler" else old_logps
    ratios = log_ratio(logps, behavior, mask, objective.ratio, decay=objective.trace_decay, segments=segments)
    marks = {}
    if hasattr(surrogate, "marks"):
        marks = surrogate.marks(ratios, advantages, **inputs_of(surrogate, logps, mask, segments))
    clipped = [marks[name] for name in STOPPING if name in marks]
    kept = clip_cov(
        key,
        cov,
        mask,
        fraction=objective.covariance_fraction,
        low=objective.covariance_low,
        high=objective.covariance_high,
        skip=functools.reduce(operator.or_, clipped, jnp.zeros_like(mask)),
        token_index=token_index,
    )
    return mask & ~kept


def _count(mask: Array, fraction: float) -> Array:
    n = jnp.asarray(mask).sum().astype(jnp.float32)
    return jnp.maximum((fraction * n + 1e-3).astype(jnp.int32), 1)


def _smallest(x: Array, n: Array) -> Array:
    """The n-th smallest number of ``x``."""
    return jnp.sort(x, axis=None)[jnp.clip(n - 1, 0, x.size - 1)]
