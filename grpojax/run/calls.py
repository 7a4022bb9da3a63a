"""The programs of a run with their arguments, and its state: only shapes, without weights and data.

`grpojax plan` compiles them for devices that are not there. Every prompt and completion is at its longest. The shapes
of a program's arguments are made next to the code that calls it; this module collects them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from grpojax.host.errors import UserError
from grpojax.models import DecoderConfig, flops
from grpojax.programs import calls, policy_state
from grpojax.programs.calls import Call
from grpojax.programs.packing import Packed
from grpojax.programs.policy import PolicyShape
from grpojax.programs.state import abstract_state
from grpojax.run import packed_batch, parts, sources
from grpojax.run.held_out import abstract_evaluation
from grpojax.run.parts.part import LearningPart, Longest, Part, read_shape
from grpojax.run.programs import learning_of, make_programs
from grpojax.run.recipe import Config


class RunCalls(NamedTuple):
    """The programs of a run by name, and its state by role: everything that it keeps on the devices, as shapes."""

    calls: dict[str, Call]
    state: dict[str, Any]


class Recipe(NamedTuple):
    """A kind of recipe, for those that ask what its run calls (`grpojax.extension.Names.recipes`).

    Attributes:
      load: reads a file with overrides, as `grpojax.run.recipe.load` does.
      calls_of: of a config and its policy.
    """

    load: Callable[[str, Sequence[str]], Any]
    calls_of: Callable[[Any, PolicyShape], RunCalls]


def calls_of(
    config: Config,
    policy: PolicyShape,
    *,
    read_shape: Callable[[str], DecoderConfig] = read_shape,
) -> RunCalls:
    """The programs of a recipe's run.

    Args:
      config: the recipe.
      policy: the model on its devices.
      read_shape: the shape of another model that the recipe names by its path.

    Raises:
      UserError: sizes that do not divide over the devices.
    """
    method, mesh = config.method, policy.mesh
    added: list[Part] = [kind(config, policy, read_shape) for kind in parts.kinds(method.variant).values()]
    programs = make_programs(learning_of(config, policy, [part.spec() for part in added]))
    networks = policy_state.networks(policy, programs.optimizer)
    for part in added:
        networks |= part.networks()
    state = abstract_state(networks, mesh)
    params = policy_state.weights(state)
    batch = packed_batch.longest_batch(config, policy)
    packed = packed_batch.in_rows(config, policy, batch)
    longest = Longest(programs, state, packed, packed_batch.work(config, policy))

    reshard, weights = calls.reshard(policy, params, config.rollout.weights)
    found = _updates(config, policy, longest, added) | _scores(config, policy, longest)
    found |= sources.calls_of(config, policy, weights) | abstract_evaluation(config, policy, params, weights) | reshard
    for part in added:
        own = part.calls(longest)
        if twice := found.keys() & own.keys():
            raise UserError(
                f"a part of the variant lists a program {min(twice)!r}, which there is: give it another name"
            )
        found |= own
    for name, call in [*found.items()]:
        for args in packed_batch.ragged(config, policy, batch, call.args) if call.ragged else ():
            found[f"ragged {name}"] = call._replace(args=args, flops=0.0)
    if (mask := found.get("covariance mask")) is not None:
        for (smaller,) in packed_batch.ragged(config, policy, batch, (packed,)):
            found["ragged covariance mask"] = mask._replace(args=_of_mask(policy, smaller))
    return RunCalls(found, state)


def times_a_step(config: Config) -> dict[str, int]:
    """How often a step runs each program. A program that only some steps run, or none, is left out.

    It follows `grpojax.run.learner.Learner`. The policy scores every minibatch if it changes before the last update or
    if its log-probs are a signal. The update runs for each minibatch in each pass. The parts of the variant say how
    often they run their programs (`grpojax.run.parts.part.Part.times`).
    """
    method, train = config.method, config.train
    needs, updates = method.variant.needs, train.updates_a_rollout
    counts = {
        "reshard": 1,
        "rollout": 1,
        "rollout turns": 0 if config.environment is None else _later_turns(config),
        "rollout phase": 0 if method.plan is None else method.plan.phases,
        "greedy": int("greedy" in needs),
        "score": method.plain_scores(train),
        "score with entropy": train.minibatches * int("entropy" in needs),
        "covariance mask": updates * int(method.variant.objective.needs_covariance_mask),
        "update": updates,
    }
    for kind in parts.kinds(method.variant).values():
        for name, times in kind.times(config).items():
            counts[name] = counts.get(name, 0) + times
    return counts


def _later_turns(config: Config) -> int:
    """The rounds after the first, if every turn is as long as it may be."""
    assert config.environment is not None, "episodes"
    tokens, turn = config.rollout.max_tokens, config.rollout.max_turn_tokens or config.rollout.max_tokens
    return min(config.environment.max_turns, -(-tokens // turn)) - 1


def _updates(config: Config, policy: PolicyShape, longest: Longest, added: Sequence[Part]) -> dict[str, Call]:
    """The programs of a step's updates, as `grpojax.run.learner.Learner.update` calls them."""
    programs, state, packed, sizes = longest
    learned, base = state["policy"], policy_state.frozen(state)
    frozen = base | _changing(config)
    work = update_flops(policy, sizes)
    update = Call(programs.update, (learned, frozen, packed), (learned, base), flops=work, ragged=True)
    second = next((part for part in added if isinstance(part, LearningPart)), None)
    if second is None:
        return {"update": update}
    role, read, more = second.role, second.frozen(state), second.update_flops(sizes)
    both = {"policy": learned, role: state[role]}
    found = {"update": update._replace(args=(both, frozen | read, packed), own=(both, base | read), flops=work + more)}
    if second.warmup_steps(config):
        args = state[role], frozen | read, packed
        found[f"{role} update"] = Call(
            programs.update_without_policy[role], args, (state[role], base | read), flops=more, ragged=True
        )
    return found


def _scores(config: Config, policy: PolicyShape, longest: Longest) -> dict[str, Call]:
    """The programs that score an update's samples before it, except those of the parts."""
    programs, packed, method, found = longest.programs, longest.packed, config.method, dict[str, Call]()
    params, objective = policy_state.weights(longest.state), method.variant.objective
    if method.plain_scores(config.train):
        found["score"] = longest.scored(programs.score, params, policy.config)
    if "entropy" in method.variant.needs:
        found["score with entropy"] = longest.scored(programs.score_policy, params, policy.config)
    if objective.needs_covariance_mask:
        found["covariance mask"] = Call(programs.covariance_mask, _of_mask(policy, packed), ())
    return found


def _of_mask(policy: PolicyShape, packed: Packed) -> tuple[Any, ...]:
    """The arguments of the covariance mask's program: a key, log-probs, the rows, and their tokens' numbers."""
    rows = dataclasses.replace(packed, per_token=dataclasses.replace(packed.per_token, covariance_mask=None))
    return calls.random_key(policy.mesh), packed.per_token.advantages, rows, packed.rows.tokens


def _changing(config: Config) -> dict[str, Any]:
    """The numbers that an update reads and that change between steps (`grpojax.run.learner.Learner.update`)."""
    adaptive = config.method.variant.objective.entropy_target is not None
    there = {"entropy_coef": adaptive, "share": config.train.tokens is not None}
    return {name: jax.ShapeDtypeStruct((), np.float32) for name, needed in there.items() if needed}


def update_flops(policy: PolicyShape, sizes: tuple[Any, Any]) -> float:
    """FLOPs of an update of the policy from prompts and samples with these numbers of tokens."""
    remat, adapted = policy.compute.remat, policy.adapter is not None
    return flops.update_flops(policy.config, *sizes, remat=remat, frozen=adapted)
