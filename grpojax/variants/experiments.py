"""Five experiments at UIUC: all on GRPO's advantage, with sums over tokens.

Their text has the loss -A Σ log π. The clipped surrogate has the same gradient at ratio 1. From the second update of a
rollout on, the clip stops tokens whose ratio has left its range. With one update per rollout, as in their recipes, the
ratio is 1 and this clip never acts (the gradient's does, ``optimizer.grad_clip``). The clip limits the change of a
token in one rollout, not over the run: the fourth experiment's loss is unbounded below with and without it.
"""

from typing import Literal

from grpojax import advantages as A
from grpojax import credit as C
from grpojax.variants.critics import BiasLoss, Critic, WithCritic
from grpojax.variants.registry import group_normalised, published

_UIUC = "Zhao, UIUC, unpublished; GRPO as in arXiv 2402.03300"


@published(
    _UIUC,
    "single team",
    needs=("critic",),
    aggregate="sequence_sum",
    control={"name": "grpo"},
    unverified="all that the notes do not state: the options' defaults",
)
def token_critic(
    *,
    bound: float | None = None,
    center_bias: bool = False,
    l2: float = 0.0,
    normalise: Literal["sum", "mean"] = "sum",
    ddof: int = 1,
    eps: float = 1e-4,
) -> WithCritic:
    """A learned bias for each token on GRPO's advantage (arXiv 2402.03300); reported as unstable.

    ``A_t = A_i + b_t``. ``b_t`` is the output of a critic that has read the token. Its loss is ``-Σ_t A_i b_t``, whose
    gradient is ``-A_i`` for every token, whatever its output is.

    Args:
      bound: largest bias, by a tanh; None for no bound, as in the experiment. Without a bound it has no fixed point.
      center_bias: keep each sample's sum of advantages unchanged. The critic's loss is not centred, since it would be
        0.
      l2: weight of ``Σ b²`` in the critic's loss; 0 as in the experiment. With it the best bias is ``A / (2 l2)``.
      normalise: the critic's loss: "sum" weighs tokens like the policy's loss, "mean" takes the mean over tokens.
    """
    steps = *group_normalised(ddof, eps), A.to_tokens()
    loss = BiasLoss(bound=bound, l2=l2, normalise=normalise)
    return WithCritic(
        advantage=A.chain(*steps, C.add_token_bias(bound=bound, center=center_bias)),
        critic=Critic(signal="token_bias", targets=A.chain(*steps), loss=loss),
    )


@published(
    _UIUC,
    "single team",
    aggregate="sequence_sum",
    control={"limit": 1.0, "relative_to": "sample", "positive_only": True},
    unverified="all that the notes do not state: the options' defaults",
)
def rare_token(
    *,
    limit: float | None = None,
    relative_to: Literal["sample", "group", "batch"] = "sample",
    positive_only: bool = True,
    ddof: int = 1,
    eps: float = 1e-4,
) -> A.Transform:
    """GRPO (arXiv 2402.03300) with up to twice the advantage on a right sample's unlikely tokens; reported as failing.

    Args:
      limit: largest factor; None for none.
      relative_to: compare with the likeliest token of the sample, of its group, or of the step's whole rollout.
      positive_only: only where A > 0; one of the two descriptions does not have this.
    """
    rare = C.compensate_rare_tokens(limit, relative_to=relative_to, positive_only=positive_only)
    return A.chain(*group_normalised(ddof, eps), A.to_tokens(), rare)


@published(
    _UIUC,
    "single team",
    needs=("culling",),
    retire=1.0,
    aggregate="sequence_sum",
    control={"name": "grpo"},
    unverified="all that the notes do not state: the options' defaults",
)
def culling(*, ddof: int = 1, eps: float = 1e-4) -> A.Transform:
    """GRPO (arXiv 2402.03300) on prompts not yet solved (`grpojax.allocation.solved`); reported as no change.

    A prompt whose samples all succeed is not drawn in later epochs.
    """
    return A.chain(*group_normalised(ddof, eps), A.to_tokens())


@published(
    _UIUC,
    "single team",
    equal_groups=True,
    aggregate="sequence_sum",
    control={"c": 0.0, "fail_reward": 0.0},
    unverified="all that the notes do not state: the options' defaults",
)
def negative_advantage(*, c: float = 1.0, fail_reward: float = 0.0, ddof: int = 1, eps: float = 1e-4) -> A.Transform:
    """GRPO (arXiv 2402.03300) with ``A = -c`` where a whole group fails; reported as inconclusive.

    Args:
      c: 1 as in the experiment; NGRPO's value would be ``1 / sqrt(G + 1)``.
      fail_reward: a sample fails if its outcome is at most this.
    """
    return A.chain(*group_normalised(ddof, eps), A.penalize_all_fail(c, fail_reward), A.to_tokens())


@published(
    _UIUC,
    "single team",
    needs=("ground_truth",),
    equal_groups=True,
    aggregate="sequence_sum",
    control={"name": "grpo"},
    unverified="all that the notes do not state: the options' defaults",
)
def gt_likelihood(
    *,
    groups: Literal["all_fail", "all"] = "all_fail",
    likelihood: Literal["per_token", "joint"] = "per_token",
    marker: str | None = None,
    include_marker: bool = False,
    missing: Literal["append", "zero"] = "append",
    train_on: Literal["sampled", "spliced"] = "sampled",
    fail_reward: float = 0.0,
    ddof: int = 1,
    eps: float = 1e-4,
) -> A.Transform:
    r"""GRPO (arXiv 2402.03300) on the true answer's likelihood where a whole group fails; reported as failing.

    It trains on the tokens that were sampled. One of the two descriptions trains on spliced text, which probably made
    the policy incoherent. A sample whose spliced text is too long for the model is left out.

    Args:
      groups: the groups whose rewards are likelihoods; with "all", no other reward is used.
      likelihood: "per_token" is the geometric mean over the answer's tokens. "joint" is the product, which falls with
        an answer's length. The products of a group are divided by the largest of them, so that eps is small compared
        with their deviation even if all answers are unlikely. The advantages are then those of the products without an
        eps.
      marker: the text after which a sample gives its answer; None is the last of ``####``, ``## Answer:`` and
        ``\boxed{``, as the rewards read it. What stands after the last marker is replaced.
      include_marker: count the marker's tokens too.
      missing: what happens to a sample without a marker: "append" puts one after its end, "zero" gives it likelihood 0.
      train_on: "sampled" trains on the samples. "spliced" trains, in groups whose rewards are likelihoods, on the text
        that the likelihood is of: a sample's reasoning, the marker, the true answer, the brace that closes a box, and
        the token that ends a sample. All of these have a loss. This text was not drawn from the policy, so the gradient
        is not that of an expected reward. The ratio's denominator is the policy before the rollout's first update, and
        corrections for the sampler are refused. A sample without such a text is not replaced, nor is one that was cut
        and has weight 0 (``train.truncated``).
      fail_reward: a sample fails if its outcome is at most this.
    """
    if marker is not None and not marker.strip():
        raise ValueError(f"variant 'gt_likelihood': marker={marker!r}: give the text before an answer, or null")
    return A.chain(
        *group_normalised(ddof, eps),
        A.to_tokens(),
        reward=A.likelihood_of_all_fail(fail_reward, everywhere=groups == "all", relative=likelihood == "joint"),
    )
