"""The group-native forward against a plain forward of one sequence at a time."""

import dataclasses
import re

import flat_batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flat_batches import Flat
from flax import nnx
from plain_decoder import BASE, FAMILIES, plain_batch, ragged_batch, random_decoder, there

from grpojax.models import Compute, layers, score
from grpojax.models import decoder as dec
from grpojax.models.logprobs import token_scores

LARGE = ("glm4_moe", "qwen3_5")  # programs that compile for a minute; the others show all ways
ALIKE = "qwen3 qwen2_untied llama smollm3 granite olmo2 gemma3_text ministral3 glm4 hunyuan".split()  # in the gradient


@pytest.mark.in_ci(*there("windows", "gemma2", "gpt_oss"))
@pytest.mark.parametrize(
    "family",
    [
        *there("qwen2", "qwen3_5"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in there("windows", "gemma2", "gpt_oss", "glm4_moe", *ALIKE)
        ),
    ],
)
def test_value_and_gradient_equal_the_plain_forward(family):
    graph, params = random_decoder(FAMILIES[family])
    batch = ragged_batch(np.random.default_rng(3), g=6)  # whose completions share rows
    weight = np.random.default_rng(2).standard_normal(batch.tokens.shape).astype(np.float32)

    def plain(params):
        logps, entropies = plain_batch(graph, params, batch, temperature=0.7)
        return (weight * (logps + 0.3 * entropies)).sum(), logps

    (want, logps), want_grad = jax.jit(jax.value_and_grad(plain, has_aux=True))(params)
    ways = [(False, "layer", None), (True, "matmuls", "gpu"), (False, "none", None)]
    for gather, remat, platform in ways[:1] if family in LARGE else ways:
        packed, layout = flat_batches.pack(batch, gather=gather)
        assert (packed.gather is not None) == gather
        rows = jax.tree.map(lambda x: x[0], packed)
        used, w = layout.index[0] >= 0, layout.pack(weight)[0]
        compute = Compute(remat=remat, vocab_chunk=13, platform=platform)  # of a GPU, layers one by one

        def ours(params, rows=rows, used=used, w=w, compute=compute):
            scores = score(graph, params, rows, compute, temperature=0.7, entropy=True)
            return jnp.where(used, w * (scores.logps + 0.3 * scores.entropy), 0.0).sum(), scores.logps

        (value, got), grad = jax.jit(jax.value_and_grad(ours, has_aux=True))(params)
        np.testing.assert_allclose(layout.unpack(np.asarray(got)[None]), logps, atol=1e-5)
        np.testing.assert_allclose(value, want, rtol=1e-5)
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grad), jax.tree.leaves(want_grad), strict=True):
            scale = float(np.abs(b).max())
            np.testing.assert_allclose(a, b, atol=1e-5 * scale, rtol=1e-4, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(("remat", "times"), [("layer", 2), ("matmuls", 1), ("none", 1)])
def test_a_layer_that_keeps_its_products_keeps_what_cudnn_gave(remat, times, monkeypatch):
    """The kernel is found by the name that jax gives it. jax only looks the library up; nothing runs here."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    graph, params = dec.abstract(dataclasses.replace(BASE, head_dim=64))
    rows = jax.tree.map(lambda x: x[0], flat_batches.pack(ragged_batch(np.random.default_rng(3)))[0])
    compute = Compute(dtype="bfloat16", remat=remat, platform="gpu")
    traced = jax.jit(jax.grad(lambda params: score(graph, params, rows, compute).logps.sum())).trace(params)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    forward, backward = (text.count(f"__cudnn$fmhaScaleBiasSoftmax{end}(") for end in ("", "Backward"))
    assert forward == times * backward > 0


def test_layers_one_by_one_are_read_at_numbers_that_the_compiler_does_not_know():
    """At known numbers a GPU's compiler writes kernels of their own for each layer."""
    graph, params = dec.abstract(BASE)
    rows = jax.tree.map(lambda x: x[0], flat_batches.pack(ragged_batch(np.random.default_rng(3)))[0])
    traced = jax.jit(lambda params: score(graph, params, rows, Compute(platform="gpu")).logps).trace(params)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    hidden = re.findall(r"(%\d+):\d+ = stablehlo.optimization_barrier", text)
    read = re.findall(r"call @dynamic_index_in_dim\w*\(%arg\d+, (%\d+)#\d+\)", text)
    assert len(read) == BASE.num_layers * len(jax.tree.leaves(params["layers"]))
    assert set(read) == set(hidden)


@pytest.mark.slow
def test_padding_changes_nothing_even_when_pad_is_a_real_token():
    """A mask read off `ids != pad` would drop real tokens that equal the pad id."""
    graph, params = random_decoder(BASE)
    batch = ragged_batch(np.random.default_rng(3), pad=0)
    reference, scored = None, jax.jit(lambda params, rows: score(graph, params, rows, Compute()).logps)
    for pad, length, most in [(0, 7, 11), (17, 12, 16), (0, 9, 13)]:
        wide = ragged_batch(np.random.default_rng(3), pad=0)

        def grow(x, n, pad=pad):
            return np.concatenate([x, np.full((*x.shape[:-1], n - x.shape[-1]), pad, x.dtype)], -1)

        tokens, prompts = grow(wide.tokens, most), grow(wide.prompts.tokens, length)
        tokens[np.arange(most) >= wide.lengths[..., None]] = pad
        prompts[np.arange(length) >= wide.prompts.lengths[:, None]] = pad
        zeros = np.zeros(tokens.shape, np.float32)
        wide = Flat(
            prompts=dataclasses.replace(wide.prompts, tokens=prompts),
            tokens=tokens,
            lengths=wide.lengths,
            arrays=dict(advantages=zeros, weights=zeros),
        )
        packed, layout = flat_batches.pack(wide)
        got = layout.unpack(np.asarray(scored(params, jax.tree.map(lambda x: x[0], packed)))[None])
        got = np.where(np.arange(most) < wide.lengths[..., None], got, 0.0)[:, :, : batch.tokens.shape[2]]
        if reference is None:
            reference = got
        np.testing.assert_allclose(got, reference, atol=5e-6)  # more padding, other sums


@pytest.mark.parametrize("with_entropy", [False, True, "value"])
@pytest.mark.parametrize("chunk", [0, 1, 5, 64])
def test_chunked_vocabulary_equals_plain(with_entropy, chunk):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((2, 13, 6)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((29, 6)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 29, (2, 13)), jnp.int32)
    a, b = (jnp.asarray(rng.standard_normal((2, 13)), jnp.float32) for _ in range(2))

    def ours(h, w):
        logps, entropy = token_scores(h, w, targets, inverse_temperature=1.3, chunk=chunk, with_entropy=with_entropy)
        assert (entropy is None) == (not with_entropy)
        return (a * logps).sum() + ((b * entropy).sum() if with_entropy else 0.0)

    def plain(h, w):
        logps = jax.nn.log_softmax(1.3 * jnp.einsum("bnd,vd->bnv", h, w), -1)
        out = (a * jnp.take_along_axis(logps, targets[..., None], -1)[..., 0]).sum()
        if not with_entropy:
            return out
        entropy = -(jnp.exp(logps) * logps).sum(-1)
        return out + (b * (jax.lax.stop_gradient(entropy) if with_entropy == "value" else entropy)).sum()

    got, want = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(hidden, weight) for f in (ours, plain))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=3e-5, rtol=1e-4), got, want)


@pytest.mark.slow
def test_bfloat16_compute_is_near_float32():
    graph, params = random_decoder(BASE)
    packed, layout = flat_batches.pack(ragged_batch(np.random.default_rng(1)))
    rows = jax.tree.map(lambda x: x[0], packed)
    used = layout.index[0] >= 0
    full, half = (np.asarray(score(graph, params, rows, Compute(dtype=d)).logps) for d in ("float32", "bfloat16"))
    assert full.dtype == half.dtype == np.float32
    assert 1e-5 < np.abs(full - half)[used].max() < 0.3


@pytest.mark.slow
def test_no_float32_array_of_tokens_by_vocabulary():
    config = dataclasses.replace(BASE, vocab_size=4096)
    graph, params = dec.abstract(config)
    batch = ragged_batch(np.random.default_rng(0), p=8, g=8, most=32, vocab=4096)
    packed, _ = flat_batches.pack(batch)
    rows = jax.tree.map(lambda x: x[0], packed)
    compute = Compute(vocab_chunk=16)
    compiled = jax.jit(jax.grad(lambda p: score(graph, p, rows, compute).logps.sum())).lower(params).compile()
    logits = rows.tokens.size * config.vocab_size * 4
    assert compiled.memory_analysis().temp_size_in_bytes < logits / 4


def test_temperature_zero_has_no_log_probs():
    graph, params = random_decoder(BASE)
    packed, _ = flat_batches.pack(ragged_batch(np.random.default_rng(0)))
    with pytest.raises(ValueError, match="temperature 0"):
        score(graph, params, jax.tree.map(lambda x: x[0], packed), Compute(), temperature=0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_a_lean_forward_gives_the_same_states(dtype, monkeypatch):
    """Weights cast layer by layer, and MLPs of five tokens at a time with a rest."""
    monkeypatch.setattr(layers, "_MLP_TOKENS", 5)
    graph, params = random_decoder(FAMILIES["qwen2"])
    rows = jax.tree.map(lambda x: x[0], flat_batches.pack(ragged_batch(np.random.default_rng(3)))[0])
    whole, lean = (
        jax.jit(
            lambda params, lean=lean: dec.token_states(nnx.merge(graph, params), rows, Compute(dtype=dtype, lean=lean))
        )
        for lean in (False, True)
    )
    assert "optimization_barrier" in str(jax.make_jaxpr(lean)(params)) and "optimization_barrier" not in str(
        jax.make_jaxpr(whole)(params)
    )
    np.testing.assert_allclose(
        *(np.asarray(f(params), np.float32) for f in (lean, whole)), rtol=0, atol=1e-5 if dtype == "float32" else 0.1
    )


def test_a_decoder_without_experts_has_no_choices():
    batch = ragged_batch(np.random.default_rng(3))
    chosen = dict(choices=np.zeros((3, 5, 11, 4), np.uint8), prompt_choices=np.zeros((3, 7, 4), np.uint8))
    packed, _ = flat_batches.pack(dataclasses.replace(batch, **chosen))
    with pytest.raises(ValueError, match="without experts"):
        score(*random_decoder(BASE), jax.tree.map(lambda x: x[0], packed), Compute())
