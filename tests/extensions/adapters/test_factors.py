"""Adapters on a frozen base: what they compute, what they learn, and that nothing dense is learned with them."""

import dataclasses
import re

import flat_batches
import jax
import jax.numpy as jnp
import matrix_forms
import numpy as np
import optax
import pytest
from flat_batches import Flat
from matrix_forms import random
from plain_decoder import BASE, FAMILIES, MIXTURE, learning_batch, random_decoder, some_prompts

from grpojax import losses, sharding
from grpojax.device import ROWS, Real
from grpojax.extensions.adapters import factors as lora
from grpojax.extensions.adapters.adapter_config import LINEAR, AdapterConfig
from grpojax.extensions.adapters.low_rank import LowRank
from grpojax.extensions.int8.eight_bits import Int8Matrix
from grpojax.host.errors import UserError
from grpojax.models import Compute, matrix
from grpojax.models import decoder as dec
from grpojax.models.weight_table import DECODER, shardings
from grpojax.programs import adapter, policy_state, policy_update, state
from grpojax.programs.optimizer import decayed
from grpojax.programs.sampler import sample_groups
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.programs.update import Learner, make_update, update_program

CONFIG = dataclasses.replace(
    BASE, vocab_size=56, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=8, num_kv_heads=4
)
HYBRID = dataclasses.replace(FAMILIES["qwen3_5"], vocab_size=56)
SHARED = dataclasses.replace(FAMILIES["qwen2_moe"], vocab_size=56)
DECODERS = {"dense": CONFIG, "hybrid": HYBRID, "mixture": MIXTURE, "shared expert": SHARED}
LORA = AdapterConfig(rank=3)
KINDS = {
    "lora": LORA,
    "dora": dataclasses.replace(LORA, dora=True),
    "int8": dataclasses.replace(LORA, base="int8"),
    "int8 dora": dataclasses.replace(LORA, base="int8", dora=True),
    "attention": dataclasses.replace(LORA, target=("q_proj", "v_proj"), rslora=True),
}


score = jax.jit(dec.score, static_argnums=(0, 3))  # by itself it would compile each of its operations


def mesh_of(sizes):
    if sizes is None:
        return None
    return sharding.make_mesh(sharding.MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]))


def packed_on(mesh, seed=0):
    packed, _ = flat_batches.pack(learning_batch(seed), shards=sharding.shards(mesh))
    return Real(mesh).put(packed, ROWS)


def rows():
    return jax.tree.map(lambda x: x[0], packed_on(None).bare)


def base_of(config, mesh=None, decoder=CONFIG):
    graph, params = random_decoder(decoder)
    if mesh is not None:
        params = jax.device_put(params, shardings(params, mesh))
    return graph, lora.on_base(params, config)


def random_factors(config, base, mesh=None, decoder=CONFIG):
    """Factors as they are after some training: none is 0, and norms are no longer the base's."""
    first = lora.fresh(config, decoder, base, 0, mesh)
    rng = np.random.default_rng(1)
    return {name: x + jnp.asarray(0.05 * rng.standard_normal(x.shape).astype(np.float32)) for name, x in first.items()}


def loss_of(graph, compute=None):
    return policy_update.policy_objective(graph, losses.Objective(), compute or Compute())


def dense(path, x):
    """What an `Adapted` stands for, made anew in numpy, with the norms of DoRA as constants."""
    if not isinstance(x, lora.Adapted):
        return x
    f = x.factors
    w = x.base if isinstance(x.base, jax.Array) else x.base.values.astype(jnp.float32) * x.base.scale[..., None, :]
    w = w + x.scale * jnp.einsum("...ir,...ro->...io", f.a, f.b)
    if f.magnitude is None:
        return w
    norms = np.linalg.norm(np.asarray(jax.lax.stop_gradient(w), np.float64), axis=1).astype(np.float32)
    return w * (f.magnitude / norms)[:, None]


@pytest.mark.parametrize(
    "of", [pytest.param(of, marks=[] if of in ("dense", "hybrid") else pytest.mark.exhaustive) for of in DECODERS]
)
@pytest.mark.slow
def test_a_start_leaves_the_base_bitwise_as_it_is(of):
    decoder = DECODERS[of]
    graph, base = base_of(LORA, decoder=decoder)
    want = score(graph, random_decoder(decoder)[1], rows(), Compute()).logps
    factors = lora.fresh(LORA, decoder, base, 0, None)
    assert all(jnp.abs(x).max() > 0 for name, x in factors.items() if name.endswith("_a"))
    for params in (base, adapter.joined(base, factors)):
        np.testing.assert_array_equal(score(graph, params, rows(), Compute()).logps, want)


@pytest.mark.parametrize(
    ("of", "kind"),
    [
        ("dense", "int8 dora"),  # all that the next three are
        *(pytest.param("dense", kind, marks=pytest.mark.exhaustive) for kind in ("lora", "dora", "int8")),
        ("dense", "attention"),
        pytest.param("hybrid", "lora", marks=pytest.mark.exhaustive),
        *(
            pytest.param(*given, marks=pytest.mark.slow)
            for given in (("hybrid", "int8 dora"), ("mixture", "int8"), ("shared expert", "lora"))
        ),
    ],
)
@pytest.mark.slow
def test_factors_compute_what_the_dense_weight_does_merged_or_not(of, kind):
    config, decoder = KINDS[kind], DECODERS[of]
    graph, base = base_of(config, decoder=decoder)
    factors = random_factors(config, base, decoder=decoder)
    params = adapter.joined(base, factors)
    jax.tree.map(np.testing.assert_array_equal, lora.factors_of(params), factors)
    got = score(graph, params, rows(), Compute()).logps
    reshard = state.make_reshard(decoder, Compute(), adapted=True)
    for merged in (reshard(params), state.merged(params, "float32")):
        np.testing.assert_allclose(score(graph, merged, rows(), Compute()).logps, got, atol=2e-5)
    if kind != "attention":  # there the other layers have no factors
        want = jax.tree_util.tree_map_with_path(dense, params, is_leaf=matrix.is_matrix)
        np.testing.assert_allclose(score(graph, want, rows(), Compute()).logps, got, atol=2e-5)
    assert jnp.abs(got - score(graph, base, rows(), Compute()).logps).max() > 1e-2


@pytest.mark.parametrize(
    ("of", "dora"),
    [
        ("dense", False),
        pytest.param("dense", True, marks=pytest.mark.exhaustive),
        pytest.param("hybrid", True, marks=pytest.mark.slow),
        pytest.param("shared expert", False, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.slow
def test_the_gradient_of_factors_is_that_of_the_dense_weight(of, dora):
    config, decoder = dataclasses.replace(LORA, dora=dora), DECODERS[of]
    graph, base = base_of(config, decoder=decoder)
    factors, loss = random_factors(config, base, decoder=decoder), loss_of(graph)
    micro = jax.tree.map(lambda x: x[0], packed_on(None))
    learner = policy_state.on_base(Learner(loss=loss, optimizer=optax.identity()))
    got = jax.jit(jax.grad(learner.loss, has_aux=True))(factors, {"base": base}, micro)[0]
    params = adapter.joined(base, factors)
    whole = jax.tree_util.tree_map_with_path(dense, params, is_leaf=matrix.is_matrix)
    grads = jax.jit(jax.grad(loss, has_aux=True))(whole, None, micro)[0]["layers"]
    of_a = dict.fromkeys(factors, 0.0)
    for name in config.weights(decoder):
        one = name if f"{name}_a" in factors else "delta_qkv"  # queries, keys and values of a delta net have one A
        a, b, g, w = factors[f"{one}_a"], factors[f"{name}_b"], grads[name][...], whole["layers"][name][...]
        if dora:
            m = factors[f"{name}_magnitude"]
            norm_gradient = (g * w / m[:, None]).sum(1)
            np.testing.assert_allclose(got[f"{name}_magnitude"], norm_gradient, atol=1e-5, rtol=1e-3, err_msg=name)
            plain = base["layers"][name].get_value().base + config.scale * a @ b
            g = g * (m / jnp.linalg.norm(plain, axis=1))[:, None]
        np.testing.assert_allclose(got[f"{name}_b"], config.scale * a.mT @ g, atol=1e-5, rtol=1e-3, err_msg=name)
        of_a[f"{one}_a"] += config.scale * g @ b.mT
    for name in (name for name in factors if name.endswith("_a")):
        np.testing.assert_allclose(got[name], of_a[name], atol=1e-5, rtol=1e-3, err_msg=name)


WITH_16_ROWS = {
    "dense": dataclasses.replace(CONFIG, num_heads=4, head_dim=4, intermediate_size=16),
    "hybrid": dataclasses.replace(
        HYBRID, hidden_size=16, head_dim=4, rotary_dim=2, intermediate_size=16,
        mixer=dataclasses.replace(HYBRID.mixer, value_heads=2, value_size=8),
    ),
    "mixture": dataclasses.replace(
        MIXTURE, hidden_size=16, head_dim=4, mlp=dataclasses.replace(MIXTURE.mlp, size=16)
    ),
}  # fmt: skip


@pytest.mark.in_ci("dense")
@pytest.mark.slow
@pytest.mark.parametrize("of", WITH_16_ROWS)
def test_full_rank_and_orthogonal_a_take_the_step_of_the_dense_weight(of):
    """``ΔW = s A ΔB = -η s² A Aᵀ G``, which is ``-η s² G``."""
    decoder = WITH_16_ROWS[of]
    config = dataclasses.replace(LORA, rank=16, alpha=16.0 * 3)
    graph, base = base_of(config, decoder=decoder)
    factors = lora.fresh(config, decoder, base, 0, None)
    q = jnp.linalg.qr(jax.random.normal(jax.random.key(3), (16, 16)))[0]
    factors = {name: jnp.broadcast_to(q, x.shape) if name.endswith("_a") else x for name, x in factors.items()}
    packed, rate = packed_on(None), 0.3
    learner = policy_state.on_base(Learner(loss=loss_of(graph), optimizer=optax.sgd(rate / config.scale**2)))
    update = jax.jit(make_update(learner.loss, learner.optimizer))
    after, _ = update(state.init_state(factors, learner.optimizer, table=lora.FACTORS), {"base": base}, packed)
    merged = state.merged(adapter.joined(base, after.params), "float32")

    def of_layers(path, g):  # what has factors
        name = path[-2].key if hasattr(path[-2], "key") else path[-1].key
        return g if name in LINEAR else jnp.zeros_like(g)

    params = random_decoder(decoder)[1]
    micro = jax.tree.map(lambda x: x[0], packed)
    grads = jax.jit(jax.grad(loss_of(graph), has_aux=True))(params, None, micro)[0]
    grads = jax.tree_util.tree_map_with_path(of_layers, grads)
    want = jax.tree.map(lambda w, g: w - rate * g, params, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), merged, want)
    assert max(jnp.abs(g).max() for g in jax.tree.leaves(grads)) > 1e-2


@pytest.mark.slow
def test_an_update_makes_no_gradient_of_a_dense_weight():
    """Their shapes are those of no other product in the program."""
    decoder = dataclasses.replace(CONFIG, hidden_size=34, head_dim=6, intermediate_size=46, vocab_size=1024)
    graph, base = base_of(LORA, decoder=decoder)
    sizes = [x.shape[-2:] for x in jax.tree.leaves(random_decoder(decoder)[1]) if x.ndim > 1 and x.shape[-2] > 2]

    def made(loss, params, frozen, table):
        update = jax.jit(make_update(loss, optax.sgd(0.1)))
        given = state.init_state(params, optax.sgd(0.1), table=table)
        text = update.lower(given, frozen, packed_on(None)).compile().as_text()
        return {tuple(map(int, x.split(","))) for x in re.findall(r"= f32\[([\d,]+)\]\S* (?:dot|custom-call)\(", text)}

    learner = policy_state.on_base(Learner(loss=loss_of(graph), optimizer=optax.sgd(0.1)))
    factors = lora.fresh(LORA, decoder, base, 0, None)
    either = {*sizes, *(s[::-1] for s in sizes)}
    assert made(loss_of(graph), random_decoder(decoder)[1], None, DECODER) & either
    assert not made(learner.loss, factors, {"base": base}, lora.FACTORS) & either


def learned(config, sizes, updates=2, decoder=CONFIG):
    mesh = mesh_of(sizes)
    compute = Compute(mesh=mesh)
    graph, base = base_of(config, mesh, decoder)
    factors = lora.fresh(config, decoder, base, 5, mesh)
    optimizer = optax.adam(0.02)
    learner = policy_state.on_base(Learner(loss=loss_of(graph, compute), optimizer=optimizer))
    update = update_program("update", make_update(learner.loss, optimizer), compute)
    made, metrics = state.init_state(factors, optimizer, Real(mesh), lora.FACTORS), {}
    for i in range(updates):
        made, metrics = update(made, {"base": base}, packed_on(mesh, i))
    reshard = state.make_reshard(decoder, compute, adapted=True)
    return made.params, metrics, reshard(adapter.joined(base, made.params))


@pytest.mark.parametrize(
    ("of", "kind", "sizes"),
    [
        ("dense", "lora", None),
        *(
            pytest.param("dense", kind, sizes, marks=pytest.mark.exhaustive)
            for kind, sizes in (("lora", (2, 1, 4)), ("int8", (2, 1, 4)), ("int8", None))
        ),
        pytest.param("hybrid", "int8", None, marks=pytest.mark.exhaustive),
        pytest.param("hybrid", "lora", (4, 1, 2), marks=pytest.mark.slow),
        pytest.param("mixture", "int8", (4, 1, 2), marks=pytest.mark.slow),
    ],
)
def test_base_and_factors_draw_what_an_update_scores(of, kind, sizes):
    mesh, decoder = mesh_of(sizes), DECODERS[of]
    graph, base = base_of(KINDS[kind], mesh, decoder)
    factors, compute = random_factors(KINDS[kind], base, mesh, decoder), Compute(mesh=mesh)
    cast = lora.make_cast(compute)(adapter.joined(base, factors))
    config = SamplerConfig(group=3, max_tokens=9, decode_slots=2)
    prompts = some_prompts(8)
    out = jax.tree.map(
        np.asarray,
        sample_groups(
            graph, adapter.joined(base, cast), prompts, jax.random.key(0), config, eos_ids=(0, 1), compute=compute
        ),
    )
    zeros = np.zeros(out.logps.shape, np.float32)
    arrays = dict(advantages=zeros, weights=zeros)
    batch = Flat(prompts=prompts, tokens=out.tokens, lengths=out.lengths, arrays=arrays)
    packed, layout = flat_batches.pack(batch)
    whole = adapter.joined(*(jax.device_get(x) for x in (base, factors)))
    logps = score(graph, whole, jax.tree.map(lambda x: x[0], packed), Compute()).logps
    drawn = np.arange(9) < out.lengths[..., None]
    assert np.abs(layout.unpack(np.asarray(logps)[None]) - out.logps)[drawn].max() < 1e-4


def test_axes_that_adapters_cannot_have_are_refused():
    """A base that is cut over fsdp must be merged, and experts on shards of their own cannot be frozen."""
    with pytest.raises(UserError, match="merged=false with mesh.fsdp=2 .*set mesh.fsdp=1"):
        LowRank(AdapterConfig(rank=2, merged=False)).check_axes(fsdp=2, expert=1)
    with pytest.raises(UserError, match="mesh.expert=2.*set mesh.expert=1"):
        LowRank(AdapterConfig(rank=2)).check_axes(fsdp=2, expert=2)
    LowRank(AdapterConfig(rank=2)).check_axes(fsdp=2, expert=1)


MESHES = [(1, 8, 1), (2, 4, 1), (8, 1, 1), (2, 2, 2), (1, 1, 8)]


@pytest.mark.in_ci("dense-int8 dora-sizes8", "hybrid-lora-sizes11")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "kind", "sizes"),
    [
        *(("dense", kind, sizes) for kind in ("lora", "int8 dora") for sizes in MESHES),
        *(("hybrid", kind, sizes) for kind in ("lora", "int8 dora") for sizes in ((1, 8, 1), (2, 2, 2))),
        *(("shared expert", kind, sizes) for kind in ("lora", "int8") for sizes in ((1, 8, 1), (2, 2, 2))),
    ],
)
def test_adapters_learn_alike_on_any_mesh(of, kind, sizes):
    want, got = (learned(KINDS[kind], s, decoder=DECODERS[of]) for s in (None, sizes))
    for name, x in got[0].items():
        assert x.sharding.is_equivalent_to(sharding.named(mesh_of(sizes), lora.FACTORS[name].axes), x.ndim)
        np.testing.assert_allclose(x, want[0][name], atol=2e-5, err_msg=name)
    assert float(got[1]["grad_norm"]) == pytest.approx(float(want[1]["grad_norm"]), rel=1e-4)
    if sizes[2] < 8:  # there heads of keys and values are repeated
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got[2], want[2])


@pytest.mark.slow
def test_attention_of_a_mixture_learns_and_its_experts_stay():
    config = KINDS["attention"]
    graph, base = base_of(config, decoder=MIXTURE)
    factors = random_factors(config, base, decoder=MIXTURE)
    assert {name[0] for name in factors} == {"q", "v"}
    params = adapter.joined(base, factors)
    got = score(graph, params, rows(), Compute()).logps
    reshard = state.make_reshard(MIXTURE, Compute(), adapted=True)
    for merged in (reshard(params), state.merged(params, "float32")):
        np.testing.assert_allclose(score(graph, merged, rows(), Compute()).logps, got, atol=2e-5)
    want, cut = (learned(config, sizes, decoder=MIXTURE) for sizes in (None, (2, 2, 2)))
    for name, x in cut[0].items():
        assert name.endswith("_a") or jnp.abs(x).max() > 1e-3
        np.testing.assert_allclose(x, want[0][name], atol=2e-5, err_msg=name)


@pytest.mark.in_ci("int8")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "int8"])
def test_grouped_products_of_experts_with_factors_equal_those_of_all_tokens(kind):
    graph, base = base_of(KINDS[kind], decoder=MIXTURE)
    factors = random_factors(KINDS[kind], base, decoder=MIXTURE)
    micro = jax.tree.map(lambda x: x[0], packed_on(None))

    def run(experts):
        loss = loss_of(graph, Compute(experts=experts))
        learner = policy_state.on_base(Learner(loss=loss, optimizer=optax.identity()))
        return jax.jit(jax.value_and_grad(learner.loss, has_aux=True))(factors, {"base": base}, micro)

    (got, _), grads = run("grouped")
    (want, _), of_all = run("every")
    assert float(got) == pytest.approx(float(want), rel=1e-5)
    for name, g in of_all.items():
        assert jnp.abs(g).max() > 1e-4
        np.testing.assert_allclose(grads[name], g, atol=1e-5 * float(jnp.abs(g).max()) + 1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("config", "decoder", "said"),
    [
        (KINDS["dora"], MIXTURE, "dora=true: experts .*\nset it to false, or .*=.q_proj,k_proj,v_proj,o_proj.$"),
        (dataclasses.replace(LORA, target=("q_proj", "out_proj")), CONFIG, "out_proj of a qwen2 .*\nset .*q_proj,"),
    ],
)
def test_layers_that_cannot_have_factors_are_refused(config, decoder, said):
    with pytest.raises(UserError, match=said):
        lora.abstract(config, decoder)


@pytest.mark.slow
def test_a_mesh_starts_with_the_same_factors():
    config = KINDS["dora"]
    made = [lora.fresh(config, CONFIG, base_of(config, mesh_of(s))[1], 7, mesh_of(s)) for s in (None, (2, 2, 2))]
    for name, x in made[0].items():
        np.testing.assert_allclose(made[1][name], x, rtol=1e-6 * name.endswith("magnitude"))
    other = lora.fresh(config, CONFIG, base_of(config)[1], 8, None)
    assert jnp.abs(other["q_a"] - made[0]["q_a"]).max() > 0.01
    one = lora.fresh(KINDS["attention"], CONFIG, base_of(config)[1], 7, None)
    np.testing.assert_array_equal(one["v_a"], made[0]["v_a"])  # whatever else has factors
    assert jnp.abs(made[0]["q_a"]).max() <= 16**-0.5 and jnp.abs(made[0]["down_a"]).max() <= 24**-0.5


def test_matrices_decay_and_norms_do_not():
    made = decayed(lora.abstract(KINDS["dora"], CONFIG), lora.FACTORS)
    assert {name.rpartition("_")[2] for name, yes in made.items() if yes} == {"a", "b"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rank": 0}, "rank=0"),
        ({"alpha": 0.0}, "alpha=0.0"),
        ({"target": ()}, "target=.*at least one"),
        ({"target": ("q_proj", "q_proj")}, "target=.*twice"),
    ],
)
def test_what_makes_no_adapter_is_refused(given, said):
    with pytest.raises(UserError, match=said):
        AdapterConfig(**{"rank": 4, **given})


FORMS = {
    "frozen": lambda w: lora.Adapted(base=w, factors=None, scale=2.0),
    "lora": lambda w: lora.Adapted(base=w, factors=factors_like(w), scale=0.5),
    "lora on int8": lambda w: lora.Adapted(base=Int8Matrix.of(w, -2), factors=factors_like(w), scale=0.5),
}


def factors_like(w):
    *lead, rows, columns = w.shape
    return lora.Factors(random(*lead, rows, 3, seed=1), random(*lead, 3, columns, seed=2))


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_with_factors_is_a_form_of_a_weight(form):
    matrix_forms.check_product(FORMS[form](random(12, 7)))
    matrix_forms.check_stacked(FORMS[form](random(4, 12, 7)))
    matrix_forms.check_map(FORMS[form](random(4, 12, 7)))
