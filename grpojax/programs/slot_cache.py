"""Keys and values of the samples that are being decoded: a token's are written, then those of all live tokens read.

All slots write at the same place of a ring, which is cut into blocks; blocks in which no slot has a live token are
not read. Of a prompt the caches are ``[R, Hkv, d, L]`` (keys) and ``[R, Hkv, L, d]`` (values), a block of its row of
slots ``[R, S, Hkv, d, B]`` and ``[R, S, Hkv, B, d]``: both as the multiplication reads them. On a CPU every block is an
array, and a branch leaves it out; on a TPU all layers and blocks are one array, and a loop over the live ones brings
each into fast memory, where a branch would have whole caches copied. On a GPU the whole ring of a layer is one array,
keys ``[R, S, Hkv, T, d]`` as values, of which a kernel reads each slot's own tokens (`grpojax.programs.slot_kernel`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpojax.host.errors import UserError
from grpojax.models import kv_heads
from grpojax.models.compute import Compute
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.sharding import constrain
from grpojax.types import Array, Scalar

_MOST = 8  # blocks of a ring, unless told otherwise
_SHORTEST = {"cpu": 64, "tpu": 128}  # positions of a block from which on leaving one out pays for asking
_AT_ONCE = 64  # positions that a GPU's kernel reads at a time, unless told otherwise
LOOP = "blocks_of_cache"  # the scope of the loop over blocks, by which its iterations are found in a compiled program


class Ring(NamedTuple):
    """How the positions of a slot are cut into blocks.

    Attributes:
      blocks: how many.
      width: positions of each.
    """

    blocks: int
    width: int

    @property
    def size(self) -> int:
        """Positions of the whole ring."""
        return self.blocks * self.width

    def live(self, position: Scalar, longest: Scalar) -> Array:
        """``[blocks]`` bool: those with one of the ``longest`` newest positions, the newest at ``position``."""
        last = (jnp.arange(self.blocks) + 1) * self.width - 1
        age = jnp.where(last - self.width < position, jnp.maximum(position - last, 0), position - last + self.size)
        return age < longest

    def mean_live(self, tokens: int, rounds: int) -> float:
        """Share of its blocks that is read on the average, where ``rounds`` times after each other all slots draw
        ``tokens`` tokens."""
        step = np.arange(max(1, rounds * (tokens - 1)))
        first = step - step % max(1, tokens - 1)
        return float(np.minimum(step // self.width - first // self.width + 1, self.blocks).mean()) / self.blocks


def ring(tokens: int, block: int, compute: Compute) -> Ring:
    """The ring of samples of at most ``tokens`` tokens.

    Args:
      tokens: T.
      block: positions of a block; 0 takes about an eighth of the ring on a CPU or a TPU, and 64 on a GPU, whose kernel
        reads a block or, of wide heads, part of one at a time.
      compute: for the platform.

    Raises:
      UserError: a block on a GPU that is no power of two, or shorter than 16.

    Example:
      >>> [ring(1024, 0, Compute(platform=p)) for p in ("cpu", "tpu", "gpu")]
      [Ring(blocks=8, width=128), Ring(blocks=8, width=128), Ring(blocks=16, width=64)]
    """
    if on_gpu(compute):
        from grpojax.programs import slot_kernel

        least = slot_kernel.SHORTEST
        if block and (block < least or block & (block - 1)):
            raise UserError(f"block={block}: on a GPU, make rollout.block 0 or a power of two from {least} on")
        width = block or min(_AT_ONCE, max(least, 1 << (tokens - 1).bit_length()))
    else:
        width = block or -(-tokens // min(_MOST, max(1, tokens // _SHORTEST.get(_platform(compute), tokens))))
    return Ring(-(-tokens // width), width)


def _platform(compute: Compute) -> str:
    return compute.platform or jax.default_backend()


def on_gpu(compute: Compute) -> bool:
    """Whether it is a GPU that is compiled for."""
    return _platform(compute) == "gpu"


def unrolls(compute: Compute) -> bool:
    """Whether layers are a list and not stacked: CPUs and GPUs copy each layer's slice of a stacked array before they
    multiply, but read separate arrays in place; a TPU reads the slice where it lies."""
    return _platform(compute) != "tpu"


def per_layer(stacked: Any, unroll: bool) -> Any:
    """A stacked tree as it is, or as a list of one tree a layer."""
    if not unroll:
        return stacked
    n = jax.tree.leaves(stacked)[0].shape[0]
    return [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(n)]


def empty(c: DecoderConfig, rows: int, slots: int, ring: Ring, dtype: Any, compute: Compute) -> tuple[Any, Any]:
    """Keys and values of all layers and slots, all 0: of each an array ``[layers, blocks, ...]``, or a list of a tuple
    of arrays, one a block (on a GPU one in all), for each layer."""
    gpu = on_gpu(compute)
    blocks, width = (1, ring.size) if gpu else ring

    def zeros(*last):
        x = jnp.zeros((c.num_layers, blocks, rows, slots, kv_heads.on_mesh(c, compute.mesh), *last), dtype)
        x = constrain(x, compute.mesh, None, None, "lane", None, "kv_heads", None, None)
        return [tuple(layer) for layer in x] if unrolls(compute) else x

    return zeros(*((width, c.head_dim) if gpu else (c.head_dim, width))), zeros(width, c.head_dim)


def no_prompts(of_all: Any, rows: int, compute: Compute) -> Any:
    """Room for the keys and values of a prompt a row, all 0; ``of_all`` are those of all prompts."""
    layers = () if unrolls(compute) else (None,)

    def nothing(x):
        x = jnp.zeros((*x.shape[: len(layers)], rows, *x.shape[len(layers) + 1 :]), x.dtype)
        return constrain(x, compute.mesh, *layers, "lane", "kv_heads", None, None)

    return jax.tree.map(nothing, of_all)


# ------------------------------------------------------------------------------------------------------- layers


def over_layers(
    body: Callable[..., Array], x: Array, layers: Any, caches: Sequence[Any], position: Scalar, compute: Compute
) -> tuple[Array, Sequence[Any]]:
    """Runs ``body(x, layer, write) -> x`` layer by layer.

    ``write(k, v)`` puts a token's keys and values into the layer's caches at ``position`` and returns what
    `decode_attention` reads of them. Caches are updated in place, as reads come after the write. Returns
    ``(x, caches)``.
    """
    if unrolls(compute):
        updated, axes = [], (-2 if on_gpu(compute) else -1, -2)
        for layer, *own in zip(layers, *caches, strict=True):

            def write(k, v, own=own):
                updated.append(_put(own, (k, v), axes, position))
                return Cached(*updated[-1])

            x = body(x, layer, write)
        return x, [list(column) for column in zip(*updated, strict=True)]

    def step(carry, i_layer):
        (x, caches), (i, layer) = carry, i_layer

        def write(k, v):
            nonlocal caches
            caches = _put_stacked(caches, k, v, position, i)
            return Cached(caches[0], caches[1], i)

        x = body(x, layer, write)
        return (x, caches), None

    n = caches[0].shape[0]
    return jax.lax.scan(step, (x, list(caches)), (jnp.arange(n), layers))[0]


def _put(caches: Sequence[Any], kv: Sequence[Array], axes: Sequence[int], position: Scalar) -> list[Any]:
    """A token along ``axes`` of keys and values: into the array that has the position, the others stay as they are."""

    def put(array, new, axis, start):
        at: list[Any] = [0] * array.ndim
        if start is None:
            at[axis] = position
            return jax.lax.dynamic_update_slice(array, new, at)
        width = array.shape[axis]
        at[axis] = jnp.clip(position - start, 0, width - 1)
        here = (start <= position) & (position < start + width)
        return jax.lax.dynamic_update_slice(
            array, jnp.where(here, new, jax.lax.dynamic_slice(array, at, new.shape)), at
        )

    out = []
    for arrays, new, axis in zip(caches, kv, axes, strict=True):
        new, width = jnp.expand_dims(new, axis), arrays[0].shape[axis]
        starts = [None] if len(arrays) == 1 else [j * width for j in range(len(arrays))]
        out.append(tuple(put(a, new, axis, start) for a, start in zip(arrays, starts, strict=True)))
    return out


def _put_stacked(caches: Sequence[Array], k: Array, v: Array, position: Scalar, layer: Scalar) -> list[Array]:
    """The same of caches of all layers and blocks."""
    keys, values = caches
    block, at = jnp.divmod(position, values.shape[-2])
    k, v = k[None, None, ..., None], v[None, None, ..., None, :]
    keys = jax.lax.dynamic_update_slice(keys, k, (layer, block, 0, 0, 0, 0, at))
    return [keys, jax.lax.dynamic_update_slice(values, v, (layer, block, 0, 0, 0, at, 0))]


# ---------------------------------------------------------------------------------------------------- attention


class Cached(NamedTuple):
    """What one layer reads: its blocks of keys ``[R, S, Hkv, d, B]`` and values ``[R, S, Hkv, B, d]``, or where
    ``layer`` says which it is, those of all layers, ``[layers, blocks, ...]``; on a GPU one array of each,
    ``[R, S, Hkv, T, d]``."""

    keys: Any
    values: Any
    layer: Any = None


class Seen(NamedTuple):
    """Which positions slots read, in the three ways in which platforms ask for it.

    Attributes:
      mask: ``[R, S, T]`` bool.
      live: ``[blocks]`` bool, the blocks that are read: of the others only the products are left out, which is all
        that reads them.
      counts: ``[R, S]`` int32, how many tokens of the slot, 0 where nobody asks what it draws; what a GPU reads.
      position: [] int32, where the newest token stands.
      ring: that all this is of.
    """

    mask: Array
    live: Array
    counts: Array
    position: Scalar
    ring: Ring


def decode_attention(
    q: Array, cached: Cached, prompt: Sequence[Array], prompt_mask: Array, seen: Seen, compute: Compute
) -> Array:
    """One query a slot over its prompt and its cached tokens, merged in one float32 softmax.

    q ``[R, S, Hkv, r, d]``; the query's own token is in the cache; prompt k ``[R, Hkv, d, L]`` and v
    ``[R, Hkv, L, d]``, its mask ``[R, L]``; compute says the platform, and of a GPU the mesh.
    """
    p, g, k, r, d = q.shape
    q = q * d**-0.5
    by_prompt = q.swapaxes(1, 2).reshape(p, k, g * r, d)
    if on_gpu(compute):
        from grpojax.programs import slot_kernel  # only here: some builds of jax come without Triton

        found = slot_kernel.of_prompt(by_prompt, *prompt, prompt_mask.sum(-1, dtype=jnp.int32), mesh=compute.mesh)
        (keys,), (values,) = cached.keys, cached.values
        given = q, keys, values, seen.position, seen.counts, *(x.reshape(p, k, g, r, *x.shape[3:]) for x in found)
        return slot_kernel.attend(*given, block=seen.ring.width, mesh=compute.mesh)
    scores = jnp.matmul(by_prompt, prompt[0], preferred_element_type=jnp.float32)
    scores = jnp.where(prompt_mask[:, None, None], scores, -jnp.inf)
    merge = _merged_with_branches if cached.layer is None else _merged_in_a_loop
    return merge(q, cached, scores, prompt[1], seen.mask, seen.live)


def _of_prompt(scores: Array, values: Array) -> tuple[Array, Array, Array]:
    """The highest score, the sum of ``exp(score - highest)`` and that of the values, ``[R, Hkv, S * r, 1 or d]``."""
    top = scores.max(-1, keepdims=True)
    w = jnp.exp(scores - top)
    out = jnp.matmul(w.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return top, w.sum(-1, keepdims=True), out


def _by_slot(x: Array, like: Array) -> Array:
    """``[R, Hkv, S * r, n]`` as ``[R, S, Hkv, r, n]``."""
    p, g, k, r, _ = like.shape
    return x.reshape(p, k, g, r, -1).swapaxes(1, 2)


def _merged_with_branches(
    q: Array, cached: Cached, s_prompt: Array, v_prompt: Array, cache_mask: Array, live: Array
) -> Array:
    """All scores at once; a block that is not live has none."""
    f32, (p, g, k, r, d) = jnp.float32, q.shape

    def there(x):
        return x.swapaxes(1, 2).reshape(p, k, g * r, -1)

    width = cache_mask.shape[-1] // len(cached.keys)
    s_cache = _products([q] * len(cached.keys), cached.keys, live, width)
    s_cache = s_cache[0] if len(s_cache) == 1 else jnp.concatenate(s_cache, -1)
    s_cache = jnp.where(cache_mask[:, :, None, None], s_cache, -jnp.inf)
    top = jnp.maximum(_by_slot(s_prompt.max(-1, keepdims=True), q), s_cache.max(-1, keepdims=True))
    w_prompt, w_cache = jnp.exp(s_prompt - there(top)), jnp.exp(s_cache - top)
    total = _by_slot(w_prompt.sum(-1, keepdims=True), q) + w_cache.sum(-1, keepdims=True)
    w_prompt = (w_prompt / there(total)).astype(v_prompt.dtype)
    out = _by_slot(jnp.matmul(w_prompt, v_prompt, preferred_element_type=f32), q)
    w_cache = (w_cache / total).astype(v_prompt.dtype)
    parts = [w_cache[..., j * width : (j + 1) * width] for j in range(len(cached.values))]
    return sum(_products(parts, cached.values, live, d), out)


def _merged_in_a_loop(
    q: Array, cached: Cached, s_prompt: Array, v_prompt: Array, cache_mask: Array, live: Array
) -> Array:
    """Block by live block: what was summed so far is scaled whenever a larger score turns up."""
    f32 = jnp.float32
    mask = cache_mask.reshape(*cache_mask.shape[:2], len(live), -1)
    which = jnp.nonzero(live, size=len(live), fill_value=0)[0]

    def block(x, j):
        of_layer = jax.lax.dynamic_slice_in_dim(x, cached.layer, 1)
        return jax.lax.dynamic_slice_in_dim(of_layer, j, 1, 1)[0, 0]

    def add(n, so_far):
        top, total, out = so_far
        j = which[n]
        scores = jnp.matmul(q, block(cached.keys, j), preferred_element_type=f32)
        mine = jax.lax.dynamic_index_in_dim(mask, j, 2, keepdims=False)
        scores = jnp.where(mine[:, :, None, None], scores, -jnp.inf)
        highest = jnp.maximum(top, scores.max(-1, keepdims=True))
        w, kept = jnp.exp(scores - highest), jnp.exp(top - highest)
        more = jnp.matmul(w.astype(v_prompt.dtype), block(cached.values, j), preferred_element_type=f32)
        return highest, kept * total + w.sum(-1, keepdims=True), kept * out + more

    of_prompt = tuple(_by_slot(x, q) for x in _of_prompt(s_prompt, v_prompt))
    with jax.named_scope(LOOP):
        _, total, out = jax.lax.fori_loop(0, live.sum(), add, of_prompt)
    return out / total


def _products(left: Sequence[Array], blocks: Sequence[Array], live: Array, columns: int) -> list[Array]:
    """``left[j] @ blocks[j]`` in float32 of each block that is live; 0 of the others, which are not read."""

    def product(a, block):
        return jnp.matmul(a, block, preferred_element_type=jnp.float32)

    if len(blocks) == 1:
        return [product(left[0], blocks[0])]

    def or_nothing(a, block, here):
        nothing = jnp.zeros((*a.shape[:-1], columns), jnp.float32)
        return jax.lax.cond(here, lambda: product(a, block), lambda: nothing)

    return [or_nothing(a, block, live[j]) for j, (a, block) in enumerate(zip(left, blocks, strict=True))]
