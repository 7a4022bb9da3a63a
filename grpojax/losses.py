"""The clipped policy objective in pieces: ratios, surrogates, KL estimators, aggregation weights.

Aggregation is an array: `loss_weights` is computed once on the global batch, and every term of the loss is
``sum(weights * x)``. Any split of the batch over micro-batches or devices then sums to the same gradient.
Everything is float32; masks come before ``exp``. This module imports jax only.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from grpojax import masked

Aggregation = Literal["token_mean", "sequence_mean", "prompt_mean", "sequence_sum", "constant"]
KLKind = Literal["k1", "k2", "k3", "unbiased"]

# exp() of more than this is no ratio of two policies any more; it also keeps the gradient finite.
_LOG_RATIO_LIMIT = 20.0


def loss_weights(mask, how: Aggregation, *, constant: float | None = None, count_empty: bool = True):
    """Weights ``w [P, G, T]`` such that ``sum(w * l)`` aggregates token losses ``l``.

    ================  ==========================================================  =====================
    how               formula                                                     used by
    ================  ==========================================================  =====================
    token_mean        Σ m l / Σ m over the batch                                  DAPO as coded, CISPO
    sequence_mean     mean over samples of (Σ m l / length)                       GRPO, GSPO
    prompt_mean       mean over prompts of (Σ m l / Σ m of the group)             DAPO as printed
    sequence_sum      mean over samples of Σ m l                                  RLOO, REINFORCE
    constant          mean over samples of (Σ m l / constant)                     Dr. GRPO
    ================  ==========================================================  =====================

    Args:
      mask: ``[P, G, T]`` bool, the tokens that count. Must be the *global* batch.
      how: a row of the table.
      constant: the divisor of "constant", usually the longest completion allowed, tokens.
      count_empty: whether samples without any token count in the means over samples (prompts).

    Returns:
      ``[P, G, T]`` float32, 0 where ``mask`` is not set; all 0 if it is set nowhere.

    Example:
      >>> import jax.numpy as jnp
      >>> mask = masked.from_lengths(jnp.array([[4, 2]]), 4)
      >>> loss = jnp.array([[[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 0.0, 0.0]]])
      >>> float((loss_weights(mask, "sequence_mean") * loss).sum())
      8.75
    """
    if (constant is not None) != (how == "constant"):
        raise ValueError(
            f"loss_weights(how={how!r}, constant={constant!r}): a constant goes with 'constant' only"
        )
    mask = jnp.asarray(mask)
    tokens = mask.sum(-1, keepdims=True).astype(jnp.float32)  # [P, G, 1]
    if how == "token_mean":
        weights = 1.0 / jnp.maximum(tokens.sum(), 1.0)
    elif how == "prompt_mean":
        group = tokens.sum(1, keepdims=True)
        prompts = jnp.float32(mask.shape[0]) if count_empty else (group > 0).sum().astype(jnp.float32)
        weights = 1.0 / (jnp.maximum(group, 1.0) * jnp.maximum(prompts, 1.0))
    elif how in ("sequence_mean", "sequence_sum", "constant"):
        samples = (
            jnp.float32(mask.shape[0] * mask.shape[1])
            if count_empty
            else (tokens > 0).sum().astype(jnp.float32)
        )
        each = {"sequence_mean": jnp.maximum(tokens, 1.0), "sequence_sum": 1.0, "constant": constant or 1.0}[
            how
        ]
        weights = 1.0 / (each * jnp.maximum(samples, 1.0))
    else:
        raise ValueError(f"loss_weights(how={how!r}): unknown aggregation")
    return jnp.where(mask, weights, 0.0)


def log_ratio(logps, behavior_logps, mask, level: Literal["token"] = "token"):
    """``log π(token) - log π_behavior(token)``, 0 where ``mask`` is not set, limited to ±20.

    Args:
      logps: ``[...]`` log-probs, differentiated.
      behavior_logps: ``[...]`` log-probs of the policy the ratio is taken against, or None: the policy itself, so
        that the ratio is exactly 1 and its gradient is that of the log-prob.
      mask: ``[...]`` bool.
      level: "token".
    """
    if level != "token":
        raise ValueError(f"log_ratio(level={level!r}): must be 'token'")
    logps = jnp.where(mask, logps, 0.0).astype(jnp.float32)
    behavior = (
        jax.lax.stop_gradient(logps) if behavior_logps is None else jnp.where(mask, behavior_logps, 0.0)
    )
    return jnp.clip(logps - behavior.astype(jnp.float32), -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class clipped:
    """PPO's surrogate: ``-min(ρ A, clip(ρ, 1 - low, 1 + high) A)`` (arXiv 1707.06347; asymmetric: DAPO, 2503.14476).

    The gradient is 0 where the ratio has passed the bound that its advantage pushes towards, and only there.
    """

    low: float = 0.2
    high: float = 0.2

    def __call__(self, log_ratios, advantages):
        ratio = jnp.exp(log_ratios)
        stop = self.is_clipped(ratio, advantages)
        bound = jnp.where(advantages > 0, 1.0 + self.high, 1.0 - self.low)
        return -jnp.where(stop, bound, ratio) * advantages

    def is_clipped(self, ratio, advantages):
        """Where the surrogate is constant."""
        over, under = ratio > 1.0 + self.high, ratio < 1.0 - self.low
        return ((advantages > 0) & over) | ((advantages < 0) & under)


def kl(logps, ref_logps, kind: KLKind = "k3", *, log_ratios=None):
    """Estimates ``KL(π || π_ref)`` per token from the drawn token.

    With ``d = logps - ref_logps``: k1 = d; k2 = d²/2; k3 = exp(-d) - 1 + d (Schulman's note; GRPO's choice);
    unbiased = ρ k3 with the differentiated ratio ρ to the behaviour policy (DeepSeek-V3.2, arXiv 2512.02556).

    As a *loss* k2 and unbiased have the gradient of KL(π || π_ref), k3 that of KL(π_ref || π), k1 none. In the
    *reward* only k1 has the right one. `Objective` refuses the others.

    Args:
      logps: ``[...]`` differentiated.
      ref_logps: ``[...]``.
      kind: the estimator.
      log_ratios: for "unbiased": `log_ratio` to the behaviour policy.
    """
    d = jnp.clip(
        logps.astype(jnp.float32) - ref_logps.astype(jnp.float32), -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT
    )
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * jnp.square(d)
    k3 = jnp.expm1(-d) + d
    if kind == "k3":
        return k3
    if kind == "unbiased":
        if log_ratios is None:
            raise ValueError("kl(kind='unbiased') needs log_ratios")
        return jnp.exp(log_ratios) * k3
    raise ValueError(f"kl(kind={kind!r}): must be k1, k2, k3 or unbiased")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """What an update minimises, as data.

    Attributes:
      surrogate: ``(log_ratios, advantages) -> token losses``.
      ratio: level of the importance ratio.
      aggregate: how token losses become one number (`loss_weights`).
      constant: divisor of ``aggregate="constant"``, tokens.
      kl_coef: weight of the KL to the reference; 0 means that no reference is ever evaluated.
      kl_kind: the estimator (`kl`).
      kl_in: "loss" (k2, k3 or unbiased) or "reward" (k1, subtracted from the reward before advantages).
      entropy_coef: weight of the entropy bonus; 0 means that no entropy is ever computed for the loss.
    """

    surrogate: Callable[..., Any] = clipped()
    ratio: Literal["token"] = "token"
    aggregate: Aggregation = "sequence_mean"
    constant: float | None = None
    kl_coef: float = 0.0
    kl_kind: KLKind = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coef: float = 0.0

    def __post_init__(self):
        for name, choices in (
            ("aggregate", get_args(Aggregation)),
            ("kl_kind", get_args(KLKind)),
            ("kl_in", ("loss", "reward")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(choices)}")
        if self.kl_coef < 0:
            raise ValueError(f"kl_coef={self.kl_coef}: must be 0 or more")
        if (self.constant is not None) != (self.aggregate == "constant") or (self.constant or 1.0) <= 0:
            raise ValueError(
                f"aggregate={self.aggregate!r} with constant={self.constant}: a constant over 0 goes with 'constant' only"
            )
        if self.kl_coef > 0 and self.kl_in == "loss" and self.kl_kind == "k1":
            raise ValueError(
                "kl_kind='k1' with kl_in='loss': its expected gradient is 0; take k2, k3 or unbiased, or kl_in='reward'"
            )
        if self.kl_coef > 0 and self.kl_in == "reward" and self.kl_kind != "k1":
            raise ValueError(
                f"kl_kind={self.kl_kind!r} with kl_in='reward': its gradient is not that of a KL; only k1 belongs there"
            )

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef != 0


def policy_loss(logps, batch, objective: Objective, *, entropy=None):
    """The loss of one (micro-)batch and its metrics, all of them sums that add up over micro-batches.

    ``sum(w * (surrogate + kl_coef * kl - entropy_coef * entropy))``

    With one update a rollout and centred advantages the *value* of the policy term is about 0 (the ratio is 1);
    its gradient is ``-Σ w A ∇ log π`` and is not.

    Args:
      logps: ``[...]`` differentiated log-probs of the completion tokens.
      batch: anything with ``weights``, ``advantages`` and optionally ``behavior_logps``, ``ref_logps`` of that
        shape, such as `grpojax.types.TrainBatch`. ``weights`` is 0 on padding; what stands there in the other
        arrays is never read.
      objective: the terms.
      entropy: ``[...]`` differentiated entropy, when ``objective.needs_entropy``.

    Returns:
      ``(loss [] float32, metrics)``. Metrics with a name that ends in ``_sum`` are sums over tokens.
    """
    weights = jnp.asarray(batch.weights, jnp.float32)
    mask = weights > 0
    advantages = jnp.where(mask, batch.advantages, 0.0).astype(jnp.float32)
    logps = jnp.where(mask, logps, 0.0).astype(jnp.float32)
    ratios = log_ratio(logps, batch.behavior_logps, mask, objective.ratio)
    policy = (weights * objective.surrogate(ratios, advantages)).sum()
    loss = policy
    metrics = {"policy_loss": policy}
    ratio = jax.lax.stop_gradient(jnp.exp(ratios))
    if hasattr(objective.surrogate, "is_clipped"):
        stop = mask & objective.surrogate.is_clipped(ratio, advantages)
        metrics["clip_low_sum"] = (stop & (advantages < 0)).sum().astype(jnp.float32)
        metrics["clip_high_sum"] = (stop & (advantages > 0)).sum().astype(jnp.float32)
    metrics["ratio_sum"] = masked.total(ratio, mask)
    metrics["tokens"] = mask.sum().astype(jnp.float32)
    if objective.needs_reference:
        if batch.ref_logps is None:
            raise ValueError(f"kl_coef={objective.kl_coef} needs batch.ref_logps, which is missing")
        ref = jnp.where(mask, batch.ref_logps, 0.0)
        if objective.kl_in == "loss":
            term = (weights * kl(logps, ref, objective.kl_kind, log_ratios=ratios)).sum()
            loss = loss + objective.kl_coef * term
            metrics["kl_loss"] = term
        metrics["kl_sum"] = jax.lax.stop_gradient(masked.total(kl(logps, ref, "k3"), mask))
    if objective.needs_entropy:
        if entropy is None:
            raise ValueError(f"entropy_coef={objective.entropy_coef} needs entropy, which is missing")
        term = (weights * jnp.where(mask, entropy, 0.0).astype(jnp.float32)).sum()
        loss = loss - objective.entropy_coef * term
    if entropy is not None:
        metrics["entropy_sum"] = jax.lax.stop_gradient(masked.total(entropy, mask))
    metrics["loss"] = loss
    return loss, metrics
