"""Methods that give the tokens of a sample, or the samples of a batch, unequal credit."""

from typing import Literal

from grpojax import advantages as A
from grpojax import allocation
from grpojax import credit as C
from grpojax import losses as L
from grpojax.variants.method import GroupNormalised, OnPolicy, group_normalised
from grpojax.variants.registry import published


@published(
    "Simoni et al., GTPO: Trajectory-Based Policy Optimization, arXiv 2508.03772",
    "single team",
    needs=("entropy",),
    unverified="the entropy filter and the conflict count, in which text and code differ",
)
class gtpo(OnPolicy):
    """GTPO, arXiv 2508.03772: protects conflicting beginnings and ends, leaves out uncertain samples. No KL, no clip.

    Not GTPO of arXiv 2508.04349, which weights rewards by entropy. It is for one update per rollout, since its ratio is
    that of the policy to itself, 1 in value. ``ratio: token`` takes PPO's clip (clip_low, clip_high) instead.

    Attributes:
      gamma: γ of ``A_i - γ mean H``.
      threshold: a sample is left out if its mean entropy is over this, in nats; ln 2 in the paper, 0.7 in the code.
      initial_entropy: the policy's entropy before training (`grpojax.credit.entropy_filter`).
      gain: factor of a right sample's conflicting tokens.
      everywhere: apply the entropy term also where A_i is 0, as in the authors' code.
      count_norm: divide by the number of conflicting tokens, as the code does and the paper does not.
      ratio: "token" for PPO's clip in place of the method's own loss; "none" is for one update a rollout.
    """

    gamma: float = 0.1
    threshold: float = 0.6931471805599453
    initial_entropy: float | None = None
    gain: float = 2.0
    everywhere: bool = False
    count_norm: bool = False
    ratio: Literal["none", "token"] = "none"
    own_surrogate, own_ratio = L.unclipped(), "own"

    def chain(self) -> A.Transform:
        return A.chain(
            A.center("group"),
            C.entropy_penalty(self.gamma, everywhere=self.everywhere),
            C.entropy_filter(self.threshold, initial=self.initial_entropy),
            A.to_tokens(),
            C.conflict_weights(self.gain, count_norm=self.count_norm),
        )


@published(
    "Wang et al., Beyond the 80/20 Rule, arXiv 2506.01939",
    "ablated",
    needs=("entropy",),
    keep=allocation.keep_prompts,
    control={"fraction": 1.0, "rule": "quantile"},
)
class high_entropy_tokens(GroupNormalised):
    """ "80/20", arXiv 2506.01939: DAPO on the 20 % of the tokens with the highest entropy; largest gains at 32B.

    Attributes:
      fraction: share of the batch's tokens that learn; the loss still divides by all tokens.
      rule: how the threshold is found (`grpojax.credit.entropy_mask`).
    """

    fraction: float = 0.2
    rule: Literal["quantile", "top"] = "quantile"
    clip_high: float = 0.28
    aggregate: L.Aggregation = "token_mean"

    def chain(self) -> A.Transform:
        return A.chain(*self.steps(), C.entropy_mask(self.fraction, rule=self.rule))


@published(
    "Cheng et al., Reasoning with Exploration, arXiv 2506.14758",
    "single team",
    needs=("entropy",),
    control={"alpha": 0.0, "kappa": 2.0},
    unverified="alpha and kappa",
)
class entropy_shaping(GroupNormalised):
    """GRPO with a bonus of the entropy on every token's advantage, arXiv 2506.14758.

    Attributes:
      alpha: advantage per nat of entropy; unconfirmed, 0.4 is from a re-implementation.
      kappa: the bonus is at most 1/kappa of the advantage's size; unconfirmed too.
    """

    alpha: float = 0.4
    kappa: float = 2.0

    def chain(self) -> A.Transform:
        return A.chain(*self.steps(), C.entropy_shaping(self.alpha, self.kappa))


@published(
    "Le et al., RL-ZVP, arXiv 2509.21880",
    "single team",
    needs=("entropy",),
    equal_groups=True,
    control={"alpha": 0.0},
    unverified="alpha, the clip and the aggregation",
)
class rl_zvp(GroupNormalised):
    """RL-ZVP, arXiv 2509.21880: groups whose outcomes are all the same learn by the entropy of their tokens.

    Attributes:
      alpha: advantage per nat of entropy (`grpojax.credit.entropy_of_equal_groups`).
      success: such a group is right if its outcome is at least this.
    """

    alpha: float = 0.1
    success: float = 1.0
    aggregate: L.Aggregation = "token_mean"

    def chain(self) -> A.Transform:
        return A.chain(*self.steps(), C.entropy_of_equal_groups(self.alpha, success=self.success))


@published(
    "Dai et al., GRPO-λ, arXiv 2505.18086",
    "single team",
    control={"name": "grpo"},
    unverified="alpha",
)
class grpo_lambda_length(GroupNormalised):
    """GRPO-λ by length, arXiv 2505.18086: the best-solved 20 % of the prompts also pay for length.

    The rest is GRPO: kl_coef 0.04 is DeepSeekMath's.

    Attributes:
      alpha: weight of the length; unconfirmed (`grpojax.allocation.length_selected`).
      share: λ, the share of prompts.
      success: a sample is right if its outcome is at least this.
    """

    alpha: float = 0.6
    share: float = 0.2
    success: float = 1.0
    kl_coef: float = 0.04

    def chain(self) -> A.Transform:
        paid = allocation.length_selected(self.alpha, share=self.share, success=self.success)
        return A.chain(*self.steps(), reward=paid)


@published(
    "Parthasarathi, Reymond et al., GRPO-λ, arXiv 2510.00194",
    "single team",
    control={"trace_decay": 0.0, "ratio": "trace"},  # a token's ratio is its own then
    unverified="the trace's weights and kl_coef, from re-implementations",
)
class grpo_lambda_traces(GroupNormalised):
    """GRPO-λ with eligibility traces, arXiv 2510.00194 (ε-trace, "recent"; "both" is ``ratio: trace_both``).

    kl_coef 0.04 is from one re-implementation only. Early tokens get up to ``1 / (1 - trace_decay)`` times the
    gradient: lower the learning rate.

    Attributes:
      lowest: lower bound of negative advantages, since their traces make training unstable.
      ratio: level of the importance ratio: a trace, whose form this says (`grpojax.losses.log_ratio`).
      trace_decay: γλ, in [0, 1].
    """

    lowest: float = -0.1
    ratio: L.Ratio = "trace"
    trace_decay: float | None = 0.99
    kl_coef: float = 0.04

    def chain(self) -> A.Transform:
        return A.chain(*group_normalised(self.ddof, self.eps), A.floor(self.lowest), A.to_tokens())


@published(
    "Bamba et al., XRPO, arXiv 2510.06672",
    "single team",
    needs=("rollout_plan",),
    combine="sum",
    control={"novelty": 0.0},
    unverified="the priority's square root and what it counts, in-context seeding, the objective",
)
class xrpo(GroupNormalised):
    """XRPO, arXiv 2510.06672: samples go where they tell most, unlikely right ones count more.

    The trainer has its in-context seeding of prompts without a right sample (``rollout.sample_allocation.exemplars``).
    The objective is GRPO's, with DeepSeekMath's kl_coef.

    The number of a prompt's samples depends on the rewards of its earlier ones (optional stopping). This biases the
    group's mean and deviation, and so the baseline: a prompt whose first samples agree by chance gets no more. The
    method itself has this bias.

    Its control has no bonus for novelty. Samples go to prompts as the recipe says, in both.

    Attributes:
      novelty: how much an unlikely right sample gains (`grpojax.credit.sharpen_novelty`).
      novelty_cap: most that a sample gains, as a share of its advantage.
    """

    novelty: float = 2.5
    novelty_cap: float = 0.5
    count_empty: bool = False  # means are over the samples that were drawn
    kl_coef: float = 0.04

    def chain(self) -> A.Transform:
        sharpened = C.sharpen_novelty(self.novelty, self.novelty_cap)
        return A.chain(*group_normalised(self.ddof, self.eps), sharpened, A.to_tokens())


@published(
    "Huang, Xu et al., Lp-Reg, arXiv 2510.03222",
    "single team",
    needs=("proxy",),
    control={"coef": 0.0},
    unverified="the constants, from the official recipes; the form of the KL after a step's first update",
)
class lp_reg(GroupNormalised):
    """Lp-Reg, arXiv 2510.03222: unlikely tokens of wrong samples are spared a little, if they are not noise.

    The official clip is so wide that it bounds right samples only, at ten times the old probability.

    Attributes:
      share: of the tokens with A < 0, the least likely ones that may be spared (`grpojax.credit.protect_rare_tokens`).
      coef: weight of the regularisation.
      noise: a token is noise if its probability is under this times that of the likeliest token.
    """

    share: float = 0.01
    coef: float = 1.0
    noise: float = 0.02
    clip_low: float = 1.0
    clip_high: float = 9.0
    aggregate: L.Aggregation = "token_mean"

    def __post_init__(self) -> None:
        if not 0 < self.noise < 1:
            raise ValueError(f"variant 'lp_reg': noise={self.noise}: must be over 0 and under 1")

    def chain(self) -> A.Transform:
        return A.chain(*self.steps(), C.protect_rare_tokens(self.share, coef=self.coef))


@published(
    "Deng et al., On the Effect of Negative Gradient in GRPO, arXiv 2505.18830",
    "single team",
    needs=("hidden_states",),
    control={"eta": 1.0, "beta": 1.0, "self_term": True, "select": "influence"},  # a penalty times 1
    unverified="whether a right sample counts itself (self_term)",
)
class nthr(GroupNormalised):
    """NTHR, arXiv 2505.18830: a softer penalty on tokens of wrong samples where it would make right ones less likely.

    Attributes:
      beta: a penalty is softened if its token's score is over this times the least mean score of a right sample.
      eta: factor of a softened penalty; None for the paper's ``2 |1/2 - p|``, p the share of right samples.
      self_term: whether a right sample counts itself in its mean score (`grpojax.credit.nthr_scores`).
      select: "influence", or an ablation of the paper: as many tokens at "random", or "all" tokens of wrong samples.
      ddof: 0 in the paper's algebra, which has no eps; 1e-4 is TRL's.
    """

    beta: float = 1.0
    eta: float | None = None
    self_term: bool = True
    select: Literal["influence", "random", "all"] = "influence"
    ddof: int = 0
    aggregate: L.Aggregation = "token_mean"
    kl_coef: float = 1e-4

    def chain(self) -> A.Transform:
        softer = C.nthr(beta=self.beta, eta=self.eta, self_term=self.self_term, select=self.select)
        return A.chain(*self.steps(), softer)
