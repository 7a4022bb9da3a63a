"""From samples to tokens: ``[P, G]`` to ``[P, G, T]``, returns, generalised advantages, KL in the reward."""

import jax
import jax.numpy as jnp

from grpojax import masked
from grpojax.advantages.signals import Signals, Transform, along_tokens, described, need, per_sample, per_token
from grpojax.types import Samples, Tokens


@described
def to_tokens() -> Transform:
    """Gives every token of a sample the sample's value: ``[P, G]`` to ``[P, G, T]``, 0 on padding.

    ``A_{i,t} = A_i``: GRPO with outcome supervision, DeepSeekMath (arXiv 2402.03300).

    Example:
      >>> from grpojax.advantages import chain
      >>> signals = Signals(mask=masked.from_lengths(jnp.array([[2, 1]]), 2))
      >>> chain(to_tokens())(jnp.array([[0.5, -0.5]]), signals).tolist()
      [[[0.5, 0.5], [-0.5, 0.0]]]
    """

    def transform(values: Samples, signals: Signals | None = None) -> Tokens:
        values, signals = per_sample(values, signals, "to_tokens")
        return jnp.where(need(signals, "mask", "to_tokens"), values[..., None], 0.0)

    return transform


@described
def process_rewards(*, ddof: int = 1, eps: float = 1e-4) -> Transform:
    """GRPO with process supervision, DeepSeekMath (arXiv 2402.03300): ``[P, G]`` to ``[P, G, T]``.

    ``A_t = Σ_{steps that end at t or later} (r_step - mean R) / (std R + eps)``, R all step rewards of the group. It
    does not read the incoming values but ``signals.step_rewards``, which are NaN where no step ends. The sum grows with
    the number of steps. Equal step rewards, and a group with a single step, give exactly 0.

    Example:
      >>> from grpojax.advantages import chain
      >>> n = jnp.nan
      >>> steps = jnp.array([[[n, 0.2, n, 0.8, n], [n, n, 1.0, n, n], [0.0, n, 0.5, n, 0.5]]])
      >>> signals = Signals(step_rewards=steps, mask=masked.from_lengths(jnp.array([[4, 3, 5]]), 5))
      >>> advantages = chain(process_rewards(ddof=0, eps=0.0))(jnp.zeros((1, 3)), signals)
      >>> [round(float(a), 4) for a in advantages[0, :, 0]], round(float(advantages[0, 0, 3]), 4)
      ([0.0, 1.4852, -1.4852], 0.8911)
    """

    def transform(values: Samples, signals: Signals | None = None) -> Tokens:
        _, signals = per_sample(values, signals, "process_rewards")
        mask = need(signals, "mask", "process_rewards")
        rewards = jnp.asarray(need(signals, "step_rewards", "process_rewards"), jnp.float32)
        ends = mask & jnp.isfinite(rewards) & signals.valid[..., None]
        kept = {"mask": ends, "axis": (1, 2), "keepdims": True}
        std, dead = masked.deviation(rewards, ends, (1, 2), ddof)
        centred = jnp.where(ends & ~dead, rewards - masked.mean(rewards, **kept), 0.0)
        return _suffix_sums(centred / jnp.where(dead, 1.0, std + eps), mask)

    return transform


def _k1(signals: Signals, transform: str) -> Tokens:
    """``log π_behavior - log π_ref`` on tokens, ``[P, G, T]``; 0 on padding."""
    mask, logps, ref = (need(signals, name, transform) for name in ("mask", "behavior_logps", "ref_logps"))
    return jnp.where(mask, jnp.asarray(logps, jnp.float32) - jnp.asarray(ref, jnp.float32), 0.0)


@described
def subtract_kl(coef: float) -> Transform:
    """``r_i - coef Σ_t (log π_behavior - log π_ref)_t``, k1 in the reward, for `chain`'s ``reward``; ``[P, G]``.

    The policy gradient with these rewards has that of ``KL(π || π_ref)`` in it (RLOO, arXiv 2402.14740;
    `grpojax.losses.kl`). Later steps of the chain see the result as the raw rewards. Needs ``signals.behavior_logps``,
    ``ref_logps`` and ``mask``.

    Example:
      >>> from grpojax.advantages import chain
      >>> ones = jnp.ones((1, 2, 1))
      >>> signals = Signals(mask=ones > 0, behavior_logps=-ones, ref_logps=ones * jnp.array([[[-3.0], [-1.0]]]))
      >>> chain(reward=subtract_kl(0.5))(jnp.array([[1.0, 0.0]]), signals).tolist()
      [[0.0, 0.0]]
    """

    def reward(values: Samples, signals: Signals | None = None) -> Samples:
        values, signals = per_sample(values, signals, "subtract_kl")
        return values - coef * _k1(signals, "subtract_kl").sum(-1)

    return reward


@described
def token_rewards(*, kl_coef: float = 0.0) -> Transform:
    """``R_t = 1[t is the last token] r - kl_coef (log π_behavior - log π_ref)_t``: ``[P, G]`` to ``[P, G, T]``.

    k1 belongs in the reward (`grpojax.losses.kl`). Needs ``signals.behavior_logps`` and ``ref_logps`` unless
    ``kl_coef`` is 0.

    The rewards of REINFORCE++ (arXiv 2501.03262), before `token_returns`. ``R`` in units of the reward, log-probs nats.

    Example:
      >>> import dataclasses
      >>> from grpojax.advantages import chain
      >>> signals = Signals(mask=jnp.ones((1, 1, 3), bool), behavior_logps=jnp.zeros((1, 1, 3)))
      >>> signals = dataclasses.replace(signals, ref_logps=jnp.full((1, 1, 3), -0.1))
      >>> [round(float(r), 4) for r in chain(token_rewards(kl_coef=0.1))(jnp.ones((1, 1)), signals)[0, 0]]
      [-0.01, -0.01, 0.99]
    """

    def transform(values: Samples, signals: Signals | None = None) -> Tokens:
        values, signals = per_sample(values, signals, "token_rewards")
        mask = jnp.asarray(need(signals, "mask", "token_rewards"))
        last = mask & (jnp.cumsum(mask[..., ::-1], -1)[..., ::-1] == 1)
        rewards = jnp.where(last, values[..., None], 0.0)
        return rewards - kl_coef * _k1(signals, "token_rewards") if kl_coef else rewards

    return transform


@described
def answer_term(coef: float = 1.0) -> Transform:
    """On the tokens of a true answer in the text: ``A_t = coef ∂R / ∂ log p_t``, in place of the sample's advantage.

    A likelihood as the reward, ``R(z) = f(p_1 .. p_k)`` of the answer's tokens after the reasoning z, depends on the
    policy itself. Its gradient has two parts (VeriFree, arXiv 2505.21493; JEPO, arXiv 2503.19618)::

      ∇ E_z[R] = E_z[R ∇ log π(z)] + E_z[Σ_t ∂R / ∂ log p_t · ∇ log p_t]

    The chain's advantages give the first, on the tokens of z, and this the second. The derivatives are 1 for ``R = log
    Π p``, R for ``Π p`` and ``p_t / k`` for ``Σ p / k``. They are not divided by a deviation as the first part may be.

    ``[P, G, T]`` to ``[P, G, T]``. Needs ``signals.answer_weights``, the derivatives, which are NaN on other tokens.

    Example:
      >>> signals = Signals(answer_weights=jnp.array([[[jnp.nan, jnp.nan, 0.3, 0.1]]]))
      >>> [round(float(a), 4) for a in answer_term(2.0)(jnp.ones((1, 1, 4)), signals)[0, 0]]
      [1.0, 1.0, 0.6, 0.2]
    """

    def transform(values: Tokens, signals: Signals | None = None) -> Tokens:
        values, signals = per_token(values, signals, "answer_term")
        weights = jnp.asarray(need(signals, "answer_weights", "answer_term"), jnp.float32)
        return jnp.where(jnp.isfinite(weights), coef * weights, values)

    return transform


@described
def distill() -> Transform:
    """``A_t = log π_teacher - log π_student`` of each sampled token, on-policy distillation: ``[P, G, T]``, nats.

    It does not read the incoming values. ``signals.ref_logps`` are the teacher's log-probs, ``behavior_logps`` the
    student's own, and ``mask`` marks the tokens of each sample. With these advantages the policy gradient is minus that
    of ``KL(student || teacher)`` of each token, given the tokens before it: the reverse KL as k1 in the reward, where a
    token gets no credit for what comes after it. Equal policies give exactly 0.

    On-policy distillation (GKD, arXiv 2306.13649, and MiniLLM, arXiv 2306.08543, have the reverse KL on the student's
    samples).

    Example:
      >>> from grpojax.advantages import chain
      >>> student, teacher = jnp.array([[[-1.0, -2.0, 0.0]]]), jnp.array([[[-0.5, -4.0, -9.0]]])
      >>> signals = Signals(mask=student < 0, behavior_logps=student, ref_logps=teacher)
      >>> chain(distill())(jnp.zeros((1, 1)), signals).tolist()
      [[[0.5, -2.0, 0.0]]]
    """

    def transform(values: Samples, signals: Signals | None = None) -> Tokens:
        _, signals = per_sample(values, signals, "distill")
        return 0.0 - _k1(signals, "distill")

    return transform


@described
def token_returns(*, gamma: float = 1.0) -> Transform:
    """Token rewards to returns: ``A_t = Σ_{s >= t} gamma^(s - t) R_s``, on ``[P, G, T]`` or flat ``[B, T]``.

    s - t counts in ``signals.mask``, of the same shape. REINFORCE++ (arXiv 2501.03262) takes them with ``gamma`` 1.

    Example:
      >>> signals = Signals(mask=jnp.ones((1, 1, 3), bool))
      >>> [round(float(a), 4) for a in token_returns()(jnp.array([[[-0.01, -0.01, 0.99]]]), signals)[0, 0]]
      [0.97, 0.98, 0.99]
    """

    def transform(values: Tokens, signals: Signals | None = None) -> Tokens:
        values, (mask,) = along_tokens(values, signals, "token_returns", "mask")
        return _suffix_sums(values, mask, gamma)

    return transform


@described
def gae(*, gamma: float = 1.0, lam: float = 1.0) -> Transform:
    """Token rewards to generalised advantages (arXiv 1506.02438), on ``[P, G, T]`` or flat ``[B, T]``.

    ``δ_t = R_t + gamma V_{t+1} - V_t``, ``A_t = δ_t + gamma lam A_{t+1}``, V 0 after the last token, also in a sample
    that was cut at the limit: its return leaves out what the rest would have earned, which is a bias. The critic's
    target is ``A + V``. With both at 1 it is the return minus V. A mask may have holes, such as tool outputs: t + 1 is
    then the next token inside the mask. ``signals.mask`` and ``signals.values`` have the shape of the rewards.

    Example:
      >>> signals = Signals(mask=jnp.ones((1, 1, 3), bool), values=jnp.array([[[0.5, 0.6, 0.7]]]))
      >>> [round(float(a), 5) for a in gae(lam=0.95)(jnp.array([[[0.0, 0.0, 1.0]]]), signals)[0, 0]]
      [0.46575, 0.385, 0.3]
    """

    def transform(values: Tokens, signals: Signals | None = None) -> Tokens:
        values, (mask, critic) = along_tokens(values, signals, "gae", "mask", "values")
        mask = jnp.asarray(mask)
        critic = jnp.where(mask, jnp.asarray(critic, jnp.float32), 0.0)
        size = mask.shape[-1]
        places = jnp.where(mask, jnp.arange(size, dtype=jnp.int32), size)
        following = jax.lax.cummin(places, axis=mask.ndim - 1, reverse=True)[..., 1:]  # the next token in the mask
        padded = jnp.pad(critic, [(0, 0)] * (mask.ndim - 1) + [(0, 1)])
        after = jnp.take_along_axis(
            padded, jnp.pad(following, [(0, 0)] * (mask.ndim - 1) + [(0, 1)], constant_values=size), -1
        )
        return _suffix_sums(values + gamma * after - critic, mask, gamma * lam)

    return transform


def _suffix_sums(x: Tokens, mask: Tokens, decay: float = 1.0) -> Tokens:
    """``y_t = x_t + decay y_{t+1}`` along the last axis, t + 1 being the next token in ``mask``; 0 outside of it."""
    x = jnp.where(mask, x, 0.0)
    if decay == 1.0:
        sums = jnp.cumsum(x[..., ::-1], -1)[..., ::-1]
    else:

        def join(late: tuple[Tokens, Tokens], early: tuple[Tokens, Tokens]) -> tuple[Tokens, Tokens]:
            return late[0] * early[0], late[1] * early[0] + early[1]

        decays = jnp.where(mask, jnp.float32(decay), 1.0)
        sums = jax.lax.associative_scan(join, (decays, x), reverse=True, axis=x.ndim - 1)[1]
    return jnp.where(mask, sums, 0.0)
