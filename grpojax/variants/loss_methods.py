"""Methods that are a policy loss: other ratios, clips and aggregations, most of them on GRPO's advantage."""

import dataclasses
from typing import Literal

from grpojax import advantages as A
from grpojax import allocation
from grpojax import losses as L
from grpojax.variants.critics import Critic, ValueLoss, add_values
from grpojax.variants.method import Clipped, GroupNormalised, Method, check_choice, given, group_normalised
from grpojax.variants.registry import published


@published("Yu et al., DAPO, arXiv 2503.14476", "replicated", keep=allocation.keep_prompts)
class dapo(Clipped):
    """DAPO, arXiv 2503.14476: a higher upper clip, mean over tokens, no KL, only mixed groups, overlong punishment.

    Overlong *filtering*, which the paper tried first, is a mask: ``loss_weights(mask & stopped[..., None], ...)``. The
    paper's overlong_factor of 1 is half the span of its rewards of ±1, and so is 0.5 of 0/1 rewards; a whole one would
    put a right sample under the group's mean.

    Attributes:
      ddof: the deviation divides by the number of samples minus this.
      eps: added to the deviation.
      overlong_limit: longest completion in tokens, rollout.max_tokens in a run (paper: 20480); None for no punishment.
      overlong_buffer: tokens before it in which the punishment grows, a fifth of the limit in a run (paper: 4096).
      overlong_factor: what a sample at the limit loses.
    """

    ddof: int = 1
    eps: float = 1e-4
    overlong_limit: int | None = None
    overlong_buffer: int | None = None
    overlong_factor: float = 0.5
    clip_high: float = 0.28
    aggregate: L.Aggregation = "token_mean"

    def __post_init__(self) -> None:
        if (self.overlong_limit is None) != (self.overlong_buffer is None):
            raise ValueError(
                f"overlong_limit={self.overlong_limit} with overlong_buffer={self.overlong_buffer}: both or none"
            )

    def chain(self) -> A.Transform:
        reward = None
        if self.overlong_limit is not None and self.overlong_buffer is not None:
            reward = allocation.soft_overlong(self.overlong_limit, self.overlong_buffer, factor=self.overlong_factor)
        return A.chain(*group_normalised(self.ddof, self.eps), A.to_tokens(), reward=reward)


_GSPO = "Zheng et al., GSPO, arXiv 2507.18071"
_NO_KL = "kl_coef: the paper leaves its KL out for brevity"

# GSPO's clip goes with its ratio: on single tokens it would stop nearly all of them.
_TOKEN_RATIO = {"name": "grpo", "clip_low": 0.2, "clip_high": 0.2}


@published(_GSPO, "deployed", control=_TOKEN_RATIO, unverified=_NO_KL)
class gspo(GroupNormalised):
    """GSPO, arXiv 2507.18071: one ratio a sample, the geometric mean of its tokens'. The paper gives no KL.

    Attributes:
      ratio: level of the importance ratio (`grpojax.losses.log_ratio`).
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    ratio: L.Ratio = "sequence"


@published(_GSPO, "deployed", control=_TOKEN_RATIO, unverified=_NO_KL)
class gspo_token(GroupNormalised):
    """GSPO-token, arXiv 2507.18071: equals GSPO for one advantage a sample, and takes one for each token.

    Attributes:
      ratio: level of the importance ratio (`grpojax.losses.log_ratio`).
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    ratio: L.Ratio = "sequence_token"


@published(
    "MiniMax-M1, arXiv 2506.13585",
    "deployed",
    unverified="weight_max, which the paper does not disclose",
)
class cispo(Method):
    """CISPO, MiniMax-M1, arXiv 2506.13585: ``-sg[min(ρ, weight_max)] A log π``.

    The paper does not disclose its bound; weight_max 5 is TRL's.

    Attributes:
      ddof: the deviation divides by the number of samples minus this.
      eps: added to the deviation.
      weight_max: largest weight of a token.
      weight_min: smallest weight of a token.
    """

    ddof: int = 1
    eps: float = 1e-4
    weight_max: float = 5.0
    weight_min: float = 0.0
    aggregate: L.Aggregation = "token_mean"

    def chain(self) -> A.Transform:
        return A.chain(*group_normalised(self.ddof, self.eps), A.to_tokens())

    def surrogate(self) -> L.cispo:
        return L.cispo(self.weight_max, weight_min=self.weight_min)


@published("SAPO, arXiv 2511.20347", "deployed")
class sapo(Method):
    """SAPO, arXiv 2511.20347: a sigmoid of the ratio in place of the clip. No KL is stated.

    Attributes:
      ddof: the deviation divides by the number of samples minus this.
      eps: added to the deviation.
      tau_positive: τ of tokens with A > 0: how fast their weight falls as the ratio leaves 1.
      tau_negative: τ of the other tokens.
    """

    ddof: int = 1
    eps: float = 1e-4
    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def chain(self) -> A.Transform:
        return A.chain(*group_normalised(self.ddof, self.eps), A.to_tokens())

    def surrogate(self) -> L.soft_adaptive:
        return L.soft_adaptive(tau_positive=self.tau_positive, tau_negative=self.tau_negative)


@published("Zhao et al., GMPO, arXiv 2507.20673", "single team")
class gmpo(Method):
    """GMPO, arXiv 2507.20673: the geometric mean of ratios, clipped token by token at ``e^±0.4``.

    Attributes:
      ddof: the deviation divides by the number of samples minus this.
      eps: added to the deviation.
      clip_low: how far a token's log-ratio may fall below 0 where A < 0, in nats.
      clip_high: how far a token's log-ratio may rise above 0 where A > 0, in nats.
    """

    ddof: int = 1
    eps: float = 1e-4
    clip_low: float = 0.4
    clip_high: float = 0.4

    def chain(self) -> A.Transform:
        return A.chain(*group_normalised(self.ddof, self.eps), A.to_tokens())

    def surrogate(self) -> L.geometric:
        return L.geometric(low=self.clip_low, high=self.clip_high)


@published("Ye et al., arXiv 1912.09729", "replicated", control={"clip_dual": None})
class dual_clip(GroupNormalised):
    """GRPO with the dual clip of arXiv 1912.09729: with A < 0 ratios over 3 stop too."""

    clip_dual: float | None = 3.0
    kl_coef: float = 0.04


@published("Schulman et al., PPO, arXiv 1707.06347", "deployed", needs=("critic",))
class ppo(Clipped):
    """PPO with a critic and GAE, arXiv 1707.06347 and 1506.02438; advantages whitened over the batch's tokens.

    For language models the loss is a mean over tokens, and the weight of the KL is the run's: 0 until it is given.
    The value after the last token is 0, of samples cut at the limit too, as is usual: for these the return leaves out
    what the rest would have earned, which is biased. ``train.truncated: mask`` or ``drop`` leaves them out. The critic
    has an optimiser of its own, so that its loss needs no weight.

    Attributes:
      gamma: discount a token.
      lam: GAE's λ; 1 is as usual for language models as 0.95.
      value_clip: how far a value may move in a rollout's updates, in the critic's loss; None for the plain square.
      kl_coef: of k1 in each token's reward; over 0 it needs signals.ref_logps.
    """

    gamma: float = 1.0
    lam: float = 0.95
    value_clip: float | None = 0.2
    aggregate: L.Aggregation = "token_mean"
    kl_coef: float = 0.0
    kl_kind: L.KLKind = "k1"
    kl_in: L.KLPlace = "token_reward"
    has_token_rewards = True

    def gae(self) -> tuple[A.Transform, ...]:
        """The advantages before they are whitened."""
        return A.token_rewards(kl_coef=self.token_kl_coef), A.gae(gamma=self.gamma, lam=self.lam)

    def chain(self) -> A.Transform:
        return A.chain(*self.gae(), A.whiten())

    def critic(self) -> Critic:
        returns = A.chain(*self.gae(), add_values())
        return Critic(signal="values", targets=returns, loss=ValueLoss(clip=self.value_clip))


@published(
    "Deng et al., LLDS, arXiv 2512.04220",
    "single team",
    needs=("displacement_weights",),
    control={"llds_coef": 0.0, "llds_gate": "action", "answer_weight": 1.0, "marker": None},
    unverified="how the paper aggregates the policy loss",
)
class llds(GroupNormalised):
    """GRPO with LLDS, arXiv 2512.04220: a loss on what the likelihood of right (A >= 0) samples lost.

    It acts from the second update of a rollout on. Without batch.actions a response is one action. How the paper
    aggregates the policy loss was not checked: GRPO's mean over a sample's tokens.

    An answer_weight under 1 is LLDS-MA's (`grpojax.losses.displacement_weights`). The paper moves it with the number of
    valid searches, of which samples without tools have none: here it is fixed. A sample without a marker has no tokens
    of an answer.

    Attributes:
      answer_weight: LLDS-MA's β in [0, 1], the weight of a sample's answer in LLDS's term; 1 is LLDS, 0 leaves it free.
      marker: the text after which a sample gives its answer, as in `gt_likelihood`; read where answer_weight is not 1.
      llds_coef: weight of LLDS's term (`grpojax.losses.displacement`); 0 for none.
      llds_gate: the unit that LLDS's gate is computed for (`grpojax.losses.displacement`).
    """

    answer_weight: float = 1.0
    marker: str | None = None
    llds_coef: float = 0.2
    llds_gate: L.Gate = "action"
    kl_coef: float = 1e-3

    def __post_init__(self) -> None:
        weight, marker = self.answer_weight, self.marker
        if not 0 <= weight <= 1:
            raise ValueError(f"variant 'llds': answer_weight={weight}: must be in [0, 1]")
        if marker is not None and (not marker.strip() or weight == 1.0):
            why = "give the text before an answer, or null" if not marker.strip() else "is not read at answer_weight=1"
            raise ValueError(f"variant 'llds': marker={marker!r}: {why}")


@published(
    "Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879",
    "replicated",
    unverified="how the paper aggregates; the bounds are prime-rl's",
)
class dppo(Method):
    """DPPO, arXiv 2602.04879: a token stops by how far its probability has moved from the sampler's, not by its ratio.

    0.2 is prime-rl's; how the paper aggregates was not checked, and the advantage is GRPO's.

    Attributes:
      ddof: the deviation divides by the number of samples minus this.
      eps: added to the deviation.
      divergence: "tv", the difference of probabilities, or "kl", of "this token or another".
      clip_low: how far down; None is 0.2 for "tv" and 0.05 nats for "kl".
      clip_high: how far up; None is 0.2 for "tv" and 0.05 nats for "kl".
      ratio_kl_coef: weight of ``(log ρ)²`` on all tokens (arXiv 2602.02276).
    """

    ddof: int = 1
    eps: float = 1e-4
    divergence: Literal["tv", "kl"] = "tv"
    clip_low: float | None = None
    clip_high: float | None = None
    ratio_kl_coef: float = 0.0
    ratio_denominator: L.RatioDenominator = "sampler"
    aggregate: L.Aggregation = "token_mean"

    def chain(self) -> A.Transform:
        return A.chain(*group_normalised(self.ddof, self.eps), A.to_tokens())

    def surrogate(self) -> L.dppo_tv:
        check_choice(self, "divergence")
        bounded = L.dppo_tv if self.divergence == "tv" else L.dppo_kl
        return bounded(**given(low=self.clip_low, high=self.clip_high), kl_coef=self.ratio_kl_coef)


@published(
    "LUSPO, arXiv 2602.05261",
    "single team",
    unverified="the clip, which is quoted by TRL",
)
class luspo(GroupNormalised):
    """LUSPO, arXiv 2602.05261: GSPO with each sample's loss times its length, so that long samples do not count less.

    The clip is the paper's as TRL cites it; GSPO's is 3e-4 and 4e-4.

    Attributes:
      ratio: level of the importance ratio (`grpojax.losses.log_ratio`).
    """

    clip_low: float = 2e-3
    clip_high: float = 2.5e-3
    ratio: L.Ratio = "sequence"
    aggregate: L.Aggregation = "sequence_sum"


@published(
    "VESPO, arXiv 2602.10693",
    "single team",
    unverified="the form and its four numbers, which are TRL's",
)
class vespo(Method):
    """VESPO, arXiv 2602.10693: ``-sg[φ(w)] A log π``, w the product of a sample's ratios; no clip, for stale samples.

    φ and its four numbers are TRL's, and so is the mean over tokens. For samples that are stale through and through
    take ``ratio_denominator: sampler``.

    Attributes:
      ddof: the deviation divides by the number of samples minus this.
      eps: added to the deviation.
      k_positive: k of tokens with A >= 0; 2 in TRL.
      lambda_positive: λ of tokens with A >= 0; 3 in TRL.
      k_negative: k of tokens with A < 0; 3 in TRL.
      lambda_negative: λ of tokens with A < 0; 2 in TRL.
      ratio: level of the importance ratio (`grpojax.losses.log_ratio`).
    """

    ddof: int = 1
    eps: float = 1e-4
    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0
    ratio: L.Ratio = "joint"
    aggregate: L.Aggregation = "token_mean"

    def chain(self) -> A.Transform:
        return A.chain(*group_normalised(self.ddof, self.eps), A.to_tokens())

    def surrogate(self) -> L.vespo:
        return L.vespo(
            k_positive=self.k_positive,
            lambda_positive=self.lambda_positive,
            k_negative=self.k_negative,
            lambda_negative=self.lambda_negative,
        )


_COVARIANCE = "Cui et al., The Entropy Mechanism of RL for Reasoning Language Models, arXiv 2505.22617"

# Without it none of its options is read, and so each stands at its default.
_NO_COVARIANCE = {"covariance": "none"} | {
    f.name: f.default for f in dataclasses.fields(Method) if f.name.startswith("covariance_")
}


@published(_COVARIANCE, "ablated", control=_NO_COVARIANCE)
class clip_cov(GroupNormalised):
    """Clip-Cov, arXiv 2505.22617: a few tokens of high covariance of A and log π teach nothing, which saves entropy.

    2e-4 of an update's tokens, drawn from a covariance in (1, 5). The rest is GRPO over tokens.
    """

    covariance: L.Covariance = "clip"
    aggregate: L.Aggregation = "token_mean"


@published(_COVARIANCE, "ablated", control=_NO_COVARIANCE)
class kl_cov(Method):
    """KL-Cov, arXiv 2505.22617: the tokens of highest covariance of A and log π pay for moving; no clip.

    The top 2e-4 of an update's tokens, at least one, pay ``|log ρ|``: nothing in the first update of a rollout. The
    coefficient 1 is the official run's; verl has 0.1.

    Attributes:
      ddof: the deviation divides by the number of samples minus this.
      eps: added to the deviation.
    """

    ddof: int = 1
    eps: float = 1e-4
    covariance: L.Covariance = "kl"
    aggregate: L.Aggregation = "token_mean"

    def chain(self) -> A.Transform:
        return A.chain(*group_normalised(self.ddof, self.eps), A.to_tokens())

    def surrogate(self) -> L.unclipped:
        return L.unclipped()
