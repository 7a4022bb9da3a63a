"""What is subtracted from rewards, and what they are divided by."""

from typing import Literal

import jax.numpy as jnp

from grpojax import masked, shapes
from grpojax.advantages.signals import Signals, Transform, described, need, per_sample, per_token
from grpojax.types import Array, Samples


def _unchanged(name: str) -> Transform:
    """The transform that changes nothing."""

    def transform(values: Samples, signals: Signals | None = None) -> Samples:
        return per_sample(values, signals, name)[0]

    return transform


def _axis(by: str, name: str) -> int | None:
    """The axis of a statistic over ``[P, G]``, its dimensions kept."""
    if by not in ("group", "batch"):
        raise ValueError(f"{name}(by={by!r}): must be 'group', 'batch' or 'none'")
    return 1 if by == "group" else None


def _keeps_singletons(singleton: str, name: str) -> bool:
    if singleton not in ("zero", "reward"):
        raise ValueError(f"{name}(singleton={singleton!r}): must be 'zero' or 'reward'")
    return singleton == "reward"


@described
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
      singleton: the result for a group of one valid sample: 0, or its reward, as in verl.

    A group whose valid rewards are all equal gives exactly 0, and so does a group of one (``singleton="zero"``). A
    reward that differs from the mean by rounding only gives 0 as well: its sign would depend on the order of the
    samples.

    Example:
      >>> from grpojax.advantages import chain
      >>> [round(float(a), 4) for a in chain(center("group", leave_one_out=True))(jnp.array([[1.0, 0.0, 0.0, 0.0]]))[0]]
      [1.0, -0.3333, -0.3333, -0.3333]
    """
    keeps = _keeps_singletons(singleton, "center")
    if by == "none":
        if leave_one_out or keeps:
            raise ValueError("center(by='none') subtracts nothing: it takes no leave_one_out and no singleton")
        return _unchanged("center")
    axis = _axis(by, "center")

    def transform(values: Samples, signals: Signals | None = None) -> Samples:
        values, signals = per_sample(values, signals, "center")
        valid = signals.valid
        n = valid.sum(axis, keepdims=True).astype(jnp.float32)
        # From the smallest on, so that a common offset costs no digits.
        low = jnp.where(n > 0, jnp.where(valid, values, jnp.inf).min(axis, keepdims=True), 0.0)
        above = jnp.where(valid, values - low, 0.0)
        centred = above - masked.mean(above, valid, axis, keepdims=True)
        spread = above.max(axis, keepdims=True)
        # What 0.1 and 5.2 are off by as floats grows with an offset; but no more than 1.3e-4 of the spread is cut.
        rounding = jnp.finfo(jnp.float32).eps * (jnp.minimum(jnp.abs(low), 1024.0 * spread) + 8.0 * spread)
        centred = jnp.where(jnp.abs(centred) <= rounding, 0.0, centred)
        if leave_one_out:
            centred = centred * n / jnp.maximum(n - 1.0, 1.0)
        dead = masked.all_equal(values, valid, axis, keepdims=True)
        return jnp.where(valid & ~dead, centred, jnp.where(valid & (n == 1) & keeps, values, 0.0))

    return transform


def signs(signals: Signals) -> Samples:
    """``[P, G]`` float32: the sign of ``r - mean r`` over the group, 0 on samples that are not valid.

    They tell right from wrong in GTPO (arXiv 2508.03772); NTHR (arXiv 2505.18830) takes those of the outcome
    (`grpojax.credit.hidden_states.outcome_signs`).

    Example:
      >>> signs(Signals(rewards=jnp.array([[1.0, 0.0, 0.0]]), valid=jnp.array([[True, True, False]]))).tolist()
      [[1.0, -1.0, 0.0]]
    """
    return jnp.sign(center("group")(need(signals, "rewards", "signs"), signals))


@described
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
    defaults are TRL's; its larger eps is the safer one.

    Args:
      by: over which samples the deviation is taken.
      of: raw rewards, or the values as they come in. With ``by="batch"`` the two differ, as raw rewards also vary
        between prompts (Lite PPO, arXiv 2508.08221, prints the first; REINFORCE++-baseline and ScaleRL use the second).
      ddof: 1 divides the squares by n - 1, 0 by n.
      eps: added to the deviation.
      live_only: leave groups whose raw rewards are all equal out of the batch's deviation, as a filter would. They make
        the deviation of centred rewards smaller.
      singleton: a group of one valid sample gives 0, or is unchanged ("reward", as in verl).

    Where the numbers under the deviation are all equal, or no more than ``ddof``, the result is exactly 0.

    Example:
      >>> from grpojax.advantages import chain
      >>> grpo = chain(center("group"), scale("group", ddof=0, eps=0.0))
      >>> [round(float(a), 4) for a in grpo(jnp.array([[1.0, 0.0, 0.0, 0.0]]))[0]]
      [1.7321, -0.5774, -0.5774, -0.5774]
    """
    if of not in ("rewards", "advantages"):
        raise ValueError(f"scale(of={of!r}): must be 'rewards' or 'advantages'")
    keeps = _keeps_singletons(singleton, "scale")
    if by == "none":
        return _unchanged("scale")
    axis = _axis(by, "scale")
    if live_only and by == "group":
        raise ValueError("scale(by='group', live_only=True): a group's deviation is its own")

    def transform(values: Samples, signals: Signals | None = None) -> Samples:
        values, signals = per_sample(values, signals, "scale")
        valid = counted = signals.valid
        base = need(signals, "rewards", "scale") if of == "rewards" else values
        if live_only:
            counted = valid & ~masked.all_equal(need(signals, "rewards", "scale"), valid, 1, keepdims=True)
        std, dead = masked.deviation(base, counted, axis, ddof)
        single = valid & (valid.sum(axis, keepdims=True) == 1) & keeps
        return jnp.where(valid & ~dead, values / jnp.where(dead, 1.0, std + eps), jnp.where(single, values, 0.0))

    return transform


@described
def whiten(*, ddof: int = 0, eps: float = 1e-8) -> Transform:
    """Subtracts the mean of the batch and divides by its standard deviation.

    Before `to_tokens` each sample counts once. After it each token counts once, so that long samples count more, as in
    the code of REINFORCE++ (arXiv 2501.03262); a group's advantages then no longer sum to 0. Where all numbers are
    equal the result is exactly 0. On ``[P, G]`` or ``[P, G, T]``.

    Example:
      >>> returns = jnp.array([[[0.97, 0.98, 0.99], [0.02, 0.02, 0.0]]])
      >>> signals = Signals(mask=masked.from_lengths(jnp.array([[3, 2]]), 3), valid=jnp.ones((1, 2), bool))
      >>> [round(float(a), 4) for a in whiten()(returns, signals).ravel()]
      [0.7952, 0.8164, 0.8377, -1.2246, -1.2246, 0.0]
    """

    def transform(values: Array, signals: Signals | None = None) -> Array:
        if len(shapes.shape_of(values)) == 3:
            values, signals = per_token(values, signals, "whiten")
            counted = need(signals, "mask", "whiten") & need(signals, "valid", "whiten")[..., None]
        else:
            values, signals = per_sample(values, signals, "whiten")
            counted = signals.valid
        std, dead = masked.deviation(values, counted, None, ddof)
        centred = values - masked.mean(values, counted)
        return jnp.where(counted & ~dead, centred / jnp.where(dead, 1.0, std + eps), 0.0)

    return transform


@described
def center_by_length() -> Transform:
    """``A_i = r_i - b``, ``b = Σ |o_j| r_j / Σ |o_j|`` over the group (OPO, arXiv 2505.23585). Lengths in tokens.

    Equal rewards give exactly 0; so does a group of one, and one without any token. On ``[P, G]``.

    Example:
      >>> from grpojax.advantages import chain
      >>> opo = chain(center_by_length())
      >>> opo(jnp.array([[1.0, 0.0, 0.0, 1.0]]), Signals(lengths=jnp.array([[2, 4, 6, 8]]))).tolist()
      [[0.5, -0.5, -0.5, 0.5]]
    """

    def transform(values: Samples, signals: Signals | None = None) -> Samples:
        values, signals = per_sample(values, signals, "center_by_length")
        valid = signals.valid
        lengths = jnp.asarray(need(signals, "lengths", "center_by_length")).astype(jnp.float32)
        tokens = masked.total(lengths, valid, 1, keepdims=True)
        baseline = masked.total(lengths * values, valid, 1, keepdims=True) / jnp.maximum(tokens, 1.0)
        dead = masked.all_equal(values, valid, 1, keepdims=True) | (tokens == 0)
        return jnp.where(valid & ~dead, values - baseline, 0.0)

    return transform


@described
def subtract_greedy() -> Transform:
    """``A_i = r_i - r_greedy``, the reward of the prompt's greedy completion (ReMax, arXiv 2310.10505).

    A group of one works too: the baseline does not come from the group. An unknown greedy reward (NaN) gives 0.
    On ``[P, G]``, ``signals.greedy_rewards [P]``.

    Example:
      >>> from grpojax.advantages import chain
      >>> chain(subtract_greedy())(jnp.array([[1.0, 0.0]]), Signals(greedy_rewards=jnp.array([1.0]))).tolist()
      [[0.0, -1.0]]
    """

    def transform(values: Samples, signals: Signals | None = None) -> Samples:
        values, signals = per_sample(values, signals, "subtract_greedy")
        greedy = jnp.asarray(need(signals, "greedy_rewards", "subtract_greedy"), jnp.float32)[:, None]
        return jnp.where(jnp.isfinite(greedy), values - greedy, 0.0)

    return transform


@described
def rescale_live() -> Transform:
    """Multiplies by ``α = B / (B - M)``: B valid samples of the batch, M of them in groups without variance.

    GPG, arXiv 2504.02546: groups that teach nothing do not weaken the others. The result is 0 if there are no others.
    On ``[P, G]``.

    Example:
      >>> from grpojax.advantages import chain
      >>> rewards = jnp.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
      >>> chain(center("group"), rescale_live())(rewards).tolist()
      [[1.5, -0.5, -0.5, -0.5], [0.0, 0.0, 0.0, 0.0]]
    """

    def transform(values: Samples, signals: Signals | None = None) -> Samples:
        values, signals = per_sample(values, signals, "rescale_live")
        valid = signals.valid
        dead = masked.all_equal(need(signals, "rewards", "rescale_live"), valid, 1, keepdims=True)
        live = (valid & ~dead).sum().astype(jnp.float32)
        alpha = jnp.where(live > 0, valid.sum().astype(jnp.float32) / jnp.maximum(live, 1.0), 0.0)
        return values * alpha

    return transform


@described
def floor(x: float) -> Transform:
    """``max(A, x)``: negative advantages go no lower (GRPO-λ's traces, arXiv 2510.00194: -0.1). ``x`` is at most 0.

    On ``[P, G]`` or ``[P, G, T]``.

    Example:
      >>> from grpojax.advantages import chain
      >>> chain(center("group"), floor(-0.25))(jnp.array([[1.0, 0.0]])).tolist()
      [[0.5, -0.25]]
    """
    if x > 0:
        raise ValueError(f"floor({x}): must be at most 0, or padding and dead groups would get an advantage")

    def transform(values: Array, signals: Signals | None = None) -> Array:
        on = per_token if len(shapes.shape_of(values)) == 3 else per_sample
        return jnp.maximum(on(values, signals, "floor")[0], x)

    return transform
