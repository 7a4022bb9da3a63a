"""What a compiled rollout with a cache of eight bits moves between devices."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from plain_decoder import BASE, random_decoder
from short_blocks import blocks_of

from grpojax import sharding
from grpojax.extensions.plan import hlo
from grpojax.models import Compute
from grpojax.models.weight_table import shardings
from grpojax.programs import state
from grpojax.programs.sampler import sample_groups
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.types import Prompts

EIGHT = SamplerConfig(group=5, max_tokens=11, cache_dtype="int8")


TPU = Compute(platform="tpu", attention="xla")  # its program, run here


def some_prompts(p=3, length=7):
    rng = np.random.default_rng(0)
    return Prompts(
        tokens=rng.integers(0, 53, (p, length)).astype(np.int32),
        lengths=rng.integers(1, length + 1, p).astype(np.int32),
        uids=np.arange(10, 10 + p, dtype=np.uint32),
        first_sample=np.zeros(p, np.int32),
    )


@pytest.mark.in_ci("int8")
@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["int8", "compute"])
def test_no_block_is_gathered(cache_dtype):
    """What the devices that sample send each other for a token are sums of activations, ``[R, S, D]`` at the most, and
    less than a layer's block of keys."""
    config = dataclasses.replace(BASE, vocab_size=56, num_heads=8, num_kv_heads=2, head_dim=32, num_layers=2)
    graph, params = random_decoder(config)
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=4, tensor=2))
    compute, cells = dataclasses.replace(TPU, mesh=mesh), {"decode_slots": 3, "cache_dtype": cache_dtype}
    own = state.make_reshard(config, compute)(jax.device_put(params, shardings(params, mesh)))
    draw = functools.partial(
        sample_groups, graph, config=dataclasses.replace(EIGHT, **cells), eos_ids=(1, 2), compute=compute
    )
    with blocks_of(4):
        text = jax.jit(lambda params, key: draw(params, some_prompts(8), key)).lower(own, jax.random.key(0)).compile()
    most = max(c.size for c in hlo.analyse(text.as_text()).collectives if c.unknown)
    assert most <= 2 * 3 * config.hidden_size * 4 < 2 * 3 * 2 * 32 * 4
