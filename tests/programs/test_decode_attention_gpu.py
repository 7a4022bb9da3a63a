"""The GPU's kernel, interpreted: against plain numpy of every slot's own tokens, and through the sampler. That it is
made for CUDA at all stands in `test_exported`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax import sharding
from grpojax.models import Compute
from grpojax.models.attention import Logits
from grpojax.programs import kv_cache
from grpojax.programs.kv_cache import Ring, Seen

RING = Ring(4, 16)


def case(
    *, p=3, g=5, k=2, r=7, d=64, length=11, ring=RING, position=37, counts=None, window=None, dtype=jnp.float32, seed=0
):
    """Random queries, caches and prompts; slots of ``counts`` tokens, and NaN wherever nothing is to be read."""
    rng = np.random.default_rng(seed)

    def some(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    counts = rng.integers(0, ring.size + 1, (p, g)) if counts is None else np.broadcast_to(counts, (p, g))
    mask = (position - np.arange(ring.size)) % ring.size < counts[..., None]
    q, keys, values = some(p, g, k, r, d), some(p, g, k, ring.size, d), some(p, g, k, ring.size, d)
    dead = ~mask[:, :, None, :, None]
    caches = [jnp.asarray(np.where(dead, np.nan, x), dtype) for x in (keys, values)]
    prompt = some(p, k, d, length), some(p, k, length, d)
    prompt_mask = np.arange(length) < rng.integers(1, length + 1, (p, 1))
    unread = ~prompt_mask[:, None, None]
    prompt = [jnp.asarray(np.where(x, np.nan, y), dtype) for x, y in zip((unread, unread.mT), prompt, strict=True)]
    seen = Seen(jnp.asarray(mask), jnp.array(True), jnp.asarray(counts, jnp.int32), jnp.int32(position), ring)
    if window is not None:
        seen = seen.within(window, jnp.asarray(prompt_mask.sum(1), jnp.int32))
    return jnp.asarray(q, dtype), caches, prompt, jnp.asarray(prompt_mask), seen


def by_hand(q, caches, prompt, prompt_mask, seen, logits=None):
    """A softmax of each query over its prompt's tokens and its own, in float64."""
    q, *kv = (np.asarray(x, np.float64) for x in (q, *caches, *prompt))
    keys, values, prompt_keys, prompt_values = kv
    out = np.zeros(q.shape)
    for i, j, head, of in np.ndindex(q.shape[:4]):
        before, mine = np.asarray(prompt_mask[i]), np.asarray(seen.mask[i, j])
        if seen.oldest is not None:
            before = before & (np.arange(len(before)) >= seen.oldest[i, j])
        kk = np.concatenate([prompt_keys[i, head].T[before], keys[i, j, head][mine]])
        vv = np.concatenate([prompt_values[i, head][before], values[i, j, head][mine]])
        s = kk @ q[i, j, head, of] * q.shape[-1] ** -0.5
        sink = []
        if logits is not None:
            s = logits.cap * np.tanh(s / logits.cap)
            sink = [logits.sinks[head * q.shape[3] + of]]
        w = np.exp([*s, *sink])
        out[i, j, head, of] = w[: len(vv)] / w.sum() @ vv
    return out


def attended(given, mesh=None, logits=None):
    q, caches, prompt, prompt_mask, seen = given
    cached = kv_cache.Cached(*((x,) for x in caches))
    compute = Compute(platform="gpu", mesh=mesh)
    attend = jax.jit(lambda q, *x: kv_cache.of(compute).attend(q, *x, prompt_mask, seen, logits))
    return attend(q, cached, prompt)


@pytest.mark.slow
def test_sinks_take_part_and_scores_are_capped():
    given = case(window=20, position=5, counts=[[0, 1, 19, 20, 60]])
    heads = given[0].shape[2] * given[0].shape[3]
    logits = Logits(0.8, jnp.asarray(np.random.default_rng(2).standard_normal(heads), jnp.float32))
    np.testing.assert_allclose(attended(given, logits=logits), by_hand(*given, logits), atol=1e-5)


@pytest.mark.parametrize(
    "cells",
    [
        {},  # ragged, some around the end of the ring
        {"position": 63, "counts": 64},  # all of it
        {"position": 5, "counts": [[0, 1, 6, 7, 22]]},  # nothing, itself, up to the start, across the end
        {"position": 20, "counts": [[59, 60, 61, 63, 64]]},  # the oldest in the block of the newest
        {"d": 24, "r": 1, "g": 3},
        {"d": 8, "r": 17, "k": 1, "ring": Ring(1, 32), "position": 31},
        {"d": 128, "r": 3, "p": 2, "ring": Ring(2, 128)},  # wider than what is read at a time
        {"length": 150, "g": 11, "d": 24},  # queries of two tiles, prompts of up to three blocks
        {
            "window": 20,
            "position": 5,
            "counts": [[0, 1, 19, 20, 60]],
        },  # all of a prompt to none
        {"window": 30, "length": 150, "g": 11, "d": 24, "counts": 7},  # blocks before the windows are left out
    ],
    ids=["ragged", "full", "few", "around", "odd head", "many queries", "parts of blocks", "prompts"]
    + ["window", "window of prompts"],
)
def test_a_slot_reads_its_prompt_and_its_own_tokens(cells):
    given = case(**cells)
    np.testing.assert_allclose(attended(given), by_hand(*given), atol=1e-5)


@pytest.mark.slow
def test_in_16_bits_it_is_as_near_as_what_xla_makes():
    given = case(dtype=jnp.bfloat16, ring=Ring(3, 32), position=90, seed=1)
    q, caches, prompt, prompt_mask, seen = given
    want = by_hand(*given)
    keys, values, *plain = (jnp.nan_to_num(x) for x in (*caches, *prompt))
    cached = kv_cache.Cached([keys.swapaxes(-1, -2)], [values])
    xla = kv_cache.of(Compute(platform="cpu")).attend(q, cached, plain, prompt_mask, seen)
    mine = attended(given)
    assert mine.dtype == jnp.bfloat16
    off, of_xla = (np.abs(np.asarray(x, np.float64) - want).max() for x in (mine, xla.astype(jnp.bfloat16)))
    assert off < 1.25 * of_xla < 0.02, (off, of_xla)


@pytest.mark.parametrize(("of_q", "of_cache"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_cache_of_another_precision(of_q, of_cache):
    """The finer of the two multiplies queries and keys, as jax would have it."""
    q, caches, prompt, *rest = case(seed=2)
    q, sharp = (20 * q).astype(of_q), [x.astype(of_cache) for x in (*caches, *prompt)]
    given = q, sharp[:2], sharp[2:], *rest
    got = attended(given)
    assert got.dtype == of_q
    np.testing.assert_allclose(np.asarray(got, np.float32), by_hand(*given), atol=0.01)


def test_devices_have_rows_and_heads_of_their_own():
    mesh = sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=2, tensor=2))
    given = case(p=4, g=3, k=2, r=3, d=16)
    np.testing.assert_allclose(attended(given, mesh), by_hand(*given), atol=1e-5)
