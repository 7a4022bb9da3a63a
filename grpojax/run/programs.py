"""All jitted functions that a run learns by, made in one place.

`make_programs` is pure: what comes out follows from the `Learning` alone, without weights and without data. The trainer
runs the programs, and `grpojax plan` compiles them for devices that are not there.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optax

from grpojax import losses as L
from grpojax.models import critic as critics
from grpojax.models.compute import Compute
from grpojax.programs import influence, policy_update, state
from grpojax.programs.compiling import program, quick_options
from grpojax.programs.critic_update import ROLE as CRITIC
from grpojax.programs.critic_update import CriticModel, make_critic_score
from grpojax.programs.optimizer import OptimizerConfig, make_optimizer
from grpojax.programs.update import Learns, Loss, make_joint_update, make_update
from grpojax.run.recipe import Config

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningCritic:
    """The critic of a run: its network, its optimiser, and the updates that its schedule is stretched over."""

    model: CriticModel
    optimizer: OptimizerConfig
    updates: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learning:
    """What the programs of a run follow from.

    Attributes:
      graph: the decoder's graph definition.
      compute: how to run it; its mesh is that of the devices that learn.
      objective: the policy's.
      optimizer: the policy's.
      updates: of the whole run, for schedules; None where that is not known.
      temperature: the one that samples are drawn at.
      entropy: whether the variant reads the entropy of each token before the updates.
      critic: of a variant that has one.
      teacher: the graph definition of a teacher, of a variant that has one.
    """

    graph: Any
    compute: Compute
    objective: L.Objective
    optimizer: OptimizerConfig
    updates: int | None
    temperature: float
    entropy: bool = False
    critic: LearningCritic | None = None
    teacher: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticPrograms:
    """What a critic adds.

    Attributes:
      optimizer: what it learns with.
      update: ``(state, frozen, packed) -> (state, metrics)``, in which it learns alone.
      score: ``(params, frozen, rows) -> [M, B, R, S]``, its outputs.
    """

    optimizer: optax.GradientTransformation
    update: Function
    score: Function


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """The programs of a run, but for those that sample (`grpojax.programs.sampler`). Each compiles when it is called.

    Attributes:
      optimizer: the policy's.
      update: ``(state, frozen, packed) -> (state, metrics)``; of a run with a critic, of both states by role.
      score: ``(params, rows) -> Scores``, log-probs of the samples.
      score_policy: the same of the policy before its updates, with the entropy where the variant reads it.
      covariance_mask: ``(key, logps, packed, places) -> mask``, the tokens that Clip-Cov or KL-Cov picks.
      refresh: ``(reference, params, mix) -> reference``.
      influence: NTHR's scores (`grpojax.programs.influence.make_influence`).
      critic: of a variant that has one.
      teacher: ``(params, rows) -> Scores`` of the teacher, of a variant that has one.
    """

    optimizer: optax.GradientTransformation
    update: Function
    score: Function
    score_policy: Function
    covariance_mask: Function
    refresh: Function
    influence: Function
    critic: CriticPrograms | None = None
    teacher: Function | None = None


def learning_of(
    config: Config,
    graph: Any,
    compute: Compute,
    parts: Iterable[Mapping[str, Any]] = (),
) -> Learning:
    """The `Learning` of a recipe.

    Args:
      config: the recipe.
      graph, compute: of the policy.
      parts: what each part of the variant adds to it (`grpojax.run.parts.part.Part.learning`).
    """
    train, own, variant = config.train, config.own_critic, config.method.variant
    warmup = 0 if own is None else own.warmup_steps
    return Learning(
        graph=graph,
        compute=compute,
        objective=variant.objective,
        optimizer=config.optimizer,
        updates=None if train.steps is None else (train.steps - warmup) * train.updates_a_rollout,
        temperature=config.rollout.temperature,
        entropy="entropy" in variant.needs,
        **{name: value for part in parts for name, value in part.items()},
    )


@functools.lru_cache(maxsize=4)  # a second run of the same recipe in a process traces and compiles nothing again
def make_programs(learning: Learning) -> Programs:
    """The programs of a run."""
    graph, compute, objective = learning.graph, learning.compute, learning.objective
    options = quick_options(compute.platform)
    scores = functools.partial(_score, compute=compute, temperature=learning.temperature)
    loss = policy_update.policy_objective(graph, objective, compute, temperature=learning.temperature, entropy=True)
    policy = Learns(
        loss=loss,
        optimizer=make_optimizer(learning.optimizer, learning.updates),
        read=policy_update.reader(graph, compute),
    )
    update, critic = make_update(loss, policy.optimizer, compute.mesh, read=policy.read), None
    if learning.critic is not None:
        model = learning.critic.model
        rule = make_optimizer(learning.critic.optimizer, learning.critic.updates, critics.CRITIC)
        alone = make_update(model.objective, rule, model.compute.mesh, read=model.read, table=critics.CRITIC)
        update = make_joint_update({"policy": policy, CRITIC: model.learns(rule)}, compute.mesh)
        critic = CriticPrograms(
            optimizer=rule,
            update=program("critic update", alone, donate=[0], options=options),
            score=program("critic", make_critic_score(model), options=options),
        )
    score = scores("score", graph)
    return Programs(
        optimizer=policy.optimizer,
        update=program("update", update, donate=[0], options=options),
        score=score,
        score_policy=scores("score with entropy", graph, entropy=True) if learning.entropy else score,
        covariance_mask=program("covariance mask", policy_update.make_covariance_mask(objective)),
        refresh=program("reference refresh", state.refreshed),
        influence=program(
            "influence",
            influence.make_influence(graph, compute, temperature=learning.temperature),
            static=["copies", "group"],
        ),
        critic=critic,
        teacher=None if learning.teacher is None else scores("teacher", learning.teacher),
    )


def _score(name: str, graph: Any, *, compute: Compute, temperature: float = 1.0, entropy: bool = False) -> Function:
    score = policy_update.make_score(graph, compute, temperature=temperature, entropy=entropy)
    return program(name, score, options=quick_options(compute.platform))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedPrograms:
    """The programs of a supervised run.

    Attributes:
      optimizer: what the policy learns with.
      update: ``(state, None, part) -> (state, metrics)``.
      score: ``(params, rows) -> Scores``.
    """

    optimizer: optax.GradientTransformation
    update: Function
    score: Function


def make_supervised_programs(
    graph: Any, compute: Compute, loss: Loss, optimizer: OptimizerConfig, updates: int | None
) -> SupervisedPrograms:
    """The programs of a supervised run.

    Args:
      graph, compute: of the policy.
      loss: of a part of a batch (`grpojax.run.teaching`).
      optimizer: the policy's.
      updates: of the whole run.
    """
    rule = make_optimizer(optimizer, updates)
    update = make_update(loss, rule, compute.mesh)
    return SupervisedPrograms(
        optimizer=rule,
        update=program("update", update, donate=[0], options=quick_options(compute.platform)),
        score=_score("score", graph, compute=compute),
    )
