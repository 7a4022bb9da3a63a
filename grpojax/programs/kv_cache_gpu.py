"""The KV cache on a GPU: the whole ring of a layer is one array, ``[R, S, Hkv, T, d]`` for keys and for values.

A kernel reads only the tokens of each slot (`grpojax.programs.decode_attention_gpu`).
"""

from collections.abc import Sequence

import jax.numpy as jnp

from grpojax.models.attention import Logits
from grpojax.models.number_formats import Kept
from grpojax.programs import decode_attention_gpu
from grpojax.programs.kv_cache import Cached, Ring, Seen, with_sinks
from grpojax.programs.kv_cache_cpu import Listed
from grpojax.types import Array


class GpuCache(Listed):
    """The cache on a GPU."""

    across = (False, False)

    def blocks(self, ring: Ring) -> Ring:
        """One array in all."""
        return Ring(1, ring.size)

    def merged(
        self,
        q: Array,
        cached: Cached,
        prompt: Sequence[Kept],
        prompt_mask: Array,
        seen: Seen,
        logits: Logits,
    ) -> Array:
        """As of `Cache`, by a kernel for the prompts and one for the slots' tokens."""
        (p, g, k, r, d), (cap, sinks) = q.shape, logits
        # Both kernels take the queries in this order, so that XLA makes them in it and copies none.
        q = q.swapaxes(1, 2)
        by_prompt = q.reshape(p, k, g * r, d)
        first = None if seen.oldest is None else jnp.repeat(seen.oldest, r, 1)
        mesh, lengths = self.compute.mesh, prompt_mask.sum(-1, dtype=jnp.int32)
        found = decode_attention_gpu.of_prompt(by_prompt, *prompt, lengths, first, mesh=mesh, cap=cap)
        (keys,), (values,) = cached.keys, cached.values
        so_far = tuple(x.reshape(p, k, g, r, *x.shape[3:]) for x in found)
        if sinks is not None:
            top, total, out = so_far
            top, total, kept = with_sinks(top, total, sinks[:, None])
            so_far = top, total, out * kept[..., None]
        given = q, keys, values, seen.position, seen.counts, so_far
        return decode_attention_gpu.attend(*given, block=seen.ring.width, mesh=mesh, cap=cap)


KEPT = GpuCache
