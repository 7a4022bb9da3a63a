"""The programs of a supervised run, as `grpojax.run.programs` makes those of a run with rewards."""

import dataclasses
from typing import Any

import optax

from grpojax.device import Program
from grpojax.models.adapters import AdapterConfig
from grpojax.models.compute import Compute
from grpojax.programs import policy_state
from grpojax.programs.optimizer import OptimizerConfig, make_optimizer
from grpojax.programs.update import Learns, Loss, update_program
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
    update: Program
    score: Program


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
    learns = learns if adapter is None else policy_state.on_base(learns)
    return SupervisedPrograms(
        optimizer=rule,
        update=update_program("update", update_of(learns), compute),
        score=score_program("score", graph, compute=compute),
    )
