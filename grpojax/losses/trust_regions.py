"""Surrogates that stop a token by how far its probability has moved, not by its ratio: DPPO (arXiv 2602.04879).

`clipped` stops unlikely tokens early, since their ratios move most, and likely ones late. The notation is that of
`grpojax.losses.surrogates`.
"""

import dataclasses

import jax.numpy as jnp

from grpojax import masked
from grpojax.losses.surrogates import as_float32
from grpojax.types import AnyTokens

_SMALLEST = 1e-30  # of a probability whose logarithm is taken


def _probabilities(log_ratios: AnyTokens, logps: AnyTokens) -> tuple[AnyTokens, AnyTokens]:
    """``(log π, log μ)`` of the drawn token, float32; both at most 0."""
    log_ratios, logps = masked.float32(log_ratios, logps)
    return jnp.minimum(logps, 0.0), jnp.minimum(logps - log_ratios, 0.0)


@dataclasses.dataclass(frozen=True)
class dppo_tv:
    """``-keep ρ A + kl_coef (log ρ)²``, ``keep`` by total variation (DPPO, arXiv 2602.04879).

    π is the policy's probability of the drawn token, and μ that of the policy in the ratio's denominator: keep = 0
    where A > 0 and ``π - μ > high``, or A < 0 and ``μ - π > low``. It is constant for the gradient. Takes
    ratio="token". On ``[...]``, ``logps`` differentiated, nats.

    Attributes:
      low, high: how far the probability may fall and rise, 0.2 in prime-rl.
      kl_coef: weight of ``(log ρ)²`` on all tokens, dropped ones too (arXiv 2602.02276).

    Example:
      >>> log_ratios, logps = jnp.log(jnp.array([1.5, 1.5])), jnp.log(jnp.array([0.9, 0.03]))
      >>> [round(float(x), 4) for x in dppo_tv()(log_ratios, jnp.ones(2), logps=logps)]
      [0.0, -1.5]
    """

    low: float = 0.2
    high: float = 0.2
    _: dataclasses.KW_ONLY
    kl_coef: float = 0.0

    needs = ("logps",)
    levels = ("token",)

    def __post_init__(self):
        if min(self.low, self.high, self.kl_coef) < 0:
            raise ValueError(f"low={self.low}, high={self.high}, kl_coef={self.kl_coef}: 0 or more")

    def __call__(self, log_ratios: AnyTokens, advantages: AnyTokens, *, logps: AnyTokens) -> AnyTokens:
        log_ratios, advantages, logps = as_float32(self, log_ratios=log_ratios, advantages=advantages, logps=logps)
        marks = self.marks(log_ratios, advantages, logps=logps)
        loss = jnp.where(marks["clip_low"] | marks["clip_high"], 0.0, -jnp.exp(log_ratios) * advantages)
        return loss + self.kl_coef * jnp.square(log_ratios) if self.kl_coef else loss

    def marks(self, log_ratios: AnyTokens, advantages: AnyTokens, *, logps: AnyTokens) -> dict[str, AnyTokens]:
        """``clip_low`` and ``clip_high``: dropped, with A < 0 and with A > 0."""
        new, old = _probabilities(log_ratios, logps)
        rise = jnp.exp(new) - jnp.exp(old)
        return {"clip_low": (advantages < 0) & (-rise > self.low), "clip_high": (advantages > 0) & (rise > self.high)}


@dataclasses.dataclass(frozen=True)
class dppo_kl(dppo_tv):
    """`dppo_tv` with the KL of "this token or another" in place of the difference (DPPO, arXiv 2602.04879).

    ``d = μ log(μ / π) + (1 - μ) log((1 - μ) / (1 - π))``: keep = 0 where A > 0, π > μ and ``d > high``, or A < 0,
    π < μ and ``d > low``.

    Attributes:
      low, high: bounds in nats; 0.05 is from a re-implementation, prime-rl has none.
      kl_coef: as in `dppo_tv`.

    Example:
      >>> log_ratios, logps = jnp.log(jnp.array([1.5, 1.5])), jnp.log(jnp.array([0.9, 0.03]))
      >>> [round(float(x), 4) for x in dppo_kl()(log_ratios, jnp.ones(2), logps=logps)]
      [0.0, -1.5]
    """

    low: float = 0.05
    high: float = 0.05

    def marks(self, log_ratios: AnyTokens, advantages: AnyTokens, *, logps: AnyTokens) -> dict[str, AnyTokens]:
        """``clip_low`` and ``clip_high``: dropped, with A < 0 and with A > 0."""
        new, old = _probabilities(log_ratios, logps)
        others = [jnp.maximum(-jnp.expm1(x), _SMALLEST) for x in (new, old)]
        divergence = jnp.exp(old) * (old - new) + others[1] * (jnp.log(others[1]) - jnp.log(others[0]))
        return {
            "clip_low": (advantages < 0) & (new < old) & (divergence > self.low),
            "clip_high": (advantages > 0) & (new > old) & (divergence > self.high),
        }
