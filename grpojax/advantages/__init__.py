"""From rewards to advantages: stateless transforms ``(values, signals) -> values``, joined by `chain`.

Values are ``[P, G]`` (a number a sample) until `to_tokens`, and ``[P, G, T]`` after it. All of it is float32 and
constant for the gradient. This module imports jax only.

Example:
  >>> import jax.numpy as jnp
  >>> grpo = chain(center("group"), scale("group", ddof=1, eps=1e-4))
  >>> [round(float(a), 4) for a in grpo(jnp.array([[1.0, 0.0, 0.0, 0.0]]))[0]]
  [1.4997, -0.4999, -0.4999, -0.4999]
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from grpojax import masked
from grpojax.types import is_concrete, pytree


@pytree
class Signals:
    """What transforms may read besides the values; a field that nobody reads may stay None.

    Numbers are float32 unless it says otherwise, log-probs nats. A pytree.

    Attributes:
      rewards: ``[P, G]`` raw rewards; `chain` fills it with its input.
      outcome: ``[P, G]`` what a sample's success is judged by, such as accuracy; `chain` fills it with its input. Where
        rewards are sums, a format bonus would otherwise make a wrong sample look as if it had not failed.
      valid: ``[P, G]`` bool, samples that have a reward; `chain` leaves those out whose reward is not finite.
      lengths: ``[P, G]`` int32 completion lengths.
      mask: ``[P, G, T]`` bool completion tokens.
      behavior_logps: ``[P, G, T]`` log-probs under the policy that drew the tokens.
      entropy: ``[P, G, T]`` entropy of the distributions that the tokens were drawn from, nats.
      tokens: ``[P, G, T]`` int32 token ids.
      token_bias: ``[P, G, T]`` a critic's output, added to advantages.
      step_rewards: ``[P, G, T]`` reward of the step that ends at a token, NaN elsewhere.
      ref_logps: ``[P, G, T]`` log-probs under the frozen reference.
      max_logps: ``[P, G, T]`` log-prob of the most likely token at each position.
      values: ``[P, G, T]`` a critic's estimate of the return before each token.
      greedy_rewards: ``[P]`` reward of each prompt's greedy completion.
      likelihood: ``[P, G]`` probability of the true answer after a sample's reasoning.
      hidden: ``[P, G, T, D]`` hidden states that the output head read.
      probs: ``[P, G, T, W]`` probabilities of the ``W`` vocabulary entries kept (`grpojax.credit.group_vocabulary`).
      columns: ``[P, G, T]`` int32, which entry of ``probs`` is the drawn token's.

    Example:
      >>> signals = Signals(lengths=jnp.array([[2, 4]]))
      >>> signals.lengths.shape, signals.mask
      ((1, 2), None)
    """

    rewards: Any = None
    outcome: Any = None
    valid: Any = None
    lengths: Any = None
    mask: Any = None
    behavior_logps: Any = None
    entropy: Any = None
    tokens: Any = None
    token_bias: Any = None
    step_rewards: Any = None
    ref_logps: Any = None
    max_logps: Any = None
    values: Any = None
    greedy_rewards: Any = None
    likelihood: Any = None
    hidden: Any = None
    probs: Any = None
    columns: Any = None


Transform = Callable[..., Any]


def need(signals: Signals, field: str, transform: str):
    """A field of ``signals``; raises `ValueError` naming transform and field where it is missing.

    Example:
      >>> need(Signals(lengths=jnp.array([[3, 2]])), "lengths", "mine").tolist()
      [[3, 2]]
    """
    value = getattr(signals, field)
    if value is None:
        raise ValueError(f"{transform} needs signals.{field}, which is missing")
    return value


def per_sample(values, transform: str):
    """``values [P, G]``; raises `ValueError` naming the transform where they are on tokens already.

    Example:
      >>> per_sample(jnp.zeros((1, 2)), "mine").shape
      (1, 2)
    """
    if values.ndim != 2:
        raise ValueError(f"{transform} takes [P, G], got {values.shape}: put it before to_tokens()")
    return values


def per_token(values, transform: str):
    """``values [P, G, T]``; raises `ValueError` naming the transform where they are not on tokens yet.

    Example:
      >>> per_token(jnp.zeros((1, 2, 3)), "mine").shape
      (1, 2, 3)
    """
    if values.ndim != 3:
        raise ValueError(f"{transform} takes [P, G, T], got {values.shape}: put it after to_tokens()")
    return values


def judged(signals: Signals):
    """``(outcome, valid)``, ``[P, G]``: what success is judged by, and of which samples it is known.

    The outcome is float32, ``valid`` bool: ``signals.valid``, less the outcomes that are not finite (`Signals`).

    Example:
      >>> signals = Signals(outcome=jnp.array([[1.0, jnp.nan]]), valid=jnp.ones((1, 2), bool))
      >>> judged(signals)[1].tolist()
      [[True, False]]
    """
    outcome = jnp.asarray(signals.outcome, jnp.float32)
    return outcome, signals.valid & jnp.isfinite(outcome)


def signs(signals: Signals):
    """``[P, G]`` float32: the sign of ``r - mean r`` over the group, 0 on samples that are not valid.

    They tell right from wrong in GTPO (arXiv 2508.03772) and NTHR (arXiv 2505.18830).

    Example:
      >>> signs(Signals(rewards=jnp.array([[1.0, 0.0, 0.0]]), valid=jnp.array([[True, True, False]]))).tolist()
      [[1.0, -1.0, 0.0]]
    """
    return jnp.sign(center("group")(signals.rewards, signals))


def chain(*transforms: Transform, reward: Transform | None = None) -> Transform:
    """Applies transforms from left to right.

    The result takes ``rewards [P, G]`` and optionally `Signals`. A sample whose reward is not finite is invalid:
    it takes no part in any statistic, and its advantage is 0.
    Out come ``[P, G]`` or, after `to_tokens`, ``[P, G, T]``, float32. `grpojax.variants` has the published chains.

    Args:
      transforms: the steps.
      reward: ``(rewards, signals) -> rewards``, a change to the rewards themselves: later steps take its result
        for the raw rewards.

    Example:
      >>> chain(center("group"))(jnp.array([[1.0, 0.0, jnp.nan]])).tolist()
      [[0.5, -0.5, 0.0]]
    """

    def apply(rewards, signals: Signals | None = None):
        signals = signals or Signals()
        values = jax.lax.stop_gradient(jnp.asarray(rewards, jnp.float32))
        signals = jax.tree.map(jax.lax.stop_gradient, signals)
        raw = values if signals.rewards is None else jnp.asarray(signals.rewards, jnp.float32)
        valid = jnp.isfinite(values) & jnp.isfinite(raw)
        if signals.valid is not None:
            valid = valid & signals.valid
        outcome = raw if signals.outcome is None else signals.outcome
        signals = dataclasses.replace(signals, rewards=raw, outcome=outcome, valid=valid)
        values = jnp.where(valid, values, 0.0)
        if reward is not None:
            values = jnp.where(signals.valid, reward(values, signals), 0.0)
            signals = dataclasses.replace(signals, rewards=values)
        for transform in transforms:
            values = transform(values, signals)
        return jnp.where(valid.reshape(valid.shape + (1,) * (values.ndim - 2)), values, 0.0)

    return apply


def _axis(by: str, name: str) -> int | None:
    """The axis of a statistic over ``[P, G]``, its dimensions kept."""
    if by not in ("group", "batch"):
        raise ValueError(f"{name}(by={by!r}): must be 'group', 'batch' or 'none'")
    return 1 if by == "group" else None


def _keeps_singletons(singleton: str, name: str) -> bool:
    if singleton not in ("zero", "reward"):
        raise ValueError(f"{name}(singleton={singleton!r}): must be 'zero' or 'reward'")
    return singleton == "reward"


def center(
    by: Literal["group", "batch", "none"] = "group",
    *,
    leave_one_out: bool = False,
    singleton: Literal["zero", "reward"] = "zero",
) -> Transform:
    """Subtracts the mean reward: ``A_i = r_i - mean_j r_j`` (DeepSeekMath, arXiv 2402.03300; Dr. GRPO, 2503.20783).

    On ``[P, G]``.

    Args:
      by: over which samples the mean is taken.
      leave_one_out: the mean of the *other* samples, ``r_i - mean_{j != i} r_j`` (RLOO, arXiv 2402.14740);
        equals the plain form times ``n / (n - 1)``.
      singleton: what a group of one valid sample gives: 0, or its reward, as in verl.

    A group whose valid rewards are all equal gives exactly 0, and so does a group of one (``singleton="zero"``). A reward that differs from
    the mean by rounding only gives 0 as well: its sign would depend on the order of the samples.

    Example:
      >>> [round(float(a), 4) for a in chain(center("group", leave_one_out=True))(jnp.array([[1.0, 0.0, 0.0, 0.0]]))[0]]
      [1.0, -0.3333, -0.3333, -0.3333]
    """
    alone = _keeps_singletons(singleton, "center")
    if by == "none":
        if leave_one_out or alone:
            raise ValueError("center(by='none') subtracts nothing: it takes no leave_one_out and no singleton")
        return lambda values, signals: values
    axis = _axis(by, "center")

    def transform(values, signals: Signals):
        valid, values = signals.valid, per_sample(values, "center")
        n = valid.sum(axis, keepdims=True).astype(jnp.float32)
        # From the smallest on, so that a common offset costs no digits.
        low = jnp.where(n > 0, jnp.where(valid, values, jnp.inf).min(axis, keepdims=True), 0.0)
        above = jnp.where(valid, values - low, 0.0)
        centred = above - masked.mean(above, valid, axis, keepdims=True)
        spread = above.max(axis, keepdims=True)
        rounding = jnp.finfo(jnp.float32).eps * (jnp.abs(low) + 8.0 * spread)
        centred = jnp.where(jnp.abs(centred) <= rounding, 0.0, centred)
        if leave_one_out:
            centred = centred * n / jnp.maximum(n - 1.0, 1.0)
        dead = masked.all_equal(values, valid, axis, keepdims=True)
        return jnp.where(valid & ~dead, centred, jnp.where(valid & (n == 1) & alone, values, 0.0))

    return transform


def scale(
    by: Literal["group", "batch", "none"] = "group",
    *,
    of: Literal["rewards", "advantages"] = "rewards",
    ddof: int = 1,
    eps: float = 1e-4,
    live_only: bool = False,
    singleton: Literal["zero", "reward"] = "zero",
) -> Transform:
    """Divides by a standard deviation: ``A_i / (std + eps)``, on ``[P, G]``.

    No GRPO paper states ddof or eps; libraries differ (TRL: 1 and 1e-4, verl: 1 and 1e-6, papers' algebra: 0). The
    defaults are TRL's, the larger eps being the safer one.

    Args:
      by: over which samples the deviation is taken.
      of: raw rewards, or the values as they come in. By batch the two differ: raw rewards also vary between
        prompts (Lite PPO, arXiv 2508.08221, prints the first; REINFORCE++-baseline and ScaleRL use the second).
      ddof: 1 divides the squares by n - 1, 0 by n.
      eps: added to the deviation.
      live_only: leave groups whose raw rewards are all equal out of a batch's deviation, as if they had been filtered
        before; they dilute that of centred rewards.
      singleton: a group of one valid sample gives 0, or stays as it comes ("reward", as in verl).

    Where the numbers under the deviation are all equal, or no more than ``ddof``, the result is exactly 0.

    Example:
      >>> grpo = chain(center("group"), scale("group", ddof=0, eps=0.0))
      >>> [round(float(a), 4) for a in grpo(jnp.array([[1.0, 0.0, 0.0, 0.0]]))[0]]
      [1.7321, -0.5774, -0.5774, -0.5774]
    """
    if of not in ("rewards", "advantages"):
        raise ValueError(f"scale(of={of!r}): must be 'rewards' or 'advantages'")
    alone = _keeps_singletons(singleton, "scale")
    if by == "none":
        return lambda values, signals: values
    axis = _axis(by, "scale")
    if live_only and by == "group":
        raise ValueError("scale(by='group', live_only=True): a group's deviation is its own")

    def transform(values, signals: Signals):
        valid, values = signals.valid, per_sample(values, "scale")
        base = signals.rewards if of == "rewards" else values
        counted = valid
        if live_only:
            counted = valid & ~masked.all_equal(signals.rewards, valid, 1, keepdims=True)
        std, dead = _deviation(base, counted, axis, ddof)
        single = valid & (valid.sum(axis, keepdims=True) == 1) & alone
        return jnp.where(valid & ~dead, values / jnp.where(dead, 1.0, std + eps), jnp.where(single, values, 0.0))

    return transform


def _deviation(x, mask, axis, ddof: int):
    """``(std, dead)``: the deviation where ``mask``, and whether there is none: all equal, or no more than ``ddof``."""
    n = jnp.asarray(mask).sum(axis, keepdims=True)
    std = jnp.sqrt(masked.variance(x, mask, axis, keepdims=True, ddof=ddof))
    return std, masked.all_equal(x, mask, axis, keepdims=True) | (n <= ddof)


def to_tokens() -> Transform:
    """Gives every token of a sample the sample's value: ``[P, G]`` to ``[P, G, T]``, 0 on padding.

    ``A_{i,t} = A_i``: GRPO with outcome supervision, DeepSeekMath (arXiv 2402.03300).

    Example:
      >>> signals = Signals(mask=masked.from_lengths(jnp.array([[2, 1]]), 2))
      >>> chain(to_tokens())(jnp.array([[0.5, -0.5]]), signals).tolist()
      [[[0.5, 0.5], [-0.5, 0.0]]]
    """

    def transform(values, signals: Signals):
        values = per_sample(values, "to_tokens")
        return jnp.where(need(signals, "mask", "to_tokens"), values[..., None], 0.0)

    return transform


# --- further baselines and scales, [P, G] -> [P, G]


def center_by_length() -> Transform:
    """``A_i = r_i - b``, ``b = Σ |o_j| r_j / Σ |o_j|`` over the group (OPO, arXiv 2505.23585). Lengths in tokens.

    Equal rewards give exactly 0; so does a group of one, and one without any token. On ``[P, G]``.

    Example:
      >>> opo = chain(center_by_length())
      >>> opo(jnp.array([[1.0, 0.0, 0.0, 1.0]]), Signals(lengths=jnp.array([[2, 4, 6, 8]]))).tolist()
      [[0.5, -0.5, -0.5, 0.5]]
    """

    def transform(values, signals: Signals):
        values, valid = per_sample(values, "center_by_length"), signals.valid
        lengths = jnp.asarray(need(signals, "lengths", "center_by_length")).astype(jnp.float32)
        tokens = masked.total(lengths, valid, 1, keepdims=True)
        baseline = masked.total(lengths * values, valid, 1, keepdims=True) / jnp.maximum(tokens, 1.0)
        dead = masked.all_equal(values, valid, 1, keepdims=True) | (tokens == 0)
        return jnp.where(valid & ~dead, values - baseline, 0.0)

    return transform


def subtract_greedy() -> Transform:
    """``A_i = r_i - r_greedy``, the reward of the prompt's greedy completion (ReMax, arXiv 2310.10505).

    A group of one is fine: the baseline is not of the group. An unknown greedy reward (NaN) gives 0.
    On ``[P, G]``, ``signals.greedy_rewards [P]``.

    Example:
      >>> chain(subtract_greedy())(jnp.array([[1.0, 0.0]]), Signals(greedy_rewards=jnp.array([1.0]))).tolist()
      [[0.0, -1.0]]
    """

    def transform(values, signals: Signals):
        greedy = jnp.asarray(need(signals, "greedy_rewards", "subtract_greedy"), jnp.float32)[:, None]
        return jnp.where(jnp.isfinite(greedy), per_sample(values, "subtract_greedy") - greedy, 0.0)

    return transform


def rescale_live() -> Transform:
    """Times ``α = B / (B - M)``: B valid samples of the batch, M of them in groups without variance.

    GPG, arXiv 2504.02546: groups that teach nothing do not water down the others. 0 if there are no others.
    On ``[P, G]``.

    Example:
      >>> rewards = jnp.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
      >>> chain(center("group"), rescale_live())(rewards).tolist()
      [[1.5, -0.5, -0.5, -0.5], [0.0, 0.0, 0.0, 0.0]]
    """

    def transform(values, signals: Signals):
        valid = signals.valid
        dead = masked.all_equal(signals.rewards, valid, 1, keepdims=True)
        live = (valid & ~dead).sum().astype(jnp.float32)
        alpha = jnp.where(live > 0, valid.sum().astype(jnp.float32) / jnp.maximum(live, 1.0), 0.0)
        return per_sample(values, "rescale_live") * alpha

    return transform


def virtual_best(reward_max: float = 1.0, count: int = 1, *, ddof: int = 1, eps: float = 1e-6) -> Transform:
    """Mean and deviation over the group *and* ``count`` virtual samples that have ``reward_max``.

    ``A_i = (r_i - mean') / (std' + eps)`` for the real samples (NGRPO, arXiv 2509.18851, as its code has it). A
    group in which all fail gets ``-1 / sqrt(G + 1)`` (ddof 1) each, and one in which all are right exactly 0. In all
    other groups the sum is negative: the method pairs this with a tighter lower clip. A group of one is no exception:
    one failure gives ``-1 / sqrt(2)`` (the authors' code leaves its reward as it is). A reward over ``reward_max``
    raises where the rewards are concrete and counts as ``reward_max`` under jit.

    Example:
      >>> fails = chain(virtual_best())(jnp.zeros((1, 8)))
      >>> round(float(fails[0, 0]), 5)
      -0.33333
    """
    if count < 1:
        raise ValueError(f"virtual_best(count={count}): must be at least 1; center and scale do without")

    def transform(values, signals: Signals):
        values, valid = per_sample(values, "virtual_best"), signals.valid
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


def _none_of(drawn: int, wrong, total):
    """``C(wrong, drawn) / C(total, drawn)``: the chance that ``drawn`` of ``total`` samples are all wrong."""
    chance = jnp.ones_like(wrong)
    for j in range(drawn):
        chance = chance * jnp.maximum(wrong - j, 0.0) / jnp.maximum(total - j, 1.0)
    return chance


def pass_at_k(k: int, *, success: float = 1.0) -> Transform:
    """The advantage under pass@k as the reward, in closed form (arXiv 2508.10751).

    With N samples, N⁻ of them wrong, ``R = 1 - C(N⁻, k) / C(N, k)`` and ``σ = sqrt(R (1 - R))``::

      right: (1 - R) / σ        wrong: (1 - R - C(N⁻ - 1, k - 1) / C(N - 1, k - 1)) / σ

    Sums to 0 over a group; k = 1 is GRPO with ddof 0 and eps 0. All wrong, or fewer than k wrong: exactly 0. The
    other method of that name is `best_margin`. On ``[P, G]``.

    Args:
      k: samples that one attempt may draw, at most the group.
      success: the outcome from which on a sample is right.

    Example:
      >>> advantages = chain(pass_at_k(4))(jnp.array([[1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]))
      >>> [round(float(a), 4) for a in advantages[0, 1:3]]
      [0.5222, -0.1741]
    """
    if k < 1:
        raise ValueError(f"pass_at_k(k={k}): must be at least 1")

    def transform(values, signals: Signals):
        outcome, valid = judged(signals)
        if k > per_sample(values, "pass_at_k").shape[1]:
            raise ValueError(f"pass_at_k(k={k}): more than the group's {values.shape[1]} samples")
        right = valid & (outcome >= success)
        total = valid.sum(1, keepdims=True).astype(jnp.float32)
        wrong = (valid & ~right).sum(1, keepdims=True).astype(jnp.float32)
        fail = _none_of(k, wrong, total)
        sigma = jnp.sqrt(fail * (1.0 - fail))
        live = valid & (total >= k) & (wrong >= k) & (wrong < total)
        gap = jnp.where(right, fail, fail - _none_of(k - 1, wrong - 1.0, total - 1.0))
        return jnp.where(live, gap / jnp.where(live, sigma, 1.0), 0.0)

    return transform


def best_margin(*, scaled: bool = False, eps: float = 1e-6) -> Transform:
    """Only a group's best sample learns: ``r_(1) - r_(2)``, the margin to the second best (arXiv 2503.19595).

    The other method called pass@k. Ties and groups of one give 0. On ``[P, G]``.

    Args:
      scaled: divide by the group's standard deviation (ddof 1) plus ``eps``.

    Example:
      >>> [round(float(a), 4) for a in chain(best_margin())(jnp.array([[0.2, 0.9, 0.5, 0.1]]))[0]]
      [0.0, 0.4, 0.0, 0.0]
    """

    def transform(values, signals: Signals):
        values, valid = per_sample(values, "best_margin"), signals.valid
        if values.shape[1] < 2:
            return jnp.zeros_like(values)
        ranked = jax.lax.top_k(jnp.where(valid, values, -jnp.inf), 2)[0]
        margin = jnp.where(jnp.isfinite(ranked[:, 1:]), ranked[:, :1] - ranked[:, 1:], 0.0)
        if scaled:
            margin = margin / (jnp.sqrt(masked.variance(values, valid, 1, keepdims=True, ddof=1)) + eps)
        return jnp.where(valid & (values == ranked[:, :1]), margin, 0.0)

    return transform


def penalize_all_fail(c: float, fail_reward: float = 0.0) -> Transform:
    """``A_i = -c`` in a group in which no outcome is over ``fail_reward``; other groups as they come; ``[P, G]``.

    The fourth of the experiments in `grpojax.variants`. Goes after the scale: it overwrites. The sum over such a group
    is ``-c G``, a push away from all that was sampled with no direction, unbounded below without a clip; NGRPO's value
    would be ``1 / sqrt(G + 1)``, c = 1 is 3 times that at G = 8.

    Example:
      >>> chain(center("group"), penalize_all_fail(1.0))(jnp.array([[0.0, 0.0], [1.0, 0.0]])).tolist()
      [[-1.0, -1.0], [0.5, -0.5]]
    """

    def transform(values, signals: Signals):
        failed = masked.all_fail(*judged(signals), fail_reward)
        return jnp.where(failed[:, None], -c, per_sample(values, "penalize_all_fail"))

    return transform


def likelihood_of_all_fail(fail_reward: float = 0.0) -> Transform:
    """For `chain`'s ``reward``: where all samples of a group fail, the reward is ``signals.likelihood [P, G]`` instead.

    The fifth of the experiments in `grpojax.variants`.
    ``R_i = P(true answer | prompt, reasoning of sample i)``, by the policy that drew the samples. Joint or per-token
    geometric mean is the caller's choice (the second compares answers of any length and lies in [0, 1]).

    Example:
      >>> signals = Signals(likelihood=jnp.array([[0.43088694, 0.9, 0.1, 0.3]]))
      >>> advantages = chain(center("group"), reward=likelihood_of_all_fail())(jnp.zeros((1, 4)), signals)
      >>> [round(float(a), 4) for a in advantages[0]]
      [-0.0018, 0.4673, -0.3327, -0.1327]
    """

    def transform(values, signals: Signals):
        likelihood = jnp.asarray(need(signals, "likelihood", "likelihood_of_all_fail"), jnp.float32)
        failed = masked.all_fail(*judged(signals), fail_reward)[:, None]
        return jnp.where(failed & jnp.isfinite(likelihood), likelihood, values)

    return transform


# --- on tokens


def floor(x: float) -> Transform:
    """``max(A, x)``: negative advantages go no lower (GRPO-λ's traces, arXiv 2510.00194: -0.1). ``x`` is at most 0.

    On ``[P, G]`` or ``[P, G, T]``.

    Example:
      >>> chain(center("group"), floor(-0.25))(jnp.array([[1.0, 0.0]])).tolist()
      [[0.5, -0.25]]
    """
    if x > 0:
        raise ValueError(f"floor({x}): must be at most 0, or padding and dead groups would get an advantage")
    return lambda values, signals: jnp.maximum(values, x)


def whiten(*, ddof: int = 0, eps: float = 1e-8) -> Transform:
    """Subtracts the mean of the batch and divides by its standard deviation.

    Before `to_tokens` each sample counts once, after it each token, so that long samples count more; the codes of
    REINFORCE++ (arXiv 2501.03262) do the second, and with it a group's advantages no longer sum to 0. Where all
    numbers are equal the result is exactly 0. On ``[P, G]`` or ``[P, G, T]``.

    Example:
      >>> returns = jnp.array([[[0.97, 0.98, 0.99], [0.02, 0.02, 0.0]]])
      >>> signals = Signals(mask=masked.from_lengths(jnp.array([[3, 2]]), 3), valid=jnp.ones((1, 2), bool))
      >>> [round(float(a), 4) for a in whiten()(returns, signals).ravel()]
      [0.7952, 0.8164, 0.8377, -1.2246, -1.2246, 0.0]
    """

    def transform(values, signals: Signals):
        counted = signals.valid
        if values.ndim == 3:
            counted = need(signals, "mask", "whiten") & counted[..., None]
        std, dead = _deviation(values, counted, None, ddof)
        centred = values - masked.mean(values, counted)
        return jnp.where(counted & ~dead, centred / jnp.where(dead, 1.0, std + eps), 0.0)

    return transform


def process_rewards(*, ddof: int = 1, eps: float = 1e-4) -> Transform:
    """GRPO with process supervision, DeepSeekMath (arXiv 2402.03300): ``[P, G]`` to ``[P, G, T]``.

    ``A_t = Σ_{steps that end at t or later} (r_step - mean R) / (std R + eps)``, R all step rewards of the group. The
    values that come in are not read; ``signals.step_rewards`` are, NaN where no step ends. The sum grows with the
    number of steps. Equal step rewards, and a group with a single step, give exactly 0.

    Example:
      >>> n = jnp.nan
      >>> steps = jnp.array([[[n, 0.2, n, 0.8, n], [n, n, 1.0, n, n], [0.0, n, 0.5, n, 0.5]]])
      >>> signals = Signals(step_rewards=steps, mask=masked.from_lengths(jnp.array([[4, 3, 5]]), 5))
      >>> advantages = chain(process_rewards(ddof=0, eps=0.0))(jnp.zeros((1, 3)), signals)
      >>> [round(float(a), 4) for a in advantages[0, :, 0]], round(float(advantages[0, 0, 3]), 4)
      ([0.0, 1.4852, -1.4852], 0.8911)
    """

    def transform(values, signals: Signals):
        per_sample(values, "process_rewards")
        mask = need(signals, "mask", "process_rewards")
        rewards = jnp.asarray(need(signals, "step_rewards", "process_rewards"), jnp.float32)
        ends = mask & jnp.isfinite(rewards) & signals.valid[..., None]
        kept = {"mask": ends, "axis": (1, 2), "keepdims": True}
        std, dead = _deviation(rewards, ends, (1, 2), ddof)
        centred = jnp.where(ends & ~dead, rewards - masked.mean(rewards, **kept), 0.0)
        return _suffix_sums(centred / jnp.where(dead, 1.0, std + eps), mask)

    return transform


def _k1(signals: Signals, transform: str):
    """``log π_behavior - log π_ref`` on tokens, ``[P, G, T]``; 0 on padding."""
    mask, logps, ref = (need(signals, name, transform) for name in ("mask", "behavior_logps", "ref_logps"))
    return jnp.where(mask, jnp.asarray(logps, jnp.float32) - jnp.asarray(ref, jnp.float32), 0.0)


def subtract_kl(coef: float) -> Transform:
    """``r_i - coef Σ_t (log π_behavior - log π_ref)_t``, k1 in the reward, for `chain`'s ``reward``; ``[P, G]``.

    Its gradient is that of ``KL(π || π_ref)`` (RLOO, arXiv 2402.14740; `grpojax.losses.kl`). What comes after it takes
    the result for the raw rewards. Needs ``signals.behavior_logps``, ``ref_logps`` and ``mask``.

    Example:
      >>> ones = jnp.ones((1, 2, 1))
      >>> signals = Signals(mask=ones > 0, behavior_logps=-ones, ref_logps=ones * jnp.array([[[-3.0], [-1.0]]]))
      >>> chain(reward=subtract_kl(0.5))(jnp.array([[1.0, 0.0]]), signals).tolist()
      [[0.0, 0.0]]
    """

    def reward(values, signals: Signals):
        return per_sample(values, "subtract_kl") - coef * _k1(signals, "subtract_kl").sum(-1)

    return reward


def token_rewards(*, kl_coef: float = 0.0) -> Transform:
    """``R_t = 1[t is the last token] r - kl_coef (log π_behavior - log π_ref)_t``: ``[P, G]`` to ``[P, G, T]``.

    k1 belongs in the reward (`grpojax.losses.kl`). Needs ``signals.behavior_logps`` and ``ref_logps`` unless
    ``kl_coef`` is 0.

    The rewards of REINFORCE++ (arXiv 2501.03262), before `token_returns`. ``R`` in units of the reward, log-probs nats.

    Example:
      >>> signals = Signals(mask=jnp.ones((1, 1, 3), bool), behavior_logps=jnp.zeros((1, 1, 3)))
      >>> signals = dataclasses.replace(signals, ref_logps=jnp.full((1, 1, 3), -0.1))
      >>> [round(float(r), 4) for r in chain(token_rewards(kl_coef=0.1))(jnp.ones((1, 1)), signals)[0, 0]]
      [-0.01, -0.01, 0.99]
    """

    def transform(values, signals: Signals):
        mask = jnp.asarray(need(signals, "mask", "token_rewards"))
        last = mask & (jnp.cumsum(mask[..., ::-1], -1)[..., ::-1] == 1)
        rewards = jnp.where(last, per_sample(values, "token_rewards")[..., None], 0.0)
        return rewards - kl_coef * _k1(signals, "token_rewards") if kl_coef else rewards

    return transform


def token_returns(*, gamma: float = 1.0) -> Transform:
    """Token rewards to returns: ``A_t = Σ_{s >= t} gamma^(s - t) R_s``, on ``[P, G, T]``; s - t counts in ``mask``.

    REINFORCE++ (arXiv 2501.03262) takes them with ``gamma`` 1.

    Example:
      >>> signals = Signals(mask=jnp.ones((1, 1, 3), bool))
      >>> [round(float(a), 4) for a in token_returns()(jnp.array([[[-0.01, -0.01, 0.99]]]), signals)[0, 0]]
      [0.97, 0.98, 0.99]
    """

    def transform(values, signals: Signals):
        return _suffix_sums(per_token(values, "token_returns"), need(signals, "mask", "token_returns"), gamma)

    return transform


def gae(*, gamma: float = 1.0, lam: float = 1.0) -> Transform:
    """Token rewards to generalised advantages (arXiv 1506.02438), on ``[P, G, T]``.

    ``δ_t = R_t + gamma V_{t+1} - V_t``, ``A_t = δ_t + gamma lam A_{t+1}``, V 0 after the last token. The critic's
    target is ``A + V``. With both at 1 it is the return minus V. A mask may have holes, as of tool outputs: t + 1 is
    the next token in it.

    Example:
      >>> signals = Signals(mask=jnp.ones((1, 1, 3), bool), values=jnp.array([[[0.5, 0.6, 0.7]]]))
      >>> [round(float(a), 5) for a in gae(lam=0.95)(jnp.array([[[0.0, 0.0, 1.0]]]), signals)[0, 0]]
      [0.46575, 0.385, 0.3]
    """

    def transform(values, signals: Signals):
        mask = need(signals, "mask", "gae")
        mask = jnp.asarray(mask)
        critic = jnp.where(mask, jnp.asarray(need(signals, "values", "gae"), jnp.float32), 0.0)
        size = mask.shape[-1]
        places = jnp.where(mask, jnp.arange(size, dtype=jnp.int32), size)
        following = jax.lax.cummin(places, axis=mask.ndim - 1, reverse=True)[..., 1:]  # the next token in the mask
        padded = jnp.pad(critic, [(0, 0)] * (mask.ndim - 1) + [(0, 1)])
        after = jnp.take_along_axis(
            padded, jnp.pad(following, [(0, 0)] * (mask.ndim - 1) + [(0, 1)], constant_values=size), -1
        )
        return _suffix_sums(per_token(values, "gae") + gamma * after - critic, mask, gamma * lam)

    return transform


def _suffix_sums(x, mask, decay: float = 1.0):
    """``y_t = x_t + decay y_{t+1}`` along the last axis, t + 1 being the next token in ``mask``; 0 outside of it."""
    x = jnp.where(mask, x, 0.0)
    if decay == 1.0:
        sums = jnp.cumsum(x[..., ::-1], -1)[..., ::-1]
    else:

        def join(late, early):
            return late[0] * early[0], late[1] * early[0] + early[1]

        decays = jnp.where(mask, jnp.float32(decay), 1.0)
        sums = jax.lax.associative_scan(join, (decays, x), reverse=True, axis=x.ndim - 1)[1]
    return jnp.where(mask, sums, 0.0)
