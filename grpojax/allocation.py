"""Which prompts are sampled and how often, and rewards that depend on lengths: pure functions. Imports jax only.

Rewards that depend on lengths are for `grpojax.advantages.chain`'s ``reward``; lengths are in tokens.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from grpojax import masked
from grpojax.advantages import Signals, Transform
from grpojax.advantages.signals import described, need, outcome_of, per_sample
from grpojax.types import Array, PerPrompt, Samples, Scalar

# --- which prompts are kept


def pass_rate(rewards: Samples, valid: Samples | None = None, *, success: float = 1.0) -> PerPrompt:
    """``[P]`` float32: the share of a group's valid samples with a reward of at least ``success``; of ``[P, G]``.

    ``Σ 1[r_i >= success] / n`` over the n valid samples, for the filter of DAPO (arXiv 2503.14476; `keep_prompts`).

    Example:
      >>> pass_rate(jnp.array([[1.0, 0.0], [1.0, jnp.nan]])).tolist()
      [0.5, 1.0]
    """
    rewards = jnp.asarray(rewards, jnp.float32)
    valid = jnp.isfinite(rewards) if valid is None else jnp.asarray(valid)
    return masked.mean((rewards >= success).astype(jnp.float32), valid, 1)


def keep_prompts(
    metrics: Mapping[str, Samples],
    on: str,
    *,
    above: float | None = None,
    below: float | None = None,
    success: float | None = None,
) -> PerPrompt:
    """Dynamic sampling's keep mask ``[P]`` bool: the groups whose samples differ in the metric called ``on``.

    On a metric of 0 and 1 that is DAPO's ``0 < pass rate < 1`` (arXiv 2503.14476), which samples on until a batch is
    full. The metric is named: the total reward varies within a group through format or length terms alone, which would
    keep groups that teach nothing.

    With a bound, the pass rate decides in place of the variance: NGRPO drops all-correct groups only (``below=1.0``).
    A group without any valid sample is dropped.

    Args:
      metrics: name to ``[P, G]``; a value that is not finite does not count.
      on: name of the metric that decides, such as "accuracy".
      above, below: bounds of the pass rate, both strict; None for none. They are for metrics of 0 and 1. Another metric
        raises if its values are concrete, unless ``success`` is given.
      success: a sample passes if its metric is at least this. It turns a graded metric into one of 0 and 1, with bounds
        or without.

    Example:
      >>> accuracy = {"accuracy": jnp.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])}
      >>> keep_prompts(accuracy, "accuracy").tolist(), keep_prompts(accuracy, "accuracy", below=1.0).tolist()
      ([False, True, False], [True, True, False])
    """
    if on not in metrics:
        raise ValueError(f"keep_prompts(on={on!r}): no such metric; there are {', '.join(sorted(metrics))}")
    bounded = above is not None or below is not None
    if bounded and success is None and not isinstance(metrics[on], jax.core.Tracer):
        known = np.asarray(metrics[on], np.float32)
        graded = known[np.isfinite(known) & (known != 0) & (known != 1)]
        if graded.size:
            raise ValueError(
                f"keep_prompts(on={on!r}, above={above}, below={below}): bounds of the pass rate are for 0 and 1, and "
                f"{on!r} has {graded[0]:g}; give success, from where on a sample passes, or no bounds"
            )
    values = jnp.asarray(metrics[on], jnp.float32)
    valid = jnp.isfinite(values)
    if success is not None:
        values = (values >= success).astype(jnp.float32)
    if not bounded:
        return ~masked.all_equal(values, valid, 1)
    rate = pass_rate(values, valid)
    keep = valid.any(1)
    if above is not None:
        keep &= rate > above
    if below is not None:
        keep &= rate < below
    return keep


def solved(metric: Samples, share: float = 1.0, *, success: float = 1.0, drawn: Samples | None = None) -> PerPrompt:
    """``[P]`` bool from ``[P, G]``: the prompts for which at least a ``share`` of the samples is known to pass.

    Culling leaves these prompts out of later epochs (`grpojax.data.RetiringBatches`). ScaleRL (arXiv 2510.13786) no
    longer draws a prompt once 0.9 of its samples passed; the third of the experiments in `grpojax.variants` takes 1.

    Args:
      metric: ``[P, G]``. A sample whose metric is not finite, such as one whose reward timed out, counts as failed, so
        that it never helps to leave a prompt out for good.
      share: share of the samples, in (0, 1].
      success: a sample passes if its metric is at least this.
      drawn: ``[P, G]`` bool, the samples that there are, where prompts have different numbers of them; None for all.

    Example:
      >>> metric = jnp.array([[1.0] * 9 + [0.0], [1.0] * 8 + [0.0] * 2])
      >>> solved(metric, 0.9).tolist(), solved(metric).tolist()
      ([True, False], [False, False])
    """
    if not 0 < share <= 1:
        raise ValueError(f"solved(share={share}): must be over 0 and at most 1")
    metric = jnp.asarray(metric, jnp.float32)
    drawn = jnp.ones(metric.shape, bool) if drawn is None else jnp.asarray(drawn)
    return pass_rate(metric, drawn, success=success) > share - 1e-5  # 9 / 10 may be rounded to under 0.9


# --- how many samples each prompt gets


def t_quantile(p: float, dof: Array) -> Array:
    """Quantile of Student's t, ``p`` in (1/2, 1), for ``dof`` degrees of freedom ``[...]``; by bisection.

    The t with ``½ I_{ν / (ν + t²)}(ν / 2, ½) = 1 - p``, I the regularised incomplete beta function and ν = ``dof``;
    float32 ``[...]``. For `xrpo_priority`.

    Example:
      >>> [round(float(t), 2) for t in t_quantile(0.975, jnp.array([3.0, 4.0]))]
      [3.18, 2.78]
    """
    if not 0.5 < p < 1:
        raise ValueError(f"t_quantile({p}): must be between 1/2 and 1")
    dof = jnp.asarray(dof, jnp.float32)

    def halve(_: Scalar, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = 0.5 * (low + high)
        tail = 0.5 * jax.scipy.special.betainc(0.5 * dof, 0.5, dof / (dof + jnp.square(middle)))
        over = tail < 1.0 - p
        return jnp.where(over, low, middle), jnp.where(over, middle, high)

    widest = 1.0 / (1.0 - p)  # the quantile of dof 1, the largest, is under 1 / (π (1 - p))
    start = (jnp.zeros_like(dof), jnp.full_like(dof, widest))
    return jax.lax.fori_loop(0, 50, halve, start)[1]


def xrpo_priority(std: PerPrompt, counts: PerPrompt, *, bonus: float = 1.0, confidence: float = 0.95) -> PerPrompt:
    """How much one more sample of each prompt is worth, ``[P]`` (XRPO, arXiv 2510.06672)::

      h(n) = t_{(1 + confidence) / 2, n - 1} std / sqrt(n)      half-width of the mean reward's interval
      priority = h(n) - h(n + 1) + bonus sqrt(log(1 + total) / n)

    ``total`` is the number of all samples so far: sources disagree on that and on the square root, and this is the
    reading of an upper confidence bound. With one sample there is no half-width, and only the bonus counts. With no
    sample the priority is infinite.

    Args:
      std: ``[P]`` standard deviation (ddof 1) of the rewards so far; one that is not finite counts as 0.
      counts: ``[P]`` int32 samples so far.
      bonus: weight of exploration.
      confidence: confidence level of the interval, such as 0.95.

    Example:
      >>> std, counts = jnp.full(4, 0.57735027), jnp.full(4, 4)
      >>> [round(float(x), 3) for x in xrpo_priority(std, counts)][:2]
      [1.043, 1.043]
    """
    n = jnp.asarray(counts).astype(jnp.float32)
    std = jnp.where(jnp.isfinite(std), std, 0.0)

    def width(n: PerPrompt) -> PerPrompt:
        quantile = t_quantile(0.5 + 0.5 * confidence, jnp.maximum(n - 1.0, 1.0))
        return quantile * std / jnp.sqrt(jnp.maximum(n, 1.0))

    gain = jnp.where(n > 1, width(n) - width(n + 1.0), 0.0)
    explore = bonus * jnp.sqrt(jnp.log1p(n.sum()) / jnp.maximum(n, 1.0))
    return jnp.where(n > 0, gain + explore, jnp.inf)


def xrpo_allocate(
    std: PerPrompt,
    counts: PerPrompt,
    budget: int,
    *,
    bonus: float = 1.0,
    confidence: float = 0.95,
    most: int | None = None,
) -> PerPrompt:
    """How many of ``budget`` further samples each prompt gets, ``[P]`` int32: one by one to the largest priority.

    ``std`` does not change, the counts grow with each sample that is given. Ties go to the first prompt. The paper
    starts with a uniform phase and plans three times.

    From XRPO (arXiv 2510.06672); ``std`` and ``counts`` are ``[P]`` as in `xrpo_priority`, ``budget`` in samples. A
    prompt with ``most`` samples gets no more (None: there is no bound); all together must have room for the budget.

    Example:
      >>> xrpo_allocate(jnp.array([0.0, 0.5, 0.5]), jnp.array([4, 4, 8]), 3).tolist()
      [1, 2, 0]
    """

    def give(_: Scalar, given: PerPrompt) -> PerPrompt:
        priority = xrpo_priority(std, counts + given, bonus=bonus, confidence=confidence)
        if most is not None:
            priority = jnp.where(counts + given < most, priority, -jnp.inf)
        return given.at[jnp.argmax(priority)].add(1)

    counts = jnp.asarray(counts, jnp.int32)
    return jax.lax.fori_loop(0, budget, give, jnp.zeros_like(counts))


# --- rewards that depend on lengths


def overlong_penalty(lengths: Array, limit: int, buffer: int) -> Array:
    """Soft overlong punishment (DAPO, arXiv 2503.14476): 0 up to ``limit - buffer`` tokens, -1 from ``limit`` on.

    Linear in between. The paper has 20480 and 4096.
    Int32 lengths ``[...]`` to float32, ``((limit - buffer) - length) / buffer``, all lengths in tokens.

    Example:
      >>> [round(float(x), 2) for x in overlong_penalty(jnp.array([80, 81, 90, 100, 101]), 100, 20)]
      [0.0, -0.05, -0.5, -1.0, -1.0]
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"overlong_penalty(limit={limit}, buffer={buffer}): 0 < buffer <= limit, in tokens")
    left = (limit - buffer) - jnp.asarray(lengths).astype(jnp.float32)
    return jnp.clip(left / buffer, -1.0, 0.0)


@described
def soft_overlong(limit: int, buffer: int, *, factor: float = 0.5) -> Transform:
    """``r_i + factor overlong_penalty``, for `grpojax.advantages.chain`'s ``reward``.

    DAPO's punishment (arXiv 2503.14476) is for a correctness of ±1: at the limit it takes half of the span between
    wrong and right. For rewards of 0 and 1 that half is a factor of 0.5. With 1 a right sample at the limit has the
    reward of a wrong one: in a group of 8 with four right samples, one of them at the limit, its advantage is -0.72
    (ddof 1). With 0.5 it is +0.13.

    The rewards are then no longer binary, so filters must use the accuracy (`keep_prompts`).
    On ``[P, G]``, ``signals.full_lengths`` in tokens, or ``signals.lengths`` if there are none.

    Args:
      limit, buffer: as in `overlong_penalty`.
      factor: half of the difference between the rewards for right and wrong; 1 for DAPO's ±1.

    Example:
      >>> from grpojax.advantages import chain
      >>> signals = Signals(lengths=jnp.array([[80, 90, 100]]))
      >>> chain(reward=soft_overlong(100, 20))(jnp.ones((1, 3)), signals).tolist()
      [[1.0, 0.75, 0.5]]
    """
    if factor < 0:
        raise ValueError(f"soft_overlong(factor={factor}): must be at least 0")

    def reward(values: Samples, signals: Signals | None = None) -> Samples:
        values, signals = per_sample(values, signals, "soft_overlong")
        full = signals.full_lengths
        lengths = need(signals, "lengths", "soft_overlong") if full is None else full
        return values + factor * overlong_penalty(lengths, limit, buffer)

    return reward


@described
def length_selected(alpha: float = 0.6, *, share: float = 0.2, success: float = 1.0) -> Transform:
    """GRPO-λ's length strategy (arXiv 2505.18086), for `grpojax.advantages.chain`'s ``reward``.

    The ``ceil(share P)`` groups of the batch with the highest pass rate (ties: the first; at least 1; none without a
    right sample) get::

      r_i = 1 - alpha σ((L_i - mean L) / std L)  if sample i is right, else 0

    with the mean and deviation (ddof 0) of L over the group's right samples. If these all have one length, the
    sigmoid's argument is 0. All other groups keep their rewards. On ``[P, G]``.

    Args:
      alpha: weight of the length. The paper's value could not be confirmed; 0.6 is that of a re-implementation.
      share: λ, 20 % in the paper.
      success: a sample is right if its outcome is at least this.

    Example:
      >>> from grpojax.advantages import chain
      >>> signals = Signals(lengths=jnp.array([[100, 200, 300, 50]]))
      >>> rewards = chain(reward=length_selected(0.6))(jnp.array([[1.0, 1.0, 1.0, 0.0]]), signals)
      >>> [round(float(r), 4) for r in rewards[0]]
      [0.8637, 0.7, 0.5363, 0.0]
    """
    if not 0 < share <= 1 or not 0 <= alpha <= 1:
        raise ValueError(f"length_selected(alpha={alpha}, share={share}): alpha in [0, 1], share in (0, 1]")

    def reward(values: Samples, signals: Signals | None = None) -> Samples:
        values, signals = per_sample(values, signals, "length_selected")
        outcome, valid = outcome_of(signals, "length_selected")
        lengths = jnp.asarray(need(signals, "lengths", "length_selected")).astype(jnp.float32)
        right = valid & (outcome >= success)
        over = {"mask": right, "axis": 1, "keepdims": True}
        std = jnp.sqrt(masked.variance(lengths, **over))
        dead = masked.all_equal(lengths, **over)
        z = jnp.where(dead, 0.0, lengths - masked.mean(lengths, **over)) / jnp.where(dead, 1.0, std)
        short = jnp.where(right, 1.0 - alpha * jax.nn.sigmoid(z), 0.0)
        rate = pass_rate(outcome, valid, success=success)
        order = jnp.argsort(jnp.where(valid.any(1), -rate, jnp.inf), stable=True)
        n = max(1, math.ceil(share * len(order) - 1e-6))
        selected = jnp.zeros(len(order), bool).at[order[:n]].set(True) & right.any(1)
        return jnp.where(selected[:, None], short, values)

    return reward
