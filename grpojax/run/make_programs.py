"""All jitted functions that a run learns by, made in one place.

`make_programs` is pure: its result depends only on shapes and settings, without weights and data. The trainer runs the
programs, and `grpojax plan` compiles them for devices that are not there.
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import optax

from grpojax import losses as L
from grpojax.device import ROWS, Program, cut, quick_options
from grpojax.host.errors import UserError
from grpojax.models import DecoderConfig, flops
from grpojax.models.compute import Compute
from grpojax.programs import policy_state, policy_update
from grpojax.programs.adapter import Adapter
from grpojax.programs.optimizer import make_optimizer
from grpojax.programs.optimizer_config import OptimizerConfig
from grpojax.programs.policy import PolicyShape
from grpojax.programs.state import Network
from grpojax.programs.update import Learner, make_joint_update, make_update, update_program
from grpojax.run import parts
from grpojax.run.recipe import Config
from grpojax.types import PerPrompt, Samples


class Adds(Protocol):
    """What a part of the variant adds (`grpojax.run.parts.part.Part`)."""

    def key(self) -> Any:
        """Parts with equal keys add the same."""
        ...

    def networks(self) -> dict[str, Network]:
        """Networks by role."""
        ...

    def make(self, inputs: "ProgramInputs") -> Mapping[str, Program]:
        """Programs by name."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramInputs:
    """What a run's programs are made from.

    Attributes:
      model: the decoder's config.
      graph: its graph definition.
      compute: how to run it. Its mesh is that of the devices that learn.
      objective: the policy's.
      optimizer: the policy's.
      updates: number of updates of the whole run, for schedules; None if that is not known.
      temperature: the temperature of the samples.
      entropy: whether the variant reads the entropy of each token before the updates.
      balance_coef: coefficient of the loss of the model's MLP (`grpojax.programs.policy_update.policy_objective`).
      adapter: what learns in place of the policy's weights.
    """

    model: DecoderConfig
    graph: Any
    compute: Compute
    objective: L.Objective
    optimizer: OptimizerConfig
    updates: int | None
    temperature: float
    entropy: bool = False
    balance_coef: float = 0.0
    adapter: Adapter | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """The programs of a run, except those that sample (`grpojax.programs.sampler`). Each compiles when it is first
    called.

    Attributes:
      optimizer: the policy's.
      update: ``(state, frozen, rows) -> (state, metrics)``. If another network learns with the policy, it takes and
        returns both states by role.
      score: ``(params, rows) -> Scores``, log-probs of the samples.
      score_policy: the same for the policy before its updates, with the entropy if the variant reads it.
      covariance_mask: ``(key, logps, rows, token_index) -> mask``, the tokens that Clip-Cov or KL-Cov picks. A
        supervised run has none.
      update_without_policy: by role, ``(state, frozen, rows) -> (state, metrics)``: that network learns and the
        policy does not.
      parts: the programs that the parts add, by name.
    """

    optimizer: optax.GradientTransformation
    update: Program
    score: Program
    score_policy: Program
    covariance_mask: Program | None = None
    update_without_policy: Mapping[str, Program] = dataclasses.field(default_factory=dict)
    parts: Mapping[str, Program] = dataclasses.field(default_factory=dict)


def program_inputs(config: Config, policy: PolicyShape) -> ProgramInputs:
    """The `ProgramInputs` of a recipe.

    Args:
      config: the recipe.
      policy: its shape.

    Raises:
      UserError: experts are to be balanced or their choices replayed, but the policy has none; or episodes are to be
        played by a policy with delta nets.
    """
    train, variant, mlp = config.train, config.method.variant, policy.config.mlp
    if train.balance_coef and mlp is None:
        raise UserError(
            f"train.balance_coef={train.balance_coef:g}: {config.model.path} has no experts to balance; set it to 0"
        )
    if config.rollout.router_replay and mlp is None:
        raise UserError(f"rollout.router_replay=true: {config.model.path} has no experts to choose; set it to false")
    if config.environment is not None and (mixer := policy.config.mixer) is not None:
        raise UserError(f"environment: {config.model.path} has {mixer.name} layers, which cannot go on after an answer")
    if config.environment is not None and not policy.config.uniform:
        raise UserError(f"environment: {config.model.path} has layers with experts and without, which is not supported")
    return ProgramInputs(
        model=policy.config,
        graph=policy.graph,
        compute=policy.compute,
        objective=variant.objective,
        optimizer=config.optimizer,
        updates=None if train.steps is None else (train.steps - parts.warmup_steps(config)) * train.updates_a_rollout,
        temperature=config.rollout.temperature,
        entropy="entropy" in variant.needs,
        balance_coef=train.balance_coef,
        adapter=policy.adapter,
    )


_MADE = collections.OrderedDict[Any, Programs]()  # the newest few, by what they follow from


def make_programs(inputs: ProgramInputs, added: Sequence[Adds] = ()) -> Programs:
    """The programs of a run, with those of the variant's parts. A second run of the same recipe in a process gets the
    same, so that it traces and compiles nothing again.

    Raises:
      UserError: two programs have the same name.
    """
    key = inputs, *(part.key() for part in added)
    if key not in _MADE:
        _MADE[key] = _make(inputs, added)
    _MADE.move_to_end(key)
    while len(_MADE) > 4:
        _MADE.popitem(last=False)
    return _MADE[key]


def _make(inputs: ProgramInputs, added: Sequence[Adds]) -> Programs:
    model, graph, compute, objective = inputs.model, inputs.graph, inputs.compute, inputs.objective
    scores = functools.partial(score_program, model=model, compute=compute, temperature=inputs.temperature)
    how = {
        "temperature": inputs.temperature,
        "entropy": True,
        "mlp": model.mlp,
        "balance_coef": inputs.balance_coef,
    }
    loss = policy_update.policy_objective(graph, objective, compute, **how)
    optimizer = make_optimizer(inputs.optimizer, inputs.updates, policy_state.table_of(inputs.adapter))
    adapted = inputs.adapter is not None
    work = functools.partial(flops.update_flops, model, remat=compute.remat, frozen=adapted)
    policy = Learner(loss=loss, optimizer=optimizer, read=policy_update.reader(graph, compute), flops=work)
    if adapted:
        policy = policy_state.on_base(policy)
    others, more = dict[str, Learner](), dict[str, Program]()
    for part in added:
        others |= {role: learner_of(network) for role, network in part.networks().items() if network.loss is not None}
        made = part.make(inputs)
        if twice := more.keys() & made.keys():
            raise UserError(f"two parts of the variant bring a program {min(twice)!r}: give one of them another name")
        more |= made
    score, mask = scores("score", graph), policy_update.make_covariance_mask(objective)
    made = Programs(
        optimizer=optimizer,
        update=update_of("update", {"policy": policy, **others}, compute),
        score=score,
        score_policy=scores("score with entropy", graph, entropy=True) if inputs.entropy else score,
        covariance_mask=Program("covariance mask", mask, out=cut(compute.mesh, ROWS)),
        update_without_policy={
            role: update_of(f"{role} update", {role: learns}, compute) for role, learns in others.items()
        },
        parts=more,
    )
    own = [p.name for p in (made.update, made.score, made.score_policy, *made.update_without_policy.values())]
    if taken := next((program.name for program in more.values() if program.name in own), None):
        raise UserError(f"a part of the variant brings a program {taken!r}, which there is: give it another name")
    return made


def learner_of(network: Network) -> Learner:
    """How a network with a loss learns."""
    assert network.loss is not None and network.optimizer is not None, "it has a loss"
    return Learner(loss=network.loss, optimizer=network.optimizer, read=network.read, flops=network.flops)


def update_of(name: str, learners: Mapping[str, Learner], compute: Compute) -> Program:
    """The program of an update of one network (`make_update`), or of several at once, by role (`make_joint_update`)."""

    def work(prompts: PerPrompt, samples: Samples) -> float:
        return sum(0.0 if each.flops is None else each.flops(prompts, samples) for each in learners.values())

    if len(learners) > 1:
        return update_program(name, make_joint_update(learners), compute, flops=work)
    (learns,) = learners.values()
    return update_program(name, make_update(learns.loss, learns.optimizer, read=learns.read), compute, flops=work)


def score_program(
    name: str,
    graph: Any,
    *,
    model: DecoderConfig,
    compute: Compute,
    temperature: float = 1.0,
    entropy: bool = False,
) -> Program:
    """``(params, rows) -> Scores`` of a decoder with the config ``model``; the other arguments are as of
    `grpojax.programs.policy_update.make_score`."""
    score = policy_update.make_score(graph, compute, temperature=temperature, entropy=entropy)
    work = functools.partial(flops.forward_flops, model)
    return Program(name, score, out=cut(compute.mesh, ROWS), options=quick_options(compute.platform), flops=work)
