"""Estimates of the KL to a reference, from drawn tokens."""

from typing import Literal

import jax
import jax.numpy as jnp

from grpojax import masked, shapes
from grpojax.losses.ratios import LOG_RATIO_LIMIT
from grpojax.types import Array

KLKind = Literal["k1", "k2", "k3", "unbiased"]
KLPlace = Literal["loss", "reward", "token_reward"]


def kl(
    logps: Array, ref_logps: Array, kind: KLKind = "k3", *, log_ratios: Array | None = None, mask: Array | None = None
) -> Array:
    """Estimates ``KL(π || π_ref)`` per token from the drawn token.

    With ``d = logps - ref_logps``: k1 = d; k2 = d²/2; k3 = exp(-d) - 1 + d (Schulman's note; GRPO's choice);
    unbiased = ρ k3 with the differentiated ratio ρ to the behaviour policy (DeepSeek-V3.2, arXiv 2512.02556).

    As a *loss* on tokens that π itself drew (on-policy), k2 has the expected gradient of KL(π || π_ref), k3 that of
    KL(π_ref || π), k1 none. On tokens of another policy (later updates of a rollout, older samples, an eight-bit
    sampler) k2 and k3 have neither gradient, and no correction is applied to them. Unbiased has the gradient of KL(π ||
    π_ref) on tokens of the policy in its ratio's denominator. With an importance correction, `policy_loss` multiplies
    it by the correction too, so that it is exact up to what the correction cuts off. In the *reward* only k1 has the
    right gradient. `Objective` refuses the others. Float32 ``[...]``, nats.

    A token far from the reference is pulled back: no clip ends a gradient. That of k2 is d, that of unbiased ρ d,
    exactly, and that of k3 ``1 - exp(-d)``, whose exponential stops growing 20 nats under the reference.

    Args:
      logps: ``[...]`` differentiated.
      ref_logps: ``[...]`` constant.
      kind: the estimator.
      log_ratios: for "unbiased": `log_ratio` to the behaviour policy; only its value is read.
      mask: ``[...]`` bool; the result is 0 where it is not set, whatever the log-probs are. None counts every token.

    Example:
      >>> p, q = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 0.75]))
      >>> [round(float((jnp.exp(p) * kl(p, q, kind)).sum()), 4) for kind in ("k1", "k2", "k3")]
      [0.1438, 0.1612, 0.1438]
    """
    shapes.check("kl", "...", logps=logps, ref_logps=ref_logps, log_ratios=log_ratios, mask=mask)
    logps, ref_logps = masked.float32(logps, jax.lax.stop_gradient(ref_logps))
    if mask is not None:
        logps, ref_logps = jnp.where(mask, logps, 0.0), jnp.where(mask, ref_logps, 0.0)
        log_ratios = None if log_ratios is None else jnp.where(mask, log_ratios, 0.0)
    d = logps - ref_logps
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * jnp.square(d)
    # Bounded in value, so that exp() stays finite; its slope beyond is that at the bound, and not 0.
    k3 = jnp.expm1(-d + jax.lax.stop_gradient(jnp.minimum(-d, LOG_RATIO_LIMIT) + d)) + d
    if kind == "k3":
        return k3
    if kind == "unbiased":
        if log_ratios is None:
            raise ValueError("kl(kind='unbiased') needs log_ratios")
        # ∇(ρ k3) = ρ (k3 + 1 - exp(-d)) ∇ log π, in which the exponentials cancel: written down, they do exactly.
        ratio, k3, slope = jax.lax.stop_gradient((jnp.exp(masked.float32(log_ratios)[0]), k3, d))
        return ratio * (k3 + slope * (logps - jax.lax.stop_gradient(logps)))
    raise ValueError(f"kl(kind={kind!r}): must be k1, k2, k3 or unbiased")
