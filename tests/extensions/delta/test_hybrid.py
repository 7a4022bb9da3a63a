"""Decoders with gated delta nets beside attention: against transformers, over meshes, and what is refused."""

import dataclasses

import flat_batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny_hf
from flat_batches import Flat
from flax import nnx
from hf_compare import assert_same_torch, our_logps, their, their_logps
from plain_decoder import BASE, FAMILIES, ragged_batch, random_decoder, score, some_prompts
from rollout_weights import for_rollouts

from grpojax import models, sharding
from grpojax.host.errors import UserError
from grpojax.models import Compute, flops
from grpojax.models import decoder as dec
from grpojax.models.layer_kinds import Kind
from grpojax.models.number_formats import Floats
from grpojax.models.weight_table import shardings
from grpojax.programs import state
from grpojax.programs.sampler import sample_groups
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.types import Rows

HYBRID = dataclasses.replace(FAMILIES["qwen3_5"], vocab_size=56)  # whose vocabulary divides
MESH = sharding.MeshConfig(data=2, fsdp=2, tensor=2)


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [(131, 67), *(pytest.param(*given, marks=pytest.mark.exhaustive) for given in ((64, 129), (2, 64)))],
)
def test_texts_longer_than_a_chunk_score_as_in_transformers(tmp_path, prompt, completion):
    made = tiny_hf.save(tmp_path, "qwen3_5")
    tokens = np.random.default_rng(0).integers(0, 94, prompt + completion)
    there = np.zeros((1, 1, completion + 3), np.int32)
    there[..., :completion] = 1
    padded = np.pad(tokens, (0, 5))
    rows = Rows(
        prompts=padded[: prompt + 5].reshape(1, 1, -1).astype(np.int32), prompt_lengths=np.array([[prompt]], np.int32),
        tokens=padded[prompt : prompt + completion + 3].reshape(1, 1, -1).astype(np.int32), segments=there,
        offsets=np.arange(completion + 3, dtype=np.int32) * there, token_prompt=np.zeros_like(there),
    )  # fmt: skip
    graph, params = nnx.split(models.load(tmp_path))
    got = jax.jit(lambda params: score(graph, params, rows, Compute()).logps)(params)[0, 0, :completion]
    want = tiny_hf.logps(made, tokens.tolist())[prompt - 1 :].numpy()
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_the_text_part_of_a_model_with_images_is_read_and_written(tmp_path):
    """Without the weights for images, and those that predict more than one token."""
    tiny_hf.save_with_images(tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    assert any("visual" in name for name in tensors) and any("language_model" in name for name in tensors)
    safetensors.numpy.save_file(tensors | {"mtp.norm.weight": np.ones(24, np.float32)}, file, {"format": "pt"})
    model = models.load(tmp_path / "in")
    theirs = their(tmp_path / "in", dtype="auto")
    for ours, want in zip(our_logps(model), their_logps(theirs), strict=True):
        np.testing.assert_allclose(ours, want, atol=1e-4, rtol=0)
    models.save(tmp_path / "out", model, source=tmp_path / "in")
    assert_same_torch(their(tmp_path / "out", dtype="auto"), theirs)
    assert models.load(tmp_path / "out").config == model.config


def scored(config, rows, weight, mesh=None, *, read=False):
    graph, params = random_decoder(config)
    compute = Compute(mesh=mesh)
    if mesh is not None:
        params = jax.device_put(params, shardings(params, mesh))

    def loss(params):
        given = rows
        if read:
            given = dataclasses.replace(rows, read=dec.read_prompts(nnx.merge(graph, params), rows, compute))
        logps = score(graph, params, given, compute).logps
        return (weight * logps).sum(), logps

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


def check_same(got, want, used, atol=2e-5):
    np.testing.assert_allclose(np.asarray(got[0][1])[used], np.asarray(want[0][1])[used], atol=atol)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(
            a, b, atol=atol * float(np.abs(b).max()), rtol=1e-4, err_msg=jax.tree_util.keystr(path)
        )


@pytest.fixture(scope="module")
def batch():
    """Rows of four shards, a weight for each token, which positions hold one, and the result on one device."""
    packed, layout = flat_batches.pack(ragged_batch(np.random.default_rng(3), p=8, g=6), shards=4)
    rows, used = jax.tree.map(lambda x: x[0], packed), layout.index[0] >= 0
    weight = np.random.default_rng(2).standard_normal(rows.tokens.shape).astype(np.float32) * used
    return rows, weight, used, scored(HYBRID, rows, weight)


@pytest.mark.slow
def test_eight_devices_equal_one(batch):
    rows, weight, used, want = batch
    check_same(scored(HYBRID, rows, weight, sharding.make_mesh(MESH)), want, used)


@pytest.mark.slow
def test_prompts_that_were_read_before_give_the_same(batch):
    rows, weight, used, want = batch
    check_same(scored(HYBRID, rows, weight, read=True), want, used)


def test_a_mesh_that_does_not_cut_heads_evenly_is_refused():
    odd = dataclasses.replace(HYBRID, mixer=dataclasses.replace(HYBRID.mixer, key_heads=3))
    with pytest.raises(UserError, match="linear_num_key_heads 3 does not divide"):
        state.decoder_network(odd, None, sharding.make_mesh(MESH))


@pytest.mark.in_ci("int8")
@pytest.mark.slow
@pytest.mark.parametrize("weights", ["compute", "int8"])
def test_draws_do_not_depend_on_the_mesh(weights):
    graph, params = random_decoder(HYBRID)
    mesh = sharding.make_mesh(MESH)

    def drawn(params, compute):
        config = SamplerConfig(group=3, max_tokens=9, decode_slots=2)
        how = {"eos_ids": tuple(range(6)), "compute": compute}
        params = for_rollouts(params, HYBRID, compute, weights)
        return jax.tree.map(np.asarray, sample_groups(graph, params, some_prompts(8), jax.random.key(0), config, **how))

    want, got = drawn(params, Compute()), drawn(jax.device_put(params, shardings(params, mesh)), Compute(mesh=mesh))
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.logps, want.logps, atol=3e-5)


@pytest.mark.slow
def test_in_sixteen_bits_sampler_and_trainer_are_near_each_other():
    """And the weights of decay, rate and convolution stay in float32."""
    graph, params = random_decoder(HYBRID)
    half, prompts = Compute(dtype="bfloat16"), some_prompts(8)
    rollout = state.make_reshard(HYBRID, half)(params)
    kinds = {name: x.dtype for name, x in nnx.to_pure_dict(rollout)["layers"].items() if name.startswith("delta")}
    assert {name for name, dtype in kinds.items() if dtype == jnp.float32} == {
        "delta_rate", "delta_decay", "delta_decay_start", "delta_decay_log", "delta_q_taps", "delta_k_taps",
        "delta_v_taps",
    }  # fmt: skip
    config = SamplerConfig(group=3, max_tokens=9, decode_slots=2)
    out = sample_groups(graph, rollout, prompts, jax.random.key(0), config, eos_ids=tuple(range(6)), compute=half)
    out = jax.tree.map(np.asarray, out)
    packed, layout = flat_batches.pack(Flat(prompts=prompts, tokens=out.tokens, lengths=out.lengths, arrays=dict()))
    rows = jax.tree.map(lambda x: x[0], packed)
    logps = layout.unpack(np.asarray(score(graph, params, rows, half).logps)[None])
    assert np.abs(logps - out.logps)[np.arange(9) < out.lengths[..., None]].max() < 0.3


@pytest.mark.parametrize("layers", [(), (0, 1, 2, 3)])
def test_layers_of_one_kind_are_no_hybrid(layers):
    with pytest.raises(UserError, match="needs both"):
        dataclasses.replace(HYBRID, mixer_layers=layers)


@pytest.mark.slow
def test_neighbouring_delta_nets_are_compiled_once(batch):
    def lines(layers):
        graph, params = dec.abstract(
            dataclasses.replace(HYBRID, num_layers=layers, mixer_layers=tuple(range(layers - 1)))
        )
        scored = jax.jit(lambda params: score(graph, params, batch[0], Compute()).logps)
        return scored.lower(params).as_text().count("\n")

    assert lines(4) < 1.1 * lines(2)


def test_layers_without_a_period_are_one():
    odd, delta = dataclasses.replace(HYBRID, mixer_layers=(2, 3)), Kind(mixer="delta")
    assert HYBRID.period == (delta, Kind()) and odd.period == (Kind(), Kind(), delta, delta)


def test_work_is_counted_by_the_kind_of_layer():
    """By hand: 2 layers of each kind; 24 wide, 40 in the MLP, 4 heads of 12, 2 of keys; delta: 2 x 5 keys, 6 x 7."""
    mlp, attends, delta = 3 * 24 * 40, 24 * (3 * 48 + 2 * 24), 24 * (2 * 10 + 3 * 42 + 2 * 6)
    assert flops.matmul_weights(HYBRID) == flops.all_layers_weights(HYBRID) == 4 * mlp + 2 * attends + 2 * delta
    assert flops.layer_weights(HYBRID) == mlp + attends
    assert flops.kv_numbers(HYBRID) == 2 * 2 * 24 and flops.state_bytes(HYBRID) == 2 * 4 * 6 * 5 * 7
    rule = 2 * (3 * 6 * 5 * 7 + (2 * 10 + 42) * 3)
    seen = (11 * 12 // 2 + 3 * 11 + 6 + 7 * 11 + 28) * 2 * 48 * 2  # each of 11, 3 and 7 tokens sees those before it
    total = 21 * (flops.matmul_weights(HYBRID) + rule) + seen + 10 * 56 * 24
    assert flops.forward_flops(HYBRID, np.array([11]), np.array([[3, 7]])) == 2 * total
    step = {"prompts": 2, "slots": 3, "cache": Floats("float32")}
    less = flops.decode_bytes(dataclasses.replace(HYBRID, mixer=None, mixer_layers=(), num_layers=2), 11, 5, **step)
    extra = 2 * (flops.all_layers_weights(HYBRID) - 2 * (mlp + attends)) + 2 * 2 * 3 * flops.state_bytes(HYBRID)
    assert flops.decode_bytes(HYBRID, 11, 5, **step) == less + extra


def test_a_family_without_delta_nets_has_one_kind():
    assert BASE.period == (Kind(),) and BASE.attending == (0, 1)
