"""The policy objective in pieces: ratios, surrogates, KL estimators, corrections, aggregation weights.

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
from grpojax.losses.surrogates import cispo, clipped, geometric, reinforce, soft_adaptive, unclipped

__all__ = [
    "Aggregation", "Gate", "Importance", "ImportanceLevel", "KLKind", "KLPlace", "Objective", "Ratio", "cispo", "clip_cov",
    "clipped", "covariance", "displacement", "displacement_weights", "dpo_loss", "full_kl", "geometric",
    "importance_correction", "kl", "kl_cov", "kl_cov_loss", "log_ratio", "loss_weights", "off_policy_mask", "policy_loss",
    "reinforce", "soft_adaptive", "unclipped", "value_loss",
]  # fmt: skip

Aggregation = Literal["token_mean", "sequence_mean", "prompt_mean", "sequence_sum", "constant"]
KLKind = Literal["k1", "k2", "k3", "unbiased"]
KLPlace = Literal["loss", "reward", "token_reward"]
Ratio = Literal["token", "sequence", "joint", "sequence_token", "trace", "trace_both", "own"]
Importance = Literal["none", "truncate", "mask"]
ImportanceLevel = Literal["token", "sequence", "geometric"]
Gate = Literal["token", "action", "response"]

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

    verl's "seq-mean-token-sum-norm", Σ m l / L without the mean over samples, is ``constant = L / (P G)``.

    Sources: GRPO, arXiv 2402.03300; DAPO, 2503.14476; Dr. GRPO, 2503.20783; RLOO, 2402.14740; GSPO, 2507.18071; CISPO,
    2506.13585.

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
        raise ValueError(f"loss_weights(how={how!r}, constant={constant!r}): a constant goes with 'constant' only")
    if constant is not None and constant <= 0:
        raise ValueError(f"loss_weights(constant={constant}): must be over 0")
    mask = jnp.asarray(mask)
    tokens = mask.sum(-1, keepdims=True).astype(jnp.float32)  # [P, G, 1]
    if how == "token_mean":
        weights = 1.0 / jnp.maximum(tokens.sum(), 1.0)
    elif how == "prompt_mean":
        group = tokens.sum(1, keepdims=True)
        prompts = jnp.float32(mask.shape[0]) if count_empty else (group > 0).sum().astype(jnp.float32)
        weights = 1.0 / (jnp.maximum(group, 1.0) * jnp.maximum(prompts, 1.0))
    elif how in ("sequence_mean", "sequence_sum", "constant"):
        samples = jnp.float32(mask.shape[0] * mask.shape[1]) if count_empty else (tokens > 0).sum().astype(jnp.float32)
        each = {"sequence_mean": jnp.maximum(tokens, 1.0), "sequence_sum": 1.0, "constant": constant or 1.0}[how]
        weights = 1.0 / (each * jnp.maximum(samples, 1.0))
    else:
        raise ValueError(f"loss_weights(how={how!r}): unknown aggregation")
    return jnp.where(mask, weights, 0.0)


def log_ratio(
    logps,
    behavior_logps,
    mask,
    level: Ratio = "token",
    *,
    decay: float | None = None,
    segments=None,
):
    """The logarithm of the importance ratio that each token's loss takes, 0 where ``mask`` is not set, within ±20.

    With ``δ = log π(token) - log π_behavior(token)`` and sums over a sample's tokens:

    ==============  ======================================================  =============================
    level           formula                                                 used by
    ==============  ======================================================  =============================
    token           δ_t                                                     PPO, GRPO
    sequence        mean_s δ_s                                              GSPO (arXiv 2507.18071)
    joint           Σ_s δ_s                                                 GSPO as some texts print it
    sequence_token  mean_s δ_s in value, the gradient of log π_t alone      GSPO-token (same)
    trace           Σ_{l <= t} decay^l δ_{t-l}                              GRPO-λ (arXiv 2510.00194)
    trace_both      the same, weights max(decay^l, decay^(t-l))             GRPO-λ, "both"
    own             0 in value, the gradient of log π_t                     GTPO, whatever the behaviour
    ==============  ======================================================  =============================

    "joint" lacks GSPO's root of the length: its ratios leave any clip range that was meant for "sequence".

    At ratio 1 a trace still differs from a token: token j gets the gradient of all later ones,
    ``(1 - decay^(T-j)) / (1 - decay)`` times, so a decay of 0.99 makes early tokens up to 100 times as strong.

    Returns ``[..., T]`` float32, nats. Sources of the rest: PPO, arXiv 1707.06347; GRPO, 2402.03300; GTPO, 2508.03772.

    Args:
      logps: ``[..., T]`` log-probs, differentiated.
      behavior_logps: ``[..., T]`` log-probs of the policy the ratio is taken against, or None: the policy itself, so
        that the ratio is exactly 1 and its gradient is that of the log-prob.
      mask: ``[..., T]`` bool.
      level: a row of the table.
      decay: γλ of the traces, in [0, 1]; None for all else.
      segments: ``[..., T]`` int32 where samples share the last axis (`grpojax.masked.sequence_total`).

    Example:
      >>> logps, old, mask = jnp.array([0.1, -0.2, 0.05]) - 1.0, jnp.full(3, -1.0), jnp.ones(3, bool)
      >>> [round(float(x), 4) for x in log_ratio(logps, old, mask, "sequence")]
      [-0.0167, -0.0167, -0.0167]
      >>> [round(float(x), 4) for x in log_ratio(logps, old, mask, "trace", decay=0.9)]
      [0.1, -0.11, -0.049]
    """
    if level not in get_args(Ratio):
        raise ValueError(f"log_ratio(level={level!r}): must be one of {', '.join(get_args(Ratio))}")
    if (decay is None) == level.startswith("trace"):
        raise ValueError(f"log_ratio(level={level!r}, decay={decay!r}): a decay goes with traces only")
    logps = jnp.where(mask, logps, 0.0).astype(jnp.float32)
    own = logps - jax.lax.stop_gradient(logps)
    behavior = None if level == "own" else behavior_logps
    if behavior is None:
        ratios = own
    else:
        ratios = logps - jax.lax.stop_gradient(jnp.where(mask, behavior, 0.0)).astype(jnp.float32)
    if level == "joint":
        ratios = masked.sequence_total(ratios, mask, segments)
    elif level in ("sequence", "sequence_token"):
        ratios = masked.sequence_mean(ratios, mask, segments)
        if level == "sequence_token":
            ratios = jax.lax.stop_gradient(ratios) + own
    elif decay is not None:
        ratios = _trace(ratios, mask, decay, segments, both=level == "trace_both")
    return jnp.where(mask, jnp.clip(ratios, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT), 0.0)


def _trace(x, mask, decay: float, segments, *, both: bool):
    """``y_t = Σ_{l <= t} w(t, l) x_{t-l}`` along the last axis, within segments."""
    if not 0 <= decay <= 1:
        raise ValueError(f"decay={decay}: must be between 0 and 1")
    x = jnp.where(mask, x, 0.0)
    size, axis = x.shape[-1], x.ndim - 1
    places = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), x.shape)
    fresh = places == 0
    if segments is not None:
        segments = jnp.asarray(segments)
        fresh = fresh.at[..., 1:].set(segments[..., 1:] != segments[..., :-1])

    def scan(x, decay):
        def join(before, after):
            return before[0] * after[0], before[1] * after[0] + after[1]

        carries = jnp.where(fresh, 0.0, jnp.float32(decay))
        return jax.lax.associative_scan(join, (carries, x), axis=axis)[1]

    recent = scan(x, decay)
    if not both:
        return recent
    # Positions before the middle of [0, t] weigh decay^position, those from it on decay^(t - position).
    start = jax.lax.cummax(jnp.where(fresh, places, 0), axis=axis)
    t = places - start
    middle = (t + 1) // 2
    power = lambda n: jnp.float32(decay) ** n.astype(jnp.float32)  # noqa: E731
    early = scan(power(t) * x, 1.0)
    before = jnp.maximum(start + middle - 1, 0)
    take = lambda y: jnp.take_along_axis(y, before, axis)  # noqa: E731
    return jnp.where(t == 0, recent, recent - power(t - middle + 1) * take(recent) + take(early))


def kl(logps, ref_logps, kind: KLKind = "k3", *, log_ratios=None, mask=None):
    """Estimates ``KL(π || π_ref)`` per token from the drawn token.

    With ``d = logps - ref_logps``: k1 = d; k2 = d²/2; k3 = exp(-d) - 1 + d (Schulman's note; GRPO's choice);
    unbiased = ρ k3 with the differentiated ratio ρ to the behaviour policy (DeepSeek-V3.2, arXiv 2512.02556).

    As a *loss* k2 and unbiased have the gradient of KL(π || π_ref), k3 that of KL(π_ref || π), k1 none. In the
    *reward* only k1 has the right one. `Objective` refuses the others. Float32 ``[...]``, nats.

    Args:
      logps: ``[...]`` differentiated.
      ref_logps: ``[...]`` constant.
      kind: the estimator.
      log_ratios: for "unbiased": `log_ratio` to the behaviour policy.
      mask: ``[...]`` bool, 0 where it is not set whatever stands there; None where all counts.

    Example:
      >>> p, q = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 0.75]))
      >>> [round(float((jnp.exp(p) * kl(p, q, kind)).sum()), 4) for kind in ("k1", "k2", "k3")]
      [0.1438, 0.1612, 0.1438]
    """
    logps, ref_logps = masked.float32(logps, jax.lax.stop_gradient(ref_logps))
    if mask is not None:
        logps, ref_logps = jnp.where(mask, logps, 0.0), jnp.where(mask, ref_logps, 0.0)
        log_ratios = None if log_ratios is None else jnp.where(mask, log_ratios, 0.0)
    d = jnp.clip(logps - ref_logps, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
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


def full_kl(logits, ref_logits):
    """``KL(π || π_ref) = Σ_v π(v) log(π(v) / π_ref(v))`` over the vocabulary, exact at each position:
    ``[..., V]`` to ``[...]``.

    Needs all logits of both models; the estimators of `kl` need the drawn token's log-probs alone.
    In nats; the definition that `kl` estimates.

    Example:
      >>> round(float(full_kl(jnp.array([0.2, -0.1, 0.4]), jnp.array([0.0, 0.5, -0.3]))), 6)
      0.140847
    """
    logits, ref_logits = masked.float32(logits, jax.lax.stop_gradient(ref_logits))
    logps = jax.nn.log_softmax(logits)
    return (jnp.exp(logps) * (logps - jax.nn.log_softmax(ref_logits))).sum(-1)


# --- constant factors and further terms


def importance_correction(
    train_logps,
    sampler_logps,
    mask,
    mode: Literal["truncate", "mask"] = "truncate",
    *,
    level: ImportanceLevel = "token",
    low: float | None = None,
    high: float = 2.0,
    segments=None,
):
    """Weights for what the sampler's numerics did to the samples: ``w = π_train / π_sampler``, constant, ``[..., T]``.

    Apart from the ratio of the objective, which is between two policies of the trainer.

    Sources: TIS and MIS as in TRL, whose defaults these are; IcePop is MIS with other bounds.

    Args:
      train_logps: ``[..., T]`` the behaviour policy as the trainer computes it.
      sampler_logps: ``[..., T]`` as the sampler reported it.
      mask: ``[..., T]`` bool; 0 elsewhere.
      mode: "truncate" gives ``min(w, high)`` (TIS), "mask" gives w inside ``[low, high]`` and 0 outside (MIS, IcePop).
      level: w of each token, the product over the sample, or its geometric mean.
      low: only with "mask"; None is 1/2 (TRL; IcePop takes 0.5 and 5).
      high: 2 in TRL.
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
    apart = jnp.where(mask, train_logps, 0.0).astype(jnp.float32)
    apart = jax.lax.stop_gradient(apart - jnp.where(mask, sampler_logps, 0.0).astype(jnp.float32))
    if level != "token":
        reduce = masked.sequence_total if level == "sequence" else masked.sequence_mean
        apart = reduce(apart, mask, segments)
    weight = jnp.exp(jnp.clip(apart, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))
    if mode == "truncate":
        weight = jnp.minimum(weight, high)
    else:
        weight = jnp.where((weight >= (0.5 if low is None else low)) & (weight <= high), weight, 0.0)
    return jnp.where(mask, weight, 0.0)


def off_policy_mask(logps, sampler_logps, advantages, mask, limit: float, *, segments=None):
    """``[..., T]`` float32: 0 on samples with ``A < 0`` and ``mean_t (log π_sampler - log π) > limit``, else 1.

    DeepSeek-V3.2 (arXiv 2512.02556): wrong samples that the policy has already left teach nothing more. ``limit`` in
    nats a token; the paper gives none, TRL suggests 0.5.
    ``logps``, ``sampler_logps``, ``advantages`` and ``mask`` are ``[..., T]``, ``segments`` as in `log_ratio`.

    Example:
      >>> logps, sampler = jnp.array([[-1.2, -1.4]] * 2), jnp.full((2, 2), -0.5)
      >>> advantages = jnp.array([[-1.0, -1.0], [1.0, 1.0]])
      >>> off_policy_mask(logps, sampler, advantages, logps < 0, 0.5).tolist()
      [[0.0, 0.0], [1.0, 1.0]]
    """
    logps = jax.lax.stop_gradient(jnp.where(mask, logps, 0.0).astype(jnp.float32))
    fallen = masked.sequence_mean(jnp.where(mask, sampler_logps, 0.0).astype(jnp.float32) - logps, mask, segments)
    return 1.0 - ((advantages < 0) & (fallen > limit)).astype(jnp.float32)


def covariance(logps, advantages, mask):
    """``(A - mean A) (log π - mean log π)`` over the batch's tokens ``[...]``, constant, 0 on padding
    (arXiv 2505.22617).

    Example:
      >>> logps, advantages = jnp.array([-0.1, -2.0, -0.5, -3.0]), jnp.array([1.0, 1.0, -1.0, -1.0])
      >>> [round(float(x), 4) for x in covariance(logps, advantages, logps < 0)]
      [1.3, -0.6, -0.9, 1.6]
    """
    logps = jax.lax.stop_gradient(jnp.asarray(logps, jnp.float32))
    advantages = jnp.asarray(advantages, jnp.float32)
    product = (advantages - masked.mean(advantages, mask)) * (logps - masked.mean(logps, mask))
    return jnp.where(mask, product, 0.0)


def clip_cov(key, cov, mask, *, fraction: float = 2e-4, low: float = 1.0, high: float = 5.0, skip=False):
    """Clip-Cov's mask (arXiv 2505.22617): False on ``max(floor(fraction N), 1)`` tokens drawn from ``low < cov < high``.

    N counts ``mask``. Set the *advantages* of these tokens to 0: what the loss divides by, its KL and its entropy stay.
    Needs the whole batch.

    Args:
      key: jax PRNG key of the draw.
      cov: ``[...]`` of `covariance`.
      mask: ``[...]`` bool.
      fraction: share of the tokens dropped.
      low, high: the range.
      skip: ``[...]`` bool, tokens never drawn: those that are clipped already.

    Example:
      >>> cov = jnp.array([1.3, -0.6, -0.9, 1.6])
      >>> clip_cov(jax.random.key(0), cov, jnp.ones(4, bool), fraction=0.5).tolist()
      [False, True, True, False]
    """
    candidates = mask & (cov > low) & (cov < high) & ~jnp.asarray(skip)
    draws = jnp.where(candidates, jax.random.uniform(key, cov.shape), jnp.inf)
    return ~(candidates & (draws <= _smallest(draws, _count(mask, fraction))))


def kl_cov(cov, mask, *, fraction: float = 2e-4):
    """KL-Cov's mask (arXiv 2505.22617): True on the ``max(floor(fraction N), 1)`` tokens of largest `covariance`, and on ties with the last.

    They get `kl_cov_loss`. Needs the whole batch. ``cov`` and ``mask`` are ``[...]``.

    Example:
      >>> kl_cov(jnp.array([1.3, -0.6, -0.9, 1.6]), jnp.ones(4, bool), fraction=0.25).tolist()
      [False, False, False, True]
    """
    negative = jnp.where(mask, -cov, jnp.inf)
    return mask & (negative <= _smallest(negative, _count(mask, fraction)))


def kl_cov_loss(log_ratios, advantages, selected, *, coef: float = 1.0):
    """``-ρ A``, and ``coef |log ρ|`` more on the ``selected`` tokens (KL-Cov, arXiv 2505.22617); ``[...]``.

    coef is 1 in the official run, 0.1 in verl's.

    Example:
      >>> log_ratios, selected = jnp.log(jnp.array([0.5, 0.5])), jnp.array([True, False])
      >>> [round(float(x), 4) for x in kl_cov_loss(log_ratios, jnp.ones(2), selected)]
      [0.1931, -0.5]
    """
    log_ratios, advantages = masked.float32(log_ratios, advantages)
    penalty = jnp.where(selected, jnp.abs(log_ratios), 0.0)
    return -jnp.exp(log_ratios) * advantages + coef * penalty


def _count(mask, fraction: float):
    n = jnp.asarray(mask).sum().astype(jnp.float32)
    return jnp.maximum((fraction * n + 1e-3).astype(jnp.int32), 1)


def _smallest(x, n):
    """The n-th smallest number of ``x``."""
    return jnp.sort(x, axis=None)[jnp.clip(n - 1, 0, x.size - 1)]


def displacement_weights(
    advantages,
    mask,
    *,
    answer=None,
    answer_weight: float = 1.0,
    normalise: Literal["preferred", "all"] = "preferred",
):
    """Weights ``[P, G, T]`` of LLDS's token terms (arXiv 2512.04220), from the *global* batch.

    Samples with A >= 0 count, 0 included.
    ``w = 1[A >= 0] / N``, N the number of such tokens, and ``answer_weight`` times that on tokens of the answer.

    Args:
      advantages: ``[P, G, T]``, one sign a sample.
      mask: ``[P, G, T]`` bool, tokens of the policy: no tool outputs, and none of a sample without a reward, whose
        advantage is 0 as well.
      answer: ``[P, G, T]`` bool, tokens of the answer; None for none.
      answer_weight: LLDS-MA's β, in [0, 1]: how much answer tokens count. The paper moves it with the number of valid
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
    preferred = jnp.asarray(mask) & (jnp.asarray(advantages) >= 0)
    divisor = (preferred if normalise == "preferred" else jnp.asarray(mask)).sum().astype(jnp.float32)
    weights = jnp.where(preferred, 1.0 / jnp.maximum(divisor, 1.0), 0.0)
    return weights if answer is None else jnp.where(answer, answer_weight * weights, weights)


def displacement(log_ratios, mask, gate: Gate = "action", *, actions=None, segments=None):
    """LLDS's token terms ``gate max(0, Δ)``, ``Δ = log π_behavior - log π`` (arXiv 2512.04220), ``[..., T]``.

    The gate is constant: open where Δ summed over the token's action (or response) is over 0; always for "token". At
    ratio 1 all terms and gradients are 0: it acts from the second update of a rollout on.

    Args:
      log_ratios: ``[..., T]`` of `log_ratio`, token level.
      mask: ``[..., T]`` bool.
      gate: what is gated as one.
      actions: ``[..., T]`` int32 in ``[0, T]``, different for the actions that share the last axis, that is for the
        stretches of a response between tool outputs. None where a response is one action.
      segments: where samples share the last axis (`grpojax.masked.sequence_total`).

    Example:
      >>> log_ratios, actions = jnp.array([-0.2, 0.5, -0.5, 0.0]), jnp.array([1, 1, 2, 2])
      >>> displacement(log_ratios, jnp.ones(4, bool), actions=actions).tolist()
      [0.0, 0.0, 0.5, 0.0]
    """
    if gate not in get_args(Gate):
        raise ValueError(f"displacement(gate={gate!r}): must be one of {', '.join(get_args(Gate))}")
    fall = jnp.where(mask, -jnp.asarray(log_ratios, jnp.float32), 0.0)
    terms = jnp.where(fall > 0, fall, 0.0)  # jnp.maximum would have half a gradient at 0
    if gate == "token":
        return terms
    parts = actions if gate == "action" and actions is not None else segments
    return jnp.where(masked.sequence_total(jax.lax.stop_gradient(fall), mask, parts) > 0, terms, 0.0)


def value_loss(values, returns, weights, *, old_values=None, clip: float | None = None):
    """PPO's critic loss: ``½ Σ w max((V - R)², (clip(V, V_old ± clip) - R)²)`` (arXiv 1707.06347).

    Returns ``[]`` float32, in squared units of the reward.

    Args:
      values: ``[...]`` differentiated.
      returns: ``[...]`` constant (`grpojax.advantages.gae` plus the old values).
      weights: ``[...]`` of `loss_weights`.
      old_values: ``[...]``, with ``clip`` only.
      clip: how far values may move in one rollout; None for the plain square.

    Example:
      >>> v, r, old = jnp.array([0.9]), jnp.array([0.4]), jnp.array([0.5])
      >>> round(float(value_loss(v, r, jnp.ones(1), old_values=old, clip=0.2)), 4)
      0.125
    """
    if (clip is None) != (old_values is None):
        raise ValueError(f"value_loss(clip={clip}): clip and old_values go together")
    mask = jnp.asarray(weights) > 0
    clean = lambda x: jnp.where(mask, x, 0.0).astype(jnp.float32)  # noqa: E731
    values, returns = clean(values), jax.lax.stop_gradient(clean(returns))
    squares = jnp.square(values - returns)
    if clip is not None:
        old = jax.lax.stop_gradient(clean(old_values))
        far = jnp.abs(values - old) > clip
        near = jnp.square(old + clip * jnp.sign(values - old) - returns)
        squares = jnp.where(far & (near > squares), near, squares)
    return 0.5 * (weights * squares).sum()


def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, *, beta: float = 0.1):
    """``-log σ(beta ((chosen - ref_chosen) - (rejected - ref_rejected)))`` of a pair (DPO, arXiv 2305.18290).

    Sums of log-probs over a sequence, ``[...]``.

    Example:
      >>> round(float(dpo_loss(*map(jnp.float32, (-10, -15, -12, -14)))), 6)
      0.554355
    """
    f32 = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    ref_chosen, ref_rejected = jax.lax.stop_gradient((f32(ref_chosen), f32(ref_rejected)))
    margin = (f32(chosen) - ref_chosen) - (f32(rejected) - ref_rejected)
    return -jax.nn.log_sigmoid(beta * margin)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """What an update minimises, as data.

    `policy_loss` has the formula, `grpojax.variants` the objectives as published.

    Attributes:
      surrogate: ``(log_ratios, advantages) -> token losses``.
      ratio: level of the importance ratio (`log_ratio`).
      trace_decay: γλ of a trace ratio; None for the other levels.
      aggregate: how token losses become one number (`loss_weights`).
      constant: divisor of ``aggregate="constant"``, tokens.
      count_empty: whether samples without any token that counts (`loss_weights`) still count as samples.
      kl_coef: weight of the KL to the reference; 0 means that no reference is ever evaluated.
      kl_kind: the estimator (`kl`).
      kl_in: "loss" (k2, k3 or unbiased), or where the advantages have it already, and the loss does not: "reward" (k1,
        its sum subtracted by `grpojax.advantages.subtract_kl`) or "token_reward" (k1, subtracted from each token's
        reward by `grpojax.advantages.token_rewards`).
      entropy_coef: weight of the entropy bonus; 0 means that no entropy is ever computed for the loss.
      importance: what is done about the sampler's numerics (`importance_correction`).
      importance_level, importance_low, importance_high: its level and bounds; None for its own defaults.
      off_policy_limit: nats a token over which wrong samples are dropped (`off_policy_mask`); None for never.
      llds_coef: weight of LLDS's term (`displacement`); 0 for none.
      llds_gate: its gate.

    Example:
      >>> objective = Objective(surrogate=clipped(high=0.28), aggregate="token_mean", kl_coef=0.04)
      >>> objective.needs_reference, objective.needs_entropy
      (True, False)
    """

    surrogate: Callable[..., Any] = clipped()
    ratio: Ratio = "token"
    trace_decay: float | None = None
    aggregate: Aggregation = "sequence_mean"
    constant: float | None = None
    count_empty: bool = True
    kl_coef: float = 0.0
    kl_kind: KLKind = "k3"
    kl_in: KLPlace = "loss"
    entropy_coef: float = 0.0
    importance: Importance = "none"
    importance_level: ImportanceLevel = "token"
    importance_low: float | None = None
    importance_high: float | None = None
    off_policy_limit: float | None = None
    llds_coef: float = 0.0
    llds_gate: Gate = "action"

    def __post_init__(self):
        for name, choices in (
            ("ratio", get_args(Ratio)),
            ("aggregate", get_args(Aggregation)),
            ("kl_kind", get_args(KLKind)),
            ("kl_in", get_args(KLPlace)),
            ("importance", get_args(Importance)),
            ("importance_level", get_args(ImportanceLevel)),
            ("llds_gate", get_args(Gate)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(choices)}")
        for name in ("kl_coef", "llds_coef"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be 0 or more")
        if (self.constant is not None) != (self.aggregate == "constant") or (self.constant or 1.0) <= 0:
            raise ValueError(
                f"aggregate={self.aggregate!r} with constant={self.constant}: a constant over 0 goes with 'constant' only"
            )
        if self.kl_coef > 0 and self.kl_in == "loss" and self.kl_kind == "k1":
            raise ValueError(
                "kl_kind='k1' with kl_in='loss': its expected gradient is 0; take k2, k3 or unbiased, or kl_in='reward'"
            )
        if self.kl_coef > 0 and self.kl_in != "loss" and self.kl_kind != "k1":
            raise ValueError(
                f"kl_kind={self.kl_kind!r} with kl_in={self.kl_in!r}: its gradient is not that of a KL; only k1 belongs "
                "there"
            )
        if (self.trace_decay is not None) != self.ratio.startswith("trace") or not 0 <= (self.trace_decay or 0) <= 1:
            raise ValueError(
                f"ratio={self.ratio!r} with trace_decay={self.trace_decay}: a decay in [0, 1] goes with traces only"
            )
        if isinstance(self.surrogate, geometric) and (self.ratio != "token" or self.aggregate != "sequence_mean"):
            raise ValueError(
                f"geometric with ratio={self.ratio!r}, aggregate={self.aggregate!r}: its mean over a sample is of token "
                "ratios and aggregated by 'sequence_mean'"
            )
        if isinstance(self.surrogate, reinforce) and self.ratio != "token":
            raise ValueError(f"reinforce with ratio={self.ratio!r}: it reads no ratio")
        low, high = self.importance_low, self.importance_high
        if self.importance == "none" and ((low, high) != (None, None) or self.importance_level != "token"):
            raise ValueError("importance_level, _low and _high go with importance='truncate' or 'mask'")
        if low is not None and high is not None and not 0 <= low <= high:
            raise ValueError(f"importance_low={low}, importance_high={high}: no range")
        if self.importance == "truncate" and self.importance_low is not None:
            raise ValueError(f"importance_low={self.importance_low}: 'truncate' has no lower bound; take 'mask'")

    @property
    def needs_reference(self) -> bool:
        """Whether ``batch.ref_logps`` is read."""
        return self.kl_coef > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether `policy_loss` takes ``entropy``."""
        return self.entropy_coef != 0

    @property
    def needs_sampler_logps(self) -> bool:
        """Whether ``batch.sampler_logps`` is read."""
        return self.importance != "none" or self.off_policy_limit is not None

    @property
    def needs_displacement_weights(self) -> bool:
        """Whether ``batch.displacement_weights`` is read."""
        return self.llds_coef > 0


def _need(batch, field: str, why: str):
    value = getattr(batch, field, None)
    if value is None:
        raise ValueError(f"{why} needs batch.{field}, which is missing")
    return value


def policy_loss(logps, batch, objective: Objective, *, entropy=None):
    """The loss of one (micro-)batch and its metrics, all of them sums that add up over micro-batches.

    ``sum(w * (kept * correction * surrogate + kl_coef * kl - entropy_coef * entropy)) + llds_coef * sum(w' * displacement)``
    with ``kept`` of `off_policy_mask`.

    With one update a rollout and centred advantages the *value* of the policy term is about 0 (the ratio is 1);
    its gradient is ``-Σ w A ∇ log π`` and is not.

    The functions that give the terms name their sources; `grpojax.variants` has the published objectives.

    Args:
      logps: ``[..., T]`` differentiated log-probs of the completion tokens.
      batch: anything with ``weights``, ``advantages`` and optionally ``behavior_logps``, ``ref_logps``,
        ``sampler_logps``, ``displacement_weights`` (`displacement_weights`), ``actions`` (`displacement`) and
        ``segments`` of that shape, such as `grpojax.types.TrainBatch`. The last axis is one sample, or several if
        there are ``segments``; a sample is never cut in two. ``weights`` is 0 on padding; what stands there in the
        other arrays is never read.
      objective: the terms.
      entropy: ``[..., T]`` differentiated entropy, when ``objective.needs_entropy``.

    Returns:
      ``(loss [] float32, metrics)``. Metrics with a name that ends in ``_sum`` are sums over tokens.

    Example:
      >>> from types import SimpleNamespace
      >>> old = jnp.array([-1.0, -2.0, -0.5, -1.5])
      >>> batch = SimpleNamespace(weights=jnp.full(4, 0.25), advantages=jnp.ones(4), behavior_logps=old)
      >>> loss, metrics = policy_loss(old + jnp.array([0.3, -0.3, 0.1, -0.05]), batch, Objective())
      >>> round(float(loss), 6), float(metrics["clip_high_sum"])
      (-0.999305, 1.0)
    """
    weights = jnp.asarray(batch.weights, jnp.float32)
    mask = weights > 0
    segments = getattr(batch, "segments", None)
    advantages = jax.lax.stop_gradient(jnp.where(mask, batch.advantages, 0.0)).astype(jnp.float32)
    logps = jnp.where(mask, logps, 0.0).astype(jnp.float32)
    ratios = log_ratio(
        logps, batch.behavior_logps, mask, objective.ratio, decay=objective.trace_decay, segments=segments
    )
    offered = {"logps": logps, "sequence_mean": lambda x: masked.sequence_mean(x, mask, segments)}
    extra = {name: offered[name] for name in getattr(objective.surrogate, "needs", ())}
    token_losses = objective.surrogate(ratios, advantages, **extra)
    metrics = {}
    if objective.importance != "none":
        sampler = _need(batch, "sampler_logps", f"importance={objective.importance!r}")
        train = logps if batch.behavior_logps is None else batch.behavior_logps
        bounds = {"low": objective.importance_low, "high": objective.importance_high}
        correction = importance_correction(
            train, sampler, mask, objective.importance, level=objective.importance_level, segments=segments,
            **{name: x for name, x in bounds.items() if x is not None},
        )  # fmt: skip
        token_losses = correction * token_losses
        metrics["importance_sum"] = correction.sum()
    if objective.off_policy_limit is not None:
        sampler = _need(batch, "sampler_logps", f"off_policy_limit={objective.off_policy_limit}")
        kept = off_policy_mask(logps, sampler, advantages, mask, objective.off_policy_limit, segments=segments)
        token_losses = kept * token_losses
        metrics["off_policy_sum"] = masked.total(1.0 - kept, mask)
    policy = (weights * token_losses).sum()
    loss = policy
    metrics["policy_loss"] = policy
    ratio = jax.lax.stop_gradient(jnp.exp(ratios))
    if hasattr(objective.surrogate, "is_clipped"):
        stop = mask & objective.surrogate.is_clipped(ratio, advantages)
        metrics["clip_low_sum"] = (stop & (ratio < 1)).sum().astype(jnp.float32)
        metrics["clip_high_sum"] = (stop & (ratio > 1)).sum().astype(jnp.float32)
    metrics["ratio_sum"] = masked.total(ratio, mask)
    metrics["tokens"] = mask.sum().astype(jnp.float32)
    by_token = (
        ratios if objective.ratio == "token" else log_ratio(logps, batch.behavior_logps, mask)
    )  # the KL and LLDS are of tokens, whatever the ratio
    if objective.needs_reference:
        ref = jnp.where(mask, _need(batch, "ref_logps", f"kl_coef={objective.kl_coef}"), 0.0)
        if objective.kl_in == "loss":
            term = (weights * kl(logps, ref, objective.kl_kind, log_ratios=by_token)).sum()
            loss = loss + objective.kl_coef * term
            metrics["kl_loss"] = term
        metrics["kl_sum"] = jax.lax.stop_gradient(masked.total(kl(logps, ref, "k3"), mask))
    if objective.needs_displacement_weights:
        share = _need(batch, "displacement_weights", f"llds_coef={objective.llds_coef}")
        fallen = displacement(
            by_token, mask, objective.llds_gate, actions=getattr(batch, "actions", None), segments=segments
        )
        term = (jnp.where(mask, share, 0.0).astype(jnp.float32) * fallen).sum()
        loss = loss + objective.llds_coef * term
        metrics["llds_loss"] = term
    if objective.needs_entropy:
        if entropy is None:
            raise ValueError(f"entropy_coef={objective.entropy_coef} needs entropy, which is missing")
        term = (weights * jnp.where(mask, entropy, 0.0).astype(jnp.float32)).sum()
        loss = loss - objective.entropy_coef * term
    if entropy is not None:
        metrics["entropy_sum"] = jax.lax.stop_gradient(masked.total(entropy, mask))
    metrics["loss"] = loss
    return loss, metrics
