"""What the class of a method holds, and the bases that have the options which many methods share.

An option is a field. The class of a method has the options that only this method has, and those whose defaults it
changes. Its ``chain`` says what its advantages are, its ``surrogate`` what the loss of a token is. All its options
stand in its class and in at most two bases: `Method`, which has those of the objective, and one of `Clipped`,
`OnPolicy` and `GroupNormalised`.
"""

import abc
import dataclasses
import typing
from typing import Any, ClassVar, Literal

from grpojax import advantages as A
from grpojax import losses as L
from grpojax.variants.critics import Critic


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method(abc.ABC):
    """A method with its options: those that every method has are of its objective (`grpojax.losses.Objective`).

    A subclass under `published` needs no ``dataclass`` above it. A field of the objective that is not among these, such
    as ``ratio``, it makes an option by a field of that name.

    Attributes:
      ratio_denominator: the policy in the ratio's denominator: "trainer", before the rollout's updates, or "sampler".
      aggregate: how token losses become one number (`grpojax.losses.loss_weights`).
      constant: the divisor of ``aggregate="constant"``, in tokens; None for the other rules.
      count_empty: whether samples without any token that counts still count as samples.
      kl_coef: weight of the KL to the reference; 0 evaluates no reference.
      kl_kind: the KL's estimator (`grpojax.losses.kl`).
      kl_in: where the KL is: "loss", "reward" of the sample, or "token_reward", where the chain has these. The last two
        take ``kl_kind="k1"`` only.
      entropy_coef: weight of the entropy bonus; with ``entropy_target``, the weight at the start.
      entropy_target: entropy in nats per token that the weight is adapted to hold; None for a fixed weight.
      entropy_step: change of that weight per step; only with ``entropy_target``.
      importance: correction for the sampler's numerics (`grpojax.losses.importance_correction`).
      importance_level: level of that correction: of each token, of a whole sample, or its geometric mean.
      importance_low: lower bound of that correction, for "mask"; None takes its default.
      importance_high: upper bound of that correction; None takes its default.
      off_policy_limit: wrong samples that became this much less likely, in nats per token, are dropped; None for none.
      covariance: what happens to tokens of high covariance of A and log π: "clip" leaves them out, "kl" makes them pay.
      covariance_fraction: share of the tokens that are picked, in (0, 1].
      covariance_low: least covariance of the tokens that "clip" draws from.
      covariance_high: largest covariance of the tokens that "clip" draws from.
      covariance_coef: weight of the penalty of "kl"; 1 in the official run, 0.1 in verl.
    """

    ratio_denominator: L.RatioDenominator = "trainer"
    aggregate: L.Aggregation = "sequence_mean"
    constant: float | None = None
    count_empty: bool = True
    kl_coef: float = 0.0
    kl_kind: L.KLKind = "k3"
    kl_in: L.KLPlace = "loss"
    entropy_coef: float = 0.0
    entropy_target: float | None = None
    entropy_step: float = 0.005
    importance: L.Importance = "none"
    importance_level: L.ImportanceLevel = "token"
    importance_low: float | None = None
    importance_high: float | None = None
    off_policy_limit: float | None = None
    covariance: L.Covariance = "none"
    covariance_fraction: float = 2e-4
    covariance_low: float = 1.0
    covariance_high: float = 5.0
    covariance_coef: float = 1.0

    # Whether the chain has token rewards, and takes the KL off them (`token_kl_coef`).
    has_token_rewards: ClassVar[bool] = False

    @abc.abstractmethod
    def chain(self) -> A.Transform:
        """The advantages: ``(rewards [P, G], Signals) -> [P, G, T]``."""

    @abc.abstractmethod
    def surrogate(self) -> Any:
        """The loss of a token, ``(log_ratios, advantages) -> losses`` (`grpojax.losses.surrogates`)."""

    def critic(self) -> Critic | None:
        """The network that learns with the policy; None without."""
        return None

    def objective(self, **fixed: Any) -> L.Objective:
        """What the update minimises; ``fixed`` are fields of the objective that are not the option of that name."""
        names = [f.name for f in dataclasses.fields(L.Objective) if f.name != "surrogate" and hasattr(self, f.name)]
        return L.Objective(surrogate=self.surrogate(), **{name: getattr(self, name) for name in names} | fixed)

    @property
    def token_kl_coef(self) -> float:
        """Weight of the KL that the chain takes off tokens' rewards: 0 if it is in the sample's reward or the loss."""
        return self.kl_coef if self.kl_in == "token_reward" else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clipped(Method):
    """A method with PPO's clip.

    Attributes:
      clip_low: how far the ratio may fall below 1 before a token stops learning.
      clip_high: how far the ratio may rise above 1 before a token stops learning.
      clip_dual: bound of the ratio where the advantage is negative; None for none.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = None

    def surrogate(self) -> Any:
        return L.clipped(self.clip_low, self.clip_high, dual=self.clip_dual)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupNormalised(Method):
    """A method with GRPO's advantages and PPO's clip. Its class adds to them, or replaces one of the two.

    Attributes:
      ddof: the deviation divides by the number of samples minus this.
      eps: added to the deviation.
      clip_low: how far the ratio may fall below 1 before a token stops learning.
      clip_high: how far the ratio may rise above 1 before a token stops learning.
      clip_dual: bound of the ratio where the advantage is negative; None for none.
    """

    ddof: int = 1
    eps: float = 1e-4
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = None

    def steps(self) -> tuple[A.Transform, ...]:
        """GRPO's advantages."""
        return *group_normalised(self.ddof, self.eps), A.to_tokens()

    def chain(self) -> A.Transform:
        return A.chain(*self.steps())

    def surrogate(self) -> Any:
        return L.clipped(self.clip_low, self.clip_high, dual=self.clip_dual)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnPolicy(Method):
    """A method whose loss reads no ratio, and which is then for one update a rollout; ``ratio`` gives it PPO's clip.

    A sequence's ratio is the geometric mean of its tokens'; TRL's RLOO clips their product.

    Attributes:
      ratio: "token" or "sequence" for PPO's clip in place of the method's own loss; "none" is for one update a rollout.
      clip_low: how far that ratio may fall below 1; None is 0.2.
      clip_high: how far that ratio may rise above 1; None is 0.2.
      clip_dual: bound of that ratio where the advantage is negative; None for none.
    """

    ratio: Literal["none", "token", "sequence"] = "none"
    clip_low: float | None = None
    clip_high: float | None = None
    clip_dual: float | None = None

    # Without a ratio: the loss of a token, and the field ``ratio`` of the objective.
    own_surrogate: ClassVar[Any] = L.reinforce()
    own_ratio: ClassVar[L.Ratio] = "token"

    def surrogate(self) -> Any:
        check_choice(self, "ratio")
        clip = given(low=self.clip_low, high=self.clip_high, dual=self.clip_dual)
        if self.ratio != "none":
            return L.clipped(**clip)
        for name, value in clip.items():
            raise ValueError(f"variant {type(self).__name__!r}: clip_{name}={value} with ratio='none' has no meaning")
        return self.own_surrogate

    def objective(self, **fixed: Any) -> L.Objective:
        return super().objective(ratio=self.own_ratio if self.ratio == "none" else self.ratio, **fixed)


def group_normalised(ddof: int, eps: float) -> tuple[A.Transform, A.Transform]:
    """GRPO's steps before `to_tokens`: subtract the group's mean, divide by its deviation."""
    return A.center("group"), A.scale("group", ddof=ddof, eps=eps)


def given(**options: Any) -> dict[str, Any]:
    """Those options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def check_choice(method: Method, option: str) -> None:
    """Raises `ValueError` where an option is not of its type, which is a ``Literal`` of texts."""
    name, choices = type(method).__name__, typing.get_args(typing.get_type_hints(type(method))[option])
    if (value := getattr(method, option)) not in choices:
        raise ValueError(f"variant {name!r}: {option}={value!r}: must be one of {', '.join(choices)}")
