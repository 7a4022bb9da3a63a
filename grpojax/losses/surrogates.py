"""Surrogates: the policy loss of a token, clipped or not, by ratio or by log-prob. Imports jax only.

A surrogate is ``(log_ratios, advantages) -> token losses``, all ``[..., T]``, 0 where both are 0. Any such function is
a surrogate. It returns a loss for each token, not their mean: `policy_loss` takes the weighted sum. What else it may
have:

===============  ======================================================================================
``needs``        what it reads more, by keyword: ``logps``, the differentiated log-probs; ``sequence_mean``,
                 the function that gives each token the mean over its sample
``marks``        called as it is, where its clip or its bound acts: name of a metric to ``[..., T]`` bool
``levels``       the levels of `log_ratio` that it takes; all, if it does not say
``reads_ratio``  False where it reads none
===============  ======================================================================================
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from grpojax import masked, shapes
from grpojax.types import AnyTokens

# The marks of tokens whose gradient is stopped.
STOPPING = ("clip_low", "clip_high", "dual_clip")


def inputs_of(
    surrogate: Any, logps: AnyTokens, mask: AnyTokens, segments: AnyTokens | None = None
) -> dict[Literal["logps", "sequence_mean"], Any]:
    """The further inputs of ``surrogate``, by name, besides log-ratios and advantages.

    ``logps`` and ``mask`` are ``[..., T]``, ``segments`` as in `grpojax.masked.sequence_total`.

    Example:
      >>> list(inputs_of(reinforce(), jnp.zeros(3), jnp.ones(3, bool)))
      ['logps']
    """

    def sequence_mean(x):
        return masked.sequence_mean(x, mask, segments)

    offered = {"logps": logps, "sequence_mean": sequence_mean}
    return {name: offered[name] for name in getattr(surrogate, "needs", ())}


def acts_without_advantage(surrogate: Any) -> bool:
    """Whether a surrogate has a gradient where the advantage is 0, as `dppo_tv` with a ``kl_coef`` has.

    Looked for at log-ratios from -3 to 3 and log-probs from 0 to -8 nats, with values: not under jit.

    Example:
      >>> acts_without_advantage(clipped()), acts_without_advantage(lambda log_ratios, advantages: log_ratios**2)
      (False, True)
    """
    logps, apart = jnp.meshgrid(-jnp.linspace(0.01, 8.0, 23), jnp.linspace(-3.0, 3.0, 31))

    def total(logps):
        ratios = logps - jax.lax.stop_gradient(logps) + apart
        extra = inputs_of(surrogate, logps, jnp.ones_like(logps, bool))
        return surrogate(ratios, jnp.zeros_like(ratios), **extra).sum()

    return bool((jax.grad(total)(logps) != 0).any())


def name_of(surrogate: Any) -> str:
    """What errors and tables call a surrogate: the name of its class, or of the function that it is.

    Example:
      >>> name_of(clipped()), name_of(max)
      ('clipped', 'max')
    """
    return getattr(surrogate, "__name__", type(surrogate).__name__)


def check_surrogate(surrogate: Any) -> None:
    """Raises `ValueError`, with the remedy, for what is no surrogate: a name, a class that was not called, or an object
    without a hash.

    Example:
      >>> check_surrogate("clipped")
      Traceback (most recent call last):
      ValueError: surrogate='clipped' is no function: give losses.clipped(), or a function of your own
    """
    if isinstance(surrogate, type):
        raise ValueError(f"surrogate={surrogate.__name__} is a class: call it, {surrogate.__name__}()")
    if not callable(surrogate):
        ours = surrogate if isinstance(surrogate, str) and isinstance(globals().get(surrogate), type) else "clipped"
        raise ValueError(f"surrogate={surrogate!r} is no function: give losses.{ours}(), or a function of your own")
    if type(surrogate).__hash__ is None:  # programs are found by their objective
        raise ValueError(f"surrogate {name_of(surrogate)} has no hash: make its class a dataclass with frozen=True")


def as_float32(surrogate: Any, **arrays: AnyTokens) -> tuple[AnyTokens, ...]:
    """The arrays that a surrogate is called with, as float32; raises `ValueError` where their shapes differ.

    A single number stands for all tokens.

    Example:
      >>> [x.dtype.name for x in as_float32(clipped(), log_ratios=jnp.zeros(3), advantages=jnp.ones(3, jnp.bfloat16))]
      ['float32', 'float32']
    """
    shapes.check(name_of(surrogate), "...", **{name: x for name, x in arrays.items() if shapes.shape_of(x)})
    return masked.float32(*arrays.values())


@dataclasses.dataclass(frozen=True)
class clipped:
    """PPO's surrogate: ``-min(ρ A, clip(ρ, 1 - low, 1 + high) A)`` (arXiv 1707.06347; asymmetric: DAPO, 2503.14476).

    The gradient is 0 only where the ratio has passed the bound in the direction of its advantage.
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

    def __call__(self, log_ratios: AnyTokens, advantages: AnyTokens) -> AnyTokens:
        log_ratios, advantages = as_float32(self, log_ratios=log_ratios, advantages=advantages)
        ratio = jnp.exp(log_ratios)
        stop = self.is_clipped(ratio, advantages)
        bound = jnp.where(advantages > 0, 1.0 + self.high, 1.0 - self.low)
        if self.dual is not None:
            bound = jnp.where((advantages < 0) & (ratio > self.dual), self.dual, bound)
        return -jnp.where(stop, bound, ratio) * advantages

    def is_clipped(self, ratio: AnyTokens, advantages: AnyTokens) -> AnyTokens:
        """Where the surrogate is constant."""
        over, under = ratio > 1.0 + self.high, ratio < 1.0 - self.low
        if self.dual is not None:
            under = under | (ratio > self.dual)
        return ((advantages > 0) & over) | ((advantages < 0) & under)

    def marks(self, log_ratios: AnyTokens, advantages: AnyTokens) -> dict[str, AnyTokens]:
        """``clip_low``, ``clip_high`` and, separately, ``dual_clip``."""
        ratio = jnp.exp(log_ratios)
        stop = self.is_clipped(ratio, advantages)
        marks = {"clip_low": stop & (ratio < 1), "clip_high": stop & (ratio > 1)}
        if self.dual is not None:
            twice = (advantages < 0) & (ratio > self.dual)
            marks |= {"clip_high": marks["clip_high"] & ~twice, "dual_clip": twice}
        return marks


@dataclasses.dataclass(frozen=True, kw_only=True)
class unclipped:
    """``-ρ A``; at ``ratio="own"`` plain policy gradient with a value of ``-A``.

    On ``[...]``. The surrogate of GTPO (arXiv 2508.03772).

    Example:
      >>> log_ratios = jnp.array([0.3, -0.3, 0.1, -0.05])
      >>> [round(float(x), 4) for x in unclipped()(log_ratios, jnp.ones(4))]
      [-1.3499, -0.7408, -1.1052, -0.9512]
    """

    def __call__(self, log_ratios: AnyTokens, advantages: AnyTokens) -> AnyTokens:
        log_ratios, advantages = as_float32(self, log_ratios=log_ratios, advantages=advantages)
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
    reads_ratio = False

    def __call__(self, log_ratios: AnyTokens, advantages: AnyTokens, *, logps: AnyTokens) -> AnyTokens:
        _, advantages, logps = as_float32(self, log_ratios=log_ratios, advantages=advantages, logps=logps)
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

    def __call__(self, log_ratios: AnyTokens, advantages: AnyTokens, *, logps: AnyTokens) -> AnyTokens:
        log_ratios, advantages, logps = as_float32(self, log_ratios=log_ratios, advantages=advantages, logps=logps)
        weight = jnp.clip(jax.lax.stop_gradient(jnp.exp(log_ratios)), self.weight_min, self.weight_max)
        return -weight * advantages * logps

    def marks(self, log_ratios: AnyTokens, advantages: AnyTokens, *, logps: AnyTokens) -> dict[str, AnyTokens]:
        """``cap_hit``: the weight is at a bound."""
        ratio = jnp.exp(log_ratios)
        return {"cap_hit": (ratio > self.weight_max) | (ratio < self.weight_min)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class vespo:
    """``-sg[φ(w)] A log π``, ``φ(w) = exp(λ + k log w - λ w)``: a soft weight of samples (VESPO, arXiv 2602.10693).

    w is the product of a sample's ratios, between 1e-8 and e^20; φ(1) = 1. φ is largest at w = k / λ, which is under 1
    for A >= 0 and over 1 for A < 0. Takes ratio="joint". On ``[..., T]``.

    Attributes:
      k_positive: k of tokens with A >= 0; 2 in TRL.
      lambda_positive: λ of tokens with A >= 0; 3 in TRL.
      k_negative: k of tokens with A < 0; 3 in TRL.
      lambda_negative: λ of tokens with A < 0; 2 in TRL.

    Example:
      >>> log_ratios, logps = jnp.log(jnp.array([0.5, 1.0, 2.0])), jnp.full(3, -1.0)
      >>> [round(float(x), 4) for x in vespo()(log_ratios, jnp.ones(3), logps=logps)]
      [1.1204, 1.0, 0.1991]
    """

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    needs = ("logps",)
    levels = ("joint",)

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if value <= 0:
                raise ValueError(f"{name}={value}: must be over 0")

    def __call__(self, log_ratios: AnyTokens, advantages: AnyTokens, *, logps: AnyTokens) -> AnyTokens:
        log_ratios = jax.lax.stop_gradient(log_ratios)
        log_ratios, advantages, logps = as_float32(self, log_ratios=log_ratios, advantages=advantages, logps=logps)
        k = jnp.where(advantages >= 0, self.k_positive, self.k_negative)
        rate = jnp.where(advantages >= 0, self.lambda_positive, self.lambda_negative)
        log_weight = jnp.clip(log_ratios, math.log(1e-8), 20.0)
        return -jnp.exp(rate + k * log_weight - rate * jnp.exp(log_weight)) * advantages * logps


@dataclasses.dataclass(frozen=True, kw_only=True)
class soft_adaptive:
    """``-f(ρ) A``, ``f(ρ) = 4/τ σ(τ (ρ - 1))`` (SAPO, arXiv 2511.20347): a clip without an edge.

    The gradient's weight is 1 at ratio 1. The *value* there is 2/τ, so it does not compare with PPO's. On ``[...]``.

    Attributes:
      tau_positive: τ of tokens with A > 0: how fast their weight falls as the ratio leaves 1.
      tau_negative: τ of the other tokens.

    Example:
      >>> [round(float(x), 4) for x in soft_adaptive()(jnp.log(jnp.array([0.5, 1.0, 2.0])), jnp.ones(3))]
      [-1.5102, -2.0, -2.9242]
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self):
        if min(self.tau_positive, self.tau_negative) <= 0:
            raise ValueError(f"tau_positive={self.tau_positive}, tau_negative={self.tau_negative}: over 0")

    def __call__(self, log_ratios: AnyTokens, advantages: AnyTokens) -> AnyTokens:
        log_ratios, advantages = as_float32(self, log_ratios=log_ratios, advantages=advantages)
        tau = jnp.where(advantages > 0, self.tau_positive, self.tau_negative)
        return -4.0 / tau * jax.nn.sigmoid(tau * (jnp.exp(log_ratios) - 1.0)) * advantages


@dataclasses.dataclass(frozen=True, kw_only=True)
class geometric:
    """``-A exp(mean_t δ_t)``, each log-ratio first clipped on the side its advantage pushes to
    (GMPO, arXiv 2507.20673).

    A > 0: ``min(δ, high)``; A < 0: ``max(δ, -low)``, in nats. A clipped token has no gradient; the others keep their
    gradient. Takes token-level log-ratios; goes with ``aggregate="sequence_mean"``. On ``[..., T]``.

    Example:
      >>> log_ratios = jnp.array([0.9, -0.1, 0.2, -0.7])
      >>> average = lambda x: masked.sequence_mean(x, jnp.ones(4, bool))
      >>> [round(float(x), 4) for x in geometric()(log_ratios, jnp.ones(4), sequence_mean=average)]
      [-0.9512, -0.9512, -0.9512, -0.9512]
    """

    low: float = 0.4
    high: float = 0.4

    needs = ("sequence_mean",)
    levels = ("token",)

    def __post_init__(self):
        if min(self.low, self.high) < 0:
            raise ValueError(f"low={self.low}, high={self.high}: 0 or more, in nats")

    def __call__(
        self, log_ratios: AnyTokens, advantages: AnyTokens, *, sequence_mean: Callable[[AnyTokens], AnyTokens]
    ) -> AnyTokens:
        log_ratios, advantages = as_float32(self, log_ratios=log_ratios, advantages=advantages)
        kept = jnp.where((advantages >= 0) & (log_ratios > self.high), self.high, log_ratios)
        kept = jnp.where((advantages < 0) & (log_ratios < -self.low), -self.low, kept)
        return -jnp.exp(sequence_mean(kept)) * advantages

    def is_clipped(self, ratio: AnyTokens, advantages: AnyTokens) -> AnyTokens:
        """Which tokens have no gradient of their own."""
        over, under = ratio > math.exp(self.high), ratio < math.exp(-self.low)
        return ((advantages > 0) & over) | ((advantages < 0) & under)

    def marks(
        self, log_ratios: AnyTokens, advantages: AnyTokens, *, sequence_mean: Callable[[AnyTokens], AnyTokens]
    ) -> dict[str, AnyTokens]:
        """``clip_low`` and ``clip_high``."""
        ratio = jnp.exp(log_ratios)
        stop = self.is_clipped(ratio, advantages)
        return {"clip_low": stop & (ratio < 1), "clip_high": stop & (ratio > 1)}
