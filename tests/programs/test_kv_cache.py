"""Blocks of the slots' cache: which of them hold tokens, what is read of the others, and how many bytes that is."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_programs import lowered
from tpu_cache import second_of_two

from grpojax.models import Compute
from grpojax.programs import kv_cache
from grpojax.programs.kv_cache import Ring
from grpojax.programs.kv_cache_cpu import CpuCache
from grpojax.programs.kv_cache_tpu import TpuCache
from grpojax.programs.sampler_config import SamplerConfig


def test_live_blocks_are_those_with_one_of_the_newest_positions():
    for ring in (Ring(1, 5), Ring(3, 4), Ring(4, 3)):
        for position in range(ring.size):
            for longest in range(ring.size + 1):
                newest = {(position - age) % ring.size // ring.width for age in range(longest)}
                got = ring.live(jnp.int32(position), jnp.int32(longest))
                assert set(np.flatnonzero(got).tolist()) == newest, (ring, position, longest)


def test_mean_share_of_live_blocks():
    assert Ring(4, 64).mean_live(257, 1) == 0.625  # 1, 2, 3 and 4 of 4 blocks, 64 steps each
    assert Ring(1, 64).mean_live(64, 3) == 1.0
    # 3 steps a round: blocks 0 0 1 | 1 0 0 | 1 1 0, so 1 1 2 | 1 2 2 | 1 1 2 of them
    assert Ring(2, 2).mean_live(4, 3) == pytest.approx(13 / 18)


@pytest.mark.parametrize("stacked", [False, True], ids=["branches", "loop"])
@pytest.mark.slow
def test_dead_blocks_are_not_read(stacked):
    """NaN in a block that is not live must not reach the result; of values as of keys."""
    rng = np.random.default_rng(0)
    p, g, k, r, d, length, ring = 2, 3, 2, 2, 5, 7, Ring(3, 4)

    def some(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    q, prompt = some(p, g, k, r, d), (some(p, k, d, length), some(p, k, length, d))
    keys, values = some(p, g, k, d, ring.size), some(p, g, k, ring.size, d)
    prompt_mask = jnp.arange(length) < jnp.array([[7], [3]])
    cache_mask = jnp.broadcast_to((jnp.arange(ring.size) >= 4) & (jnp.arange(ring.size) < 8), (p, g, ring.size))

    def attend(keys, values):
        blocks = jnp.split(keys, ring.blocks, -1), jnp.split(values, ring.blocks, -2)
        if stacked:  # the second of two layers
            cached, cache = kv_cache.Cached(*(second_of_two(jnp.stack(b)) for b in blocks), jnp.int32(1)), TpuCache
        else:
            cached, cache = kv_cache.Cached(*blocks), CpuCache
        counts, live = jnp.full((p, g), 4), jnp.array([False, True, False])
        seen = kv_cache.Seen(cache_mask, live, counts, jnp.int32(7), ring)
        return cache(Compute(platform="cpu")).attend(q, cached, prompt, prompt_mask, seen)

    dead = np.arange(ring.size) // ring.width != 1
    got = jax.jit(attend)(keys.at[..., dead].set(jnp.nan), values.at[..., dead, :].set(jnp.nan))
    want = np.zeros(q.shape)
    for i, j, head, of in np.ndindex(p, g, k, r):
        kk = np.concatenate([prompt[0][i, head][:, prompt_mask[i]], keys[i, j, head][:, 4:8]], 1)
        vv = np.concatenate([prompt[1][i, head][prompt_mask[i]], values[i, j, head][4:8]], 0)
        w = np.exp(np.asarray(q[i, j, head, of]) @ kk * d**-0.5)
        want[i, j, head, of] = w / w.sum() @ vv
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_a_gpus_blocks_are_64_positions_or_a_power_of_two():
    gpu = Compute(platform="gpu")
    assert [kv_cache.ring(n, gpu) for n in (5, 17, 300)] == [Ring(1, 16), Ring(1, 32), Ring(5, 64)]


def test_a_tpus_blocks_are_an_eighth_or_128_positions():
    got = [kv_cache.ring(tokens, Compute(platform="tpu")) for tokens in (100, 300, 1024, 4096)]
    assert got == [Ring(1, 100), Ring(2, 150), Ring(8, 128), Ring(8, 512)]


@pytest.mark.slow
def test_on_a_cpu_kernels_are_the_first_factors_of_a_tokens_products():
    """And lie ``[out, in]``, in the compiled HLO: few rows in front take up to three times as long."""
    text = lowered(SamplerConfig(group=8, max_tokens=64, decode_slots=4), Compute()).compile().as_text()
    made = re.findall(r"= f32\[(\d+),(\d+)\]\S* dot\(.*while/body/(?:qkv|out|mlp)/", text)
    assert sorted({(int(n), int(rows)) for n, rows in made}) == [(512, 16), (1024, 16), (2816, 16)]
