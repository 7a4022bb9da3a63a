"""The KV cache on a TPU: all layers and blocks are one array, ``[layers, blocks, R, Hkv * S, ...]``.

A loop over the live blocks brings each into fast memory; a branch would copy whole caches. Heads and slots are one
axis. A token's numbers are adjacent in memory, and arrays are stored in tiles over that axis and these numbers. A tile
of eight-bit numbers has at least four rows, so that two heads without the slots would leave half of it empty.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh

from grpojax.models import number_formats
from grpojax.models.attention import Logits, capped
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.number_formats import CacheFormat, Kept
from grpojax.programs.kv_cache import (
    LOOP,
    Cache,
    Cached,
    Ring,
    Seen,
    by_slot,
    of_prompt,
    scores_of_prompt,
    with_sinks,
)
from grpojax.sharding import TRAIN, spec
from grpojax.types import Array, Scalar


class TpuCache(Cache):
    """The cache on a TPU."""

    listed = False

    def empty(self, c: DecoderConfig, rows: int, slots: int, ring: Ring, form: CacheFormat) -> tuple[Any, Any]:
        """As of `Cache`."""
        held = (self.heads(c) * slots,), ("kv_heads",)
        keys, values = (self.zeros(c, ring, form, rows, *held, across=across) for across in self.across)
        return keys, values

    def write(self, caches: Any, layer: Any, k: Any, v: Any, position: Scalar, writes: Array | None) -> Any:
        """As of `Cache`."""
        return _put(caches, k, v, position, layer if isinstance(layer, jax.Array) else jnp.int32(layer), writes)

    def merged(
        self,
        q: Array,
        cached: Cached,
        prompt: Sequence[Kept],
        prompt_mask: Array,
        seen: Seen,
        logits: Logits,
    ) -> Array:
        """As of `Cache`, in a loop over the live blocks; a larger score rescales the sums so far."""
        s_prompt = scores_of_prompt(q, prompt[0], prompt_mask, seen, logits.cap)
        live, mask = seen.live, seen.mask.reshape(*seen.mask.shape[:2], len(seen.live), -1)
        which = jnp.nonzero(live, size=len(live), fill_value=0)[0]

        def block(cache, j, axis):
            def of(x, axis):
                of_layer = jax.lax.dynamic_slice_in_dim(x, cached.layer, 1)
                x = jax.lax.dynamic_slice_in_dim(of_layer, j, 1, 1)[0, 0]
                x = _as_written(x, axis, self.compute.mesh) if x.ndim == 4 else x
                return x.reshape(len(x), q.shape[2], q.shape[1], *x.shape[2:]).swapaxes(1, 2)

            return jax.tree.map(of, cache, number_formats.token_axes(cache, axis))

        def add(n, so_far):
            (top, total, out), j = so_far, which[n]
            scores = capped(number_formats.dot_keys(q, block(cached.keys, j, -1)), logits.cap)
            mine = jax.lax.dynamic_index_in_dim(mask, j, 2, keepdims=False)
            scores = jnp.where(mine[:, :, None, None], scores, -jnp.inf)
            highest = jnp.maximum(top, scores.max(-1, keepdims=True))
            w, kept = jnp.exp(scores - highest), jnp.exp(top - highest)
            more = number_formats.mix_values(w, block(cached.values, j, -2), q.dtype)
            return highest, kept * total + w.sum(-1, keepdims=True), kept * out + more

        top, total, out = (by_slot(x, q) for x in of_prompt(s_prompt, prompt[1], q.dtype))
        if logits.sinks is not None:
            top, total, kept = with_sinks(top, total, logits.sinks[..., None])
            out = out * kept
        with jax.named_scope(LOOP):
            _, total, out = jax.lax.fori_loop(0, live.sum(), add, (top, total, out))
        return out / total

    def whole(self, cache: Any, slots: int, across: bool) -> Array:
        """As of `Cache`."""
        cache = cache.reshape(*cache.shape[:2], -1, slots, *cache.shape[3:])
        cache = (cache.swapaxes(-1, -2) if across else cache).transpose(1, 3, 2, 0, 4, 5)
        return cache.reshape(*cache.shape[:3], -1, cache.shape[-1])

    def cut(self, cache: Array, ring: Ring, across: bool) -> Any:
        """As of `Cache`."""
        cache = cache.reshape(*cache.shape[:3], *ring, cache.shape[-1]).transpose(3, 0, 2, 1, 4, 5)
        cache = cache.swapaxes(-1, -2) if across else cache
        return cache.reshape(*cache.shape[:2], -1, *cache.shape[4:])

    def place(self, row: Scalar, slot: Scalar, cache: Array, new: Array) -> Array:
        """As of `Cache`."""
        at = (0, 0, row, 0, slot, *(0,) * (cache.ndim - 5))
        return jax.lax.dynamic_update_slice(cache, jnp.expand_dims(new, (2, 4)), at)

    def by_slots(self, caches: Any, slots: int) -> Any:
        """As of `Cache`."""
        return jax.tree.map(lambda x: x.reshape(*x.shape[:3], -1, slots, *x.shape[4:]), caches)


KEPT = TpuCache


def _put(caches: Sequence[Any], k: Any, v: Any, position: Scalar, layer: Scalar, writes: Array | None) -> list[Any]:
    """Writes a token into the blocks of all layers."""
    block, within = jnp.divmod(position, jax.tree.leaves(caches[1])[0].shape[-2])

    def of_column(new, axis):
        return jnp.expand_dims(new.swapaxes(1, 2).reshape(1, 1, len(new), -1, *new.shape[3:]), axis)

    def put(array, new, axis):
        at: list[Any] = [layer, block] + [0] * (array.ndim - 2)
        mine = None
        if writes is not None:
            mine = of_column(jnp.broadcast_to(writes.reshape(*writes.shape, *(1,) * (new.ndim - 2)), new.shape), axis)
        new = of_column(new, axis)
        if array.ndim == 5:
            # Scales. To write one column the compiler would change the layout of all, and copy them for every layer.
            old = jax.lax.dynamic_slice(array, at, (1, 1, *array.shape[2:]))
            here = jnp.arange(array.shape[-1]) == within
            new = jnp.where(here if mine is None else here & mine, new, old)
        else:
            at[axis] = within
            if mine is not None:
                new = jnp.where(mine, new, jax.lax.dynamic_slice(array, at, new.shape))
        return jax.lax.dynamic_update_slice(array, new, at)

    return [
        jax.tree.map(put, c, new, number_formats.token_axes(new, axis))
        for c, new, axis in zip(caches, (k, v), (-1, -2), strict=True)
    ]


def _as_written(x: Array, axis: int, mesh: Mesh | None) -> Array:
    """Pins a block ``[R, Hkv * S, ...]`` with tokens along ``axis`` to the layout that it was written in. For another
    layout the compiler would copy the blocks of all layers in every layer."""
    layout = Layout((axis % 4, *(i for i in range(4) if i != axis % 4)))
    pinned, cut = functools.partial(with_layout_constraint, layouts=layout), spec(("shard", "kv_heads"), TRAIN)
    if mesh is not None:  # a constraint on all parts at once would gather them
        pinned = jax.shard_map(pinned, mesh=mesh, in_specs=cut, out_specs=cut)
    return pinned(x)
