"""A fake device beside a real one."""

import dry_calls
import fake_device
import jax
import numpy as np
import pytest

from grpojax.programs.policy import Policy
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


def check_every(config, policy):
    """A fake takes and gives for every program of a run what a real device does."""
    device, names = fake_device.Fake(), set()
    for call in dry_calls.every(config, policy.shape):
        name, shapes = call.program.name, dry_calls.shapes(call)
        if name in fake_device.REAL or call.samples:
            continue
        args = numbers_for(shapes)
        assert kinds(device.call(call.program, *args)) == kinds(jax.eval_shape(call.program.fn, *shapes)), name
        took = [info.donated for info in jax.tree.leaves(call.program.trace(*shapes).args_info[0])]
        assert [x.is_deleted() for x in jax.tree.leaves(args)] == took
        assert any(took) == ("update" in name)
        names.add(name)
    assert names >= {"update", "score"}
