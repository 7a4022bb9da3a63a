"""The group-native forward against a plain forward of one sequence at a time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from grpojax import packing
from grpojax.models import Compute, Decoder, DecoderConfig, score
from grpojax.models import decoder as dec
from grpojax.models.config import RopeScaling
from grpojax.models.vocab import token_scores
from grpojax.types import Prompts, TrainBatch

BASE = DecoderConfig(
    family="qwen2", vocab_size=53, hidden_size=24, intermediate_size=40, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=6, rope_theta=1e4, qkv_bias=True,
)  # fmt: skip
FAMILIES = {
    "qwen2": BASE,
    "qwen2_untied": dataclasses.replace(BASE, tie_embeddings=False),
    "qwen3": dataclasses.replace(BASE, family="qwen3", qkv_bias=False, qk_norm=True, head_dim=10),
    "llama": dataclasses.replace(
        BASE, family="llama", qkv_bias=True, out_bias=True, mlp_bias=True, num_kv_heads=1,
        rope_scaling=RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=16),
    ),
}  # fmt: skip


def random_decoder(config, seed=0):
    """Every weight random, biases and norms too, so that none of them can be left out unseen."""
    graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(seed)))
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    leaves = [x + jnp.asarray(0.1 * rng.standard_normal(x.shape), jnp.float32) for x in leaves]
    return graph, jax.tree.unflatten(treedef, leaves)


def ragged_batch(rng, p=3, g=5, length=7, most=11, vocab=53, pad=0):
    prompt_lengths = rng.integers(1, length + 1, p).astype(np.int32)
    lengths = rng.integers(1, most + 1, (p, g)).astype(np.int32)
    tokens = rng.integers(0, vocab, (p, g, most)).astype(np.int32)
    tokens[np.arange(most) >= lengths[..., None]] = pad
    prompts = rng.integers(0, vocab, (p, length)).astype(np.int32)
    prompts[np.arange(length) >= prompt_lengths[:, None]] = pad
    zeros = np.zeros(tokens.shape, np.float32)
    return TrainBatch(
        prompts=Prompts(
            tokens=prompts, lengths=prompt_lengths, uids=np.arange(p, dtype=np.uint32), first_sample=np.zeros(p, np.int32)
        ),
        tokens=tokens, lengths=lengths, advantages=zeros, weights=zeros,
    )  # fmt: skip


def plain_scores(graph, params, sequences, temperature=1.0):
    """The oracle: whole sequences ``[n, N]``, full causal attention, loops over layers and heads; no group, rows or chunks.

    Returns log-prob and entropy of position t + 1 at index t. Right padding cannot reach back through a causal mask.
    """
    model = nnx.merge(graph, params)
    c = model.config
    n = sequences.shape[1]
    x = model.embed[...][sequences]
    freq = []
    for j in range(c.head_dim // 2):
        f = c.rope_theta ** (-2 * j / c.head_dim)
        if (r := c.rope_scaling) is not None:
            turns = r.original_positions * f / (2 * np.pi)
            if turns < r.low_freq_factor:
                f = f / r.factor
            elif turns < r.high_freq_factor:
                share = (turns - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor)
                f = (1 - share) * f / r.factor + share * f
        freq.append(f)
    angle = np.arange(n)[:, None] * np.array(freq)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def norm(x, w):
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + c.norm_eps) * w

    def turn(x):
        a, b = x[..., : c.head_dim // 2], x[..., c.head_dim // 2 :]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    weights = nnx.to_pure_dict(nnx.state(model.layers))
    for i in range(c.num_layers):
        w = {k: v[i] for k, v in weights.items()}
        linear = lambda h, name, w=w: h @ w[name] + w.get(f"{name}_bias", 0.0)  # noqa: E731
        h = norm(x, w["attn_norm"])
        q, k, v = linear(h, "q"), linear(h, "k"), linear(h, "v")
        heads = []
        for head in range(c.num_heads):
            kv = head // (c.num_heads // c.num_kv_heads)
            cut = lambda y, j: y[..., j * c.head_dim : (j + 1) * c.head_dim]  # noqa: E731
            qh, kh, vh = cut(q, head), cut(k, kv), cut(v, kv)
            if c.qk_norm:
                qh, kh = norm(qh, w["q_norm"]), norm(kh, w["k_norm"])
            s = turn(qh) @ turn(kh).swapaxes(1, 2) / np.float32(c.head_dim**0.5)
            heads.append(jax.nn.softmax(jnp.where(np.tri(n, dtype=bool), s, -jnp.inf), -1) @ vh)
        x = x + linear(jnp.concatenate(heads, -1), "o")
        h = norm(x, w["mlp_norm"])
        x = x + linear(jax.nn.silu(linear(h, "gate")) * linear(h, "up"), "down")
    logps = jax.nn.log_softmax(norm(x, model.norm[...]) @ model.unembed.T / temperature, -1)[:, :-1]
    return jnp.take_along_axis(logps, sequences[:, 1:, None], -1)[..., 0], -(jnp.exp(logps) * logps).sum(-1)


def plain_batch(graph, params, batch, temperature=1.0):
    """The oracle's log-probs and entropies of the completions, ``[P, G, T]``, 0 on padding."""
    p, g, most = batch.tokens.shape
    length = batch.prompts.tokens.shape[1]
    sequences = np.zeros((p, g, length + most), np.int32)
    for i, n in enumerate(batch.prompts.lengths):
        sequences[i, :, :n] = batch.prompts.tokens[i, :n]
        sequences[i, :, n : n + most] = batch.tokens[i]
    out = plain_scores(graph, params, sequences.reshape(p * g, -1), temperature)
    at = (batch.prompts.lengths - 1)[:, None, None] + np.arange(most)
    mask = np.arange(most) < batch.lengths[..., None]
    take = lambda x: jnp.take_along_axis(x.reshape(p, g, -1), np.broadcast_to(at, batch.tokens.shape), -1)  # noqa: E731
    return tuple(jnp.where(mask, take(x), 0.0) for x in out)


@pytest.mark.parametrize("family", FAMILIES)
def test_value_and_gradient_equal_the_plain_forward(family):
    graph, params = random_decoder(FAMILIES[family])
    batch = ragged_batch(np.random.default_rng(1))
    weight = np.random.default_rng(2).standard_normal(batch.tokens.shape).astype(np.float32)

    def plain(params):
        logps, entropies = plain_batch(graph, params, batch, temperature=0.7)
        return (weight * (logps + 0.3 * entropies)).sum(), logps

    (want, logps), want_grad = jax.jit(jax.value_and_grad(plain, has_aux=True))(params)
    for seats, remat in [(False, "layer"), (True, "matmuls"), (False, "none")]:
        packed, layout = packing.pack(batch, seats=seats)
        assert (packed.rows.seats is not None) == seats
        rows = jax.tree.map(lambda x: x[0], packed.rows)
        used, w = layout.index[0] >= 0, layout.pack(weight)[0]
        compute = Compute(remat=remat, vocab_chunk=13)

        def ours(params, rows=rows, used=used, w=w, compute=compute):
            scores = score(graph, params, rows, compute, temperature=0.7, entropy=True)
            return jnp.where(used, w * (scores.logps + 0.3 * scores.entropy), 0.0).sum(), scores.logps

        (value, got), grad = jax.jit(jax.value_and_grad(ours, has_aux=True))(params)
        np.testing.assert_allclose(layout.unpack(np.asarray(got)[None]), logps, atol=1e-5)
        np.testing.assert_allclose(value, want, rtol=1e-5)
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(grad), jax.tree.leaves(want_grad), strict=True
        ):
            scale = float(np.abs(b).max())
            np.testing.assert_allclose(a, b, atol=1e-5 * scale, rtol=1e-4, err_msg=jax.tree_util.keystr(path))


def test_padding_changes_nothing_even_when_pad_is_a_real_token():
    """A mask read off `ids != pad` would drop real tokens that equal the pad id."""
    graph, params = random_decoder(BASE)
    batch = ragged_batch(np.random.default_rng(3), pad=0)
    reference = None
    for pad, length, most in [(0, 7, 11), (17, 12, 16), (0, 9, 13)]:
        wide = ragged_batch(np.random.default_rng(3), pad=0)
        grow = (
            lambda x, n, pad=pad: np.concatenate(  # noqa: E731
                [x, np.full((*x.shape[:-1], n - x.shape[-1]), pad, x.dtype)], -1
            )
        )
        tokens, prompts = grow(wide.tokens, most), grow(wide.prompts.tokens, length)
        tokens[np.arange(most) >= wide.lengths[..., None]] = pad
        prompts[np.arange(length) >= wide.prompts.lengths[:, None]] = pad
        zeros = np.zeros(tokens.shape, np.float32)
        wide = TrainBatch(
            prompts=dataclasses.replace(wide.prompts, tokens=prompts), tokens=tokens, lengths=wide.lengths,
            advantages=zeros, weights=zeros,
        )  # fmt: skip
        packed, layout = packing.pack(wide)
        got = layout.unpack(
            np.asarray(score(graph, params, jax.tree.map(lambda x: x[0], packed.rows), Compute()).logps)[None]
        )
        got = np.where(np.arange(most) < wide.lengths[..., None], got, 0.0)[:, :, : batch.tokens.shape[2]]
        if reference is None:
            reference = got
        np.testing.assert_allclose(got, reference, atol=2e-6)


@pytest.mark.parametrize("with_entropy", [False, True, "value"])
@pytest.mark.parametrize("chunk", [0, 1, 5, 64])
def test_chunked_vocabulary_equals_plain(with_entropy, chunk):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((2, 13, 6)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((29, 6)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 29, (2, 13)), jnp.int32)
    a, b = (jnp.asarray(rng.standard_normal((2, 13)), jnp.float32) for _ in range(2))

    def ours(h, w):
        logps, entropy = token_scores(
            h, w, targets, inverse_temperature=1.3, chunk=chunk, with_entropy=with_entropy
        )
        assert (entropy is None) == (not with_entropy)
        return (a * logps).sum() + ((b * entropy).sum() if with_entropy else 0.0)

    def plain(h, w):
        logps = jax.nn.log_softmax(1.3 * jnp.einsum("bnd,vd->bnv", h, w), -1)
        out = (a * jnp.take_along_axis(logps, targets[..., None], -1)[..., 0]).sum()
        if not with_entropy:
            return out
        entropy = -(jnp.exp(logps) * logps).sum(-1)
        return out + (b * (jax.lax.stop_gradient(entropy) if with_entropy == "value" else entropy)).sum()

    got, want = (jax.value_and_grad(f, argnums=(0, 1))(hidden, weight) for f in (ours, plain))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=3e-5, rtol=1e-4), got, want)


def test_bfloat16_compute_is_near_float32():
    graph, params = random_decoder(BASE)
    packed, layout = packing.pack(ragged_batch(np.random.default_rng(1)))
    rows = jax.tree.map(lambda x: x[0], packed.rows)
    used = layout.index[0] >= 0
    full, half = (
        np.asarray(score(graph, params, rows, Compute(dtype=d)).logps) for d in ("float32", "bfloat16")
    )
    assert full.dtype == half.dtype == np.float32
    assert 1e-5 < np.abs(full - half)[used].max() < 0.3


def test_no_float32_array_of_tokens_by_vocabulary():
    config = dataclasses.replace(BASE, vocab_size=4096)
    graph, params = dec.abstract(config)
    batch = ragged_batch(np.random.default_rng(0), p=8, g=8, most=32, vocab=4096)
    packed, _ = packing.pack(batch)
    rows = jax.tree.map(lambda x: x[0], packed.rows)
    compute = Compute(vocab_chunk=16)
    compiled = jax.jit(jax.grad(lambda p: score(graph, p, rows, compute).logps.sum())).lower(params).compile()
    logits = rows.tokens.size * config.vocab_size * 4
    assert compiled.memory_analysis().temp_size_in_bytes < logits / 4


def test_temperature_zero_has_no_log_probs():
    graph, params = random_decoder(BASE)
    packed, _ = packing.pack(ragged_batch(np.random.default_rng(0)))
    with pytest.raises(ValueError, match="temperature 0"):
        score(graph, params, jax.tree.map(lambda x: x[0], packed.rows), Compute(), temperature=0.0)
