"""Methods that give the tokens of a sample, or the samples of a batch, unequal credit."""

from typing import Literal

from grpojax import advantages as A
from grpojax import allocation
from grpojax import credit as C
from grpojax import losses as L
from grpojax.variants.choices import on_policy
from grpojax.variants.registry import group_normalised, published


@published(
    "Simoni et al., GTPO: Trajectory-Based Policy Optimization, arXiv 2508.03772",
    "single team",
    needs=("entropy",),
    surrogate=on_policy(L.unclipped(), "token"),
    ratio="own",
    unverified="the entropy filter and the conflict count, in which text and code differ",
)
def gtpo(
    *,
    gamma: float = 0.1,
    threshold: float = 0.6931471805599453,
    initial_entropy: float | None = None,
    gain: float = 2.0,
    everywhere: bool = False,
    count_norm: bool = False,
) -> A.Transform:
    """GTPO, arXiv 2508.03772: protects conflicting beginnings and ends, leaves out uncertain samples. No KL, no clip.

    Not GTPO of arXiv 2508.04349, which weights rewards by entropy. It is for one update per rollout, since its ratio is
    that of the policy to itself, 1 in value. ``ratio: token`` takes PPO's clip (clip_low, clip_high) instead.

    Args:
      gamma: γ of ``A_i - γ mean H``.
      threshold: a sample is left out if its mean entropy is over this, in nats; ln 2 in the paper, 0.7 in the code.
      initial_entropy: the policy's entropy before training (`grpojax.credit.entropy_filter`).
      gain: factor of a right sample's conflicting tokens.
      everywhere: apply the entropy term also where A_i is 0, as in the authors' code.
      count_norm: divide by the number of conflicting tokens, as the code does and the paper does not.
    """
    return A.chain(
        A.center("group"),
        C.entropy_penalty(gamma, everywhere=everywhere),
        C.entropy_filter(threshold, initial=initial_entropy),
        A.to_tokens(),
        C.conflict_weights(gain, count_norm=count_norm),
    )


@published(
    "Wang et al., Beyond the 80/20 Rule, arXiv 2506.01939",
    "ablated",
    needs=("entropy",),
    keep=allocation.keep_prompts,
    surrogate=L.clipped(high=0.28),
    aggregate="token_mean",
    control={"fraction": 1.0, "rule": "quantile"},
)
def high_entropy_tokens(
    *, fraction: float = 0.2, rule: Literal["quantile", "top"] = "quantile", ddof: int = 1, eps: float = 1e-4
) -> A.Transform:
    """ "80/20", arXiv 2506.01939: DAPO on the 20 % of the tokens with the highest entropy; largest gains at 32B.

    Args:
      fraction: share of the batch's tokens that learn; the loss still divides by all tokens.
      rule: how the threshold is found (`grpojax.credit.entropy_mask`).
    """
    return A.chain(*group_normalised(ddof, eps), A.to_tokens(), C.entropy_mask(fraction, rule=rule))


@published(
    "Cheng et al., Reasoning with Exploration, arXiv 2506.14758",
    "single team",
    needs=("entropy",),
    control={"alpha": 0.0, "kappa": 2.0},
    unverified="alpha and kappa",
)
def entropy_shaping(*, alpha: float = 0.4, kappa: float = 2.0, ddof: int = 1, eps: float = 1e-4) -> A.Transform:
    """GRPO with a bonus of the entropy on every token's advantage, arXiv 2506.14758.

    Args:
      alpha: advantage per nat of entropy; unconfirmed, 0.4 is from a re-implementation.
      kappa: the bonus is at most 1/kappa of the advantage's size; unconfirmed too.
    """
    return A.chain(*group_normalised(ddof, eps), A.to_tokens(), C.entropy_shaping(alpha, kappa))


@published(
    "Dai et al., GRPO-λ, arXiv 2505.18086",
    "single team",
    kl_coef=0.04,
    control={"name": "grpo"},
    unverified="alpha",
)
def grpo_lambda_length(
    *, alpha: float = 0.6, share: float = 0.2, success: float = 1.0, ddof: int = 1, eps: float = 1e-4
) -> A.Transform:
    """GRPO-λ by length, arXiv 2505.18086: the best-solved 20 % of the prompts also pay for length.

    The rest is GRPO: kl_coef 0.04 is DeepSeekMath's.

    Args:
      alpha: weight of the length; unconfirmed (`grpojax.allocation.length_selected`).
      share: λ, the share of prompts.
      success: a sample is right if its outcome is at least this.
    """
    return A.chain(
        *group_normalised(ddof, eps),
        A.to_tokens(),
        reward=allocation.length_selected(alpha, share=share, success=success),
    )


@published(
    "Parthasarathi, Reymond et al., GRPO-λ, arXiv 2510.00194",
    "single team",
    ratio="trace",
    trace_decay=0.99,
    kl_coef=0.04,
    control={"trace_decay": 0.0, "ratio": "trace"},  # a token's ratio is its own then
    unverified="the trace's weights and kl_coef, from re-implementations",
)
def grpo_lambda_traces(*, lowest: float = -0.1, ddof: int = 1, eps: float = 1e-4) -> A.Transform:
    """GRPO-λ with eligibility traces, arXiv 2510.00194 (ε-trace, "recent"; "both" is ``ratio: trace_both``).

    kl_coef 0.04 is from one re-implementation only.

    Args:
      lowest: lower bound of negative advantages, since their traces make training unstable.
      trace_decay: γλ. Early tokens get up to ``1 / (1 - trace_decay)`` times the gradient: lower the learning rate.
    """
    return A.chain(*group_normalised(ddof, eps), A.floor(lowest), A.to_tokens())


@published(
    "Bamba et al., XRPO, arXiv 2510.06672",
    "single team",
    needs=("rollout_plan",),
    combine="sum",
    kl_coef=0.04,
    count_empty=False,  # means are over the samples that were drawn
    unverified="the priority's square root and what it counts, in-context seeding, the objective",
)
def xrpo(*, novelty: float = 2.5, novelty_cap: float = 0.5, ddof: int = 1, eps: float = 1e-4) -> A.Transform:
    """XRPO, arXiv 2510.06672: samples go where they tell most, unlikely right ones count more.

    The trainer has its in-context seeding of prompts without a right sample (``rollout.sample_allocation.exemplars``).
    The objective is GRPO's, with DeepSeekMath's kl_coef.

    The number of a prompt's samples depends on the rewards of its earlier ones (optional stopping). This biases the
    group's mean and deviation, and so the baseline: a prompt whose first samples agree by chance gets no more. The
    method itself has this bias.

    Args:
      novelty: how much an unlikely right sample gains (`grpojax.credit.sharpen_novelty`).
      novelty_cap: most that a sample gains, as a share of its advantage.
    """
    return A.chain(*group_normalised(ddof, eps), C.sharpen_novelty(novelty, novelty_cap), A.to_tokens())


@published(
    "Deng et al., On the Effect of Negative Gradient in GRPO, arXiv 2505.18830",
    "single team",
    needs=("hidden_states",),
    aggregate="token_mean",
    kl_coef=1e-4,
    control={"eta": 1.0, "beta": 1.0, "self_term": True, "select": "influence"},  # a penalty times 1
    unverified="whether a right sample counts itself (self_term)",
)
def nthr(
    *,
    beta: float = 1.0,
    eta: float | None = None,
    self_term: bool = True,
    select: Literal["influence", "random", "all"] = "influence",
    ddof: int = 0,
    eps: float = 1e-4,
) -> A.Transform:
    """NTHR, arXiv 2505.18830: a softer penalty on tokens of wrong samples where it would make right ones less likely.

    Args:
      beta, eta, self_term, select: as in `grpojax.credit.nthr`.
      ddof: 0 in the paper's algebra, which has no eps; 1e-4 is TRL's.
    """
    return A.chain(
        *group_normalised(ddof, eps),
        A.to_tokens(),
        C.nthr(beta=beta, eta=eta, self_term=self_term, select=select),
    )
