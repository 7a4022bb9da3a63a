"""Fakes of a run's programs beside the real ones."""

import dataclasses
from collections.abc import Mapping

import fake_programs
import jax
import numpy as np
import pytest

from grpojax.programs.policy import Policy
from grpojax.run import calls
from grpojax.run import recipe as recipes


@pytest.fixture(scope="module")
def policy(recipe):
    """The tiny model on one device; a module takes it up by ``policy = fake_checks.policy``."""
    config = recipes.load(recipe)
    return Policy(config.model, config.mesh, jax.devices()[:1]).load()


def numbers_for(shapes):
    """Arrays of these shapes, of ones."""

    def one(x):
        return jax.random.key(1) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else np.ones(x.shape, x.dtype)

    return jax.tree.map(lambda x: jax.device_put(one(x)), shapes)


def kinds(tree):
    return jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def check_every(config, policy, monkeypatch):
    """Every program of a run has a fake that takes and gives the same."""
    made, make = [], calls.make_programs
    monkeypatch.setattr(calls, "make_programs", lambda learning: made.append(make(learning)) or made[0])
    planned = calls.calls_of(config, policy.shape).calls.values()
    fakes = dict(pairs(made[0], fake_programs.fakes_of(made[0])))
    learning = [call for call in planned if call.program in fakes]
    assert {call.program.__name__ for call in learning} >= {"update", "score"}
    for call in learning:
        args, want = numbers_for(call.args), jax.eval_shape(call.program, *call.args, **call.static)
        assert kinds(fakes[call.program](*args, **call.static)) == kinds(want), call.program.__name__
        took = [info.donated for info in jax.tree.leaves(call.program.trace(*call.args, **call.static).args_info[0])]
        assert [x.is_deleted() for x in jax.tree.leaves(args)] == took
        assert any(took) == ("update" in call.program.__name__)


def pairs(real, fake):
    """Programs of two values, one beside the other; what is no program is the same in both."""
    for field in dataclasses.fields(real):
        one, other = getattr(real, field.name), getattr(fake, field.name)
        if isinstance(one, Mapping):
            assert one.keys() == other.keys()
            yield from ((one[name], other[name]) for name in one)
        elif isinstance(other, fake_programs.Fake):
            yield one, other
        else:
            assert one is other and not hasattr(one, "lower"), field.name
