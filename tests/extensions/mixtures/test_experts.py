"""Mixtures of experts: both ways to run them against a loop, on meshes, in the sampler, and beside transformers."""

import dataclasses

import flat_batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_hf
from flat_batches import Flat
from flax import nnx
from plain_decoder import FAMILIES, MIXTURE, plain_mixture, ragged_batch, random_decoder, score, some_prompts
from rollout_weights import for_rollouts

from grpojax import sharding
from grpojax.device import Real
from grpojax.extensions.int8.eight_bits import Int8Matrix
from grpojax.extensions.mixtures import experts
from grpojax.extensions.mixtures.experts import Experts
from grpojax.host.errors import UserError
from grpojax.models import Compute, decoder, hf
from grpojax.models.layers import Layer
from grpojax.models.weight_table import shardings
from grpojax.programs import blocks, policy_update, state
from grpojax.programs.optimizer import make_optimizer
from grpojax.programs.optimizer_config import OptimizerConfig
from grpojax.programs.sampler import no_samples, sample_groups
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.records.checkpoint import Checkpoints
from grpojax.types import Rows

SHARED = FAMILIES["qwen2_moe"]
OSS, GLM = (dataclasses.replace(FAMILIES[name], vocab_size=56) for name in ("gpt_oss", "glm4_moe"))
MESH = sharding.MeshConfig(data=2, fsdp=2, tensor=2)
EIGHT = dataclasses.replace(MIXTURE, mlp=Experts(count=8, chosen=2, size=14))
ON_SHARDS = sharding.MeshConfig(fsdp=2, expert=2, tensor=2)  # experts on shards of their own


def some_weights(count=5, hidden=6, size=7, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"router": (hidden, count), "expert_gate": (count, hidden, size), "expert_up": (count, hidden, size),
              "expert_down": (count, size, hidden)}  # fmt: skip
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("tokens", "renormalised"),
    [
        (1, True),
        (64, False),
        *(pytest.param(*given, marks=pytest.mark.exhaustive) for given in ((1, False), (11, False), (64, True))),
    ],
)
def test_values_and_gradients_equal_a_loop_over_experts(tokens, renormalised):
    """With few tokens some expert has none."""
    config = dataclasses.replace(MIXTURE, mlp=Experts(count=5, chosen=3, size=7, renormalised=renormalised))
    h = jnp.asarray(np.random.default_rng(1).standard_normal((tokens, 6)), jnp.float32)
    up = jnp.asarray(np.random.default_rng(2).standard_normal((tokens, 6)), jnp.float32)
    weights = some_weights()

    def ours(apply):
        def run(h, w):
            routing = experts.route(h, experts.Router(w["router"]), config.mlp)
            return apply(h, routing, w["expert_gate"], w["expert_up"], w["expert_down"])

        return run

    def out(run):
        return jax.jit(jax.value_and_grad(lambda h, w: (up * run(h, w)).sum(), argnums=(0, 1)))(h, weights)

    want = out(lambda h, w: plain_mixture(h, w, config))
    for apply in (experts.every, experts.grouped):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-4), out(ours(apply)), want)


@pytest.mark.slow
def test_experts_in_eight_bits_are_the_rounded_experts():
    weights = some_weights()
    h = jnp.asarray(np.random.default_rng(1).standard_normal((11, 6)), jnp.float32)
    routing = experts.route(h, experts.Router(weights["router"]), Experts(count=5, chosen=2, size=7))
    eight = [Int8Matrix.of(weights[name], 1) for name in ("expert_gate", "expert_up", "expert_down")]
    whole = [w.values.astype(jnp.float32) * w.scale[:, None] for w in eight]
    for apply in (experts.every, experts.grouped):
        run = jax.jit(apply)
        np.testing.assert_allclose(run(h, routing, *eight), run(h, routing, *whole), rtol=1e-5, atol=1e-5)


def test_more_experts_than_there_are_cannot_be_chosen():
    with pytest.raises(UserError, match="num_experts_per_tok 3.*num_experts 2"):
        Experts(count=2, chosen=3, size=7)


@pytest.mark.slow
def test_in_sixteen_bits_the_router_stays_in_float32():
    """For the rollout, in eight bits too, and in a reference's copy."""
    _, params = random_decoder(SHARED)
    half = Compute(dtype="bfloat16")
    for made in (
        state.make_reshard(SHARED, half)(params),
        state.make_reshard(SHARED, half, "int8")(params),
        state.make_frozen_copy(half)(params),
    ):
        for name in ("router", "shared_router"):
            np.testing.assert_array_equal(made["layers"][name][...], params["layers"][name][...])
        norm = made["layers"]["mlp_norm"][...]
        assert norm.dtype == jnp.bfloat16
    of_layer = jax.tree.map(lambda x: x[0], nnx.to_pure_dict(params)["layers"])
    layer = Layer(SHARED.kinds[0], of_layer, SHARED, half)
    assert layer.w["router"].dtype == jnp.float32 and layer.w["expert_up"].dtype == jnp.bfloat16


def scored(config, compute, rows, weight):
    graph, params = random_decoder(config)
    if compute.mesh is not None:
        params = jax.device_put(params, shardings(params, compute.mesh))

    def loss(params):
        scores = score(graph, params, rows, compute)
        return (weight * scores.logps).sum(), scores.logps

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


@pytest.mark.in_ci("shared", "gpt-oss", "glm4-moe")
@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [MIXTURE, dataclasses.replace(SHARED, vocab_size=56), OSS, GLM],
    ids=["plain", "shared", "gpt-oss", "glm4-moe"],
)
def test_eight_devices_equal_one_in_either_form(config):
    packed, layout = flat_batches.pack(ragged_batch(np.random.default_rng(3), p=8), shards=4)
    rows = jax.tree.map(lambda x: x[0], packed)
    weight = np.random.default_rng(2).standard_normal(rows.tokens.shape).astype(np.float32) * (layout.index[0] >= 0)
    (_, want), want_grad = scored(config, Compute(), rows, weight)
    mesh = sharding.make_mesh(MESH)
    (_, got), grad = scored(config, Compute(mesh=mesh, experts="grouped"), rows, weight)
    used = layout.index[0] >= 0
    np.testing.assert_allclose(np.asarray(got)[used], np.asarray(want)[used], atol=2e-5)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grad), jax.tree.leaves(want_grad), strict=True):
        scale = float(np.abs(b).max())
        np.testing.assert_allclose(a, b, atol=2e-5 * scale, rtol=1e-4, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
def test_a_checkpoint_of_one_mesh_opens_on_another(tmp_path):
    _, params = random_decoder(EIGHT)
    meshes = [sharding.make_mesh(m) for m in (ON_SHARDS, MESH, sharding.MeshConfig(fsdp=1, expert=8))]
    tx, saved = make_optimizer(OptimizerConfig(), 10), []
    for n, mesh in enumerate(meshes):
        params = jax.device_put(params, shardings(params, mesh))
        kept = state.init_state(params, tx, Real(mesh))
        checkpoints = Checkpoints(tmp_path / str(n))
        checkpoints.save(1, {"policy": kept}, {"step": 1})
        checkpoints.wait()
        other = meshes[n - 1]
        want = state.abstract_state({"policy": state.decoder_network(EIGHT, tx, other)[1]}, other)
        got, _ = checkpoints.restore(want)
        saved.append(got["policy"].params)
        cut = got["policy"].params["layers"]["expert_up"].get_value().sharding
        assert cut.is_equivalent_to(want["policy"].params["layers"]["expert_up"].get_value().sharding, 4)
    for got in saved:
        jax.tree.map(np.testing.assert_array_equal, got, saved[0])


def test_a_mesh_that_does_not_share_out_experts_evenly_is_refused():
    with pytest.raises(UserError, match=r"mesh.expert=2.*\n.*mesh.expert to one of: 1, 5$"):
        state.decoder_network(MIXTURE, None, sharding.make_mesh(sharding.MeshConfig(expert=2)))


def replayed(config, batch, choices, of_prompts, **how):
    batch = dataclasses.replace(batch, choices=choices, prompt_choices=of_prompts)
    packed, layout = flat_batches.pack(batch, **how)
    return jax.tree.map(lambda x: x[0], packed), layout


def own_choices(config, batch):
    """The trainer's own choices for each token, ``[P, G, T, C]`` and ``[P, L, C]``."""
    (p, g, most), length = batch.tokens.shape, batch.prompts.tokens.shape[1]
    model = nnx.merge(*random_decoder(config))

    @jax.jit
    def chosen(ids, size):
        return decoder.run_prompts(model, ids[None, None], size[None, None], Compute(), config.mlp.choices)[1]

    width = len(config.mlp_layers) * config.mlp.chosen
    choices, of_prompts = np.zeros((p, g, most, width), np.uint8), np.zeros((p, length, width), np.uint8)
    for i in range(p):
        n = int(batch.prompts.lengths[i])
        for j in range(g):
            m = int(batch.lengths[i, j])
            ids = np.zeros(length + most, np.int32)
            ids[: n + m] = *batch.prompts.tokens[i, :n], *batch.tokens[i, j, :m]
            by_token = np.moveaxis(np.asarray(chosen(ids, np.int32(n + m)))[:, 0, 0], 0, 1).reshape(-1, width)
            of_prompts[i, :n], choices[i, j, :m] = by_token[:n], by_token[n : n + m]
    return choices, of_prompts


@pytest.mark.in_ci("first layers without")
@pytest.mark.parametrize(
    "config",
    [pytest.param(MIXTURE, marks=pytest.mark.slow), SHARED, pytest.param(GLM, marks=pytest.mark.slow)],
    ids=["renormalised", "plain", "first layers without"],
)
def test_a_replay_of_the_trainers_own_choices_changes_no_bit(config):
    batch = ragged_batch(np.random.default_rng(3), p=4)
    graph, params = random_decoder(config)
    choices, of_prompts = own_choices(config, batch)

    def out(rows):
        def loss(params):
            logps = score(graph, params, rows, Compute()).logps
            return jnp.where(rows.segments > 0, logps, 0.0).sum(), logps

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    rows, _ = replayed(config, batch, choices, of_prompts)
    want = out(dataclasses.replace(rows, choices=None, prompt_choices=None))
    used = rows.segments > 0
    got = out(rows)
    np.testing.assert_array_equal(np.asarray(got[0][1])[used], np.asarray(want[0][1])[used])
    jax.tree.map(np.testing.assert_array_equal, got[1], want[1])


@pytest.mark.slow
def test_each_token_of_a_row_gets_its_own_choices():
    """Other choices change the scores; a batch in another order of samples gives each sample the same scores, in
    blocks that follow a reading of prompts too, and on a mesh."""
    config, rng = EIGHT, np.random.default_rng(3)
    batch = ragged_batch(rng, p=8)
    graph, params = random_decoder(config)
    width = len(config.mlp_layers) * config.mlp.chosen
    choices = rng.permuted(np.tile(np.arange(8), (*batch.tokens.shape, config.num_layers, 1)), axis=-1)
    choices = choices[..., :2].reshape(*batch.tokens.shape, width).astype(np.uint8)
    of_prompts = rng.permuted(np.tile(np.arange(8), (*batch.prompts.tokens.shape, config.num_layers, 1)), axis=-1)
    of_prompts = of_prompts[..., :2].reshape(*batch.prompts.tokens.shape, width).astype(np.uint8)

    def scores(batch, compute=Compute(), placed=params, **how):  # noqa: B008
        packed, layout = how.pop("pack", flat_batches.pack)(batch, **how)
        found = jax.jit(policy_update.make_score(graph, compute))(placed, packed)
        return np.where(np.arange(11) < batch.lengths[..., None], layout.unpack(np.asarray(found.logps)), 0)

    batch = dataclasses.replace(batch, choices=choices, prompt_choices=of_prompts)
    want = scores(batch)
    assert np.abs(want - scores(dataclasses.replace(batch, choices=None, prompt_choices=None))).max() > 0.01
    assert np.abs(want - scores(dataclasses.replace(batch, prompt_choices=np.full_like(of_prompts, 255)))).max() > 0.01
    np.testing.assert_allclose(scores(batch, microbatches=4), want, atol=1e-5)
    short = np.minimum(batch.lengths, 4)
    fewer = dataclasses.replace(batch, lengths=short)
    packed, _ = flat_batches.pack_blocks(fewer, microbatches=2)
    assert blocks.after_reading(packed) > 1
    got = scores(fewer, pack=flat_batches.pack_blocks, microbatches=2)
    np.testing.assert_allclose(got, np.where(np.arange(11) < short[..., None], want, 0), atol=1e-5)
    order = rng.permuted(np.tile(np.arange(5), (8, 1)), axis=1)
    other = {name: np.take_along_axis(getattr(batch, name), order[..., None], 1) for name in ("tokens",)}
    other |= {"lengths": np.take_along_axis(batch.lengths, order, 1)}
    other |= {"choices": np.take_along_axis(choices, order[..., None, None], 1)}
    got = scores(dataclasses.replace(batch, **other))
    np.testing.assert_allclose(got, np.take_along_axis(want, order[..., None], 1), atol=1e-5)
    for mesh in map(sharding.make_mesh, (MESH, ON_SHARDS)):
        on_mesh = jax.device_put(params, shardings(params, mesh))
        got = scores(batch, Compute(mesh=mesh, experts="grouped"), on_mesh, shards=4)
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_too_few_layers_for_any_expert_name_how_many_there_must_be():
    with pytest.raises(UserError, match="^1 layers.*first 1 have no experts.*\n.* at least 2$"):
        dataclasses.replace(GLM, num_layers=1)


def test_a_mesh_that_does_not_cut_experts_evenly_is_refused():
    odd = dataclasses.replace(MIXTURE, mlp=Experts(count=5, chosen=2, size=15))
    with pytest.raises(UserError, match="moe_intermediate_size 15 does not divide"):
        state.decoder_network(odd, None, sharding.make_mesh(MESH))


def drawn(decoder, config, *, compute=Compute()):  # noqa: B008
    out = sample_groups(*decoder, some_prompts(8), jax.random.key(0), config, eos_ids=tuple(range(6)), compute=compute)
    return jax.tree.map(np.asarray, out)


CONFIG = SamplerConfig(group=3, max_tokens=9, decode_slots=2)


def test_partial_samples_do_not_keep_choices():
    config = dataclasses.replace(CONFIG, router_replay=True, decode_slots=0)
    how = {"eos_ids": (), "compute": Compute(), "partial": no_samples(8, 3, 9)}
    with pytest.raises(UserError, match="router_replay=true.*partial.*false"):
        sample_groups(*random_decoder(MIXTURE), some_prompts(8), jax.random.key(0), config, **how)


@pytest.mark.parametrize("mesh", [None, pytest.param(MESH, marks=pytest.mark.slow)], ids=["one device", "mesh"])
def test_the_sampler_keeps_the_choices_that_the_trainer_makes(mesh):
    """In float32 both choose the same. The last token of a sample is never read, and nothing is chosen for it."""
    graph, params = random_decoder(MIXTURE)
    compute = Compute(mesh=None if mesh is None else sharding.make_mesh(mesh))
    placed = params if mesh is None else jax.device_put(params, shardings(params, compute.mesh))
    weights = for_rollouts(placed, MIXTURE, compute)
    out = drawn((graph, weights), dataclasses.replace(CONFIG, router_replay=True), compute=compute)
    zeros = np.zeros(out.logps.shape, np.float32)
    batch = Flat(prompts=some_prompts(8), tokens=out.tokens, lengths=out.lengths,
                       arrays=dict(advantages=zeros, weights=zeros))  # fmt: skip
    choices, of_prompts = own_choices(MIXTURE, batch)
    read = np.arange(9) < out.lengths[..., None] - 1
    assert read.any() and out.choices.dtype == np.uint8 and (out.choices[~read] == 255).all()
    np.testing.assert_array_equal(out.choices[read], choices[read])
    there = np.arange(of_prompts.shape[1]) < batch.prompts.lengths[:, None]
    np.testing.assert_array_equal(out.prompt_choices[:, 0][there], of_prompts[there])


@pytest.mark.parametrize(
    "config", [pytest.param(MIXTURE, marks=pytest.mark.exhaustive), SHARED], ids=["plain", "shared"]
)
def test_log_probs_of_the_sampler_equal_the_trainers(config):
    graph, params = random_decoder(config)
    out = drawn((graph, params), CONFIG)
    zeros = np.zeros(out.logps.shape, np.float32)
    batch = Flat(prompts=some_prompts(8), tokens=out.tokens, lengths=out.lengths,
                       arrays=dict(advantages=zeros, weights=zeros))  # fmt: skip
    packed, layout = flat_batches.pack(batch)
    rows = jax.tree.map(lambda x: x[0], packed)
    logps = layout.unpack(np.asarray(score(graph, params, rows, Compute()).logps)[None])
    assert np.abs(logps - out.logps)[np.arange(9) < out.lengths[..., None]].max() < 1e-4


@pytest.mark.in_ci("mesh", "shards", "shards, every")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "how", "weights"),
    [
        pytest.param(MESH, "grouped", "compute", id="mesh"),
        pytest.param(MESH, "grouped", "int8", id="mesh, int8"),
        pytest.param(ON_SHARDS, "grouped", "int8", id="shards"),
        pytest.param(ON_SHARDS, "every", "int8", id="shards, every"),
    ],
)
def test_draws_do_not_depend_on_the_mesh(mesh, how, weights):
    graph, params = random_decoder(EIGHT)
    want = drawn((graph, for_rollouts(params, EIGHT, Compute(), weights)), CONFIG)
    compute = Compute(mesh=sharding.make_mesh(mesh), experts=how)
    placed = jax.device_put(params, shardings(params, compute.mesh))
    got = drawn((graph, for_rollouts(placed, EIGHT, compute, weights)), CONFIG, compute=compute)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.logps, want.logps, atol=2e-5)


@pytest.mark.in_ci()
@pytest.mark.parametrize(
    "name",
    [*(pytest.param(x, marks=pytest.mark.slow) for x in ("qwen3-moe", "olmoe")), "qwen2-moe", "gpt-oss", "glm4-moe"],
)
def test_greedy_text_equals_transformers(tmp_path, name):
    from with_torch import torch

    theirs = tiny_hf.save(tmp_path, name)
    prompts = dataclasses.replace(some_prompts(4), tokens=some_prompts(4).tokens + 31)
    greedy = SamplerConfig(group=1, max_tokens=13, temperature=0.0)
    ours = nnx.split(hf.load(tmp_path))
    out = sample_groups(*ours, prompts, jax.random.key(0), greedy, eos_ids=(), compute=Compute())
    for p, n in enumerate(prompts.lengths):
        ids = torch.tensor(prompts.tokens[p : p + 1, :n], dtype=torch.long)
        want = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=13, eos_token_id=None
        )
        assert want[0, n:].tolist() == np.asarray(out.tokens)[p, 0].tolist()


@pytest.mark.slow
def test_the_load_of_packed_completions_equals_a_loop_over_them():
    """Two completions and padding in one row, one in another; a row of padding weighs nothing."""
    rng = np.random.default_rng(0)
    segments = np.array([[[1, 1, 1, 2, 2, 0, 0], [3, 3, 3, 3, 3, 3, 3], [0] * 7]], np.int32)
    offsets = np.array([[[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6], [0] * 7]], np.int32)
    zeros = np.zeros((1, 1, 1), np.int32)
    rows = Rows(prompts=zeros, prompt_lengths=zeros[0] + 1, tokens=segments, segments=segments, offsets=offsets,
                token_prompt=segments * 0)  # fmt: skip
    probabilities = rng.dirichlet(np.ones(5), (1, 3, 7)).astype(np.float32)
    chosen = np.argsort(-probabilities, -1)[..., :2].astype(np.int32)
    weights = rng.random((1, 3, 7)).astype(np.float32)
    routing = experts.Routing(jnp.asarray(chosen), jnp.zeros((1, 3, 7, 2)), jnp.asarray(probabilities))
    counts, entropy, balance = np.zeros(5), 0.0, 0.0
    for which in (1, 2, 3):
        at = segments == which
        p, sent = probabilities[at], np.array([[e in picks for e in range(5)] for picks in chosen[at]])
        counts += sent.sum(0)
        entropy -= (p * np.log(p)).sum()
        balance += (weights[at] * 5 * (p * sent.mean(0)).sum(-1)).sum()
    found = experts.load(routing, rows, jnp.asarray(weights))
    np.testing.assert_array_equal(found.counts, counts)
    np.testing.assert_allclose([found.entropy, found.balance], [entropy, balance], rtol=1e-5)
    assert experts.load(routing, rows).balance is None
