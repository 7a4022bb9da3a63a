"""Constant factors on the policy's term: for the sampler's numerics, and for samples that have become unlikely."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from grpojax import masked, shapes
from grpojax.losses.ratios import LOG_RATIO_LIMIT
from grpojax.types import AnyTokens

Importance = Literal["none", "truncate", "mask"]
IMPORTANCE_CAP, IMPORTANCE_FLOOR = 2.0, 0.5  # TIS's cap; the floor of "mask"
ImportanceLevel = Literal["token", "sequence", "geometric"]


def importance_correction(
    train_logps: AnyTokens,
    sampler_logps: AnyTokens,
    mask: AnyTokens,
    mode: Literal["truncate", "mask"] = "truncate",
    *,
    level: ImportanceLevel = "token",
    low: float | None = None,
    high: float = IMPORTANCE_CAP,
    segments: AnyTokens | None = None,
) -> AnyTokens:
    """Weights that correct for the sampler's numerics: ``w = π_train / π_sampler``, constant, ``[..., T]``.

    They are separate from the objective's ratio, which compares two policies of the trainer.

    The defaults are TIS with its cap of 2, which loses no token. IcePop is MIS with other bounds. TRL's own (1.16) are
    ``mode="mask", level="sequence", low=0.0, high=3.0``: it leaves out whole samples whose product is over 3, which few
    long samples survive.

    Args:
      train_logps: ``[..., T]`` the behaviour policy as the trainer computes it.
      sampler_logps: ``[..., T]`` as the sampler reported it.
      mask: ``[..., T]`` bool; 0 elsewhere.
      mode: "truncate" gives ``min(w, high)`` (TIS), "mask" gives w inside ``[low, high]`` and 0 outside (MIS, IcePop).
      level: w of each token, the product over the sample, or its geometric mean.
      low: only with "mask"; None is 1/2 (IcePop takes 0.5 and 5), 0 no bound.
      high: the cap of "truncate", the upper bound of "mask".
      segments: where samples share the last axis (`grpojax.masked.sequence_total`).

    Example:
      >>> train, sampler = jnp.log(jnp.array([0.5, 0.3, 0.2, 0.1])), jnp.log(jnp.array([0.4, 0.5, 0.05, 0.1]))
      >>> [round(float(w), 3) for w in importance_correction(train, sampler, jnp.ones(4, bool), "mask")]
      [1.25, 0.6, 0.0, 1.0]
    """
    if mode not in ("truncate", "mask") or level not in get_args(ImportanceLevel):
        raise ValueError(
            f"importance_correction({mode!r}, level={level!r}): mode truncate or mask; level "
            f"{', '.join(get_args(ImportanceLevel))}"
        )
    if mode == "truncate" and low is not None:
        raise ValueError(f"importance_correction('truncate', low={low}): it has no lower bound; take 'mask'")
    arrays = {"train_logps": train_logps, "sampler_logps": sampler_logps, "mask": mask, "segments": segments}
    shapes.check("importance_correction", "... T", **arrays)
    difference = jnp.where(mask, train_logps, 0.0).astype(jnp.float32)
    difference = jax.lax.stop_gradient(difference - jnp.where(mask, sampler_logps, 0.0).astype(jnp.float32))
    if level != "token":
        reduce = masked.sequence_total if level == "sequence" else masked.sequence_mean
        difference = reduce(difference, mask, segments)
    weight = jnp.exp(jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    if mode == "truncate":
        weight = jnp.minimum(weight, high)
    else:
        weight = jnp.where((weight >= (IMPORTANCE_FLOOR if low is None else low)) & (weight <= high), weight, 0.0)
    return jnp.where(mask, weight, 0.0)


def off_policy_mask(
    logps: AnyTokens,
    sampler_logps: AnyTokens,
    advantages: AnyTokens,
    mask: AnyTokens,
    limit: float,
    *,
    segments: AnyTokens | None = None,
) -> AnyTokens:
    """``[..., T]`` float32: 0 on samples with ``A < 0`` and ``mean_t (log π_sampler - log π) > limit``, else 1.

    DeepSeek-V3.2 (arXiv 2512.02556): wrong samples that the policy has already made unlikely are left out. ``limit`` in
    nats a token; the paper gives none, TRL suggests 0.5.
    ``logps``, ``sampler_logps``, ``advantages`` and ``mask`` are ``[..., T]``, ``segments`` as in `log_ratio`.

    Example:
      >>> logps, sampler = jnp.array([[-1.2, -1.4]] * 2), jnp.full((2, 2), -0.5)
      >>> advantages = jnp.array([[-1.0, -1.0], [1.0, 1.0]])
      >>> off_policy_mask(logps, sampler, advantages, logps < 0, 0.5).tolist()
      [[0.0, 0.0], [1.0, 1.0]]
    """
    arrays = {"logps": logps, "sampler_logps": sampler_logps, "advantages": advantages, "mask": mask}
    shapes.check("off_policy_mask", "... T", **arrays, segments=segments)
    logps = jax.lax.stop_gradient(jnp.where(mask, logps, 0.0).astype(jnp.float32))
    fallen = masked.sequence_mean(jnp.where(mask, sampler_logps, 0.0).astype(jnp.float32) - logps, mask, segments)
    return 1.0 - ((advantages < 0) & (fallen > limit)).astype(jnp.float32)
