"""Five experiments at UIUC: all on GRPO's advantage, with sums over tokens.

Their text has the loss -A Σ log π. The clipped surrogate has the same gradient at ratio 1 and stops where the policy
has moved, without which the fourth is unbounded below.
"""

from grpojax import advantages as A
from grpojax import credit as C
from grpojax.variants.registry import group_normalised, published

_UIUC = "Zhao, UIUC, unpublished; GRPO as in arXiv 2402.03300"


@published(_UIUC, "single team", needs=("critic",), aggregate="sequence_sum")
def token_critic(
    *, bound: float | None = None, center_bias: bool = False, ddof: int = 1, eps: float = 1e-4
) -> A.Transform:
    """A learned bias for each token on GRPO's advantage (arXiv 2402.03300); reported as unstable.

    Args:
      bound: largest bias by a tanh; None for none, as tried. Unbounded it has no fixed point.
      center_bias: no change to a sample's sum of advantages.
    """
    return A.chain(
        *group_normalised(ddof, eps),
        A.to_tokens(),
        C.add_token_bias(bound=bound, center=center_bias),
    )


@published(_UIUC, "single team", aggregate="sequence_sum")
def rare_token(
    *, limit: float | None = None, positive_only: bool = True, ddof: int = 1, eps: float = 1e-4
) -> A.Transform:
    """GRPO (arXiv 2402.03300) with up to twice the advantage on a right sample's unlikely tokens; reported as failing.

    Args:
      limit: largest factor; None for none.
      positive_only: only where A > 0; one of the two descriptions leaves that out.
    """
    return A.chain(
        *group_normalised(ddof, eps), A.to_tokens(), C.compensate_rare_tokens(limit, positive_only=positive_only)
    )


@published(_UIUC, "single team", needs=("culling",), retire=1.0, aggregate="sequence_sum")
def culling(*, ddof: int = 1, eps: float = 1e-4) -> A.Transform:
    """GRPO (arXiv 2402.03300) on prompts not yet solved (`grpojax.allocation.cull`); reported as no change.

    A prompt whose samples all succeed is not drawn in later epochs.
    """
    return A.chain(*group_normalised(ddof, eps), A.to_tokens())


@published(_UIUC, "single team", aggregate="sequence_sum")
def negative_advantage(*, c: float = 1.0, fail_reward: float = 0.0, ddof: int = 1, eps: float = 1e-4) -> A.Transform:
    """GRPO (arXiv 2402.03300) with ``A = -c`` where a whole group fails; reported as inconclusive.

    Args:
      c: 1 as tried; NGRPO's would be ``1 / sqrt(G + 1)``.
      fail_reward: the outcome up to which a sample fails.
    """
    return A.chain(*group_normalised(ddof, eps), A.penalize_all_fail(c, fail_reward), A.to_tokens())


@published(_UIUC, "single team", needs=("ground_truth",), aggregate="sequence_sum")
def gt_likelihood(*, fail_reward: float = 0.0, ddof: int = 1, eps: float = 1e-4) -> A.Transform:
    """GRPO (arXiv 2402.03300) on the true answer's likelihood where a whole group fails; reported as failing.

    Trains on the tokens that were sampled; training on spliced text was the likely cause of incoherence.

    Args:
      fail_reward: the outcome up to which a sample fails.
    """
    return A.chain(
        *group_normalised(ddof, eps),
        A.to_tokens(),
        reward=A.likelihood_of_all_fail(fail_reward),
    )
