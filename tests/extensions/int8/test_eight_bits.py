"""Eight-bit weights against plain numpy, and what the rollout draws with them against weights rounded beforehand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_decoder import BASE, FAMILIES, random_decoder, some_prompts

from grpojax import sharding
from grpojax.extensions.int8 import eight_bits
from grpojax.extensions.int8.eight_bits import Int8Matrix
from grpojax.models import Compute, matrix
from grpojax.models.weight_table import multiplies, shardings
from grpojax.programs import state
from grpojax.programs.sampler import sample_groups
from grpojax.programs.sampler_config import SamplerConfig

CONFIG = dataclasses.replace(BASE, vocab_size=56)


def rounded(w, axis):
    """Oracle: channel by channel, ``(values, scale)``."""
    channels = np.moveaxis(np.float32(w), axis, -1)
    values, scale = np.zeros(channels.shape, np.int8), np.zeros(channels.shape[:-1], np.float32)
    for at in np.ndindex(*scale.shape):
        scale[at] = np.float32(max(abs(x) for x in channels[at])) / np.float32(127)
        for n, x in enumerate(channels[at]):
            values[at][n] = round(float(x) / float(scale[at])) if scale[at] else 0
    return np.moveaxis(values, -1, axis), scale


@pytest.mark.parametrize("axis", [0, 1])
def test_rounds_to_the_nearest_of_255_values_a_channel(axis):
    w = np.random.default_rng(axis).standard_normal((7, 11)).astype(np.float32)
    w[:, 3] = 0.0
    w[2] *= 100.0
    made, (values, scale) = Int8Matrix(*eight_bits.rounded(jnp.asarray(w), axis)), rounded(w, axis)
    assert made.values.dtype == jnp.int8 and made.scale.dtype == jnp.float32
    np.testing.assert_array_equal(made.values, values)
    np.testing.assert_allclose(made.scale, scale, rtol=1e-6)
    apart = np.abs(np.asarray(made.values) * np.expand_dims(np.asarray(made.scale), axis) - w)
    assert (apart <= np.expand_dims(scale, axis) * 0.5001).all()
    assert np.abs(np.asarray(made.values)).max(axis).tolist() == [127 if s else 0 for s in scale]


def test_half_a_scale_holds_where_the_scale_is_rounded_too():
    """Scales of bfloat16 from one power of two to the next; values rounded by a scale before it is rounded itself would
    be off by up to 127 / 256 of a scale more."""
    largest = np.float32(127) * np.linspace(1, 2, 1001, dtype=np.float32)
    w = largest * np.linspace(-1, 1, 257, dtype=np.float32)[:, None]
    made = Int8Matrix(*eight_bits.rounded(jnp.asarray(w), 0, jnp.bfloat16))
    scale = np.float32(largest / np.float32(127)).astype(jnp.bfloat16)
    assert made.scale.dtype == jnp.bfloat16 and (made.scale == scale).all() and len(set(scale.tolist())) == 129
    apart = np.abs(np.float64(made.values) * np.float64(scale) - w)
    assert (apart <= 0.50001 * np.float64(scale)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_products_are_those_of_whole_numbers_and_scales(dtype):
    rng = np.random.default_rng(0)
    w = rng.standard_normal((13, 5)).astype(np.float32)
    x = jnp.asarray(rng.standard_normal((3, 13)), dtype)
    made = Int8Matrix.of(jnp.asarray(w), 0)
    exact = np.float64(np.asarray(x, np.float32)) @ np.float64(made.values) * np.float64(made.scale)
    got = matrix.matmul(x, made)
    assert got.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(got, np.float32), exact, rtol=1e-5 if dtype == "float32" else 2**-8)
    table = Int8Matrix.of(jnp.asarray(w.T), 1)  # the same channels, as rows
    logits = matrix.unembed(x, table)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, exact, rtol=1e-5)
    rows = matrix.take(table, jnp.array([[4, 0]]), dtype)
    want = (np.float32(table.values) * np.float32(table.scale)[:, None])[[[4, 0]]]
    np.testing.assert_allclose(np.asarray(rows, np.float32), want, rtol=1e-6 if dtype == "float32" else 2**-8)


@pytest.mark.parametrize("family", ["qwen2_untied", "llama"])
@pytest.mark.slow
def test_matrices_are_quantised_and_nothing_else(family):
    _, params = random_decoder(FAMILIES[family])
    made = state.make_reshard(FAMILIES[family], Compute(), "int8")(params)
    found = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(made)}
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if multiplies(path, x):
            values, scale = rounded(x, 1)
            np.testing.assert_array_equal(found.pop(name + ".values"), values, err_msg=name)
            np.testing.assert_allclose(found.pop(name + ".scale"), scale, rtol=1e-6)
        else:
            np.testing.assert_array_equal(found.pop(name), x)
    assert not found


@pytest.mark.slow
def test_on_a_mesh_the_same_numbers_lie_where_the_weights_would():
    _, params = random_decoder(CONFIG)
    mesh = sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=2, tensor=2))
    want = state.make_reshard(CONFIG, Compute(), "int8")(params)
    got = state.make_reshard(CONFIG, Compute(mesh=mesh), "int8")(jax.device_put(params, shardings(params, mesh)))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    placed = shardings(got, mesh, sharding.ROLLOUT)
    assert all(jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), got, placed)))
    cut = got["layers"]["o"].get_value()
    assert isinstance(cut, Int8Matrix)
    assert cut.values.sharding.shard_shape(cut.values.shape)[1] == 12 and cut.scale.sharding.is_fully_replicated


def test_axes_of_a_scale():
    """Those of the weight without the one that products sum over."""
    made = Int8Matrix.of(jnp.ones((3, 5, 7)), -2).map(lambda x, axes, _: axes, ("layers", "mlp", "embed"), None)
    assert made == Int8Matrix(("layers", "mlp", "embed"), ("layers", "embed"))
    made = Int8Matrix.of(jnp.ones((5, 7)), 1).map(lambda x, axes, _: axes, ("vocab", "embed"), None)
    assert made == Int8Matrix(("vocab", "embed"), ("vocab",), -1)


def drawn(graph, params, compute=Compute()):  # noqa: B008
    config = SamplerConfig(group=5, max_tokens=11)
    rollout = sample_groups(
        graph, params, some_prompts(8), jax.random.key(0), config, eos_ids=tuple(range(6)), compute=compute
    )
    return jax.tree.map(np.asarray, rollout)


@pytest.mark.in_ci("sizes1")
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [None, (2, 2, 2)])
def test_samples_are_those_of_the_rounded_weights(sizes):
    """The sampler's own log-probs are those of the rounded policy, and not those of the policy that learns."""
    config = dataclasses.replace(BASE, vocab_size=56)
    graph, params = random_decoder(config)
    mesh = sizes and sharding.make_mesh(sharding.MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]))
    compute = Compute(mesh=mesh)
    made = state.make_reshard(config, Compute(), "int8")(params)
    rounded = jax.tree.map(matrix.merged, made, is_leaf=matrix.is_matrix)
    want = drawn(graph, rounded)
    placed = params if mesh is None else jax.device_put(params, shardings(params, mesh))
    got = drawn(graph, state.make_reshard(config, compute, "int8")(placed), compute)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.logps, want.logps, atol=2e-5)
    plain = drawn(graph, params)
    assert np.abs(plain.logps[:, :, 0] - got.logps[:, :, 0]).max() > 1e-4
