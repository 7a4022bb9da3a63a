"""What to watch in a run: likelihood displacement, groups, mismatch, collapse. Pure functions that import jax only."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpojax import masked
from grpojax.credit import influence
from grpojax.types import AnyTokens, Array, Hidden, Max, Mean, PerPrompt, Samples, Scalar, Tokens, pytree


def likelihood_displacement(
    before: Array, after: Array, rewards: Samples, mask: Tokens | None = None, *, success: float = 1.0
) -> PerPrompt:
    """``Δ(x) = mean over right samples of [log π'(y | x) - log π(y | x)]``, joint log-probs: ``[P]``, nats.

    At or under 0: the right answers got less likely although they were rewarded (lazy likelihood displacement, arXiv
    2505.18830). Exact if π' is π after one update *on that prompt alone*, started over for each prompt. With the
    log-probs of two consecutive steps on samples that were kept it is the cheap proxy for a running training.

    Args:
      before, after: ``[P, G, T]`` log-probs under π and π', or ``[P, G]`` their sums.
      rewards: ``[P, G]``.
      mask: ``[P, G, T]`` bool; None with sums.
      success: the reward from which on a sample is right.

    Returns:
      ``[P]`` float32; NaN where no sample is right, so that it counts in no mean by mistake.

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


def exact_displacement(
    params: Any,
    problems: Any,
    logps: Callable[[Any, Any], Array],
    update: Callable[[Any, Any], Any],
    rewards: Samples,
    mask: Tokens,
    *,
    success: float = 1.0,
) -> PerPrompt:
    """Δ(x) as it is defined: one update on each prompt alone, every one from the same weights (arXiv 2505.18830).

    Prompts go one after the other, as each has weights of its own.

    Args:
      params: the policy's weights, any pytree.
      problems: pytree of arrays ``[P, ...]``: what ``logps`` and ``update`` need of each prompt.
      logps: ``(params, problem) -> [G, T]`` log-probs of the prompt's samples.
      update: ``(params, problem) -> params`` after one update on the prompt.
      rewards, mask, success: as in `likelihood_displacement`.

    Returns:
      ``[P]`` float32, nats; NaN where no sample is right.

    Example:
      >>> policy = lambda logits, tokens: jax.nn.log_softmax(logits)[tokens]
      >>> raise_first = lambda logits, tokens: logits.at[tokens[0, 0]].add(1.0)
      >>> tokens = jnp.array([[[0], [1]], [[2], [0]]])
      >>> rewards = jnp.array([[1.0, 0.0], [0.0, 1.0]])
      >>> delta = exact_displacement(jnp.zeros(3), tokens, policy, raise_first, rewards, tokens >= 0)
      >>> [round(float(x), 4) for x in delta]
      [0.5472, -0.4528]
    """
    before, after = jax.lax.map(lambda x: (logps(params, x), logps(update(params, x), x)), problems)
    return likelihood_displacement(before, after, rewards, mask, success=success)


def gwhes(
    probs: Array, hidden: Hidden, columns: Tokens, mask: Tokens, rewards: Samples, *, success: float = 1.0
) -> Samples:
    """Group weighted hidden embedding score of each right sample, ``[P, G]`` (arXiv 2505.18830)::

      p⁻ Σ_k Σ_{wrong j, k'} <g, g><h, h> - p⁺ Σ_k Σ_{right i', k''} <g, g><h, h>

    with ``p⁺ = (1 - p) / sqrt(p (1 - p))``, ``p⁻ = p / sqrt(p (1 - p))``. Larger predicts more displacement; the mean
    over right samples ranks prompts (the paper does not say how it aggregates).

    Args:
      probs, hidden, columns, mask: as in `grpojax.credit.influence`.
      rewards: ``[P, G]``; what is not finite counts nowhere.
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
    """Of the ``top`` prompts with the highest scores, the share that is among the ``top`` of the lowest Δ: ``[]``.

    How well `gwhes` predicts `likelihood_displacement` (arXiv 2505.18830; 50 to 60 % of 10 there). Rankings that have
    nothing to do with each other share ``top / P`` on average, and no two share less than ``(2 top - P) / top``: with
    10 of 15 that is 67 % and 50 %. So ``top`` should be at most a fifth of P. `rank_correlation` reads whole rankings.

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

    0 on average of rankings that have nothing to do with each other. Pearson's correlation of the ranks, in which
    equal values have the mean of their ranks; 0 where all values of one of them are equal. For `gwhes` and
    `likelihood_displacement` (arXiv 2505.18830).

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
    of *samples* whose metric is not finite). A group without a valid sample is in none of the first three, and not in
    what they are shares of.

    The shares that dynamic sampling acts on (DAPO, arXiv 2503.14476; `grpojax.allocation.keep_prompts`).

    Args:
      metric: ``[P, G]``; a sample whose metric is not finite is invalid.
      success: from where on a sample is right.
      fail: up to where it fails.
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


def advantage_sums(advantages: Tokens, weights: Tokens) -> PerPrompt:
    """``Σ w A`` of each group, ``[P]``: which way it moves the likelihood of its samples as a whole, at ratio 1.

    0 for centred advantages that are aggregated over samples; with lengths in the weights it need not be.

    Both arguments are ``[P, G, T]``, the weights of `grpojax.losses.loss_weights`; the loss at ratio 1 is the negative.

    Example:
      >>> mask = masked.from_lengths(jnp.array([[2, 4, 6, 8]]), 8)
      >>> advantages = jnp.broadcast_to(jnp.array([1.7320508] + [-0.5773503] * 3)[:, None], mask.shape)
      >>> round(float(advantage_sums(advantages, jnp.where(mask, 0.05, 0.0))[0]), 4)
      -0.3464
    """
    mask = jnp.asarray(weights) > 0
    return masked.total(jnp.where(mask, advantages, 0.0) * weights, mask, (1, 2))


def effective_tokens(advantages: Tokens, weights: Tokens) -> dict[str, Scalar]:
    """How many tokens the update is spread over: ``(Σ |w A|)² / Σ (w A)²``, and the share of tokens with A != 0.

    Kish's effective sample size, with ``|w A|`` for the weights; both arguments are ``[P, G, T]``.

    Returns:
      ``{"effective": [], "teaching": []}`` float32; 0 where all is 0.

    Example:
      >>> advantages = jnp.array([[[1.0, 1.0], [-1.0, 0.0]]])
      >>> {name: round(float(x), 4) for name, x in effective_tokens(advantages, jnp.full((1, 2, 2), 0.25)).items()}
      {'effective': 3.0, 'teaching': 0.75}
    """
    mask = jnp.asarray(weights) > 0
    force = jnp.where(mask, jnp.abs(jnp.where(mask, advantages, 0.0) * weights), 0.0).astype(jnp.float32)
    force = force / jnp.maximum(force.max(), 1e-30)  # squares of small numbers would vanish
    squares = jnp.square(force).sum()
    return {
        "effective": jnp.square(force.sum()) / jnp.where(squares > 0, squares, 1.0),
        "teaching": masked.mean((force > 0).astype(jnp.float32), mask),
    }


def mismatch(train_logps: AnyTokens, sampler_logps: AnyTokens, mask: AnyTokens) -> dict[str, Mean | Max]:
    """How far trainer and sampler disagree on the sampled tokens, as metrics that add up over parts of a batch.

    ``logp_difference`` and ``logp_difference_max``: mean and largest |log π_train - log π_sampler|, nats.
    ``sampler_kl``: KL(π_sampler || π_train) by k3 (`grpojax.losses.kl`), nats. ``sampler_ratio``: π_train / π_sampler,
    the weight of `grpojax.losses.importance_correction`; over the sampler's own tokens its mean is 1 but for noise.
    ``sampler_ratio_square``: its square, for `effective_sample_size`.

    All arguments are ``[..., T]``; what stands outside of ``mask`` is never read, and all of it is constant for the
    gradient. What goes into exp is limited to ±20 nats.

    Example:
      >>> train, sampler = jnp.log(jnp.array([0.5, 0.3, 0.2, 0.1])), jnp.log(jnp.array([0.4, 0.5, 0.05, 0.1]))
      >>> apart = mismatch(train, sampler, jnp.ones(4, bool))
      >>> round(float(apart["logp_difference_max"].value), 4), round(float(apart["sampler_ratio"].value), 4)
      (1.3863, 1.7125)
    """
    train, sampler = (jax.lax.stop_gradient(x) for x in masked.float32(train_logps, sampler_logps))
    difference = jnp.where(mask, train - sampler, 0.0)
    apart = jnp.abs(difference)
    d = jnp.clip(difference, -20.0, 20.0)
    ratio = jnp.exp(d)
    n = jnp.asarray(mask).sum().astype(jnp.float32)
    return {
        "logp_difference": Mean(total=apart.sum(), count=n),
        "logp_difference_max": Max(value=apart.max()),
        "sampler_kl": Mean(total=(jnp.expm1(d) - d).sum(), count=n),
        "sampler_ratio": Mean(total=masked.total(ratio, mask), count=n),
        "sampler_ratio_square": Mean(total=masked.total(jnp.square(ratio), mask), count=n),
    }


def effective_sample_size(ratio: Scalar, ratio_square: Scalar) -> Scalar:
    """``(Σ w)² / (N Σ w²)`` of importance weights w, ``[]`` in [0, 1]: 1 where all are equal, 0 of none.

    Plain arithmetic: numbers in, a number out.

    Args:
      ratio, ratio_square: the means of w and of w² over the same tokens, as `mismatch` gives them.

    Example:
      >>> effective_sample_size(1.0, 2.0)
      0.5
    """
    return ratio * ratio / (ratio_square + (ratio_square == 0))


def repetition(tokens: Tokens, lengths: Samples, ngram: int = 4) -> Samples:
    """Share of a sample's ``ngram`` tokens in a row that were in it before, ``[P, G]`` in numpy: near 1 in a loop.

    NaN for a sample without any. N-grams are told apart by 64-bit codes.

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollapseLimits:
    """When `collapse_alarm` rings.

    Attributes:
      window: newest steps that a trend is taken over, at least 2.
      entropy_low: nats a token under which the policy has collapsed.
      entropy_high: nats over which it babbles.
      entropy_drop: fall of the entropy in one window, as a share of what it was at the window's start.
      displacement: Δ per step under which right answers get less likely; judged by the window's mean.
      deviations: standard errors by which that mean must be under it, and the trend under 0; at least 3 known steps.

    Example:
      >>> CollapseLimits(window=5).entropy_drop
      0.5
    """

    window: int = 20
    entropy_low: float = 0.02
    entropy_high: float = 5.0
    entropy_drop: float = 0.5
    displacement: float = 0.0
    deviations: float = 2.0

    def __post_init__(self) -> None:
        if self.window < 2:
            raise ValueError(f"window={self.window}: must be at least 2 steps")


@pytree
class Alarm:
    """What `collapse_alarm` saw, ``[]`` bool each.

    Attributes:
      entropy_collapse: the newest entropy is under ``entropy_low``.
      entropy_explosion: it is over ``entropy_high``.
      entropy_falling: the line through the window falls by more than ``entropy_drop`` of its start.
      displacement: the window's mean Δ is under the limit and Δ is falling, both by more than noise.
      not_finite: the newest entropy is not a finite number, or the newest Δ is infinite.

    Example:
      >>> calm = Alarm(**dict.fromkeys(Alarm.__dataclass_fields__, jnp.array(False)))
      >>> bool(calm.any), bool(dataclasses.replace(calm, not_finite=jnp.array(True)).any)
      (False, True)
    """

    entropy_collapse: Scalar
    entropy_explosion: Scalar
    entropy_falling: Scalar
    displacement: Scalar
    not_finite: Scalar

    @property
    def any(self) -> Scalar:
        """Whether one of them is set, ``[]`` bool."""
        return (
            self.entropy_collapse | self.entropy_explosion | self.entropy_falling | self.displacement | self.not_finite
        )


_DEFAULT_LIMITS = CollapseLimits()


def collapse_alarm(
    entropy: Array, displacement: Array | None = None, limits: CollapseLimits = _DEFAULT_LIMITS
) -> Alarm:
    """Whether recent metrics look like the start of a collapse: a pure function of their history.

    Trends are least-squares lines over the newest ``limits.window`` steps; with fewer than two steps nothing falls.
    The rules are this package's own, as `Alarm` and `CollapseLimits` state them; Δ is that of arXiv 2505.18830.

    Args:
      entropy: ``[S]`` mean entropy of the last S steps, oldest first, nats a token.
      displacement: ``[S]`` Δ of the same steps (`likelihood_displacement`, mean over prompts). NaN where a step has no
        right sample; such steps are left out of its trend. None where nobody measures it: it then never rings.
      limits: when it rings.

    Example:
      >>> alarm = collapse_alarm(jnp.array([1.0, 0.7, 0.4, 0.1]), jnp.array([0.1, 0.2, 0.1, 0.2]))
      >>> bool(alarm.entropy_falling), bool(alarm.displacement), bool(alarm.entropy_collapse)
      (True, False, False)
    """
    entropy = jnp.asarray(entropy, jnp.float32)[-limits.window :]
    delta = jnp.full_like(entropy, jnp.nan) if displacement is None else jnp.asarray(displacement, jnp.float32)
    delta = delta[-limits.window :]
    if entropy.shape != delta.shape or entropy.ndim != 1 or not entropy.size:
        raise ValueError(f"collapse_alarm of {entropy.shape} and {delta.shape}: the same steps, at least one")
    steps = jnp.arange(entropy.size, dtype=jnp.float32)

    def line(y: Array) -> tuple[Scalar, Scalar, tuple[Scalar, Scalar], Scalar]:
        known = jnp.isfinite(y)
        x = jnp.where(known, steps - masked.mean(steps, known), 0.0)
        spread = jnp.maximum(jnp.square(x).sum(), 1e-30)
        slope = masked.total(x * jnp.where(known, y, 0.0), known) / spread
        mean = masked.mean(y, known)
        n = known.sum().astype(jnp.float32)
        rest = jnp.sqrt(masked.total(jnp.square(y - mean - slope * x), known) / jnp.maximum(n - 2.0, 1.0))
        errors = rest / jnp.sqrt(jnp.maximum(n, 1.0)), rest / jnp.sqrt(spread)
        return mean, jnp.where(n > 1, slope, 0.0), errors, n

    level, slope, _, _ = line(entropy)
    start = level - slope * masked.mean(steps, jnp.isfinite(entropy))
    mean, trend, (mean_error, trend_error), n = line(delta)
    margin = limits.deviations
    displaced = (mean + margin * mean_error < limits.displacement) & (trend + margin * trend_error < 0) & (n >= 3)
    return Alarm(
        entropy_collapse=entropy[-1] < limits.entropy_low,
        entropy_explosion=entropy[-1] > limits.entropy_high,
        entropy_falling=-slope * (entropy.size - 1) > limits.entropy_drop * jnp.maximum(start, 1e-30),
        displacement=displaced,
        not_finite=~jnp.isfinite(entropy[-1]) | jnp.isinf(delta[-1]),
    )
