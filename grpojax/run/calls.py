"""The programs of a run with what they are called with, and its state: shapes alone, without weights and without data.

To compile a run's programs ahead of it is a loop over this value, and `grpojax plan` is the same loop for devices that
are not there. Every prompt and completion is at its longest. The shapes that a program takes are made beside the code
that calls it; here they are put together.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from grpojax.models import DecoderConfig, flops
from grpojax.models.weight_table import shardings
from grpojax.programs import calls
from grpojax.programs.calls import Call, abstract
from grpojax.programs.critic_update import ROLE as CRITIC
from grpojax.programs.critic_update import TRUNK
from grpojax.programs.packing import Packed
from grpojax.programs.policy import PolicyShape
from grpojax.programs.state import abstract_state, decoder_network, frozen_copy
from grpojax.run import packed_batch, teaching
from grpojax.run.allocated_rollouts import abstract_phases
from grpojax.run.finetune_recipe import DPOConfig, SFTConfig
from grpojax.run.groups import abstract_rollouts
from grpojax.run.held_out import abstract_evaluation
from grpojax.run.parts.critic import abstract_critic, critic_flops, critic_model
from grpojax.run.parts.influence import abstract_influence
from grpojax.run.parts.teacher import read_shape
from grpojax.run.programs import LearningCritic, Programs, learning_of, make_programs, make_supervised_programs
from grpojax.run.recipe import Config
from grpojax.run.regroup import longest, room, tokens_at_once

Sizes = tuple[np.ndarray, np.ndarray]  # tokens of prompts and of samples

UPDATES = 1000  # of a supervised run, whose length follows from its data: schedules have no shape of their own


class RunCalls(NamedTuple):
    """The programs of a run by name, and its state by role: all that it keeps on the devices, as shapes."""

    calls: dict[str, Call]
    state: dict[str, Any]


def calls_of(config: Config, policy: PolicyShape, *, teacher: DecoderConfig | None = None) -> RunCalls:
    """The programs of a recipe's run.

    Args:
      config: the recipe.
      policy: the model on its devices.
      teacher: the shape of a variant's teacher; None reads it from the recipe's folder.

    Raises:
      UserError: sizes that do not divide over the devices.
    """
    variant, own, train, mesh = config.method.variant, config.own_critic, config.train, policy.mesh
    critic, taught, added = None, None, {}
    if own is not None and variant.critic is not None:
        critic = critic_model(own, policy.config, policy.compute, variant.critic)
        added["critic"] = LearningCritic(model=critic, optimizer=own.optimizer, updates=train.updates)
    if "teacher" in variant.needs:
        teacher = read_shape(variant.options["teacher"]) if teacher is None else teacher
        taught = decoder_network(teacher, None, mesh)
        added["teacher"] = taught[0]
    programs = make_programs(learning_of(config, policy.graph, policy.compute, [added]))
    state = abstract_state({"policy": decoder_network(policy.config, programs.optimizer, mesh)[1]}, mesh)
    learned = state["policy"]
    params, frozen = learned.params, _changing(config)
    batch, sizes = packed_batch.longest_batch(config, policy), packed_batch.work(config, policy)
    packed = packed_batch.in_rows(config, policy, batch)

    work = flops.update_flops(policy.config, *sizes, remat=policy.compute.remat)
    found = {
        "update": Call(programs.update, (learned, frozen, packed), learned, flops=work),
        "score": _score(programs.score, params, packed, policy.config, sizes),
    }
    reshard, weights = calls.reshard(policy, params, config.rollout.weights)
    draws = abstract_rollouts if config.method.plan is None else abstract_phases
    found |= draws(config, policy, weights) | abstract_evaluation(config, policy, params, weights) | reshard
    if "entropy" in variant.needs:
        found["score with entropy"] = _score(programs.score_policy, params, packed, policy.config, sizes)
    if variant.objective.needs_covariance_mask:
        picked = dataclasses.replace(packed, per_token=dataclasses.replace(packed.per_token, covariance_mask=None))
        args = calls.random_key(mesh), packed.per_token.advantages, picked, packed.rows.tokens
        found["covariance mask"] = Call(programs.covariance_mask, args, ())
    found |= _late(config, policy, programs, params)
    if variant.objective.needs_reference:
        reference = _reference(config, policy, params)
        state["reference"] = reference
        if train.reference_every:
            args = reference, params, _number()
            found["reference refresh"] = Call(programs.refresh, args, (reference, params))
    if critic is not None and programs.critic is not None and own is not None:
        by_itself, roles = abstract_critic(critic, programs.critic, packed, sizes, warms_up=own.warmup_steps > 0)
        both, trunk = {"policy": learned, CRITIC: roles[CRITIC]}, {TRUNK: roles[TRUNK]} if critic.frozen else {}
        work += critic_flops(critic, sizes)
        found["update"] = Call(programs.update, (both, frozen | trunk, packed), (both, trunk), flops=work)
        found |= by_itself
        state |= roles
    if taught is not None and teacher is not None:
        state |= abstract_state({"teacher": taught[1]}, mesh)
        found["teacher"] = _score(programs.teacher, state["teacher"], packed, teacher, sizes)
    update = found["update"]
    for args in packed_batch.ragged(config, policy, batch, update.args):
        found["ragged update"] = update._replace(args=args, flops=0.0)
    return RunCalls(found, state)


def _score(program: Any, params: Any, packed: Packed, model: DecoderConfig, sizes: Sizes) -> Call:
    return Call(program, (params, packed.rows), params, flops=flops.forward_flops(model, *sizes))


def _changing(config: Config) -> dict[str, Any]:
    """The numbers that an update reads and that change from step to step (`grpojax.run.learner.Learner.update`)."""
    adaptive = config.method.variant.objective.entropy_target is not None
    there = {"entropy_coef": adaptive, "share": config.train.tokens is not None}
    return {name: _number() for name, needed in there.items() if needed}


def _number() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), np.float32)


def _reference(config: Config, policy: PolicyShape, params: Any) -> Any:
    averaged = config.train.reference_every > 0
    made = jax.eval_shape(lambda params: frozen_copy(params, policy.compute, averaged=averaged), params)
    return jax.tree.map(abstract, made, shardings(made, policy.mesh))


def supervised_calls_of(config: SFTConfig | DPOConfig, policy: PolicyShape) -> RunCalls:
    """As `calls_of`, of a supervised run: every prompt with as many answers as there may be."""
    kind, data = teaching.teaching_of(config), config.data
    part, rows, batch = teaching.longest_batch(config, policy)
    loss = kind.objective(policy.graph, policy.compute)
    programs = make_supervised_programs(policy.graph, policy.compute, loss, config.optimizer, UPDATES)
    state = abstract_state({"policy": decoder_network(policy.config, programs.optimizer, policy.mesh)[1]}, policy.mesh)
    learned, sizes = state["policy"], (batch.prompts.lengths, batch.lengths)
    work = flops.update_flops(policy.config, *sizes, remat=policy.compute.remat)
    found = {"update": Call(programs.update, (learned, None, part), learned, flops=work)}
    if data.validation is not None or data.test is not None or kind.needs_reference:
        scored = flops.forward_flops(policy.config, *sizes)
        found["score"] = Call(programs.score, (learned.params, rows), learned.params, flops=scored)
    return RunCalls(found, state)


def _late(config: Config, policy: PolicyShape, programs: Programs, params: Any) -> dict[str, Call]:
    """The programs of signals that need the rewards, for groups that are as long as any.

    Args:
      config: the recipe.
      policy: the model.
      programs: of the run.
      params: the policy's weights.
    """
    rollout, method, needs, found = config.rollout, config.method, config.method.variant.needs, {}
    group, tokens = method.widest(rollout.group), rollout.max_tokens
    at_once = tokens_at_once(rollout.prompts * group * tokens, config.train, policy.shards)
    sizes = {"most": rollout.prompts, "group": group, "longest_prompt": config.data.max_prompt_tokens}
    if "hidden_states" in needs:
        own = not method.variant.options["self_term"]
        found["influence"] = abstract_influence(
            policy, programs.influence, params, own=own, tokens_at_once=at_once, tokens=tokens, **sizes
        )
    if "ground_truth" in needs:
        spliced = longest(policy, tokens=room(tokens), tokens_at_once=at_once, **sizes)
        found["true answers"] = Call(programs.score, (params, spliced.rows), params, flops=spliced.flops)
    return found
