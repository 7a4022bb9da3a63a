"""What a token of the policy loss is: clipped or not, by ratio or by log-prob. Imports jax only.

A surrogate is ``(log_ratios, advantages) -> token losses``, all ``[..., T]``, 0 where both are 0. One that reads
more names it in ``needs``: ``logps``, the differentiated log-probs, or ``sequence_mean``, the function that gives
each token the mean over its sample. One that has a clip says where it is constant in ``is_clipped``.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from grpojax import masked


@dataclasses.dataclass(frozen=True)
class clipped:
    """PPO's surrogate: ``-min(ρ A, clip(ρ, 1 - low, 1 + high) A)`` (arXiv 1707.06347; asymmetric: DAPO, 2503.14476).

    The gradient is 0 where the ratio has passed the bound that its advantage pushes towards, and only there.
    On ``[...]``, ρ of `log_ratio`.

    Attributes:
      low, high: how far the ratio may fall under and rise over 1.
      dual: with A < 0 the loss also stops at ``-dual A``, ratios over ``dual`` (dual clip, arXiv 1912.09729: 3;
        INTELLECT-2's two-sided clip: 4). None for no such bound.

    Example:
      >>> log_ratios = jnp.array([0.3, -0.3, 0.1, -0.05])
      >>> [round(float(x), 4) for x in clipped()(log_ratios, jnp.ones(4))]
      [-1.2, -0.7408, -1.1052, -0.9512]
    """

    low: float = 0.2
    high: float = 0.2
    _: dataclasses.KW_ONLY
    dual: float | None = None

    def __post_init__(self):
        if not 0 <= self.low <= 1 or self.high < 0:
            raise ValueError(f"low={self.low}, high={self.high}: low in [0, 1], high 0 or more")
        if self.dual is not None and self.dual <= 1:
            raise ValueError(f"dual={self.dual}: must be over 1")

    def __call__(self, log_ratios, advantages):
        log_ratios, advantages = masked.float32(log_ratios, advantages)
        ratio = jnp.exp(log_ratios)
        stop = self.is_clipped(ratio, advantages)
        bound = jnp.where(advantages > 0, 1.0 + self.high, 1.0 - self.low)
        if self.dual is not None:
            bound = jnp.where((advantages < 0) & (ratio > self.dual), self.dual, bound)
        return -jnp.where(stop, bound, ratio) * advantages

    def is_clipped(self, ratio, advantages):
        """Where the surrogate is constant."""
        over, under = ratio > 1.0 + self.high, ratio < 1.0 - self.low
        if self.dual is not None:
            under = under | (ratio > self.dual)
        return ((advantages > 0) & over) | ((advantages < 0) & under)


@dataclasses.dataclass(frozen=True, kw_only=True)
class unclipped:
    """``-ρ A``; at ``ratio="own"`` plain policy gradient with a value of ``-A``.

    On ``[...]``. The surrogate of GTPO (arXiv 2508.03772).

    Example:
      >>> log_ratios = jnp.array([0.3, -0.3, 0.1, -0.05])
      >>> [round(float(x), 4) for x in unclipped()(log_ratios, jnp.ones(4))]
      [-1.3499, -0.7408, -1.1052, -0.9512]
    """

    def __call__(self, log_ratios, advantages):
        log_ratios, advantages = masked.float32(log_ratios, advantages)
        return -jnp.exp(log_ratios) * advantages


@dataclasses.dataclass(frozen=True, kw_only=True)
class reinforce:
    """``-A log π``: the policy gradient, no ratio and no clip (RLOO, arXiv 2402.14740; GPG, 2504.02546).

    On ``[...]``, ``logps`` differentiated, nats.

    Example:
      >>> log_ratios, logps = jnp.zeros(4), jnp.array([-0.7, -2.3, -0.4, -1.55])
      >>> [round(float(x), 4) for x in reinforce()(log_ratios, jnp.ones(4), logps=logps)]
      [0.7, 2.3, 0.4, 1.55]
    """

    needs = ("logps",)

    def __call__(self, log_ratios, advantages, *, logps):
        advantages, logps = masked.float32(advantages, logps)
        return -advantages * logps


@dataclasses.dataclass(frozen=True)
class cispo:
    """``-sg[clip(ρ, weight_min, weight_max)] A log π`` (MiniMax-M1, arXiv 2506.13585): no token loses its gradient.

    The bounds are on the weight itself, not on its distance from 1 (the paper and verl print ``1 + ε``, TRL an
    absolute cap; the paper's ε is not disclosed). 5 is TRL's. On ``[...]``.

    Example:
      >>> log_ratios, logps = jnp.array([0.3, -0.3, 0.1, -0.05]), jnp.array([-0.7, -2.3, -0.4, -1.55])
      >>> [round(float(x), 4) for x in cispo(1.28)(log_ratios, jnp.ones(4), logps=logps)]
      [0.896, 1.7039, 0.4421, 1.4744]
    """

    weight_max: float = 5.0
    _: dataclasses.KW_ONLY
    weight_min: float = 0.0

    needs = ("logps",)

    def __post_init__(self):
        if not 0 <= self.weight_min <= 1 <= self.weight_max:
            raise ValueError(
                f"weight_min={self.weight_min}, weight_max={self.weight_max}: bounds on the ratio, around 1"
            )

    def __call__(self, log_ratios, advantages, *, logps):
        log_ratios, advantages, logps = masked.float32(log_ratios, advantages, logps)
        weight = jnp.clip(jax.lax.stop_gradient(jnp.exp(log_ratios)), self.weight_min, self.weight_max)
        return -weight * advantages * logps


@dataclasses.dataclass(frozen=True, kw_only=True)
class soft_adaptive:
    """``-f(ρ) A``, ``f(ρ) = 4/τ σ(τ (ρ - 1))`` (SAPO, arXiv 2511.20347): a clip without an edge.

    τ is ``tau_positive`` where A > 0 and ``tau_negative`` elsewhere. The gradient's weight is 1 at ratio 1; the
    *value* there is 2/τ, so it does not compare with PPO's. On ``[...]``.

    Example:
      >>> [round(float(x), 4) for x in soft_adaptive()(jnp.log(jnp.array([0.5, 1.0, 2.0])), jnp.ones(3))]
      [-1.5102, -2.0, -2.9242]
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self):
        if min(self.tau_positive, self.tau_negative) <= 0:
            raise ValueError(f"tau_positive={self.tau_positive}, tau_negative={self.tau_negative}: over 0")

    def __call__(self, log_ratios, advantages):
        log_ratios, advantages = masked.float32(log_ratios, advantages)
        tau = jnp.where(advantages > 0, self.tau_positive, self.tau_negative)
        return -4.0 / tau * jax.nn.sigmoid(tau * (jnp.exp(log_ratios) - 1.0)) * advantages


@dataclasses.dataclass(frozen=True, kw_only=True)
class geometric:
    """``-A exp(mean_t δ_t)``, each log-ratio first clipped on the side its advantage pushes to
    (GMPO, arXiv 2507.20673).

    A > 0: ``min(δ, high)``; A < 0: ``max(δ, -low)``, in nats. A clipped token has no gradient; the others keep theirs.
    Takes token-level log-ratios; goes with ``aggregate="sequence_mean"``. On ``[..., T]``.

    Example:
      >>> log_ratios = jnp.array([0.9, -0.1, 0.2, -0.7])
      >>> average = lambda x: masked.sequence_mean(x, jnp.ones(4, bool))
      >>> [round(float(x), 4) for x in geometric()(log_ratios, jnp.ones(4), sequence_mean=average)]
      [-0.9512, -0.9512, -0.9512, -0.9512]
    """

    low: float = 0.4
    high: float = 0.4

    needs = ("sequence_mean",)

    def __post_init__(self):
        if min(self.low, self.high) < 0:
            raise ValueError(f"low={self.low}, high={self.high}: 0 or more, in nats")

    def __call__(self, log_ratios, advantages, *, sequence_mean):
        log_ratios, advantages = masked.float32(log_ratios, advantages)
        kept = jnp.where((advantages >= 0) & (log_ratios > self.high), self.high, log_ratios)
        kept = jnp.where((advantages < 0) & (log_ratios < -self.low), -self.low, kept)
        return -jnp.exp(sequence_mean(kept)) * advantages

    def is_clipped(self, ratio, advantages):
        """Which tokens have no gradient of their own."""
        over, under = ratio > math.exp(self.high), ratio < math.exp(-self.low)
        return ((advantages > 0) & over) | ((advantages < 0) & under)
