"""Methods that change the advantage: baselines, normalisation, and rewards."""

import dataclasses
import functools
from typing import Literal

from grpojax import advantages as A
from grpojax import allocation
from grpojax import losses as L
from grpojax.variants.method import Clipped, GroupNormalised, Method, OnPolicy
from grpojax.variants.registry import published

_MATH = "Shao et al., DeepSeekMath, arXiv 2402.03300"


@published(_MATH, "deployed", unverified="the clip, which the paper does not state")
class grpo(GroupNormalised):
    """GRPO with outcome supervision, DeepSeekMath, arXiv 2402.03300.

    ``A_i = (r_i - mean r) / (std r + eps)``; clipped surrogate, mean over a sample's tokens, then over samples;
    k3 in the loss. The paper states kl_coef 0.04, but no clip: 0.2 is TRL's.
    """

    kl_coef: float = 0.04


@published(
    _MATH,
    "ablated",
    needs=("step_rewards",),
    combine="sum",
    unverified="the clip, which the paper does not state",
)
class grpo_process(GroupNormalised):
    """GRPO with process supervision, arXiv 2402.03300: suffix sums of the steps' normalised rewards.

    Rewards of whole samples, which the paper does not have, add GRPO's own advantage. If they are all equal, they add
    nothing.
    """

    kl_coef: float = 0.04

    def chain(self) -> A.Transform:
        @A.described
        def grpo_process(outcome: A.Transform, steps: A.Transform) -> A.Transform:
            return lambda values, signals: steps(values, signals) + outcome(values, signals)

        return A.chain(grpo_process(super().chain(), A.process_rewards(ddof=self.ddof, eps=self.eps)))


@published(
    "Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783",
    "replicated",
    control={"name": "grpo"},  # under the same aggregate: the deviation alone
)
class dr_grpo(Clipped):
    """Dr. GRPO, arXiv 2503.20783: ``A_i = r_i - mean r``, token sums divided by a constant, no KL.

    Attributes:
      leave_one_out: subtract the mean of the other samples, as some texts print Dr. GRPO; it is RLOO's baseline.
      constant: the divisor, the longest completion allowed in tokens (the trainer fills in rollout.max_tokens).
    """

    leave_one_out: bool = False
    aggregate: L.Aggregation = "constant"
    constant: float | None = dataclasses.field()  # must be given

    def chain(self) -> A.Transform:
        return A.chain(A.center("group", leave_one_out=self.leave_one_out), A.to_tokens())


@published("Ahmadian et al., Back to Basics, arXiv 2402.14740", "replicated")
class rloo(OnPolicy):
    """RLOO, arXiv 2402.14740: ``A_i = r_i - mean_{j != i} r_j``, ``-A Σ_t log π``, k1 in the reward.

    kl_coef 0.03 is the paper's on TL;DR; 0.10 on HH.
    """

    aggregate: L.Aggregation = "sequence_sum"
    kl_coef: float = 0.03
    kl_kind: L.KLKind = "k1"
    kl_in: L.KLPlace = "reward"

    def chain(self) -> A.Transform:
        return A.chain(A.center("group", leave_one_out=True), A.to_tokens())


_PLUS = "Hu et al., REINFORCE++, arXiv 2501.03262"


@published(_PLUS, "replicated")
class reinforce_pp(Clipped):
    """REINFORCE++, arXiv 2501.03262: returns of token rewards with k1 in them, whitened over the batch's tokens.

    Attributes:
      ddof: of the batch's deviation; OpenRLHF 0, verl 1.
      eps: added to that deviation.
      kl_coef: weight of k1 in each token's reward, which the paper does not state; over 0 it needs signals.ref_logps.
    """

    ddof: int = 0
    eps: float = 1e-8
    aggregate: L.Aggregation = "token_mean"
    kl_coef: float = 0.0
    kl_kind: L.KLKind = "k1"
    kl_in: L.KLPlace = "token_reward"
    has_token_rewards = True

    def chain(self) -> A.Transform:
        rewards = A.token_rewards(kl_coef=self.token_kl_coef)
        return A.chain(rewards, A.token_returns(), A.whiten(ddof=self.ddof, eps=self.eps))


@published(_PLUS, "replicated")
class reinforce_pp_baseline(Clipped):
    """REINFORCE++-baseline, arXiv 2501.03262: ``r - mean r`` of the group, whitened over the batch; KL as a k2 loss.

    The run sets the weight of that loss: kl_coef is 0 by default. Deviations weighted by tokens are those of OpenRLHF,
    the authors' code, and of verl; those weighted by sequences are those of TRL and ms-swift.

    Attributes:
      weighted_by: what counts once in the batch's mean and deviation: "tokens" or "sequences".
      ddof: of the batch's deviation; OpenRLHF 0, verl 1.
      eps: added to that deviation.
    """

    weighted_by: Literal["tokens", "sequences"] = "tokens"
    ddof: int = 0
    eps: float = 1e-8
    aggregate: L.Aggregation = "token_mean"
    kl_kind: L.KLKind = "k2"

    def __post_init__(self) -> None:
        if self.weighted_by not in ("tokens", "sequences"):
            raise ValueError(f"weighted_by={self.weighted_by!r}: must be 'tokens' or 'sequences'")

    def chain(self) -> A.Transform:
        steps = A.to_tokens(), A.whiten(ddof=self.ddof, eps=self.eps)
        return A.chain(A.center("group"), *(steps if self.weighted_by == "tokens" else steps[::-1]))


@published(
    "Li et al., ReMax, arXiv 2310.10505",
    "replicated",
    needs=("greedy",),
    combine="sum",  # a single greedy sample has no group to be normalised in
)
class remax(OnPolicy):
    """ReMax, arXiv 2310.10505: ``A = r - r_greedy``, ``-A Σ_t log π``. No KL here; the paper's is in the reward.

    If a prompt's greedy completion has no reward, its samples teach nothing.
    For one update a rollout, unless ``ratio`` asks for a clip (`rloo`).
    """

    aggregate: L.Aggregation = "sequence_sum"

    def chain(self) -> A.Transform:
        return A.chain(A.subtract_greedy(), A.to_tokens())


@published("Chu et al., GPG, arXiv 2504.02546", "single team")
class gpg(OnPolicy):
    """GPG, arXiv 2504.02546: ``A = α (r - mean r) / F``, ``-A log π``; α compensates for groups without variance.

    For one update a rollout, unless ``ratio`` asks for a clip (`rloo`).

    Attributes:
      scaled: F is the group's deviation; 1 otherwise.
      ddof: the deviation divides by the number of samples minus this.
      eps: added to the deviation.
    """

    scaled: bool = False
    ddof: int = 1
    eps: float = 1e-4
    aggregate: L.Aggregation = "token_mean"

    def chain(self) -> A.Transform:
        scale = A.scale("group" if self.scaled else "none", ddof=self.ddof, eps=self.eps)
        return A.chain(A.center("group"), scale, A.rescale_live(), A.to_tokens())


@published(
    "Zhu et al., Weighted REINFORCE, arXiv 2506.01347",
    "single team",
    equal_groups=True,
    control={"positive": 1.0},
    unverified="the aggregation",
)
class w_reinforce(OnPolicy):
    """Weighted REINFORCE, arXiv 2506.01347: ``A = 0.1`` for a right sample, ``-1`` for a wrong one, ``-A log π``.

    Right samples count less, so that the policy gets less sure of what it does already. There is no baseline: a group
    that is all wrong makes each of its samples less likely. For one update a rollout, unless ``ratio`` asks for a clip
    (`rloo`).

    Attributes:
      positive: weight of right samples, λ in the paper; 1 is REINFORCE on +1 and -1.
      negative: weight of wrong samples; 0 learns from right ones alone.
      success: a sample is right if its outcome is at least this.
    """

    positive: float = 0.1
    negative: float = 1.0
    success: float = 1.0
    aggregate: L.Aggregation = "token_mean"

    def chain(self) -> A.Transform:
        return A.chain(A.weigh_signs(self.positive, self.negative, success=self.success), A.to_tokens())


@published(
    "Chen et al., Pass@k Training, arXiv 2508.10751",
    "single team",
    control={"k": 1},
    unverified="the objective",
)
class pass_at_k(Clipped):
    """Pass@k as the reward in closed form, arXiv 2508.10751; k = 1 is GRPO with ddof 0.

    The objective was not checked: the clipped surrogate over tokens.

    Attributes:
      k: samples that one attempt may draw, at most the group; 4 is our choice.
      success: a sample is right if its outcome is at least this.
    """

    k: int = 4
    success: float = 1.0
    aggregate: L.Aggregation = "token_mean"

    def chain(self) -> A.Transform:
        return A.chain(A.pass_at_k(self.k, success=self.success), A.to_tokens())


@published("Tang et al., arXiv 2503.19595", "single team", unverified="the objective; the advantage is verl's")
class pass_at_k_margin(Clipped):
    """Another pass@k, arXiv 2503.19595: only the best sample learns, by its margin to the second best.

    The objective was not checked: the clipped surrogate over tokens.

    Attributes:
      scaled: divide by the group's standard deviation (ddof 1).
    """

    scaled: bool = False
    aggregate: L.Aggregation = "token_mean"

    def chain(self) -> A.Transform:
        return A.chain(A.best_margin(scaled=self.scaled), A.to_tokens())


@published(
    "Hao et al., On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585",
    "single team",
    unverified="how the paper aggregates",
)
class opo(OnPolicy):
    """OPO, arXiv 2505.23585: a baseline weighted by length; for exactly one update a rollout.

    For more updates, ``ratio`` gives it a clip (`rloo`), which the paper does not have.

    How the paper aggregates was not checked; its baseline is derived for sums over tokens.
    """

    aggregate: L.Aggregation = "sequence_sum"

    def chain(self) -> A.Transform:
        return A.chain(A.center_by_length(), A.to_tokens())


@published(
    "Liu et al., Tricks or Traps?, arXiv 2508.08221",
    "ablated",
    control={"name": "grpo"},
    unverified="whose deviation it divides by",
)
class lite_ppo(Clipped):
    """Lite PPO, arXiv 2508.08221: the group's mean, the batch's deviation, mean over tokens.

    Attributes:
      of: take the deviation of raw rewards, as the paper prints, or of centred ones, as ScaleRL and Magistral do.
      ddof: the deviation divides by the number of samples minus this.
      eps: added to the deviation.
    """

    of: Literal["rewards", "advantages"] = "rewards"
    ddof: int = 1
    eps: float = 1e-4
    aggregate: L.Aggregation = "token_mean"

    def chain(self) -> A.Transform:
        return A.chain(A.center("group"), A.scale("batch", of=self.of, ddof=self.ddof, eps=self.eps), A.to_tokens())


@published(
    "Khatri et al., ScaleRL, arXiv 2510.13786",
    "ablated",
    keep=allocation.keep_prompts,
    resample=False,
    retire=0.9,
    unverified="the bound of CISPO; the paper's text on the filter was not at hand",
)
class scale_rl(Method):
    """ScaleRL, arXiv 2510.13786: the deviation of the batch's centred rewards, CISPO, mean over prompts.

    Groups without variance are left out of the loss, and no others are drawn in their place ("zero-variance
    filtering"), unlike in DAPO. A prompt is not drawn in later epochs once at least 0.9 of its group solved it
    ("no-positive resampling"). The bound of CISPO is TRL's.

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
    aggregate: L.Aggregation = "prompt_mean"

    def chain(self) -> A.Transform:
        scale = A.scale("batch", of="advantages", ddof=self.ddof, eps=self.eps)
        return A.chain(A.center("group"), scale, A.to_tokens())

    def surrogate(self) -> L.cispo:
        return L.cispo(self.weight_max, weight_min=self.weight_min)


@published(
    "Mistral AI, Magistral, arXiv 2506.10910",
    "deployed",
    keep=allocation.keep_prompts,
    unverified="the filter: whether its batches are filled up with other groups",
)
class magistral(Clipped):
    """Magistral, arXiv 2506.10910: rewards centred in the group, then whitened over the batch; a higher upper clip.

    The loss is divided by a group's tokens; no KL. The paper's upper clip is 0.26 to 0.28. Training batches have no
    groups without variance. Its generators do not wait for the trainer, so we assume that other groups fill up a batch
    (dynamic sampling); ``filter: {max_rollouts: 1}`` only leaves them out.

    Attributes:
      ddof: the batch's deviation divides by the number of samples minus this.
      eps: added to that deviation.
    """

    ddof: int = 1
    eps: float = 1e-4
    clip_high: float = 0.28
    aggregate: L.Aggregation = "prompt_mean"

    def chain(self) -> A.Transform:
        return A.chain(A.center("group"), A.whiten(ddof=self.ddof, eps=self.eps), A.to_tokens())


@published(
    "DeepSeek-AI, DeepSeek-V3.2, arXiv 2512.02556",
    "deployed",
    unverified="kl_coef and off_policy_limit, which the paper does not give",
)
class deepseek_v3_2(Clipped):
    """DeepSeek-V3.2's GRPO, arXiv 2512.02556: no deviation, an unbiased KL, unlikely wrong samples masked.

    The paper gives neither the weight of the KL (0.001 is R1's) nor the limit of the mask (0.5 is TRL's). Its
    keep-routing and keep-sampling-mask belong to the sampler and are not here.
    """

    kl_coef: float = 0.001
    kl_kind: L.KLKind = "unbiased"
    off_policy_limit: float | None = 0.5

    def chain(self) -> A.Transform:
        return A.chain(A.center("group"), A.to_tokens())


@published(
    "Nan et al., NGRPO, arXiv 2509.18851",
    "single team",
    keep=functools.partial(allocation.keep_prompts, above=None, below=1.0),
    bounded_rewards=True,
    control={"count": 0, "reward_max": 1.0},
    unverified="the closed form of its Eq. 6, which its code and Figure 3 contradict",
)
class ngrpo(GroupNormalised):
    """NGRPO, arXiv 2509.18851: statistics with a virtual best sample, so that groups in which all fail teach too.

    Groups in which all samples are right are left out, and others are drawn until the batch is full (as in the authors'
    code).

    Attributes:
      reward_max: the best reward there is.
      count: number of virtual samples; with 0 the rest is GRPO with NGRPO's clip and filter.
      ddof: of the group's deviation; 1 in the code and the paper's Figure 3, and its Eq. 6 does not match.
    """

    reward_max: float = 1.0
    count: int = 1
    eps: float = 1e-6
    clip_low: float = 0.16
    clip_high: float = 0.24
    aggregate: L.Aggregation = "token_mean"

    def chain(self) -> A.Transform:
        if self.count == 0:
            return super().chain()
        return A.chain(A.virtual_best(self.reward_max, self.count, ddof=self.ddof, eps=self.eps), A.to_tokens())


@published(
    "NVIDIA, GDPO, arXiv 2601.05242", "single team", combine="normalize", unverified="the objective, eps and ddof"
)
class gdpo(Clipped):
    """GDPO, arXiv 2601.05242: each reward is centred and scaled in its group, their sum scaled by the batch.

    Otherwise a reward with a large deviation outweighs the others, and different mixtures get the same advantage. Each
    reward is normalised before the sum (``rewards: {combine: normalize}``). The objective is GRPO's.

    Attributes:
      ddof: the batch's deviation divides by the number of samples minus this.
      eps: added to that deviation.
    """

    ddof: int = 1
    eps: float = 1e-4

    def chain(self) -> A.Transform:
        scale = A.scale("batch", of="advantages", ddof=self.ddof, eps=self.eps)
        return A.chain(A.center("group"), scale, A.to_tokens())


@published("MaxRL, arXiv 2602.02710", "single team", bounded_rewards=True, unverified="the objective")
class max_rl(Clipped):
    """MaxRL, arXiv 2602.02710: ``A_i = (r_i - mean r) / mean r`` of the group, rewards of 0 or more.

    For 0/1 rewards it is an expansion of log p(success): rarely solved prompts count more than with any deviation
    (`grpojax.advantages.max_rl`). A group whose mean is 0 teaches nothing. The objective was not checked: the clipped
    surrogate over tokens.
    """

    aggregate: L.Aggregation = "token_mean"

    def chain(self) -> A.Transform:
        return A.chain(A.max_rl(), A.to_tokens())


@published(
    "Agarwal, GKD, arXiv 2306.13649; Gu, MiniLLM, arXiv 2306.08543",
    "replicated",
    needs=("teacher",),
    equal_groups=True,
    unverified="the clipped surrogate, which is that of trainers",
)
class distill(Clipped):
    """On-policy distillation (GKD, arXiv 2306.13649): ``A_t = log π_teacher - log π`` of the policy's own tokens.

    Its gradient is that of the reverse KL, estimated from one token per position (`grpojax.advantages.distill`). GKD
    differentiates the divergence itself, MiniLLM uses returns; trainers use the clipped surrogate over tokens. Rewards
    are logged and not learned from, but a sample without a reward has weight 0.

    Attributes:
      teacher: folder of a model with the policy's tokenizer; the trainer reads it.
    """

    teacher: str
    aggregate: L.Aggregation = "token_mean"

    def chain(self) -> A.Transform:
        return A.chain(A.distill())
