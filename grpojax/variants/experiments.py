"""Five experiments at UIUC: all on GRPO's advantage, with sums over tokens.

Their text has the loss -A Σ log π. The clipped surrogate has the same gradient at ratio 1. From the second update of a
rollout on, the clip stops tokens whose ratio has left its range. With one update per rollout, as in their recipes, the
ratio is 1 and this clip never acts (the gradient's does, ``optimizer.grad_clip``). The clip limits the change of a
token in one rollout, not over the run: the fourth experiment's loss is unbounded below with and without it.
"""

from typing import Literal

from grpojax import advantages as A
from grpojax import credit as C
from grpojax import losses as L
from grpojax.variants.critics import BiasLoss, Critic
from grpojax.variants.method import GroupNormalised, group_normalised
from grpojax.variants.registry import published

_UIUC = "Zhao, UIUC, unpublished; GRPO as in arXiv 2402.03300"
_DEFAULTS = "all that the notes do not state: the options' defaults"


@published(_UIUC, "single team", needs=("critic",), control={"name": "grpo"}, unverified=_DEFAULTS)
class token_critic(GroupNormalised):
    """A learned bias for each token on GRPO's advantage (arXiv 2402.03300); reported as unstable.

    ``A_t = A_i + b_t``. ``b_t`` is the output of a critic that has read the token. Its loss is ``-Σ_t A_i b_t``, whose
    gradient is ``-A_i`` for every token, whatever its output is. Without a bound it has no fixed point; with ``l2`` the
    best bias is ``A / (2 l2)``. The critic's loss is not centred by ``center_bias``, since it would be 0.

    Attributes:
      bound: largest bias, by a tanh; None for no bound, as in the experiment.
      center_bias: keep each sample's sum of advantages unchanged.
      l2: weight of ``Σ b²`` in the critic's loss; 0 as in the experiment.
      normalise: the critic's loss: "sum" weighs tokens like the policy's loss, "mean" takes the mean over tokens.
    """

    bound: float | None = None
    center_bias: bool = False
    l2: float = 0.0
    normalise: Literal["sum", "mean"] = "sum"
    aggregate: L.Aggregation = "sequence_sum"

    def chain(self) -> A.Transform:
        return A.chain(*self.steps(), C.add_token_bias(bound=self.bound, center=self.center_bias))

    def critic(self) -> Critic:
        loss = BiasLoss(bound=self.bound, l2=self.l2, normalise=self.normalise)
        return Critic(signal="token_bias", targets=A.chain(*self.steps()), loss=loss)


@published(
    _UIUC,
    "single team",
    control={"limit": 1.0, "relative_to": "sample", "positive_only": True},
    unverified=_DEFAULTS,
)
class rare_token(GroupNormalised):
    """GRPO (arXiv 2402.03300) with up to twice the advantage on a right sample's unlikely tokens; reported as failing.

    Attributes:
      limit: largest factor; None for none.
      relative_to: compare with the likeliest token of the sample, of its group, or of the step's whole rollout.
      positive_only: only where A > 0; one of the two descriptions does not have this.
    """

    limit: float | None = None
    relative_to: Literal["sample", "group", "batch"] = "sample"
    positive_only: bool = True
    aggregate: L.Aggregation = "sequence_sum"

    def chain(self) -> A.Transform:
        rare = C.compensate_rare_tokens(self.limit, relative_to=self.relative_to, positive_only=self.positive_only)
        return A.chain(*self.steps(), rare)


@published(_UIUC, "single team", needs=("culling",), retire=1.0, control={"name": "grpo"}, unverified=_DEFAULTS)
class culling(GroupNormalised):
    """GRPO (arXiv 2402.03300) on prompts not yet solved (`grpojax.allocation.solved`); reported as no change.

    A prompt whose samples all succeed is not drawn in later epochs.
    """

    aggregate: L.Aggregation = "sequence_sum"


@published(
    _UIUC,
    "single team",
    equal_groups=True,
    control={"c": 0.0, "fail_reward": 0.0},
    unverified=_DEFAULTS,
)
class negative_advantage(GroupNormalised):
    """GRPO (arXiv 2402.03300) with ``A = -c`` where a whole group fails; reported as inconclusive.

    Attributes:
      c: 1 as in the experiment; NGRPO's value would be ``1 / sqrt(G + 1)``.
      fail_reward: a sample fails if its outcome is at most this.
    """

    c: float = 1.0
    fail_reward: float = 0.0
    aggregate: L.Aggregation = "sequence_sum"

    def chain(self) -> A.Transform:
        penalty = A.penalize_all_fail(self.c, self.fail_reward)
        return A.chain(*group_normalised(self.ddof, self.eps), penalty, A.to_tokens())


@published(
    _UIUC,
    "single team",
    needs=("ground_truth",),
    equal_groups=True,
    control={"name": "grpo"},
    unverified=_DEFAULTS,
)
class gt_likelihood(GroupNormalised):
    r"""GRPO (arXiv 2402.03300) on the true answer's likelihood where a whole group fails; reported as failing.

    It trains on the tokens that were sampled. One of the two descriptions trains on spliced text, which probably made
    the policy incoherent. A sample whose spliced text is too long for the model is left out.

    The "joint" likelihood falls with an answer's length. The products of a group are divided by the largest of them, so
    that eps is small compared with their deviation even if all answers are unlikely. The advantages are then those of
    the products without an eps. What stands after the last marker is replaced.

    The experiment failed. What differs in methods that work are four options: every group learns from likelihoods
    (``groups: all``); ``likelihood: log``, the best in a comparison (arXiv 2602.03979) and JEPO's (arXiv 2503.19618),
    "mean" as in RLPR (arXiv 2506.18254), or "joint" as in VeriFree (arXiv 2505.21493); RLPR's ``relative_to``; and
    ``answer_term: 1``, the part of the reward's gradient that VeriFree and JEPO have and this experiment has not.

    "spliced" trains, in groups whose rewards are likelihoods, on the text that the likelihood is of: a sample's
    reasoning, the marker, the true answer, the brace that closes a box, and the token that ends a sample. All of these
    have a loss. This text was not drawn from the policy, so the gradient is not that of an expected reward. The ratio's
    denominator is the policy before the rollout's first update, and corrections for the sampler are refused. A sample
    without such a text is not replaced, nor is one that was cut and has weight 0 (``train.truncated``).

    Attributes:
      groups: the groups whose rewards are likelihoods; with "all", no other reward is used.
      likelihood: of an answer of k tokens: "per_token", the k-th root of their probabilities' product, "joint", the
        product itself, "log", its logarithm, or "mean", the arithmetic mean of the probabilities.
      relative_to: "no_reasoning" rewards by how far a likelihood is over that of the answer without reasoning, and by
        0 where it is lower. The group's mean takes any constant away: this floor is all that it changes.
      answer_term: weight of the answer's own gradient (`grpojax.advantages.answer_term`), over 0 with "spliced" only.
        The tokens that end the sample have the mean weight of the answer's.
      marker: the text before an answer; None is the last of ``####``, ``## Answer:``, ``\boxed{``, as rewards read it.
      include_marker: count the marker's tokens too.
      missing: of a sample without a marker: "append" puts one after its end, "zero" gives it likelihood 0.
      train_on: "sampled" trains on the samples, "spliced" on the text that the likelihood is of.
      fail_reward: a sample fails if its outcome is at most this.
    """

    groups: Literal["all_fail", "all"] = "all_fail"
    likelihood: Literal["per_token", "joint", "log", "mean"] = "per_token"
    relative_to: Literal["none", "no_reasoning"] = "none"
    answer_term: float = 0.0
    marker: str | None = None
    include_marker: bool = False
    missing: Literal["append", "zero"] = "append"
    train_on: Literal["sampled", "spliced"] = "sampled"
    fail_reward: float = 0.0
    aggregate: L.Aggregation = "sequence_sum"

    def __post_init__(self) -> None:
        if self.marker is not None and not self.marker.strip():
            why = "give the text before an answer, or null"
            raise ValueError(f"variant 'gt_likelihood': marker={self.marker!r}: {why}")
        if self.answer_term < 0 or (self.answer_term and self.train_on != "spliced"):
            why = "0 or more, and over 0 with train_on='spliced' only, where samples have the answer's tokens"
            raise ValueError(f"variant 'gt_likelihood': answer_term={self.answer_term}: {why}")
        if self.likelihood == "log" and self.missing == "zero":
            why = "0 has no logarithm; take missing='append'"
            raise ValueError(f"variant 'gt_likelihood': likelihood='log' with missing='zero': {why}")

    def chain(self) -> A.Transform:
        everywhere, relative = self.groups == "all", self.likelihood == "joint"
        reward = A.likelihood_of_all_fail(self.fail_reward, everywhere=everywhere, relative=relative)
        answer = (A.answer_term(self.answer_term),) if self.answer_term else ()
        return A.chain(*self.steps(), *answer, reward=reward)
