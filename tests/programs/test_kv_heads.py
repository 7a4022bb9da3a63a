"""More devices along ``tensor`` than heads of keys and values: the numbers of one device, and weights as on disk."""

import dataclasses

import flat_batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_decoder import BASE, FORMATS, ragged_batch, random_decoder
from rollout_weights import for_rollouts

from grpojax import sharding
from grpojax.device import ROWS, Real
from grpojax.models import Compute, kv_heads, score
from grpojax.models.weight_table import check_mesh, shardings
from grpojax.programs.sampler import sample_groups
from grpojax.programs.sampler_config import SamplerConfig

CONFIG = dataclasses.replace(BASE, vocab_size=56, num_heads=8, num_kv_heads=2, head_dim=4, num_layers=2)


def test_heads_are_repeated_in_place():
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=2, tensor=4))
    w = np.arange(3 * 8, dtype=np.float32).reshape(3, 8)
    first, second = w[:, :4], w[:, 4:]
    got = kv_heads.repeated(jnp.asarray(w), CONFIG, mesh)
    np.testing.assert_array_equal(got, np.concatenate([first, first, second, second], 1))
    np.testing.assert_array_equal(kv_heads.repeated(got, CONFIG, mesh), got)
    np.testing.assert_array_equal(kv_heads.repeated(w, CONFIG, None), w)


def placed_on(tensor):
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=8 // tensor, tensor=tensor))
    check_mesh(CONFIG, mesh)
    graph, params = random_decoder(CONFIG)
    return mesh, graph, params, jax.device_put(params, shardings(params, mesh))


@pytest.mark.in_ci("8")
@pytest.mark.slow
@pytest.mark.parametrize("tensor", [4, 8])
def test_scores_and_gradients_are_those_of_one_device(tensor):
    mesh, graph, params, placed = placed_on(tensor)
    batch = ragged_batch(np.random.default_rng(0), p=4, g=3, vocab=56)

    def of(params, mesh):
        packed, layout = flat_batches.pack(batch, shards=sharding.shards(mesh))
        rows = jax.tree.map(lambda x: x[0], Real(mesh).put(packed, ROWS))
        weight = jnp.asarray(packed.segments[0] > 0, jnp.float32)

        def total(params):
            logps = score(graph, params, rows, Compute(mesh=mesh)).logps
            return (logps * weight).sum(), logps

        (_, logps), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
        return layout.unpack(np.asarray(logps)[None]), gradient

    (want, gradient), (got, own) = of(params, None), of(placed, mesh)
    there = np.arange(want.shape[-1]) < batch.lengths[..., None]
    np.testing.assert_allclose(got[there], want[there], atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-4), own, gradient)


@pytest.mark.in_ci("8-compute")
@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "weights"), [(4, "compute"), *((8, form) for form in FORMATS)])
def test_samples_are_those_of_one_device(tensor, weights):
    mesh, graph, params, placed = placed_on(tensor)
    batch = ragged_batch(np.random.default_rng(1), p=4, vocab=56)
    config = SamplerConfig(group=5, max_tokens=7)

    def program(compute):
        def run(params, key):
            return sample_groups(graph, params, batch.prompts, key, config, eos_ids=(1, 2, 3), compute=compute)

        return jax.jit(run)

    whole = for_rollouts(params, CONFIG, Compute(), weights)
    want = program(Compute())(whole, jax.random.key(0))
    own = for_rollouts(placed, CONFIG, Compute(mesh=mesh), weights)
    got = program(Compute(mesh=mesh))(own, jax.random.key(0))
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.logps, want.logps, atol=2e-5)
