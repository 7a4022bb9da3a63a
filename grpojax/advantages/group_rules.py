"""Advantages of a group by other rules than mean and deviation, ``[P, G]``."""

import jax
import jax.numpy as jnp

from grpojax import masked
from grpojax.advantages.baselines import center
from grpojax.advantages.signals import Signals, Transform, described, need, outcome_of, per_sample
from grpojax.types import Array, Samples, is_concrete


@described
def virtual_best(reward_max: float = 1.0, count: int = 1, *, ddof: int = 1, eps: float = 1e-6) -> Transform:
    """Mean and deviation over the group *and* ``count`` virtual samples that have ``reward_max``.

    ``A_i = (r_i - mean') / (std' + eps)`` for the real samples (NGRPO, arXiv 2509.18851, as its code has it). A
    group in which all fail gets ``-1 / sqrt(G + 1)`` (ddof 1) each, and one in which all are right exactly 0. In all
    other groups the sum is negative: the method pairs this with a tighter lower clip. The same holds for a group of
    one: one failure gives ``-1 / sqrt(2)`` (the authors' code leaves its reward as it is). A reward over ``reward_max``
    raises where the rewards are concrete and counts as ``reward_max`` under jit.

    Example:
      >>> from grpojax.advantages import chain
      >>> fails = chain(virtual_best())(jnp.zeros((1, 8)))
      >>> round(float(fails[0, 0]), 5)
      -0.33333
    """
    if count < 1:
        raise ValueError(f"virtual_best(count={count}): must be at least 1; center and scale do without")

    def transform(values: Samples, signals: Signals | None = None) -> Samples:
        values, signals = per_sample(values, signals, "virtual_best")
        valid = signals.valid
        if is_concrete(values) and is_concrete(valid) and bool((valid & (values > reward_max)).any()):
            raise ValueError(
                f"virtual_best(reward_max={reward_max}): a reward is {float(values.max()):g}; give the largest there is"
            )
        values = jnp.minimum(values, reward_max)
        n = valid.sum(1, keepdims=True).astype(jnp.float32) + count
        mean = (masked.total(values, valid, 1, keepdims=True) + count * reward_max) / n
        squares = masked.total(jnp.square(values - mean), valid, 1, keepdims=True)
        variance = (squares + count * jnp.square(reward_max - mean)) / jnp.maximum(n - ddof, 1.0)
        live = valid & (valid & (values < reward_max)).any(1, keepdims=True)
        return jnp.where(live, (values - mean) / jnp.where(live, jnp.sqrt(variance) + eps, 1.0), 0.0)

    return transform


def _none_of(drawn: int, wrong: Array, total: Array) -> Array:
    """``C(wrong, drawn) / C(total, drawn)``: the chance that ``drawn`` of ``total`` samples are all wrong."""
    chance = jnp.ones_like(wrong)
    for j in range(drawn):
        chance = chance * jnp.maximum(wrong - j, 0.0) / jnp.maximum(total - j, 1.0)
    return chance


@described
def pass_at_k(k: int, *, success: float = 1.0) -> Transform:
    """The advantage under pass@k as the reward, in closed form (arXiv 2508.10751).

    With N samples, N⁻ of them wrong, ``R = 1 - C(N⁻, k) / C(N, k)`` and ``σ = sqrt(R (1 - R))``::

      right: (1 - R) / σ        wrong: (1 - R - C(N⁻ - 1, k - 1) / C(N - 1, k - 1)) / σ

    which is ``sqrt((1 - R) / R)``, and ``1 - N / N⁻`` times that, also where 1 - R is too small a number to divide by.
    Sums to 0 over a group; k = 1 is GRPO with ddof 0 and eps 0. All wrong, or fewer than k wrong: exactly 0.
    `best_margin` is another method with that name. On ``[P, G]``.

    Args:
      k: samples that one attempt may draw, at most the group.
      success: a sample is right if its outcome is at least this.

    Example:
      >>> from grpojax.advantages import chain
      >>> advantages = chain(pass_at_k(4))(jnp.array([[1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]))
      >>> [round(float(a), 4) for a in advantages[0, 1:3]]
      [0.5222, -0.1741]
    """
    if k < 1:
        raise ValueError(f"pass_at_k(k={k}): must be at least 1")

    def transform(values: Samples, signals: Signals | None = None) -> Samples:
        values, signals = per_sample(values, signals, "pass_at_k")
        outcome, valid = outcome_of(signals, "pass_at_k")
        if k > values.shape[1]:
            raise ValueError(f"pass_at_k(k={k}): more than the group's {values.shape[1]} samples")
        right = valid & (outcome >= success)
        total = valid.sum(1, keepdims=True).astype(jnp.float32)
        wrong = (valid & ~right).sum(1, keepdims=True).astype(jnp.float32)
        live = valid & (total >= k) & (wrong >= k) & (wrong < total)
        fail = _none_of(k, wrong, total)
        gain = jnp.sqrt(fail / jnp.where(live, 1.0 - fail, 1.0))
        return jnp.where(live, jnp.where(right, gain, gain * (1.0 - total / jnp.maximum(wrong, 1.0))), 0.0)

    return transform


@described
def best_margin(*, scaled: bool = False, eps: float = 1e-6) -> Transform:
    """Only a group's best sample learns: ``r_(1) - r_(2)``, the margin to the second best (arXiv 2503.19595).

    `pass_at_k` is another method that is called pass@k. Ties and groups of one give 0. On ``[P, G]``.

    Args:
      scaled: divide by the group's standard deviation (ddof 1) plus ``eps``.

    Example:
      >>> from grpojax.advantages import chain
      >>> [round(float(a), 4) for a in chain(best_margin())(jnp.array([[0.2, 0.9, 0.5, 0.1]]))[0]]
      [0.0, 0.4, 0.0, 0.0]
    """

    def transform(values: Samples, signals: Signals | None = None) -> Samples:
        values, signals = per_sample(values, signals, "best_margin")
        valid = signals.valid
        if values.shape[1] < 2:
            return jnp.zeros_like(values)
        ranked = jax.lax.top_k(jnp.where(valid, values, -jnp.inf), 2)[0]
        margin = jnp.where(jnp.isfinite(ranked[:, 1:]), ranked[:, :1] - ranked[:, 1:], 0.0)
        if scaled:
            margin = margin / (masked.deviation(values, valid, 1, 1)[0] + eps)
        return jnp.where(valid & (values == ranked[:, :1]), margin, 0.0)

    return transform


@described
def max_rl() -> Transform:
    """Maximum likelihood by its expansion: ``A_i = (r_i - mean r) / mean r`` of the group (MaxRL, arXiv 2602.02710).

    Rewards are 0 or more. A group whose mean is 0 gives exactly 0, and so does one of equal rewards. For 0/1 rewards of
    rate p the expected gradient of ``mean_i A_i log π(y_i)`` over G samples is that of ``-Σ_{k<G} (1 - p)^k / k``, the
    expansion of ``log p`` to order G - 1: hard prompts weigh up to G - 1 times as much as in REINFORCE, which has order
    1. (Groups that fail are left alone; with -1 for their samples it would be order G.) A reward under 0 raises where
    the rewards are concrete; under jit a group whose mean is not over 0 gives 0. On ``[P, G]``.

    Example:
      >>> from grpojax.advantages import chain
      >>> chain(max_rl())(jnp.array([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])).tolist()
      [[3.0, -1.0, -1.0, -1.0], [0.0, 0.0, 0.0, 0.0]]
    """
    centred = center("group")

    def transform(values: Samples, signals: Signals | None = None) -> Samples:
        values, signals = per_sample(values, signals, "max_rl")
        valid = signals.valid
        if is_concrete(values) and is_concrete(valid) and bool((valid & (values < 0)).any()):
            raise ValueError(f"max_rl: a reward is {float(values.min()):g}; it takes rewards of 0 or more")
        mean = masked.mean(values, valid, 1, keepdims=True)
        live = mean > 0
        return jnp.where(live, centred(values, signals) / jnp.where(live, mean, 1.0), 0.0)

    return transform


@described
def penalize_all_fail(c: float, fail_reward: float = 0.0) -> Transform:
    """``A_i = -c`` in a group in which no outcome is over ``fail_reward``; other groups as they come; ``[P, G]``.

    The fourth of the experiments in `grpojax.variants`. It goes after `scale`, since it overwrites the values. Such a
    group sums to ``-c G``: every sample is made less likely, none more likely, and without a clip the loss is unbounded
    below. NGRPO's value would be ``1 / sqrt(G + 1)``; c = 1 is 3 times that at G = 8.

    Example:
      >>> from grpojax.advantages import chain
      >>> chain(center("group"), penalize_all_fail(1.0))(jnp.array([[0.0, 0.0], [1.0, 0.0]])).tolist()
      [[-1.0, -1.0], [0.5, -0.5]]
    """

    def transform(values: Samples, signals: Signals | None = None) -> Samples:
        values, signals = per_sample(values, signals, "penalize_all_fail")
        failed = masked.all_fail(*outcome_of(signals, "penalize_all_fail"), fail_reward)
        return jnp.where(failed[:, None], 0.0 - c, values)  # c = 0 gives 0, not -0

    return transform


@described
def weigh_signs(positive: float = 0.1, negative: float = 1.0, *, success: float = 1.0) -> Transform:
    """``positive`` for a right sample and ``-negative`` for a wrong one, whatever the values are; ``[P, G]``.

    Weighted REINFORCE (arXiv 2506.01347) on outcomes of +1 and -1, without a baseline. ``positive=1`` is REINFORCE,
    ``positive=0`` learns from wrong samples alone, and ``negative=0`` from right ones.

    Args:
      positive: weight of right samples, λ in the paper.
      negative: weight of wrong samples.
      success: a sample is right if its outcome is at least this.

    Example:
      >>> from grpojax.advantages import chain
      >>> [round(float(a), 4) for a in chain(weigh_signs())(jnp.array([[1.0, 0.0, jnp.nan]]))[0]]
      [0.1, -1.0, 0.0]
    """
    if positive < 0 or negative < 0:
        raise ValueError(f"weigh_signs({positive}, {negative}): weights must be 0 or more")

    def transform(values: Samples, signals: Signals | None = None) -> Samples:
        values, signals = per_sample(values, signals, "weigh_signs")
        outcome, known = outcome_of(signals, "weigh_signs")
        return jnp.where(known, jnp.where(outcome >= success, positive, 0.0 - negative), 0.0)

    return transform


@described
def likelihood_of_all_fail(fail_reward: float = 0.0, *, everywhere: bool = False, relative: bool = False) -> Transform:
    """For `chain`'s ``reward``: where all samples of a group fail, the reward is ``signals.likelihood [P, G]`` instead.

    The fifth of the experiments in `grpojax.variants`.
    ``R_i = P(true answer | prompt, reasoning of sample i)``, by the policy that drew the samples. The caller chooses
    the joint probability or the geometric mean per token. The second compares answers of any length and lies in [0, 1].
    In a group with any likelihood, a sample whose own is not finite is left out: its reward would be in another unit.
    Groups without any keep their rewards.

    Args:
      fail_reward: a sample fails if its outcome is at most this.
      everywhere: use the likelihood in all groups, whatever their rewards.
      relative: divide by the group's largest likelihood. The advantage of GRPO as printed (arXiv 2402.03300, no eps)
        depends on the ratios of a group's likelihoods only. With an eps it does not: under an eps of 1e-4 a group of
        likelihoods around 1e-6 would have no advantage. With this it has the advantages of likelihoods around 0.1 in
        the same ratio.

    Example:
      >>> from grpojax.advantages import chain
      >>> signals = Signals(likelihood=jnp.array([[0.43088694, 0.9, 0.1, 0.3]]))
      >>> advantages = chain(center("group"), reward=likelihood_of_all_fail())(jnp.zeros((1, 4)), signals)
      >>> [round(float(a), 4) for a in advantages[0]]
      [-0.0018, 0.4673, -0.3327, -0.1327]
    """

    def transform(values: Samples, signals: Signals | None = None) -> Samples:
        values, signals = per_sample(values, signals, "likelihood_of_all_fail")
        likelihood = jnp.asarray(need(signals, "likelihood", "likelihood_of_all_fail"), jnp.float32)
        known = jnp.isfinite(likelihood)
        taken = jnp.broadcast_to(known.any(1, keepdims=True), known.shape)
        if not everywhere:
            taken &= masked.all_fail(*outcome_of(signals, "likelihood_of_all_fail"), fail_reward)[:, None]
        if relative:
            counts = known & need(signals, "valid", "likelihood_of_all_fail")
            largest = jnp.where(counts, likelihood, 0.0).max(1, keepdims=True)
            likelihood = likelihood / jnp.where(largest > 0, largest, 1.0)
        return jnp.where(taken, jnp.where(known, likelihood, jnp.nan), values)

    return transform
