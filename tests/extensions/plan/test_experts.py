"""What compiled programs of a mixture of experts move between devices."""

import dataclasses

import flat_batches
import jax
import numpy as np
import pytest
from plain_decoder import MIXTURE, ragged_batch, random_decoder

from grpojax import losses, sharding
from grpojax.device import ROWS, Real
from grpojax.extensions.mixtures.experts import Experts
from grpojax.extensions.plan import hlo
from grpojax.models import Compute, decoder, score
from grpojax.models.weight_table import shardings
from grpojax.programs import policy_update, state
from grpojax.programs.optimizer import make_optimizer
from grpojax.programs.optimizer_config import OptimizerConfig
from grpojax.programs.update import make_update, update_program

MESH = sharding.MeshConfig(data=2, fsdp=2, tensor=2)


EIGHT = dataclasses.replace(MIXTURE, mlp=Experts(count=8, chosen=2, size=14))


@pytest.mark.slow
def test_gradients_of_experts_are_scattered_and_those_of_tokens_summed_once_a_token():
    """No shard gets the whole gradient of its experts. The shards of ``tensor`` add up ``[N, D]``, not ``[N k, D]``."""
    config = dataclasses.replace(MIXTURE, mlp=Experts(count=8, chosen=4, size=32))
    packed, _ = flat_batches.pack(ragged_batch(np.random.default_rng(3), p=8), shards=4)
    rows = jax.tree.map(lambda x: x[0], packed)
    graph, params = random_decoder(config)
    mesh = sharding.make_mesh(MESH)
    params = jax.device_put(params, shardings(params, mesh))
    compute = Compute(mesh=mesh, experts="grouped")
    loss = jax.jit(jax.grad(lambda params: score(graph, params, rows, compute).logps.sum()))
    moved = hlo.analyse(loss.lower(params).compile().as_text()).collectives
    tokens = (rows.prompts[0].size + rows.tokens[0].size) * config.hidden_size * 4
    part = 8 * config.hidden_size * 32 * 4 // 2  # of one matrix of experts, that a device of ``tensor`` has
    assert [c.size for c in moved if c.kind == "reduce-scatter"].count(part // 2) == 3

    def summed(over):  # the largest sum of a group that has device 0 and device ``over``
        return max(c.size for c in moved if c.kind == "all-reduce" and {0, over} <= {*c.groups[0]})

    assert summed(2) < part and summed(1) < 4 * tokens


@pytest.mark.slow
def test_an_update_never_gathers_experts_over_their_own_axis():
    """It keeps each expert, its gradient and its moments where they are. Tokens move."""
    config = dataclasses.replace(EIGHT, mlp=Experts(count=8, chosen=2, size=128))
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=1, expert=8))
    tx = make_optimizer(OptimizerConfig(), 10)
    learner = state.abstract_state({"policy": state.decoder_network(config, tx, mesh)[1]}, mesh)["policy"]
    for moment in jax.tree.leaves(learner):
        assert len(moment.shape) < 4 or moment.sharding.shard_shape(moment.shape)[1] == 1
    batch = ragged_batch(np.random.default_rng(3), p=8)
    packed, _ = flat_batches.pack(batch, shards=8)
    graph = decoder.abstract(config)[0]
    compute = Compute(mesh=mesh, experts="grouped")
    loss = policy_update.policy_objective(graph, losses.Objective(), compute, mlp=config.mlp)
    step = update_program("update", make_update(loss, tx), compute)
    moved = hlo.analyse(step.lower(learner, {}, Real(mesh).put(packed, ROWS)).compile().as_text()).collectives
    one = config.hidden_size * 128 * 4  # bytes of one matrix of one expert
    moved = [c for c in moved if len(c.groups[0]) > 1]
    assert max(c.size for c in moved if c.kind != "all-to-all") < one
    assert any(c.kind == "all-to-all" and c.unknown for c in moved)
