"""What a compiled rollout moves between devices where more of them than heads of keys stand along ``tensor``."""

import dataclasses

import jax
import numpy as np
import pytest
from plain_decoder import BASE, ragged_batch, random_decoder

from grpojax import sharding
from grpojax.extensions.plan import hlo
from grpojax.models import Compute
from grpojax.models.weight_table import shardings
from grpojax.programs import state
from grpojax.programs.sampler import sample_groups
from grpojax.programs.sampler_config import SamplerConfig

CONFIG = dataclasses.replace(BASE, vocab_size=56, num_heads=8, num_kv_heads=2, head_dim=4, num_layers=2)


@pytest.mark.in_ci("8-compute")
@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "weights"), [(4, "compute"), (8, "compute"), (8, "int8")])
def test_no_weight_moves_for_a_token(tensor, weights):
    """Of a decode step the sums over the parts of a layer's products do, float32 [prompts, slots, D] at the most."""
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=8 // tensor, tensor=tensor))
    graph, params = random_decoder(CONFIG)
    prompts = ragged_batch(np.random.default_rng(1), p=4, vocab=56).prompts
    config, compute = SamplerConfig(group=5, max_tokens=7), Compute(mesh=mesh)
    own = state.make_reshard(CONFIG, compute, weights)(jax.device_put(params, shardings(params, mesh)))

    def run(params, key):
        return sample_groups(graph, params, prompts, key, config, eos_ids=(1, 2, 3), compute=compute)

    text = jax.jit(run).lower(own, jax.random.key(0)).compile().as_text()
    each = [c for c in hlo.analyse(text).collectives if c.unknown]
    assert each and max(c.size for c in each) <= 4 * 4 * 5 * CONFIG.hidden_size
