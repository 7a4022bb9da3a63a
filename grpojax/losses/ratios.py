"""Importance ratios between the policy and the one in the denominator."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from grpojax import masked, shapes
from grpojax.types import AnyTokens

Ratio = Literal["token", "sequence", "joint", "sequence_token", "trace", "trace_both", "own"]

# exp() of more than this is no ratio of two policies any more; it also keeps the gradient finite.
LOG_RATIO_LIMIT = 20.0


def log_difference(logps: AnyTokens, behavior_logps: AnyTokens | None, mask: AnyTokens) -> AnyTokens:
    """``δ = log π(token) - log π_behavior(token)``, without a limit; 0 where ``mask`` is not set.

    ``[..., T]`` float32, nats; arguments as in `log_ratio`. Losses that pull a token back, such as LLDS's (arXiv
    2512.04220), need its gradient however far the token has moved.

    Example:
      >>> log_difference(jnp.array([-30.0, -1.0]), jnp.array([-2.0, -1.5]), jnp.ones(2, bool)).tolist()
      [-28.0, 0.5]
    """
    shapes.check("log_difference", "... T", logps=logps, behavior_logps=behavior_logps, mask=mask)
    logps = jnp.where(mask, logps, 0.0).astype(jnp.float32)
    if behavior_logps is None:
        return logps - jax.lax.stop_gradient(logps)
    return logps - jax.lax.stop_gradient(jnp.where(mask, behavior_logps, 0.0)).astype(jnp.float32)


def log_ratio(
    logps: AnyTokens,
    behavior_logps: AnyTokens | None,
    mask: AnyTokens,
    level: Ratio = "token",
    *,
    decay: float | None = None,
    segments: AnyTokens | None = None,
) -> AnyTokens:
    """The logarithm of the importance ratio of each token's loss, limited to ±20; 0 where ``mask`` is not set.

    With ``δ = log π(token) - log π_behavior(token)`` and sums over a sample's tokens:

    ==============  ======================================================  =============================
    level           formula                                                 used by
    ==============  ======================================================  =============================
    token           δ_t                                                     PPO, GRPO
    sequence        mean_s δ_s                                              GSPO (arXiv 2507.18071)
    joint           Σ_s δ_s                                                 GSPO as some texts print it
    sequence_token  mean_s δ_s in value, the gradient of log π_t only       GSPO-token (same)
    trace           Σ_{l <= t} decay^l δ_{t-l}, of tokens in ``mask``       GRPO-λ (arXiv 2510.00194)
    trace_both      the same, weights max(decay^l, decay^(t-l))             GRPO-λ, "both"
    own             0 in value, the gradient of log π_t                     GTPO, whatever the behaviour
    ==============  ======================================================  =============================

    "joint" lacks GSPO's root of the length: its ratios are outside of any clip range that is meant for "sequence".

    At ratio 1 a trace still differs from a token: token j gets the gradient of all later ones,
    ``(1 - decay^(T-j)) / (1 - decay)`` times, so a decay of 0.99 makes early tokens up to 100 times as strong.

    Returns ``[..., T]`` float32, nats. Sources of the rest: PPO, arXiv 1707.06347; GRPO, 2402.03300; GTPO, 2508.03772.

    Args:
      logps: ``[..., T]`` log-probs, differentiated.
      behavior_logps: ``[..., T]`` log-probs of the policy in the denominator. None is the policy itself: the ratio is
        exactly 1, and its gradient is that of the log-prob.
      mask: ``[..., T]`` bool.
      level: a row of the table.
      decay: γλ of the traces, in [0, 1]; None for the other levels.
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
    arrays = {"logps": logps, "behavior_logps": behavior_logps, "mask": mask, "segments": segments}
    shapes.check("log_ratio", "... T", **arrays)
    mask = masked.as_mask(mask)
    ratios = log_difference(logps, None if level == "own" else behavior_logps, mask)
    if level == "joint":
        ratios = masked.sequence_total(ratios, mask, segments)
    elif level in ("sequence", "sequence_token"):
        ratios = masked.sequence_mean(ratios, mask, segments)
        if level == "sequence_token":
            ratios = jax.lax.stop_gradient(ratios) + log_difference(logps, None, mask)
    elif decay is not None:
        ratios = _trace(ratios, mask, decay, segments, both=level == "trace_both")
    return jnp.where(mask, jnp.clip(ratios, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0.0)


def _trace(x: AnyTokens, mask: AnyTokens, decay: float, segments: AnyTokens | None, *, both: bool) -> AnyTokens:
    """``y_t = Σ_{l <= t} w(t, l) x_{t-l}`` over the tokens in ``mask`` along the last axis, within segments.

    t and l count those tokens only, as the returns of an episode do: what its environment answered takes no time.
    """
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

        carries = jnp.where(fresh, 0.0, jnp.where(mask, jnp.float32(decay), 1.0))
        return jax.lax.associative_scan(join, (carries, x), axis=axis)[1]

    recent = scan(x, decay)
    if not both:
        return recent
    # Positions before the middle of [0, t] weigh decay^position, those from it on decay^(t - position).
    count = jnp.cumsum(mask, axis, dtype=jnp.int32) - mask.astype(jnp.int32)  # of tokens before
    start = jax.lax.cummax(jnp.where(fresh, places, 0), axis=axis)
    first = jnp.take_along_axis(count, start, axis)
    t = count - first
    place_of = jnp.argsort(jnp.where(mask, places, size), axis=axis)  # of the n-th token of the row
    middle = (t + 1) // 2

    def power(n):
        return jnp.float32(decay) ** n.astype(jnp.float32)

    def take(y):
        return jnp.take_along_axis(y, before, axis)

    early = scan(power(t) * x, 1.0)
    before = jnp.take_along_axis(place_of, jnp.maximum(first + middle - 1, 0), axis)
    return jnp.where(t == 0, recent, recent - power(t - middle + 1) * take(recent) + take(early))
