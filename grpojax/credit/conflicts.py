"""Tokens that right and wrong samples of a group share."""

import jax.numpy as jnp

from grpojax.advantages.baselines import signs
from grpojax.advantages.signals import Signals, Transform, described, need, per_token
from grpojax.types import Samples, Tokens


def _conflict_run(tokens: Tokens, mask: Tokens, sign: Samples) -> Tokens:
    """``[P, G, T]`` bool: the positions from 0 on at which positive and negative samples have the same token.

    A position conflicts if its token stands there in a positive *and* in a negative sample, any of the group.
    """
    same = (tokens[:, :, None] == tokens[:, None]) & mask[:, :, None] & mask[:, None]  # [P, G, G, T]

    def stands(of: Samples) -> Tokens:
        return (same & of[:, None, :, None]).any(2)

    conflicts = stands(sign > 0) & stands(sign < 0) & mask & (sign != 0)[..., None]
    return jnp.cumprod(conflicts.astype(jnp.int32), -1).astype(bool)


@described
def conflict_weights(gain: float = 2.0, *, count_norm: bool = False) -> Transform:
    """Protects the beginnings and ends that right and wrong samples share, on ``[P, G, T]`` (GTPO, arXiv 2508.03772).

    The forward run is the longest run of conflicting positions from the first token on, the backward run the same
    counted from the last token. In each, a token of a positive sample weighs ``gain`` and one of a negative sample 0;
    the weights multiply, ``gain²`` where runs overlap. The mask must cover whole completions, without holes. A sample's
    sign is that of ``r - mean r`` before any shaping, so that samples which a filter has set to 0 still count. Without
    positives or without negatives all weights are 1.

    ``A_t w_t v_t``, w and v the weights of the two runs.

    Args:
      gain: 2 in the paper.
      count_norm: divide a sample by the number of its conflicting tokens (at least 1), as the authors' code does and
        the paper does not; like that code, the count takes the backward run in reversed coordinates.

    Example:
      >>> tokens = jnp.array([[[5, 7, 9, 2, 8], [5, 7, 3, 2, 8], [5, 4, 9, 8, 0]]])
      >>> rewards, valid = jnp.array([[1.0, 0.0, 0.0]]), jnp.ones((1, 3), bool)
      >>> signals = Signals(tokens=tokens, mask=tokens > 0, rewards=rewards, valid=valid)
      >>> conflict_weights()(jnp.ones((1, 3, 5)), signals)[0].astype(int).tolist()
      [[2, 2, 2, 4, 4], [0, 0, 1, 0, 0], [0, 1, 1, 0, 0]]
    """

    def transform(values: Tokens, signals: Signals | None = None) -> Tokens:
        values, signals = per_token(values, signals, "conflict_weights")
        mask = need(signals, "mask", "conflict_weights")
        tokens = jnp.asarray(need(signals, "tokens", "conflict_weights"))
        mask = jnp.asarray(mask) & need(signals, "valid", "conflict_weights")[..., None]
        sign = signs(signals)
        n = mask.sum(-1, keepdims=True)
        mirror = jnp.clip(n - 1 - jnp.arange(mask.shape[-1]), 0)
        forward = _conflict_run(tokens, mask, sign)
        reversed_run = _conflict_run(jnp.take_along_axis(tokens, mirror, -1), mask, sign)
        backward = jnp.take_along_axis(reversed_run, mirror, -1) & mask
        weight = jnp.where(sign > 0, gain, 0.0)[..., None]
        values = values * jnp.where(forward, weight, 1.0) * jnp.where(backward, weight, 1.0)
        if count_norm:
            count = (forward | reversed_run).sum(-1, keepdims=True)
            values = values / jnp.maximum(count, 1).astype(jnp.float32)
        return jnp.where(mask, values, 0.0)

    return transform
