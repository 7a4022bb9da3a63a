"""What an update minimises, as data."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

from grpojax.losses.corrections import IMPORTANCE_CAP, IMPORTANCE_FLOOR, Importance, ImportanceLevel
from grpojax.losses.divergence import KLKind, KLPlace
from grpojax.losses.llds import Gate
from grpojax.losses.ratios import Ratio
from grpojax.losses.surrogates import check_surrogate, clipped, geometric, name_of, unclipped
from grpojax.losses.token_weights import NO_CONSTANT, Aggregation

RatioDenominator = Literal["trainer", "sampler"]
Covariance = Literal["none", "clip", "kl"]

# Which of the options of the covariance each of its kinds reads.
_COVARIANCE_READS = {
    "none": (),
    "clip": ("covariance_fraction", "covariance_low", "covariance_high"),
    "kl": ("covariance_fraction", "covariance_coef"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """What an update minimises, as data.

    `policy_loss` has the formula, `grpojax.variants` the published objectives.

    Attributes:
      surrogate: ``(log_ratios, advantages) -> token losses`` (`grpojax.losses.surrogates`): a function of this package,
        such as ``clipped(0.2, 0.28)``, or one of your own.
      ratio: level of the importance ratio (`log_ratio`).
      ratio_denominator: the policy in the ratio's denominator. "trainer" reads ``old_logps``. "sampler" reads
        ``sampler_logps``: the ratio then also corrects for the sampler's numerics and for stale samples, and the old
        policy needs no forward pass.
      trace_decay: γλ of a trace ratio, in [0, 1]; None for the other levels.
      aggregate: how token losses become one number (`loss_weights`).
      constant: divisor of ``aggregate="constant"``, in tokens; None for the other rules.
      count_empty: whether samples without any token that counts (`loss_weights`) still count as samples.
      kl_coef: weight of the KL to the reference; 0 evaluates no reference.
      kl_kind: the estimator (`kl`).
      kl_in: where the KL is. "loss" adds it to the loss (k2, k3 or unbiased). "reward" (k1;
        `grpojax.advantages.subtract_kl` subtracts its sum) and "token_reward" (k1; `grpojax.advantages.token_rewards`
        subtracts it from each token's reward) mean that the advantages contain it: the loss then reads the reference
        for the metric ``kl`` only.
      entropy_coef: weight of the entropy bonus; with ``entropy_target``, the weight at the start. 0 without a target
        computes no entropy for the loss.
      entropy_target: entropy in nats per token that the weight is adapted to hold (`adapt_entropy_coef`; Skywork-OR1,
        arXiv 2505.22312, has 0.2); None for a fixed weight.
      entropy_step: change of the weight per step. Only with ``entropy_target``.
      importance: correction for the sampler's numerics (`importance_correction`): "none", "truncate" or "mask".
      importance_level: level of that correction: of each token, of a whole sample, or its geometric mean.
      importance_low, importance_high: its bounds; None takes the defaults of `importance_correction`.
      off_policy_limit: wrong samples are dropped if they have become this much less likely, in nats per token
        (`off_policy_mask`); None never drops.
      llds_coef: weight of LLDS's term (`displacement`); 0 for none.
      llds_gate: the unit that LLDS's gate is computed for (`displacement`).
      covariance: what happens to the tokens of `covariance_mask`. "clip" leaves them out of the policy's term
        (Clip-Cov). "kl" adds ``covariance_coef |log ρ|`` for them and needs the surrogate `unclipped` (KL-Cov). "none"
        changes nothing.
      covariance_fraction: share of the tokens that are picked, in (0, 1].
      covariance_low, covariance_high: range of covariances that "clip" draws tokens from.
      covariance_coef: weight of the penalty of "kl"; 1 in the official run, 0.1 in verl.

    Example:
      >>> objective = Objective(surrogate=clipped(high=0.28), aggregate="token_mean", kl_coef=0.04)
      >>> objective.needs_reference, objective.needs_entropy
      (True, False)
    """

    surrogate: Callable[..., Any] = clipped()
    ratio: Ratio = "token"
    ratio_denominator: RatioDenominator = "trainer"
    trace_decay: float | None = None
    aggregate: Aggregation = "sequence_mean"
    constant: float | None = None
    count_empty: bool = True
    kl_coef: float = 0.0
    kl_kind: KLKind = "k3"
    kl_in: KLPlace = "loss"
    entropy_coef: float = 0.0
    entropy_target: float | None = None
    entropy_step: float = 0.005
    importance: Importance = "none"
    importance_level: ImportanceLevel = "token"
    importance_low: float | None = None
    importance_high: float | None = None
    off_policy_limit: float | None = None
    llds_coef: float = 0.0
    llds_gate: Gate = "action"
    covariance: Covariance = "none"
    covariance_fraction: float = 2e-4
    covariance_low: float = 1.0
    covariance_high: float = 5.0
    covariance_coef: float = 1.0

    def __post_init__(self):
        check_surrogate(self.surrogate)
        for field in dataclasses.fields(self):
            _check_type(field, getattr(self, field.name))
        for name in ("kl_coef", "llds_coef", "covariance_coef"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be 0 or more")
        if self.aggregate == "constant" and self.constant is None:
            raise ValueError(NO_CONSTANT.format("aggregate"))
        if self.constant is not None and (self.aggregate != "constant" or self.constant <= 0):
            raise ValueError(
                f"aggregate={self.aggregate!r} with constant={self.constant}: a constant over 0 goes with 'constant' "
                "only"
            )
        self._check_kl()
        self._check_ratio()
        self._check_importance()
        self._check_entropy()
        self._check_covariance()

    def _check_kl(self):
        if self.kl_coef > 0 and self.kl_in == "loss" and self.kl_kind == "k1":
            raise ValueError(
                "kl_kind='k1' with kl_in='loss': its expected gradient is 0; take k2, k3 or unbiased, or kl_in='reward'"
            )
        if self.kl_coef > 0 and self.kl_in != "loss" and self.kl_kind != "k1":
            raise ValueError(
                f"kl_kind={self.kl_kind!r} with kl_in={self.kl_in!r}: its gradient is not that of a KL; only k1 "
                "belongs there: set kl_kind='k1'"
            )

    def _check_ratio(self):
        if (self.trace_decay is not None) != self.ratio.startswith("trace") or not 0 <= (self.trace_decay or 0) <= 1:
            raise ValueError(
                f"ratio={self.ratio!r} with trace_decay={self.trace_decay}: a decay in [0, 1] goes with traces only"
            )
        name, levels = name_of(self.surrogate), getattr(self.surrogate, "levels", get_args(Ratio))
        if isinstance(self.surrogate, geometric) and (self.ratio != "token" or self.aggregate != "sequence_mean"):
            raise ValueError(
                f"geometric with ratio={self.ratio!r}, aggregate={self.aggregate!r}: its mean over a sample is of "
                "token ratios and aggregated by 'sequence_mean'"
            )
        if not getattr(self.surrogate, "reads_ratio", True) and self.ratio != "token":
            raise ValueError(f"{name} with ratio={self.ratio!r}: it reads no ratio")
        if self.ratio not in levels:
            raise ValueError(f"{name} with ratio={self.ratio!r}: it takes ratio={', '.join(map(repr, levels))}")
        if self.ratio_denominator == "sampler" and not self.has_ratio:
            raise ValueError(f"ratio_denominator='sampler' with {name}, ratio={self.ratio!r}: there is no ratio")

    def _check_importance(self):
        low, high = self.importance_low, self.importance_high
        if self.importance == "none" and ((low, high) != (None, None) or self.importance_level != "token"):
            raise ValueError("importance_level, _low and _high go with importance='truncate' or 'mask'")
        if self.importance == "truncate" and low is not None:
            raise ValueError(f"importance_low={low}: 'truncate' has no lower bound; take 'mask'")
        high = IMPORTANCE_CAP if high is None else high
        if self.importance == "mask":
            low = IMPORTANCE_FLOOR if low is None else low
            if not (0 <= low <= high and high > 0):
                raise ValueError(f"importance_low={low}, importance_high={high}: no range over 0")
        elif high <= 0:
            raise ValueError(f"importance_high={high}: must be over 0")
        if self.importance != "none" and self.ratio_denominator == "sampler":
            raise ValueError(
                f"importance={self.importance!r} with ratio_denominator='sampler': the ratio already is that"
            )

    def _check_entropy(self):
        if self.entropy_step <= 0:
            raise ValueError(f"entropy_step={self.entropy_step}: must be over 0")
        if self.entropy_target is None and self.entropy_step != type(self).entropy_step:
            raise ValueError(f"entropy_step={self.entropy_step} without entropy_target: it is not read")
        if self.entropy_target is not None and min(self.entropy_target, self.entropy_coef) < 0:
            raise ValueError(
                f"entropy_target={self.entropy_target}, entropy_coef={self.entropy_coef}: with a target both are 0 or "
                "more"
            )

    def _check_covariance(self):
        read = _COVARIANCE_READS[self.covariance]
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            if field.name.startswith("covariance_") and field.name not in read and given != field.default:
                raise ValueError(f"{field.name}={given} with covariance={self.covariance!r}: it is not read")
        if not 0 < self.covariance_fraction <= 1 or self.covariance_low > self.covariance_high:
            raise ValueError(
                f"covariance_fraction={self.covariance_fraction}, covariance_low={self.covariance_low}, "
                f"covariance_high={self.covariance_high}: a share in (0, 1], and a range"
            )
        if self.covariance == "kl" and not isinstance(self.surrogate, unclipped):
            raise ValueError(
                f"covariance='kl' with {name_of(self.surrogate)}: KL-Cov has no clip; take the surrogate "
                "unclipped (the variant kl_cov)"
            )

    @property
    def has_ratio(self) -> bool:
        """Whether the policy's term has an importance ratio; without one, samples must be the current policy's."""
        return getattr(self.surrogate, "reads_ratio", True) and self.ratio != "own"

    @property
    def reads(self) -> dict[str, str]:
        """What `policy_loss` must be given besides log-probs, advantages and weights: array to the term that reads it.

        Example:
          >>> Objective(kl_coef=0.1, ratio_denominator="sampler").reads
          {'ref_logps': 'kl_coef=0.1', 'sampler_logps': "ratio_denominator='sampler'"}
        """
        terms = {}
        if self.needs_reference:
            terms["ref_logps"] = f"kl_coef={self.kl_coef}"
        if self.ratio_denominator == "sampler":
            terms["sampler_logps"] = f"ratio_denominator={self.ratio_denominator!r}"
        elif self.importance != "none":
            terms["sampler_logps"] = f"importance={self.importance!r}"
        elif self.off_policy_limit is not None:
            terms["sampler_logps"] = f"off_policy_limit={self.off_policy_limit}"
        if self.needs_displacement_weights:
            terms["displacement_weights"] = f"llds_coef={self.llds_coef}"
        if self.needs_covariance_mask:
            terms["covariance_mask"] = f"covariance={self.covariance!r}"
        if self.needs_entropy:
            terms["entropy"] = f"entropy_coef={self.entropy_coef}, entropy_target={self.entropy_target}"
        return terms

    @property
    def needs_reference(self) -> bool:
        """Whether ``ref_logps`` is read."""
        return self.kl_coef > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether `policy_loss` takes ``entropy``."""
        return self.entropy_coef != 0 or self.entropy_target is not None

    @property
    def needs_sampler_logps(self) -> bool:
        """Whether ``sampler_logps`` is read."""
        return self.importance != "none" or self.off_policy_limit is not None or self.ratio_denominator == "sampler"

    @property
    def needs_displacement_weights(self) -> bool:
        """Whether ``displacement_weights`` is read."""
        return self.llds_coef > 0

    @property
    def needs_covariance_mask(self) -> bool:
        """Whether ``covariance_mask`` is read (`covariance_mask`)."""
        return self.covariance != "none"


def _check_type(field: dataclasses.Field, value: Any) -> None:
    """Raises `ValueError` where a field of `Objective` holds something of another type than it says."""
    kinds, name = (get_args(field.type) or (field.type,)), field.name
    if get_origin(field.type) is Literal:
        if not isinstance(value, str) or value not in kinds:
            raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(str, kinds))}")
    elif bool in kinds:
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r}: must be True or False")
    elif float in kinds and not (value is None and type(None) in kinds):
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value):
            raise ValueError(f"{name}={value!r}: must be a number")


def check_given(function: str, objective: Objective, arrays: Mapping[str, Any]) -> None:
    """Raises `ValueError`, naming the array and the term that reads it, where one of ``Objective.reads`` is None.

    Args:
      function: the name of the function that was called, for the error.
      objective: the terms.
      arrays: by name, those that the function takes; others are not looked for.

    Example:
      >>> check_given("policy_loss", Objective(kl_coef=0.1), {"ref_logps": None})
      Traceback (most recent call last):
      ValueError: policy_loss: kl_coef=0.1 needs ref_logps, which is missing
    """
    for name, term in objective.reads.items():
        if name in arrays and arrays[name] is None:
            raise ValueError(f"{function}: {term} needs {name}, which is missing")
