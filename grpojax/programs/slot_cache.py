"""Keys and values of the samples that are being decoded: one layer's are written, then read.

Of a prompt the caches are ``[P, Hkv, d, L]`` (keys) and ``[P, Hkv, L, d]`` (values), of its slots
``[P, g, Hkv, d, T]`` and ``[P, g, Hkv, T, d]``: both as the multiplication reads them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from grpojax.models.compute import Compute
from grpojax.types import Array, Scalar


def unrolls(compute: Compute) -> bool:
    """Whether layers are a list and not stacked: a CPU copies each layer's slice of a stacked array before it
    multiplies, but reads separate arrays in place."""
    return (compute.platform or jax.default_backend()) == "cpu"


def per_layer(stacked: Any, unroll: bool) -> Any:
    """A stacked tree as it is, or as a list of one tree a layer."""
    if not unroll:
        return stacked
    n = jax.tree.leaves(stacked)[0].shape[0]
    return [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(n)]


def over_layers(
    body: Callable[..., Array], x: Array, layers: Any, caches: Sequence[Any], position: Scalar, unroll: bool
) -> tuple[Array, Sequence[Any]]:
    """Runs ``body(x, layer, write) -> x`` layer by layer; ``write(k, v)`` puts a token's keys and values into the
    layer's caches at ``position`` and returns these. Caches are updated in place, as reads come after the write.
    Returns ``(x, caches)``."""

    def put(caches, k, v, *layer):
        """Of keys a column, of values a row."""
        out = []
        for cache, new, axis in zip(caches, (k[..., None], v[..., None, :]), (-1, -2), strict=True):
            at: list[Any] = [*layer, *(0,) * new.ndim]
            at[axis] = position
            out.append(jax.lax.dynamic_update_slice(cache, new[(None,) * len(layer)], at))
        return out

    if unroll:
        updated = []
        for layer, *own in zip(layers, *caches, strict=True):

            def write(k, v, own=own):
                updated.append(put(own, k, v))
                return updated[-1]

            x = body(x, layer, write)
        return x, [list(column) for column in zip(*updated, strict=True)]

    def step(carry, i_layer):
        (x, caches), (i, layer) = carry, i_layer

        def write(k, v):
            nonlocal caches
            caches = put(caches, k, v, i)
            return [jax.lax.dynamic_index_in_dim(cache, i, keepdims=False) for cache in caches]

        x = body(x, layer, write)
        return (x, caches), None

    return jax.lax.scan(step, (x, list(caches)), (jnp.arange(caches[0].shape[0]), layers))[0]


def decode_attention(
    q: Array, cache: Sequence[Array], prompt: Sequence[Array], prompt_mask: Array, cache_mask: Array
) -> Array:
    """One query a slot over its prompt and its cached tokens, merged in one float32 softmax.

    q ``[P, g, Hkv, r, d]``; cache k ``[P, g, Hkv, d, T]`` and v ``[P, g, Hkv, T, d]``, the query's own token
    included; prompt k ``[P, Hkv, d, L]`` and v ``[P, Hkv, L, d]``; masks ``[P, L]`` and ``[P, g, T]``.
    """
    f32, (p, g, k, r, d) = jnp.float32, q.shape

    def back(x):
        return x.reshape(p, k, g, r, -1).swapaxes(1, 2)

    def there(x):
        return x.swapaxes(1, 2).reshape(p, k, g * r, -1)

    q = q * d**-0.5
    by_prompt = q.swapaxes(1, 2).reshape(p, k, g * r, d)
    s_prompt = jnp.matmul(by_prompt, prompt[0], preferred_element_type=f32)
    s_prompt = jnp.where(prompt_mask[:, None, None], s_prompt, -jnp.inf)
    s_cache = jnp.matmul(q, cache[0], preferred_element_type=f32)
    s_cache = jnp.where(cache_mask[:, :, None, None], s_cache, -jnp.inf)
    top = jnp.maximum(back(s_prompt.max(-1, keepdims=True)), s_cache.max(-1, keepdims=True))
    w_prompt, w_cache = jnp.exp(s_prompt - there(top)), jnp.exp(s_cache - top)
    total = back(w_prompt.sum(-1, keepdims=True)) + w_cache.sum(-1, keepdims=True)
    out = back(jnp.matmul((w_prompt / there(total)).astype(prompt[1].dtype), prompt[1]))
    return out + jnp.matmul((w_cache / total).astype(cache[1].dtype), cache[1])
