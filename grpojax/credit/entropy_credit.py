"""Credit by the entropy of the distributions that tokens were drawn from, nats."""

import math
from typing import Literal

import jax.numpy as jnp

from grpojax import masked
from grpojax.advantages.signals import Signals, Transform, described, need, outcome_of, per_sample, per_token
from grpojax.types import Samples, Tokens


@described
def entropy_mask(fraction: float = 0.2, *, rule: Literal["quantile", "top"] = "quantile") -> Transform:
    """Only the tokens of highest entropy learn, on ``[P, G, T]`` ("80/20", arXiv 2506.01939).

    The other tokens' advantage is 0. The loss still divides by all tokens.

    Args:
      fraction: share of the batch's tokens that learn.
      rule: the threshold is the (1 - fraction) quantile, linear between neighbours as in numpy, or the
        ceil(fraction N)-th largest entropy. Codes differ, and the paper speaks of a quantile; ties with the threshold
        learn in both.

    Example:
      >>> entropy = jnp.array([[[0.1, 2.0, 0.5, 1.5, 0.05, 0.3, 0.9, 0.2, 0.01, 1.1]]])
      >>> signals = Signals(valid=jnp.ones((1, 1), bool), mask=entropy > 0, entropy=entropy)
      >>> entropy_mask(0.2)(jnp.ones((1, 1, 10)), signals)[0, 0].astype(bool).nonzero()[0].tolist()
      [1, 3]
    """
    if not 0 < fraction <= 1 or rule not in ("quantile", "top"):
        raise ValueError(f"entropy_mask({fraction}, rule={rule!r}): a share in (0, 1]; rule 'quantile' or 'top'")

    def transform(values: Tokens, signals: Signals | None = None) -> Tokens:
        values, signals = per_token(values, signals, "entropy_mask")
        mask = need(signals, "mask", "entropy_mask") & need(signals, "valid", "entropy_mask")[..., None]
        entropy = jnp.asarray(need(signals, "entropy", "entropy_mask"), jnp.float32)
        ranked = jnp.sort(jnp.where(mask, entropy, jnp.inf), axis=None)
        n = mask.sum()
        if rule == "top":  # the small number undoes roundings such as 0.2 * 15 = 3.0000002
            kept = jnp.ceil(fraction * n.astype(jnp.float32) - 1e-3).astype(jnp.int32)
            threshold = ranked[jnp.maximum(n - kept, 0)]
        else:
            at = (1.0 - fraction) * jnp.maximum(n - 1, 0).astype(jnp.float32)
            low = jnp.floor(at).astype(jnp.int32)
            high = jnp.minimum(low + 1, jnp.maximum(n - 1, 0))
            threshold = ranked[low] + (at - low.astype(jnp.float32)) * (ranked[high] - ranked[low])
        return jnp.where(mask & (entropy >= threshold), values, 0.0)

    return transform


@described
def entropy_shaping(alpha: float = 0.4, kappa: float = 2.0) -> Transform:
    """``A_t + min(alpha H_t, |A_t| / kappa)`` on ``[P, G, T]`` (arXiv 2506.14758).

    This holds for both signs: a negative advantage gets smaller, by at most 1/kappa of its size. A = 0 stays 0. kappa
    over 1. H in nats.

    Example:
      >>> signals = Signals(mask=jnp.ones((1, 2, 3), bool), entropy=jnp.array([[[0.5, 2.0, 0.0]] * 2]))
      >>> shaped = entropy_shaping(0.4, 2.0)(jnp.array([[[1.0] * 3, [-1.0] * 3]]), signals)
      >>> [[round(float(a), 4) for a in row] for row in shaped[0]]
      [[1.2, 1.5, 1.0], [-0.8, -0.5, -1.0]]
    """
    if alpha < 0 or kappa <= 1:
        raise ValueError(f"entropy_shaping({alpha}, {kappa}): alpha 0 or more, kappa over 1")

    def transform(values: Tokens, signals: Signals | None = None) -> Tokens:
        values, signals = per_token(values, signals, "entropy_shaping")
        mask = need(signals, "mask", "entropy_shaping")
        entropy = jnp.asarray(need(signals, "entropy", "entropy_shaping"), jnp.float32)
        return jnp.where(mask, values + jnp.minimum(alpha * entropy, jnp.abs(values) / kappa), 0.0)

    return transform


@described
def entropy_of_equal_groups(alpha: float = 0.1, *, success: float = 1.0) -> Transform:
    """Advantages for groups whose outcomes are all the same, on ``[P, G, T]`` (RL-ZVP, arXiv 2509.21880)::

      all right:  A_t = alpha H_t          all wrong:  A_t = -alpha (max_k H_k - H_t)

    The entropies are those of the sample's tokens, in nats. So where all is right the uncertain tokens gain most, and
    where all is wrong they lose least; the most uncertain token of a wrong sample loses nothing. Other groups stay as
    they come.

    Args:
      alpha: advantage per nat.
      success: such a group is right if its outcome is at least this.

    Example:
      >>> every = jnp.ones((2, 1), bool)
      >>> signals = Signals(outcome=jnp.array([[1.0], [0.0]]), valid=every, mask=jnp.ones((2, 1, 2), bool),
      ...     entropy=jnp.array([[[0.5, 2.0]]] * 2))
      >>> [[round(float(a), 4) for a in row] for row in entropy_of_equal_groups()(jnp.zeros((2, 1, 2)), signals)[:, 0]]
      [[0.05, 0.2], [-0.15, 0.0]]
    """
    if alpha < 0:
        raise ValueError(f"entropy_of_equal_groups({alpha}): alpha must be 0 or more")

    def transform(values: Tokens, signals: Signals | None = None) -> Tokens:
        values, signals = per_token(values, signals, "entropy_of_equal_groups")
        mask = need(signals, "mask", "entropy_of_equal_groups")
        entropy = jnp.asarray(need(signals, "entropy", "entropy_of_equal_groups"), jnp.float32)
        outcome, known = outcome_of(signals, "entropy_of_equal_groups")
        equal = masked.all_equal(outcome, known, 1, keepdims=True) & known
        most = jnp.where(mask, entropy, -jnp.inf).max(-1, keepdims=True)
        right = (outcome >= success)[..., None]
        shaped = jnp.where(right, alpha * entropy, 0.0 - alpha * (most - entropy))  # alpha = 0 gives 0, not -0
        return jnp.where(mask & equal[..., None], shaped, values)

    return transform


def _sample_entropy(signals: Signals, transform: str) -> Samples:
    """``[P, G]``: mean entropy of a sample's tokens, nats."""
    return masked.mean(need(signals, "entropy", transform), need(signals, "mask", transform), -1)


@described
def entropy_penalty(coef: float = 0.1, *, everywhere: bool = False) -> Transform:
    """``A_i - coef mean_t H_t`` on ``[P, G]`` (GTPO, arXiv 2508.03772).

    Args:
      coef: advantage per nat.
      everywhere: also in groups whose raw rewards are all equal, as the authors' code has it: every sample in them is
        then made less likely. Off by default, so that such groups teach nothing. In all other groups every sample is
        shaped, also one whose reward is the group's mean.

    Example:
      >>> from grpojax.advantages import center, chain
      >>> signals = Signals(mask=jnp.ones((1, 3, 1), bool), entropy=jnp.array([[[0.3], [0.9], [0.5]]]))
      >>> [round(float(a), 4) for a in chain(center(), entropy_penalty(0.1))(jnp.array([[1.0, 0.0, 0.0]]), signals)[0]]
      [0.6367, -0.4233, -0.3833]
    """

    def transform(values: Samples, signals: Signals | None = None) -> Samples:
        values, signals = per_sample(values, signals, "entropy_penalty")
        shaped = values - coef * _sample_entropy(signals, "entropy_penalty")
        live = ~masked.all_equal(need(signals, "rewards", "entropy_penalty"), signals.valid, 1, keepdims=True)
        return jnp.where(live | everywhere, shaped, 0.0)

    return transform


@described
def entropy_filter(threshold: float = math.log(2), *, initial: float | None = None) -> Transform:
    """Samples with a mean entropy over ``threshold`` nats get 0, on ``[P, G]`` (GTPO, arXiv 2508.03772).

    ``A_i 1[mean_t H_t <= threshold]``.

    Args:
      threshold: ln 2 in the paper, 0.7 in the authors' code.
      initial: mean entropy of the policy before training. The paper does not filter if this is over ``threshold``. None
        always filters, as the code does.

    Example:
      >>> signals = Signals(mask=jnp.ones((1, 3, 1), bool), entropy=jnp.array([[[0.3], [0.9], [0.5]]]))
      >>> [round(float(a), 4) for a in entropy_filter()(jnp.array([[0.6367, -0.4233, -0.3833]]), signals)[0]]
      [0.6367, 0.0, -0.3833]
    """

    def transform(values: Samples, signals: Signals | None = None) -> Samples:
        values, signals = per_sample(values, signals, "entropy_filter")
        if initial is not None and initial > threshold:
            return values
        kept = _sample_entropy(signals, "entropy_filter") <= threshold
        return jnp.where(kept, values, 0.0)

    return transform
