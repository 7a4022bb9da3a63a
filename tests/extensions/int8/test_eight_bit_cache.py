"""Keys and values of eight bits against plain numpy: attention of a step, whole rollouts, and layouts."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from plain_decoder import BASE, plain_states, random_decoder, whole_sequences
from short_blocks import blocks_of
from tpu_cache import second_of_two

from grpojax import sharding
from grpojax.extensions.int8.eight_bits import INT8, Int8
from grpojax.host.errors import UserError
from grpojax.models import Compute, flops
from grpojax.models.number_formats import Floats
from grpojax.models.weight_table import shardings
from grpojax.programs import kv_cache, state
from grpojax.programs.kv_cache import Ring
from grpojax.programs.kv_cache_cpu import CpuCache
from grpojax.programs.kv_cache_tpu import TpuCache
from grpojax.programs.sampler import sample_groups
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.types import Prompts

EIGHT = SamplerConfig(group=5, max_tokens=11, cache_dtype="int8")
EXACT = dataclasses.replace(EIGHT, cache_dtype="compute")
TPU = Compute(platform="tpu", attention="xla")  # its program, run here


def rounded(x):
    """Oracle: a token's numbers ``[..., d]`` as they are read again, and their scale ``[...]``."""
    x = np.asarray(x, np.float32)
    scale = (np.abs(x).max(-1) / np.float32(127)).astype(jnp.bfloat16).astype(np.float32)
    safe = np.where(scale > 0, scale, 1)[..., None]
    return np.clip(np.round(x / safe), -127, 127) * scale[..., None], scale


# --------------------------------------------------------------------------------------- attention of a step


P, G, K, R, D, L = 2, 3, 2, 2, 5, 7
RING = Ring(3, 4)
SEEN = np.stack([np.arange(12) < 6, (np.arange(12) >= 3) & (np.arange(12) < 8), np.arange(12) < 1])  # of each slot
LIVE = np.array([True, True, False])


def numbers(seed=0, sizes=30.0):
    """q, and keys and values of prompts and samples; keys of samples of all ``sizes``."""
    rng = np.random.default_rng(seed)
    shapes = (P, G, K, R, D), (P, L, K, D), (P, L, K, D), (P, G, RING.size, K, D), (P, G, RING.size, K, D)
    q, *rest = (np.float32(rng.standard_normal(shape)) for shape in shapes)
    rest[0][0, 1] = rest[3][1, 2, 0] = 0.0  # a prompt's key and a sample's value of zeros
    rest[2] *= np.float32(sizes ** rng.standard_normal((P, G, RING.size, K, 1)))
    return q, *rest


PROMPT_LENGTHS = np.array([7, 3])


def plain(q, pk, pv, k, v):
    """Oracle: one query, head, slot and token after the other."""
    out = np.zeros(q.shape)
    for p, g, head, r in np.ndindex(q.shape[:-1]):
        n, seen = PROMPT_LENGTHS[p], SEEN[g]
        keys = np.concatenate([pk[p, :n, head], k[p, g, seen, head]])
        values = np.concatenate([pv[p, :n, head], v[p, g, seen, head]])
        s = np.float64(keys) @ np.float64(q[p, g, head, r]) / np.sqrt(D)
        w = np.exp(s - s.max())
        out[p, g, head, r] = w / w.sum() @ np.float64(values)
    return out


def attended(q, pk, pv, k, v, stacked, dtype="int8"):
    """The library's, by branches or, ``stacked``, in a loop; a dead block is full of numbers that are none."""
    prompt = [np.moveaxis(pk, 1, -1), pv.swapaxes(1, 2)]
    cache = [np.moveaxis(k, 2, -1), v.swapaxes(2, 3)]
    form = INT8.cache if dtype == "int8" else Floats(dtype)
    prompt = [form.stored(jnp.asarray(x), axis) for x, axis in zip(prompt, (-2, -1), strict=True)]
    cache = [form.stored(jnp.asarray(x), axis) for x, axis in zip(cache, (-2, -1), strict=True)]

    def blocks(x, axis):
        parts = jnp.split(x, RING.blocks, axis)
        parts[2] = jnp.full_like(parts[2], 127 if x.dtype == jnp.int8 else jnp.nan)
        return parts

    def cached(x, axis):
        if not isinstance(x, Int8):
            parts = blocks(x, axis)
            return second_of_two(jnp.stack(parts)) if stacked else parts
        values, scale = blocks(x.values, axis), blocks(x.scale, -1)
        if stacked:
            return Int8(second_of_two(jnp.stack(values)), second_of_two(jnp.stack(scale)))
        return [Int8(*both) for both in zip(values, scale, strict=True)]

    layer = jnp.int32(1) if stacked else None
    of_layer = kv_cache.Cached(cached(cache[0], -1), cached(cache[1], -2), layer)
    mask = jnp.broadcast_to(jnp.asarray(SEEN), (P, G, RING.size))
    seen = kv_cache.Seen(mask, jnp.asarray(LIVE), mask.sum(-1), jnp.int32(7), RING)
    prompt_mask = jnp.arange(L) < jnp.asarray(PROMPT_LENGTHS)[:, None]

    def attend(q, of_layer, prompt):
        cache = (TpuCache if stacked else CpuCache)(Compute(platform="cpu"))
        return cache.attend(q, of_layer, prompt, prompt_mask, seen)

    return np.asarray(jax.jit(attend)(jnp.asarray(q), of_layer, prompt), np.float32)


@pytest.mark.parametrize("stacked", [False, True], ids=["branches", "loop"])
@pytest.mark.slow
def test_attention_is_that_of_the_rounded_numbers(stacked):
    q, *kv = numbers()
    got = attended(q, *kv, stacked)
    want = plain(q, *(rounded(x)[0] for x in kv))
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert np.abs(plain(q, *kv) - want).max() > 1e-3  # which is not that of the numbers themselves


@pytest.mark.parametrize("stacked", [False, True], ids=["branches", "loop"])
@pytest.mark.slow
def test_how_far_it_is_off_is_bounded(stacked):
    """A score is off by half a scale times ``sum |q| / sqrt(d)`` at most, e: no weight by more than ``exp(2 e)`` to
    one, and a value by half a scale."""
    q, pk, pv, k, v = numbers(1, sizes=1.0)
    got, exact = (attended(q, pk, pv, k, v, stacked, dtype) for dtype in ("int8", "float32"))
    np.testing.assert_allclose(exact, plain(q, pk, pv, k, v), atol=1e-5)
    half = [0.5001 * rounded(x)[1].max() for x in (np.concatenate([pk.ravel(), k.ravel()]).reshape(-1, D), v, pv)]
    e = half[0] * np.abs(q).sum(-1, keepdims=True) / np.sqrt(D)
    bound = np.expm1(2 * e) * max(np.abs(pv).max(), np.abs(v).max()) + max(half[1:])
    assert (np.abs(got - exact) <= bound).all()
    assert np.median(np.abs(got - exact)) > 1e-4


def test_bfloat16_multiplies_in_bfloat16():
    q, *kv = numbers(2)
    q = np.float32(jnp.asarray(q, jnp.bfloat16))
    want = plain(q, *(rounded(x)[0] for x in kv))
    for stacked in (False, True):
        got = attended(jnp.asarray(q, jnp.bfloat16), *kv, stacked)
        assert np.abs(got - want).mean() < 0.02


# ------------------------------------------------------------------------------------------------- rollouts


@pytest.fixture(scope="module")
def decoder():
    return random_decoder(BASE)


def some_prompts(p=3, length=7):
    rng = np.random.default_rng(0)
    return Prompts(
        tokens=rng.integers(0, 53, (p, length)).astype(np.int32),
        lengths=rng.integers(1, length + 1, p).astype(np.int32),
        uids=np.arange(10, 10 + p, dtype=np.uint32),
        first_sample=np.zeros(p, np.int32),
    )


def run(decoder, prompts, config, compute=Compute(), block=None):  # noqa: B008
    with blocks_of(block):
        rollout = sample_groups(*decoder, prompts, jax.random.key(0), config, eos_ids=tuple(range(6)), compute=compute)
    return jax.tree.map(np.asarray, rollout)


def plain_logps(decoder, prompts, out):
    """Oracle: completion tokens read rounded keys and values, their own too; a prompt's tokens read those they are."""
    (p, g, most), model = out.tokens.shape, nnx.merge(*decoder)
    sequences = whole_sequences(SimpleNamespace(tokens=out.tokens, prompts=prompts)).reshape(p * g, -1)
    ends = np.repeat(prompts.lengths, g)
    hidden = plain_states(model, sequences, prompt=ends, read=lambda x: rounded(x)[0])
    every = np.asarray(jax.nn.log_softmax(hidden @ model.unembed.T, -1))
    at = ends[:, None] + np.arange(most)
    return every[np.arange(p * g)[:, None], at - 1, sequences[np.arange(p * g)[:, None], at]].reshape(p, g, most)


@pytest.mark.parametrize(
    ("slots", "block", "compute"),
    [
        (2, 4, Compute()),
        pytest.param(0, None, Compute(), marks=pytest.mark.exhaustive),
        pytest.param(3, 4, TPU, marks=pytest.mark.exhaustive),
    ],
    ids=["blocks and slots", "all at once", "tpu"],
)
def test_log_probs_are_those_that_tokens_were_drawn_with(decoder, slots, block, compute):
    prompts = some_prompts()
    out = run(decoder, prompts, dataclasses.replace(EIGHT, decode_slots=slots), compute, block)
    there = np.arange(EIGHT.max_tokens) < out.lengths[..., None]
    apart = np.abs(plain_logps(decoder, prompts, out) - out.logps)[there]
    assert np.quantile(apart, 0.9) < 1e-5 and apart.max() < 3e-3  # a number between two may be rounded either way
    exact = run(decoder, prompts, EXACT)
    np.testing.assert_allclose(exact.logps[:, :, 0], out.logps[:, :, 0], atol=2e-6)  # the prompt reads its own
    alike = (there & (np.cumsum(exact.tokens != out.tokens, -1) == 0))[:, :, 1:]
    assert 1e-4 < np.median(np.abs(exact.logps - out.logps)[:, :, 1:][alike]) < 0.1


@pytest.mark.parametrize(
    ("slots", "block", "compute"), [(3, None, Compute()), (2, 4, Compute()), (1, 3, TPU), (0, 11, TPU)], ids=str
)
@pytest.mark.slow
def test_draws_do_not_depend_on_slots_blocks_or_platform(decoder, slots, block, compute):
    want = run(decoder, some_prompts(), EIGHT)
    got = run(decoder, some_prompts(), dataclasses.replace(EIGHT, decode_slots=slots), compute, block)
    same(got, want)


def same(got, want):
    """But for numbers that rounding errors take to another of the 255."""
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.lengths, want.lengths)
    apart = np.abs(got.logps - want.logps)
    assert np.quantile(apart, 0.9) < 1e-5 and apart.max() < 3e-3


@pytest.mark.in_ci("tpu")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "of", "heads"),
    [((1, 4, 2), TPU, 2), ((2, 2, 2), Compute(), 2), ((1, 2, 4), TPU, 2)],
    ids=["tpu", "cpu", "repeated heads"],
)
def test_draws_do_not_depend_on_the_mesh(sizes, of, heads):
    config = dataclasses.replace(BASE, vocab_size=56, num_heads=8, num_kv_heads=heads, head_dim=4)
    graph, params = random_decoder(config)
    want = run((graph, params), some_prompts(8), EIGHT)
    mesh = sharding.make_mesh(sharding.MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]))
    compute = dataclasses.replace(of, mesh=mesh)
    placed = state.make_reshard(config, compute)(jax.device_put(params, shardings(params, mesh)))
    fewer = dataclasses.replace(EIGHT, decode_slots=2)
    same(run((graph, placed), some_prompts(8), fewer, compute, block=4), want)


def test_a_gpu_is_refused(decoder):
    with pytest.raises(UserError, match="cache_dtype=int8: .* GPU.*set rollout.cache_dtype=compute"):
        run(decoder, some_prompts(), EIGHT, compute=Compute(platform="gpu", attention="xla"))


def test_bytes_of_a_token():
    half = Floats("bfloat16")
    assert flops.kv_bytes(BASE, half) == 2 * 2 * 2 * 6 * 2
    assert flops.kv_bytes(BASE, INT8.cache) == 2 * 2 * 2 * (6 + 2)
    read = [flops.decode_bytes(BASE, 7, 11, prompts=3, slots=5, block=4, cache=c) for c in (half, INT8.cache)]
    assert read[0] - read[1] == 3 * (7 + 5 * 12) * (96 - 64)
