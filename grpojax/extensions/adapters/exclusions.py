"""Settings that adapters do not go with."""

from collections.abc import Mapping
from typing import Any

from grpojax.run.exclusions import Exclusion


def _unmerged(c: Any) -> bool:
    """Whether rollouts sample with base and factors in two products."""
    return c.model.adapter is not None and not c.model.adapter.merged


TABLE: Mapping[str, tuple[Exclusion, ...]] = {
    "recipe": (
        Exclusion(
            settings="`model.adapter` and `train.reference_every` over 0",
            why="the reference is the base with the factors of the start, which do not change",
            when=lambda c: c.model.adapter is not None and c.train.reference_every,
            message=lambda c: (
                f"train.reference_every={c.train.reference_every}: with model.adapter the reference is the base with "
                "the factors of the start, which do not change; set it to 0"
            ),
        ),
        Exclusion(
            settings="`model.adapter.merged: false` and `rollout.weights: int8`",
            why="a rollout then samples with the base as it is, whose format `model.adapter.base` sets",
            when=lambda c: _unmerged(c) and c.rollout.weights != "compute",
            message=lambda c: (
                f"rollout.weights={c.rollout.weights}: model.adapter.merged=false samples with the base as it is\n"
                "set rollout.weights=compute, and model.adapter.base=int8 for eight bits"
            ),
        ),
        Exclusion(
            settings="`model.adapter.merged: false` and `mesh.rollout`",
            why="devices that only sample have no base",
            when=lambda c: _unmerged(c) and c.mesh.rollout,
            message=lambda c: (
                f"mesh.rollout={c.mesh.rollout}: devices that only sample have no base; set it to 0, or "
                "model.adapter.merged=true"
            ),
        ),
    ),
}
