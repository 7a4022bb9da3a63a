"""The KV cache on a CPU, and what it shares with a GPU's: every layer has arrays of its own.

On a CPU every block is an array, and a branch skips the blocks that are not live. A block of a row of slots is
``[R, S, Hkv, d, B]`` (keys) and ``[R, S, Hkv, B, d]`` (values).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from grpojax.models import number_formats
from grpojax.models.attention import Logits, capped
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.number_formats import CacheFormat, Kept
from grpojax.programs.kv_cache import (
    Cache,
    Cached,
    Ring,
    Seen,
    by_slot,
    per_layer,
    scores_of_prompt,
)
from grpojax.types import Array, Scalar


class Listed(Cache):
    """Keys and values as a list with a tuple for each layer; the tuple has one array for each block."""

    listed = True

    def empty(self, c: DecoderConfig, rows: int, slots: int, ring: Ring, form: CacheFormat) -> tuple[Any, Any]:
        """As of `Cache`."""
        held = (slots, self.heads(c)), (None, "kv_heads")
        keys, values = (self.apart(self.zeros(c, ring, form, rows, *held, across=across)) for across in self.across)
        return keys, values

    def write(self, caches: Any, layer: Any, k: Any, v: Any, position: Scalar, writes: Array | None) -> Any:
        """As of `Cache`: into the array of keys and of values that has the position."""
        axes = [-1 if across else -2 for across in self.across]
        return _put(caches, (k, v), axes, position, writes)

    def whole(self, cache: Any, slots: int, across: bool) -> Array:
        """As of `Cache`."""
        return jnp.concatenate([b.swapaxes(-1, -2) if across else b for b in cache], -2)

    def cut(self, cache: Array, ring: Ring, across: bool) -> Any:
        """As of `Cache`."""
        each = jnp.split(cache, self.blocks(ring).blocks, -2)
        return tuple(b.swapaxes(-1, -2) if across else b for b in each)

    def place(self, row: Scalar, slot: Scalar, cache: Array, new: Array) -> Array:
        """As of `Cache`."""
        return jax.lax.dynamic_update_slice(cache, jnp.expand_dims(new, (0, 1)), (row, slot, *(0,) * (cache.ndim - 2)))

    def apart(self, stacked: Any) -> Any:
        """As of `Cache`: a tuple of blocks for each layer."""
        return [tuple(per_layer(layer, True)) for layer in per_layer(stacked, True)]


class CpuCache(Listed):
    """The cache on a CPU."""

    def merged(
        self,
        q: Array,
        cached: Cached,
        prompt: Sequence[Kept],
        prompt_mask: Array,
        seen: Seen,
        logits: Logits,
    ) -> Array:
        """As of `Cache`, with all scores at once; the scores of blocks that are not live are not computed."""
        s_prompt = scores_of_prompt(q, prompt[0], prompt_mask, seen, logits.cap)
        p, g, k, r, d = q.shape
        mix = functools.partial(number_formats.mix_values, dtype=q.dtype)

        def there(x):
            return x.swapaxes(1, 2).reshape(p, k, g * r, -1)

        width, live = seen.mask.shape[-1] // len(cached.keys), seen.live
        s_cache = _products(number_formats.dot_keys, [q] * len(cached.keys), cached.keys, live, width)
        s_cache = s_cache[0] if len(s_cache) == 1 else jnp.concatenate(s_cache, -1)
        s_cache = jnp.where(seen.mask[:, :, None, None], capped(s_cache, logits.cap), -jnp.inf)
        top = jnp.maximum(by_slot(s_prompt.max(-1, keepdims=True), q), s_cache.max(-1, keepdims=True))
        if logits.sinks is not None:
            top = jnp.maximum(top, logits.sinks[..., None])
        w_prompt, w_cache = jnp.exp(s_prompt - there(top)), jnp.exp(s_cache - top)
        total = by_slot(w_prompt.sum(-1, keepdims=True), q) + w_cache.sum(-1, keepdims=True)
        if logits.sinks is not None:
            total = total + jnp.exp(logits.sinks[..., None] - top)
        out, w_cache = by_slot(mix(w_prompt / there(total), prompt[1]), q), w_cache / total
        parts = [w_cache[..., j * width : (j + 1) * width] for j in range(len(cached.values))]
        return sum(_products(mix, parts, cached.values, live, d), out)


KEPT = CpuCache


def _put(
    caches: Sequence[Any], kv: Sequence[Any], axes: Sequence[int], position: Scalar, writes: Array | None
) -> list[tuple[Any, ...]]:
    """Writes a token into the array of keys and of values that has ``position``; ``axes`` are their token axes."""

    def put(array, new, axis, start):
        new, at = jnp.expand_dims(new, axis), [0] * array.ndim
        mine = True if writes is None else writes.reshape(*writes.shape, *(1,) * (new.ndim - 2))
        if start is None:
            at[axis] = position
            if writes is not None:
                new = jnp.where(mine, new, jax.lax.dynamic_slice(array, at, new.shape))
            return jax.lax.dynamic_update_slice(array, new, at)
        width = array.shape[axis]
        at[axis] = jnp.clip(position - start, 0, width - 1)
        here = (start <= position) & (position < start + width) & mine
        new = jnp.where(here, new, jax.lax.dynamic_slice(array, at, new.shape))
        return jax.lax.dynamic_update_slice(array, new, at)

    out = []
    for blocks, new, axis in zip(caches, kv, axes, strict=True):
        width, along = jax.tree.leaves(blocks)[0].shape[axis], number_formats.token_axes(new, axis)
        starts = [None] if len(blocks) == 1 else [j * width for j in range(len(blocks))]
        each = zip(blocks, starts, strict=True)
        out.append(tuple(jax.tree.map(functools.partial(put, start=start), a, new, along) for a, start in each))
    return out


def _products(
    product: Callable[..., Array], left: Sequence[Array], blocks: Sequence[Any], live: Array, columns: int
) -> list[Array]:
    """``product(left[j], blocks[j])`` for each block that is live; 0 for the others, which are not read."""
    if len(blocks) == 1:
        return [product(left[0], blocks[0])]

    def or_nothing(a, block, here):
        nothing = jnp.zeros((*a.shape[:-1], columns), jnp.float32)
        return jax.lax.cond(here, lambda: product(a, block), lambda: nothing)

    return [or_nothing(a, block, live[j]) for j, (a, block) in enumerate(zip(left, blocks, strict=True))]
