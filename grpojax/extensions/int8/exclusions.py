"""Settings that rounded weights and caches do not go with."""

from collections.abc import Mapping
from typing import Any

from grpojax.run.exclusions import Exclusion


def _remedy(c: Any) -> str:
    denominator = " or variant.ratio_denominator=sampler" if c.variant.objective.has_ratio else ""
    remedy = f"variant.importance=truncate{denominator}"
    return f"variant.train_on=sampled and {remedy}" if c.spliced else remedy


TABLE: Mapping[str, tuple[Exclusion, ...]] = {
    "method": (
        Exclusion(
            settings="`rollout.weights` or `rollout.cache_dtype` of int8 and an objective that takes samples for the "
            "policy's own",
            why="the samples do not come from the policy that learns, and nothing corrects for it; "
            "`rollout.uncorrected: true` allows it",
            when=lambda c: (
                bool(c.rollout.eight_bits)
                and not c.rollout.uncorrected
                and c.variant.objective.importance == "none"
                and c.variant.objective.ratio_denominator == "trainer"
            ),
            message=lambda c: (
                f"{' and '.join(c.rollout.eight_bits)} with variant {c.variant.name!r}: the samples do not come from "
                f"the policy that learns, and nothing corrects for it: set {_remedy(c)}, or "
                "rollout.uncorrected=true"
            ),
        ),
    ),
}
