"""The programs of a supervised run, as `grpojax.run.programs` makes those of a run with rewards."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import optax

from grpojax.device import ROWS, Device, Program
from grpojax.models import flops
from grpojax.programs import policy_state
from grpojax.programs.optimizer import OptimizerConfig, make_optimizer
from grpojax.programs.policy import PolicyShape
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
    update: Program
    score: Program


def make_supervised_programs(
    policy: PolicyShape, loss: Loss, optimizer: OptimizerConfig, updates: int | None
) -> SupervisedPrograms:
    """The programs of a supervised run.

    Args:
      policy: the model. If it has adapters, an update is given their base.
      loss: of a part of a batch (`grpojax.extensions.supervised.teaching`).
      optimizer: the policy's.
      updates: of the whole run.
    """
    compute, adapted = policy.compute, policy.adapter is not None
    rule = make_optimizer(optimizer, updates, policy_state.table_of(policy.adapter))
    work = functools.partial(flops.update_flops, policy.config, remat=compute.remat, frozen=adapted)
    learns = Learns(loss=loss, optimizer=rule, flops=work)
    learns = policy_state.on_base(learns) if adapted else learns
    return SupervisedPrograms(
        optimizer=rule,
        update=update_of("update", {"policy": learns}, compute),
        score=score_program("score", policy.graph, model=policy.config, compute=compute),
    )


def learn(
    programs: SupervisedPrograms, device: Device, networks: Mapping[str, Any], part: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Dispatches an update of the run's networks, by role, from a part of a batch. Returns them and its metrics."""
    learned, frozen = networks["policy"], policy_state.frozen(networks)
    policy, metrics = device.call(programs.update, learned, frozen, device.put(part, ROWS))
    return {**networks, "policy": policy}, metrics
