"""The programs of a supervised run, as `grpojax.run.make_programs` makes those of a run with rewards."""

import functools

from grpojax.models import flops
from grpojax.programs import policy_state
from grpojax.programs.optimizer import make_optimizer
from grpojax.programs.optimizer_config import OptimizerConfig
from grpojax.programs.policy import PolicyShape
from grpojax.programs.update import Learner, Loss
from grpojax.run.make_programs import Programs, score_program, update_of


def make_supervised_programs(
    policy: PolicyShape, loss: Loss, optimizer: OptimizerConfig, updates: int | None
) -> Programs:
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
    learner = Learner(loss=loss, optimizer=rule, flops=work)
    learner = policy_state.on_base(learner) if adapted else learner
    score = score_program("score", policy.graph, model=policy.config, compute=compute)
    return Programs(
        optimizer=rule,
        update=update_of("update", {"policy": learner}, compute),
        score=score,
        score_policy=score,
    )
