"""Measures to watch in a run: likelihood displacement, groups, mismatch, repetition. Imports jax only."""

import jax
import jax.numpy as jnp
import numpy as np

from grpojax import masked
from grpojax.credit import influence
from grpojax.types import AnyTokens, Array, Hidden, Max, Mean, PerPrompt, Samples, Scalar, Tokens


def likelihood_displacement(
    before: Array, after: Array, rewards: Samples, mask: Tokens | None = None, *, success: float = 1.0
) -> PerPrompt:
    """``Δ(x) = mean over right samples of [log π'(y | x) - log π(y | x)]``, joint log-probs: ``[P]``, nats.

    A value of 0 or less means that right answers did not get likelier although they were rewarded (lazy likelihood
    displacement, arXiv 2505.18830). It is exact if π' is π after one update *on that prompt only*, from the same π for
    each prompt. The log-probs of two consecutive steps on kept samples are a cheap proxy during training.

    Args:
      before, after: ``[P, G, T]`` log-probs under π and π', or ``[P, G]`` their sums.
      rewards: ``[P, G]``.
      mask: ``[P, G, T]`` bool; None with sums.
      success: the reward from which on a sample is right.

    Returns:
      ``[P]`` float32; NaN where no sample is right, so that no mean counts it by mistake.

    Example:
      >>> delta = likelihood_displacement(jnp.array([[-5.0, -7.0]]), jnp.array([[-4.5, -7.9]]), jnp.ones((1, 2)))
      >>> round(float(delta[0]), 6)
      -0.2
    """
    if (mask is None) != (jnp.ndim(before) == 2):
        raise ValueError(f"likelihood_displacement of {jnp.shape(before)}: [P, G, T] with a mask, [P, G] without")
    change = jnp.asarray(after, jnp.float32) - jnp.asarray(before, jnp.float32)
    change = change if mask is None else masked.total(change, mask, -1)
    right = jnp.asarray(rewards, jnp.float32) >= success
    return jnp.where(right.any(1), masked.mean(change, right, 1), jnp.nan)


def gwhes(
    probs: Array, hidden: Hidden, columns: Tokens, mask: Tokens, rewards: Samples, *, success: float = 1.0
) -> Samples:
    """Group weighted hidden embedding score of each right sample, ``[P, G]`` (arXiv 2505.18830)::

      p⁻ Σ_k Σ_{wrong j, k'} <g, g><h, h> - p⁺ Σ_k Σ_{right i', k''} <g, g><h, h>

    with ``p⁺ = (1 - p) / sqrt(p (1 - p))``, ``p⁻ = p / sqrt(p (1 - p))``. Larger predicts more displacement; the mean
    over right samples ranks prompts (the paper does not say how it aggregates).

    Args:
      probs, hidden, columns, mask: as in `grpojax.credit.influence`.
      rewards: ``[P, G]``; one that is not finite does not count.
      success: the reward from which on a sample is right.

    Returns:
      ``[P, G]`` float32, 0 on wrong samples and in groups that are not mixed.

    Example:
      >>> half, hidden = jnp.full((1, 2, 1, 2), 0.5), jnp.array([[[[1.0]], [[2.0]]]])
      >>> columns = jnp.zeros((1, 2, 1), jnp.int32)
      >>> gwhes(half, hidden, columns, columns == 0, jnp.array([[1.0, 0.0]])).tolist()
      [[0.5, 0.0]]
    """
    weight = gwhes_weights(rewards, success=success)
    weights = jnp.broadcast_to(weight[..., None], jnp.shape(mask))
    scores = masked.total(influence(probs, hidden, columns, mask, weights), mask, -1)
    return jnp.where(weight < 0, scores, 0.0)


def gwhes_weights(rewards: Samples, *, success: float = 1.0) -> Samples:
    """The weight of a sample's tokens in `gwhes`, ``[P, G]`` float32: ``p⁻`` for wrong samples, ``-p⁺`` for right ones.

    0 in groups that are not mixed and where the reward is not finite (arXiv 2505.18830). With it, `gwhes` is the sum of
    `grpojax.credit.influence` over the tokens of a right sample. Arguments as in `gwhes`.

    Example:
      >>> gwhes_weights(jnp.array([[1.0, 0.0], [1.0, 1.0]])).tolist()
      [[-1.0, 1.0], [0.0, 0.0]]
    """
    rewards = jnp.asarray(rewards, jnp.float32)
    valid = jnp.isfinite(rewards)
    right = valid & (rewards >= success)
    p = masked.mean(right.astype(jnp.float32), valid, 1, keepdims=True)
    mixed = (p > 0) & (p < 1)
    sigma = jnp.sqrt(jnp.where(mixed, p * (1.0 - p), 1.0))
    return jnp.where(valid & mixed, jnp.where(right, -(1.0 - p) / sigma, p / sigma), 0.0)


def ranking_overlap(scores: PerPrompt, displacement: PerPrompt, top: int) -> Scalar:
    """Share of the ``top`` prompts with the highest scores that are among the ``top`` with the lowest Δ: ``[]``.

    How well `gwhes` predicts `likelihood_displacement` (arXiv 2505.18830; 50 to 60 % of 10 there). Unrelated rankings
    share ``top / P`` on average, and no two rankings share less than ``(2 top - P) / top``: with 10 of 15 that is 67 %
    and 50 %. So ``top`` should be at most a fifth of P. `rank_correlation` reads whole rankings.

    Args:
      scores, displacement: ``[P]``, finite.
      top: at most P.

    Example:
      >>> float(ranking_overlap(jnp.array([3.0, 2.0, 1.0, 0.0]), jnp.array([-0.5, 0.2, -0.1, 0.4]), 2))
      0.5
    """
    if not 1 <= top <= len(scores):
        raise ValueError(f"ranking_overlap(top={top}) of {len(scores)} prompts: must be between 1 and all")
    high, low = jnp.argsort(-jnp.asarray(scores))[:top], jnp.argsort(jnp.asarray(displacement))[:top]
    return jnp.isin(high, low).astype(jnp.float32).mean()


def rank_correlation(scores: PerPrompt, displacement: PerPrompt) -> Scalar:
    """Spearman's correlation of the scores and ``-Δ``, ``[]`` in [-1, 1]: 1 where the highest score has the lowest Δ.

    It is 0 on average for unrelated rankings. It is Pearson's correlation of the ranks, where equal values share the
    mean of their ranks, and 0 if all values of one argument are equal. For `gwhes` and `likelihood_displacement` (arXiv
    2505.18830).

    Args:
      scores, displacement: ``[P]``, finite.

    Example:
      >>> float(rank_correlation(jnp.array([3.0, 2.0, 1.0]), jnp.array([-0.5, 0.2, 0.4])))
      1.0
    """

    def ranks(x: PerPrompt) -> PerPrompt:
        x = jnp.asarray(x)
        under, same = (x[None] < x[:, None]).sum(1), (x[None] == x[:, None]).sum(1)
        return under.astype(jnp.float32) + 0.5 * same.astype(jnp.float32) - 0.5 * x.size  # the mean, exactly

    a, b = ranks(scores), ranks(-jnp.asarray(displacement))
    size = jnp.sqrt(jnp.square(a).sum() * jnp.square(b).sum())
    return jnp.where(size > 0, (a * b).sum() / jnp.where(size > 0, size, 1.0), 0.0)


def group_statistics(
    metric: Samples, *, success: float = 1.0, fail: float = 0.0, drawn: Samples | None = None
) -> dict[str, Scalar]:
    """Shares of groups, ``{name: [] float32}``, of a metric ``[P, G]`` such as accuracy.

    ``all_fail`` (no sample over ``fail``), ``all_correct`` (every sample at least ``success``, so that none is
    invalid), ``zero_variance`` (all valid samples equal: nothing to learn from a centred advantage), ``invalid`` (share
    of *samples* whose metric is not finite). A group without a valid sample does not count in the first three, neither
    in the numerator nor in the denominator.

    The shares that dynamic sampling acts on (DAPO, arXiv 2503.14476; `grpojax.allocation.keep_prompts`).

    Args:
      metric: ``[P, G]``; a sample whose metric is not finite is invalid.
      success: a sample is right if its metric is at least this.
      fail: a sample fails if its metric is at most this.
      drawn: ``[P, G]`` bool, the samples that there are, where prompts have different numbers of them; None for all.

    Example:
      >>> shares = group_statistics(jnp.array([[0.0, 0.0], [1.0, 1.0], [1.0, 0.0], [0.5, 0.5]]))
      >>> {name: float(x) for name, x in shares.items()}
      {'all_fail': 0.25, 'all_correct': 0.25, 'zero_variance': 0.75, 'invalid': 0.0}
    """
    metric = jnp.asarray(metric, jnp.float32)
    drawn = jnp.ones(metric.shape, bool) if drawn is None else jnp.asarray(drawn)
    valid = drawn & jnp.isfinite(metric)
    there = valid.any(1)

    def share(which: PerPrompt) -> Scalar:
        return masked.mean(which.astype(jnp.float32), there)

    return {
        "all_fail": share(masked.all_fail(metric, valid, fail)),
        "all_correct": share((~drawn | (metric >= success)).all(1)),
        "zero_variance": share(masked.all_equal(metric, valid, 1)),
        "invalid": masked.mean((~valid).astype(jnp.float32), drawn),
    }


def mismatch(train_logps: AnyTokens, sampler_logps: AnyTokens, mask: AnyTokens) -> dict[str, Mean | Max]:
    """How far trainer and sampler disagree on the sampled tokens, as metrics that add up over parts of a batch.

    ``logp_difference`` and ``logp_difference_max``: mean and largest |log π_train - log π_sampler|, nats.
    ``sampler_kl``: KL(π_sampler || π_train) by k3 (`grpojax.losses.kl`), nats. ``sampler_ratio``: π_train / π_sampler,
    the weight of `grpojax.losses.importance_correction`; over the sampler's own tokens its mean is 1 but for noise.
    ``sampler_ratio_square``: its square, for `effective_sample_size`.

    All arguments are ``[..., T]`` and constant for the gradient. Values outside of ``mask`` are never read. Differences
    are limited to ±20 nats before the exponential.

    Example:
      >>> train, sampler = jnp.log(jnp.array([0.5, 0.3, 0.2, 0.1])), jnp.log(jnp.array([0.4, 0.5, 0.05, 0.1]))
      >>> found = mismatch(train, sampler, jnp.ones(4, bool))
      >>> round(float(found["logp_difference_max"].value), 4), round(float(found["sampler_ratio"].value), 4)
      (1.3863, 1.7125)
    """
    train, sampler = (jax.lax.stop_gradient(x) for x in masked.float32(train_logps, sampler_logps))
    difference = jnp.where(mask, train - sampler, 0.0)
    size = jnp.abs(difference)
    d = jnp.clip(difference, -20.0, 20.0)
    ratio = jnp.exp(d)
    n = jnp.asarray(mask).sum().astype(jnp.float32)
    return {
        "logp_difference": Mean(total=size.sum(), count=n),
        "logp_difference_max": Max(value=size.max()),
        "sampler_kl": Mean(total=(jnp.expm1(d) - d).sum(), count=n),
        "sampler_ratio": Mean(total=masked.total(ratio, mask), count=n),
        "sampler_ratio_square": Mean(total=masked.total(jnp.square(ratio), mask), count=n),
    }


def effective_sample_size(ratio: Scalar, ratio_square: Scalar) -> Scalar:
    """``(Σ w)² / (N Σ w²)`` of importance weights w, ``[]`` in [0, 1]: 1 if all are equal, 0 if there are none.

    Plain arithmetic: numbers in, a number out.

    Args:
      ratio, ratio_square: the means of w and of w² over the same tokens, as `mismatch` gives them.

    Example:
      >>> effective_sample_size(1.0, 2.0)
      0.5
    """
    return ratio * ratio / (ratio_square + (ratio_square == 0))


def repetition(tokens: Tokens, lengths: Samples, ngram: int = 4) -> Samples:
    """Share of a sample's n-grams that occurred in it before, ``[P, G]`` in numpy: near 1 in a loop.

    An n-gram is ``ngram`` tokens in a row. NaN for a sample without n-grams. N-grams are compared by 64-bit codes.

    Example:
      >>> repetition(np.array([[[1, 2, 1, 2, 3]]]), np.array([[5]]), 2).tolist()
      [[0.25]]
    """
    counts = np.maximum(np.asarray(lengths) - ngram + 1, 0)
    again = np.zeros(counts.shape)
    for p, ids in enumerate(np.asarray(tokens)):  # a group fits into a cache
        codes = np.zeros(ids.shape, np.uint64)
        for i in range(ngram):  # modulo 2^64
            codes = codes * np.uint64(0x9E3779B97F4A7C15) + np.roll(ids, -i, -1).astype(np.uint64)
        codes = np.sort(np.where(np.arange(ids.shape[-1]) < counts[p, :, None], codes, ~np.uint64(0)), -1)
        again[p] = ((codes[:, 1:] == codes[:, :-1]) & (codes[:, 1:] < ~np.uint64(0))).sum(-1)
    return np.where(counts > 0, again / np.maximum(counts, 1), np.nan)
