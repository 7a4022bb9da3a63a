"""Methods that are a policy loss: other ratios, clips and aggregations, most of them on GRPO's advantage."""

import dataclasses

from grpojax import advantages as A
from grpojax import allocation
from grpojax import losses as L
from grpojax.variants.choices import SurrogateChoice
from grpojax.variants.critics import Critic, ValueLoss, WithCritic, add_values
from grpojax.variants.registry import group_normalised, published


@published(
    "Yu et al., DAPO, arXiv 2503.14476",
    "replicated",
    keep=allocation.keep_prompts,
    surrogate=L.clipped(high=0.28),
    aggregate="token_mean",
)
def dapo(
    *,
    ddof: int = 1,
    eps: float = 1e-4,
    overlong_limit: int | None = None,
    overlong_buffer: int | None = None,
    overlong_factor: float = 0.5,
) -> A.Transform:
    """DAPO, arXiv 2503.14476: a higher upper clip, mean over tokens, no KL, only mixed groups, overlong punishment.

    Overlong *filtering*, which the paper tried first, is a mask: ``loss_weights(mask & stopped[..., None], ...)``.

    Args:
      overlong_limit: longest completion in tokens (paper: 20480); None for no punishment. The trainer fills in
        rollout.max_tokens.
      overlong_buffer: tokens before it in which the punishment grows (paper: 4096; the trainer fills in the same
        fifth of the limit).
      overlong_factor: what a sample at the limit loses. The paper's 1 is half the span of its rewards of ±1, and so is
        0.5 of 0/1 rewards; a whole one would put a right sample under the group's mean.
    """
    if (overlong_limit is None) != (overlong_buffer is None):
        raise ValueError(f"overlong_limit={overlong_limit} with overlong_buffer={overlong_buffer}: both or none")
    reward = None
    if overlong_limit is not None and overlong_buffer is not None:
        reward = allocation.soft_overlong(overlong_limit, overlong_buffer, factor=overlong_factor)
    return A.chain(*group_normalised(ddof, eps), A.to_tokens(), reward=reward)


_GSPO = "Zheng et al., GSPO, arXiv 2507.18071"


# GSPO's clip goes with its ratio: on single tokens it would stop nearly all of them.
_TOKEN_RATIO = {"name": "grpo", "clip_low": 0.2, "clip_high": 0.2}


@published(
    _GSPO,
    "deployed",
    surrogate=L.clipped(low=3e-4, high=4e-4),
    ratio="sequence",
    control=_TOKEN_RATIO,
    unverified="kl_coef: the paper leaves its KL out for brevity",
)
def gspo(*, ddof: int = 1, eps: float = 1e-4) -> A.Transform:
    """GSPO, arXiv 2507.18071: one ratio a sample, the geometric mean of its tokens'. The paper gives no KL."""
    return A.chain(*group_normalised(ddof, eps), A.to_tokens())


@published(
    _GSPO,
    "deployed",
    surrogate=L.clipped(low=3e-4, high=4e-4),
    ratio="sequence_token",
    control=_TOKEN_RATIO,
    unverified="kl_coef: the paper leaves its KL out for brevity",
)
def gspo_token(*, ddof: int = 1, eps: float = 1e-4) -> A.Transform:
    """GSPO-token, arXiv 2507.18071: equals GSPO for one advantage a sample, and takes one for each token."""
    return A.chain(*group_normalised(ddof, eps), A.to_tokens())


@published(
    "MiniMax-M1, arXiv 2506.13585",
    "deployed",
    surrogate=L.cispo(),
    aggregate="token_mean",
    unverified="weight_max, which the paper does not disclose",
)
def cispo(*, ddof: int = 1, eps: float = 1e-4) -> A.Transform:
    """CISPO, MiniMax-M1, arXiv 2506.13585: ``-sg[min(ρ, weight_max)] A log π``.

    The paper does not disclose its bound; weight_max 5 is TRL's.
    """
    return A.chain(*group_normalised(ddof, eps), A.to_tokens())


@published("SAPO, arXiv 2511.20347", "deployed", surrogate=L.soft_adaptive())
def sapo(*, ddof: int = 1, eps: float = 1e-4) -> A.Transform:
    """SAPO, arXiv 2511.20347: a sigmoid of the ratio in place of the clip. No KL is stated."""
    return A.chain(*group_normalised(ddof, eps), A.to_tokens())


@published("Zhao et al., GMPO, arXiv 2507.20673", "single team", surrogate=L.geometric())
def gmpo(*, ddof: int = 1, eps: float = 1e-4) -> A.Transform:
    """GMPO, arXiv 2507.20673: the geometric mean of ratios, clipped token by token at ``e^±0.4``."""
    return A.chain(*group_normalised(ddof, eps), A.to_tokens())


@published(
    "Ye et al., arXiv 1912.09729",
    "replicated",
    surrogate=L.clipped(dual=3.0),
    kl_coef=0.04,
    control={"clip_dual": None},
)
def dual_clip(*, ddof: int = 1, eps: float = 1e-4) -> A.Transform:
    """GRPO with the dual clip of arXiv 1912.09729: with A < 0 ratios over 3 stop too."""
    return A.chain(*group_normalised(ddof, eps), A.to_tokens())


@published(
    "Schulman et al., PPO, arXiv 1707.06347",
    "deployed",
    needs=("critic",),
    aggregate="token_mean",
    kl_kind="k1",
    kl_in="token_reward",
    token_kl=True,
)
def ppo(*, gamma: float = 1.0, lam: float = 0.95, value_clip: float | None = 0.2, kl_coef: float = 0.0) -> WithCritic:
    """PPO with a critic and GAE, arXiv 1707.06347 and 1506.02438; advantages whitened over the batch's tokens.

    For language models the loss is a mean over tokens, and the weight of the KL is the run's: 0 until it is given.
    The value after the last token is 0, of samples cut at the limit too, as is usual: for these the return leaves out
    what the rest would have earned, which is biased. ``train.truncated: mask`` or ``drop`` leaves them out.

    Args:
      gamma: discount a token.
      lam: GAE's λ; 1 is as usual for language models as 0.95.
      value_clip: how far a value may move in the updates of one rollout, in the critic's loss; None for the plain
        square. The critic has an optimiser of its own, so that its loss needs no weight.
      kl_coef: of k1 in each token's reward; over 0 it needs signals.ref_logps.
    """
    steps = A.token_rewards(kl_coef=kl_coef), A.gae(gamma=gamma, lam=lam)
    return WithCritic(
        advantage=A.chain(*steps, A.whiten()),
        critic=Critic(signal="values", targets=A.chain(*steps, add_values()), loss=ValueLoss(clip=value_clip)),
    )


@published(
    "Deng et al., LLDS, arXiv 2512.04220",
    "single team",
    needs=("displacement_weights",),
    kl_coef=1e-3,
    llds_coef=0.2,
    llds_gate="action",
    control={"llds_coef": 0.0, "llds_gate": "action", "answer_weight": 1.0, "marker": None},
    unverified="how the paper aggregates the policy loss",
)
def llds(*, answer_weight: float = 1.0, marker: str | None = None, ddof: int = 1, eps: float = 1e-4) -> A.Transform:
    """GRPO with LLDS, arXiv 2512.04220: a loss on what the likelihood of right (A >= 0) samples lost.

    It acts from the second update of a rollout on. Without batch.actions a response is one action. How the paper
    aggregates the policy loss was not checked: GRPO's mean over a sample's tokens.

    Args:
      answer_weight: LLDS-MA's β in [0, 1]: how much the tokens of a sample's answer count in LLDS's term
        (`grpojax.losses.displacement_weights`); 1 is LLDS, 0 leaves the answer free. The paper moves it with the number
        of valid searches, of which samples without tools have none: here it is fixed.
      marker: the text after which a sample gives its answer, as in `gt_likelihood`; read where answer_weight is not 1.
        A sample without one has no tokens of an answer.
    """
    if not 0 <= answer_weight <= 1:
        raise ValueError(f"variant 'llds': answer_weight={answer_weight}: must be in [0, 1]")
    if marker is not None and (not marker.strip() or answer_weight == 1.0):
        why = "give the text before an answer, or null" if not marker.strip() else "is not read at answer_weight=1"
        raise ValueError(f"variant 'llds': marker={marker!r}: {why}")
    return A.chain(*group_normalised(ddof, eps), A.to_tokens())


@published(
    "Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879",
    "replicated",
    surrogate=SurrogateChoice("divergence", {"tv": L.dppo_tv(), "kl": L.dppo_kl()}),
    ratio_denominator="sampler",
    aggregate="token_mean",
    unverified="how the paper aggregates; the bounds are prime-rl's",
)
def dppo(*, ddof: int = 1, eps: float = 1e-4) -> A.Transform:
    """DPPO, arXiv 2602.04879: a token stops by how far its probability has moved from the sampler's, not by its ratio.

    0.2 is prime-rl's; how the paper aggregates was not checked, and the advantage is GRPO's.

    Args:
      divergence: "tv", the difference of probabilities, or "kl", of "this token or another".
      clip_low, clip_high: how far down and up; None is 0.2 for "tv" and 0.05 nats for "kl".
      ratio_kl_coef: weight of ``(log ρ)²`` on all tokens (arXiv 2602.02276).
    """
    return A.chain(*group_normalised(ddof, eps), A.to_tokens())


@published(
    "LUSPO, arXiv 2602.05261",
    "single team",
    surrogate=L.clipped(low=2e-3, high=2.5e-3),
    ratio="sequence",
    aggregate="sequence_sum",
    unverified="the clip, which is quoted by TRL",
)
def luspo(*, ddof: int = 1, eps: float = 1e-4) -> A.Transform:
    """LUSPO, arXiv 2602.05261: GSPO with each sample's loss times its length, so that long samples do not count less.

    The clip is the paper's as TRL cites it; GSPO's is 3e-4 and 4e-4.
    """
    return A.chain(*group_normalised(ddof, eps), A.to_tokens())


@published(
    "VESPO, arXiv 2602.10693",
    "single team",
    surrogate=L.vespo(),
    ratio="joint",
    aggregate="token_mean",
    unverified="the form and its four numbers, which are TRL's",
)
def vespo(*, ddof: int = 1, eps: float = 1e-4) -> A.Transform:
    """VESPO, arXiv 2602.10693: ``-sg[φ(w)] A log π``, w the product of a sample's ratios; no clip, for stale samples.

    φ and its four numbers are TRL's, and so is the mean over tokens. For samples that are stale through and through
    take ``ratio_denominator: sampler``.
    """
    return A.chain(*group_normalised(ddof, eps), A.to_tokens())


_COVARIANCE = "Cui et al., The Entropy Mechanism of RL for Reasoning Language Models, arXiv 2505.22617"


# Without it none of its options is read, and so each stands at its default.
_NO_COVARIANCE = {"covariance": "none"} | {
    f.name: f.default for f in dataclasses.fields(L.Objective) if f.name.startswith("covariance_")
}


@published(_COVARIANCE, "ablated", covariance="clip", aggregate="token_mean", control=_NO_COVARIANCE)
def clip_cov(*, ddof: int = 1, eps: float = 1e-4) -> A.Transform:
    """Clip-Cov, arXiv 2505.22617: a few tokens of high covariance of A and log π teach nothing, which saves entropy.

    2e-4 of an update's tokens, drawn from a covariance in (1, 5). The rest is GRPO over tokens.
    """
    return A.chain(*group_normalised(ddof, eps), A.to_tokens())


@published(
    _COVARIANCE,
    "ablated",
    surrogate=L.unclipped(),
    covariance="kl",
    aggregate="token_mean",
    control=_NO_COVARIANCE,
)
def kl_cov(*, ddof: int = 1, eps: float = 1e-4) -> A.Transform:
    """KL-Cov, arXiv 2505.22617: the tokens of highest covariance of A and log π pay for moving; no clip.

    The top 2e-4 of an update's tokens, at least one, pay ``|log ρ|``: nothing in the first update of a rollout. The
    coefficient 1 is the official run's; verl has 0.1.
    """
    return A.chain(*group_normalised(ddof, eps), A.to_tokens())
