"""More credit for unlikely tokens and unlikely samples."""

from typing import Literal

import jax.numpy as jnp

from grpojax import masked
from grpojax.advantages.signals import Signals, Transform, described, need, per_sample, per_token
from grpojax.types import Samples, Tokens


@described
def compensate_rare_tokens(
    limit: float | None = None,
    *,
    relative_to: Literal["sample", "group", "batch", "vocabulary"] = "sample",
    positive_only: bool = True,
) -> Transform:
    """``A_t = A_i C_t``, ``C_t = 2 - p_t / p_max`` in [1, 2), on ``[P, G, T]``; p of the policy that drew the tokens.

    A group's advantages then no longer sum to 0: the least likely tokens get more.

    The second of the experiments in `grpojax.variants`.

    Args:
      limit: largest factor; None for none.
      relative_to: the tokens that p_max is the largest probability of: those drawn in the sample (the default, "within
        that sample" in the words of the method's author), in its group, or in all groups of the batch. The last two
        leave invalid samples out. "vocabulary" takes the likeliest token at the same position, from
        ``signals.max_logps``.
      positive_only: do not change A <= 0.

    Example:
      >>> logps = jnp.log(jnp.array([[[0.9, 0.6, 0.3]]]))
      >>> signals = Signals(mask=jnp.ones((1, 1, 3), bool), behavior_logps=logps)
      >>> [round(float(a), 4) for a in compensate_rare_tokens()(jnp.full((1, 1, 3), 1.5), signals)[0, 0]]
      [1.5, 2.0, 2.5]
    """
    axes = {"sample": (2,), "group": (1, 2), "batch": (0, 1, 2), "vocabulary": None}
    if relative_to not in axes:
        raise ValueError(f"compensate_rare_tokens(relative_to={relative_to!r}): must be one of {', '.join(axes)}")
    axis = axes[relative_to]

    def transform(values: Tokens, signals: Signals | None = None) -> Tokens:
        values, signals = per_token(values, signals, "compensate_rare_tokens")
        mask = need(signals, "mask", "compensate_rare_tokens")
        logps = jnp.asarray(need(signals, "behavior_logps", "compensate_rare_tokens"), jnp.float32)
        if relative_to in ("group", "batch"):
            mask = mask & need(signals, "valid", "compensate_rare_tokens")[..., None]
        if axis is None:
            most = jnp.asarray(need(signals, "max_logps", "compensate_rare_tokens"), jnp.float32)
        else:
            most = jnp.where(mask, logps, -jnp.inf).max(axis, keepdims=True)
        factor = 2.0 - jnp.exp(jnp.where(mask, logps - most, 0.0))
        factor = factor if limit is None else jnp.minimum(factor, limit)
        return jnp.where(mask, values * jnp.where((values > 0) | (not positive_only), factor, 1.0), 0.0)

    return transform


@described
def protect_rare_tokens(share: float = 0.01, *, coef: float = 1.0) -> Transform:
    """A weaker penalty on unlikely tokens that are not noise, on ``[P, G, T]`` (Lp-Reg, arXiv 2510.03222)::

      A_t + coef (π'_t / π_t - 1)   on the least likely ``share`` of the tokens with A < 0, where π'_t > π_t

    π' is the policy's distribution without the tokens whose probability is under a fraction of the likeliest one's, so
    that a token that stays gets a little more than it had. A token that is left out is noise, and is penalised as
    before.

    The official code adds ``coef (π'/π - log(π'/π) - 1)`` to the loss of these tokens, with π' fixed. Before a step's
    first update its gradient is that of this transform. With later updates the two differ: here the term keeps its
    size, and there it falls as the token gets likelier.

    Needs ``signals.proxy_ratios``, which are π'/π, and ``behavior_logps``. The share is of all groups of the batch, at
    least one token; equally likely tokens at its border are all taken.

    Example:
      >>> ones = jnp.ones((1, 1, 3), bool)
      >>> given = {"behavior_logps": jnp.log(jnp.array([[[0.9, 0.1, 0.02]]])), "valid": ones[..., 0]}
      >>> signals = Signals(mask=ones, proxy_ratios=jnp.array([[[1.02, 1.02, 0.0]]]), **given)
      >>> [round(float(a), 4) for a in protect_rare_tokens(0.7)(jnp.full((1, 1, 3), -1.0), signals)[0, 0]]
      [-1.0, -0.98, -1.0]
    """
    if not 0 < share <= 1 or coef < 0:
        raise ValueError(f"protect_rare_tokens(share={share}, coef={coef}): a share in (0, 1], and a coef of 0 or more")

    def transform(values: Tokens, signals: Signals | None = None) -> Tokens:
        values, signals = per_token(values, signals, "protect_rare_tokens")
        logps = jnp.asarray(need(signals, "behavior_logps", "protect_rare_tokens"), jnp.float32)
        ratios = jnp.asarray(need(signals, "proxy_ratios", "protect_rare_tokens"), jnp.float32)
        counts = need(signals, "mask", "protect_rare_tokens")
        counts &= need(signals, "valid", "protect_rare_tokens")[..., None]
        penalised = counts & (values < 0)
        taken = jnp.maximum((share * penalised.sum().astype(jnp.float32)).astype(jnp.int32), 1)
        highest = jnp.sort(jnp.where(penalised, logps, jnp.inf), axis=None)[taken - 1]
        rare = penalised & (logps <= highest) & (ratios > 1)
        return jnp.where(rare, values + coef * (ratios - 1), values)

    return transform


@described
def sharpen_novelty(coef: float = 2.5, cap: float = 0.5) -> Transform:
    """More credit for unlikely correct samples, on ``[P, G]`` (XRPO, arXiv 2510.06672)::

      s_i = mean_t log p, η_i = exp(s_i - mean_j s_j);  A > 0:  A + min(max(coef (1 - η_i), 0), cap A)

    A sample gains at most ``cap`` times its advantage. A <= 0 does not change.

    Example:
      >>> every = jnp.ones((1, 4), bool)
      >>> logps = jnp.array([[[-0.4], [-0.8], [-0.5], [-0.3]]])
      >>> signals = Signals(valid=every, mask=every[..., None], behavior_logps=logps)
      >>> sharpen_novelty()(jnp.array([[1.0, 1.0, -1.0, -1.0]]), signals).tolist()
      [[1.0, 1.5, -1.0, -1.0]]
    """

    def transform(values: Samples, signals: Signals | None = None) -> Samples:
        values, signals = per_sample(values, signals, "sharpen_novelty")
        valid = signals.valid
        mask = need(signals, "mask", "sharpen_novelty")
        scores = masked.mean(need(signals, "behavior_logps", "sharpen_novelty"), mask, -1)
        novelty = jnp.exp(jnp.where(valid, scores - masked.mean(scores, valid, 1, keepdims=True), 0.0))
        bonus = jnp.minimum(jnp.maximum(coef * (1.0 - novelty), 0.0), cap * values)
        return jnp.where(values > 0, values + bonus, values)

    return transform
