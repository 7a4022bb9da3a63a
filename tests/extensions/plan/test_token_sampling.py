"""What a compiled draw from a vocabulary over devices moves between them."""

import jax
import numpy as np
import pytest

from grpojax import sharding
from grpojax.extensions.plan import hlo
from grpojax.programs.sampler_config import DrawConfig
from grpojax.programs.token_sampling import draw


@pytest.mark.parametrize(
    ("tensor", "options"),
    [
        (4, {"temperature": 0.0}),
        (2, {"temperature": 0.8}),
        (4, {"top_k": 300, "top_p": 0.8, "min_p": 0.01}),
    ],
    ids=str,
)
def test_a_few_numbers_a_token_and_the_likeliest_k_move_and_never_logits(tensor, options):
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=2, tensor=tensor), jax.devices()[: 2 * tensor])
    config = DrawConfig(**options)
    logits = np.float32(3.0 * np.random.default_rng(3).standard_normal((2, 3, 151936)))
    placed = jax.device_put(logits, sharding.named(mesh, ("shard", None, "vocab")))
    keys = jax.random.split(jax.random.key(7), (2, 3))
    drawn = jax.jit(lambda z, k: draw(z, k, config, mesh)).lower(placed, keys).compile()
    moved = hlo.analyse(drawn.as_text()).collectives
    assert moved and max(c.size for c in moved) <= 4 * 3 * max(tensor * config.top_k, 8)
