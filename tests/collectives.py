"""What the programs of a run move between devices."""

import collections
import dataclasses
import re

import dry_calls
import jax

from grpojax.programs.policy import Policy
from grpojax.run import recipe as recipes

_KINDS = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def check(recipe, *case):
    """Of a recipe's programs on eight devices each lays its results out as it says, and moves no more for it than if
    XLA were to choose. Returns the names of those that say it."""
    config = recipes.load(recipe, ["mesh={data: 2, fsdp: 2, tensor: 2}", "rewards.0.name=tiny_run:parity", *case])
    policy, names, seen = Policy(config.model, config.mesh).shape, set(), set()
    for call in dry_calls.every(config, policy):
        args = dry_calls.shapes(call)
        key = call.program, *((x.shape, x.dtype) for x in jax.tree.leaves(args))
        if call.program.out is None or key in seen:
            continue
        seen.add(key)
        said, chosen = (p.lower(*args).compile() for p in (call.program, _without(call.program)))
        assert _moved(said) == _moved(chosen), call.program.name
        asked, found = call.program.out(*args), said.output_shardings
        jax.tree.map(_lies, asked, found, is_leaf=lambda x: x is None or isinstance(x, jax.sharding.Sharding))
        names.add(call.program.name)
    return names


def _lies(asked, found):
    """XLA laid a result out as it was asked to."""
    for x in jax.tree.leaves(found) if asked is not None else ():
        assert x.spec == asked.spec, (x, asked)


def _without(program):
    return dataclasses.replace(program, out=None, _made=[])


def _moved(compiled):
    return collections.Counter(_KINDS.findall(compiled.as_text()))
