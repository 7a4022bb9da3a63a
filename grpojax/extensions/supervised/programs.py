"""The programs of a supervised run, as `grpojax.run.programs` makes those of a run with rewards."""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

from grpojax.models.adapters import AdapterConfig
from grpojax.models.compute import Compute
from grpojax.programs import policy_state
from grpojax.programs.compiling import program, quick_options
from grpojax.programs.optimizer import OptimizerConfig, make_optimizer
from grpojax.programs.update import Learns, Loss
from grpojax.run.programs import score_program, update_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedPrograms:
    """The programs of a supervised run.

    Attributes:
      optimizer: the optimizer of the policy.
      update: ``(state, frozen, part) -> (state, metrics)``; ``frozen`` is that of `grpojax.programs.policy_state`.
      score: ``(params, rows) -> Scores``.
    """

    optimizer: optax.GradientTransformation
    update: Callable[..., Any]
    score: Callable[..., Any]


def make_supervised_programs(
    graph: Any,
    compute: Compute,
    loss: Loss,
    optimizer: OptimizerConfig,
    updates: int | None,
    adapter: AdapterConfig | None = None,
) -> SupervisedPrograms:
    """The programs of a supervised run.

    Args:
      graph, compute: of the policy.
      loss: of a part of a batch (`grpojax.extensions.supervised.teaching`).
      optimizer: the policy's.
      updates: of the whole run.
      adapter: what learns in place of the policy's weights; an update is then given their base.
    """
    rule = make_optimizer(optimizer, updates, policy_state.table_of(adapter))
    learns = Learns(loss=loss, optimizer=rule)
    update = update_of(learns if adapter is None else policy_state.on_base(learns), compute)
    return SupervisedPrograms(
        optimizer=rule,
        update=program("update", update, donate=[0], options=quick_options(compute.platform)),
        score=score_program("score", graph, compute=compute),
    )
