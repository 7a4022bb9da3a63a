"""Keys and values of the samples that are being decoded: a token's are written, then those of all live tokens read.

All slots write at the same place of a ring, which is cut into blocks; blocks in which no slot has a live token are
not read. Of a prompt the caches are ``[R, Hkv, d, L]`` (keys) and ``[R, Hkv, L, d]`` (values), a block of its row of
slots ``[R, S, Hkv, d, B]`` and ``[R, S, Hkv, B, d]``: both as the multiplication reads them. On a CPU every block is an
array, and a branch leaves it out; on a TPU all layers and blocks are one array, and a loop over the live ones brings
each into fast memory, where a branch would have whole caches copied. There heads and slots are one axis, ``[R, Hkv * S,
...]``: a token's numbers lie side by side, in tiles whose other side is that axis, of four at least in eight bits, and
two heads alone would leave half of them empty. On a GPU the whole ring of a layer is one array, keys ``[R, S, Hkv, T,
d]`` as values, of which a kernel reads each slot's own tokens (`grpojax.programs.decode_attention_gpu`).

In eight bits an array is a `grpojax.models.quantised.Int8`, whose scales have all its axes but d. Tokens are rounded as
they are written, and multiplied as they lie there.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh
from jax.typing import DTypeLike

from grpojax.host.errors import UserError
from grpojax.models import kv_heads, quantised
from grpojax.models.compute import Compute
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.sharding import TRAIN, constrain, spec
from grpojax.types import Array, Scalar

MOST = 8  # blocks of a ring
SHORTEST = {"cpu": 64, "tpu": 128}  # positions of a block from which on leaving one out pays for asking
AT_ONCE = 64  # positions that a GPU's kernel reads at a time
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


def ring(tokens: int, compute: Compute) -> Ring:
    """The ring of samples of at most ``tokens`` tokens, in blocks whose size is chosen by platform.

    On a CPU or a TPU there are at most 8 blocks, and fewer where a block would be so short that leaving one out costs
    more than reading it. On a GPU a block has 64 positions: what the kernel reads at a time.

    Args:
      tokens: T.
      compute: for the platform.

    Example:
      >>> [ring(1024, Compute(platform=p)) for p in ("cpu", "tpu", "gpu")]
      [Ring(blocks=8, width=128), Ring(blocks=8, width=128), Ring(blocks=16, width=64)]
    """
    if compute.on_gpu:
        from grpojax.programs import decode_attention_gpu

        width = min(AT_ONCE, max(decode_attention_gpu.SHORTEST, 1 << (tokens - 1).bit_length()))
    else:
        width = -(-tokens // min(MOST, max(1, tokens // SHORTEST.get(platform(compute), tokens))))
    return Ring(-(-tokens // width), width)


def platform(compute: Compute) -> str:
    """What is compiled for."""
    return compute.platform or jax.default_backend()


def unrolls(compute: Compute) -> bool:
    """Whether layers are a list and not stacked: CPUs and GPUs copy each layer's slice of a stacked array before they
    multiply, but read separate arrays in place; a TPU reads the slice where it lies."""
    return platform(compute) != "tpu"


def dtype_of(cache_dtype: str, compute: Compute) -> jnp.dtype:
    """The dtype that `grpojax.programs.sampler.SamplerConfig.cache_dtype` stands for.

    Raises:
      UserError: eight bits on a GPU.

    Example:
      >>> dtype_of("compute", Compute(dtype="bfloat16")), dtype_of("int8", Compute(platform="tpu"))
      (dtype(bfloat16), dtype('int8'))
    """
    if cache_dtype == "int8" and compute.on_gpu:
        raise UserError(
            "cache_dtype=int8: the kernels that read keys and values on a GPU take floats; set "
            "rollout.cache_dtype=compute (rollout.weights=int8 works there)"
        )
    return jnp.dtype(compute.dtype if cache_dtype == "compute" else cache_dtype)


def per_layer(stacked: Any, unroll: bool) -> Any:
    """A stacked tree as it is, or as a list of one tree a layer."""
    if not unroll:
        return stacked
    n = jax.tree.leaves(stacked)[0].shape[0]
    return [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(n)]


def empty(c: DecoderConfig, rows: int, slots: int, ring: Ring, dtype: Any, compute: Compute) -> tuple[Any, Any]:
    """Keys and values of all layers and slots, all 0: of each an array ``[layers, blocks, R, Hkv * S, ...]``, or a list
    of a tuple of arrays, one a block (on a GPU one in all), for each layer."""
    gpu = compute.on_gpu
    blocks, width = (1, ring.size) if gpu else ring
    heads, unrolled = kv_heads.on_mesh(c, compute.mesh), unrolls(compute)
    shape, axes = ((slots, heads), (None, "kv_heads")) if unrolled else ((heads * slots,), ("kv_heads",))

    def zeros(*last, dtype=dtype):
        x = jnp.zeros((c.num_layers, blocks, rows, *shape, *last), dtype)
        return constrain(x, compute.mesh, None, None, "shard", *axes, *(None,) * len(last))

    def all_of(*last):
        x = zeros(*last)
        if dtype == jnp.int8:
            x = quantised.Int8(x, zeros(width, dtype=quantised.CACHE_SCALE))
        return [tuple(per_layer(layer, True)) for layer in per_layer(x, True)] if unrolled else x

    return all_of(*((width, c.head_dim) if gpu else (c.head_dim, width))), all_of(width, c.head_dim)


# ---------------------------------------------------------------------------------- samples of an earlier rollout


class ReadSamples(NamedTuple):
    """Samples that an earlier rollout drew in part, once they were read: K of each data-parallel shard.

    Attributes:
      kv: keys and values of their prompts and of what follows, ``[layers, K, N, Hkv, d]`` each.
      first: ``[K]`` int32, where in N a sample's own tokens begin.
      counts: ``[K]`` int32, how many it has; the last of them has no keys and values yet.
      slots: ``[K]`` int32, its slot of the shard, ``row * S + slot``.
      used: ``[1]`` int32, how many of the K there are.
    """

    kv: tuple[Array, Array]
    first: Array
    counts: Array
    slots: Array
    used: Array


def insert(
    samples: ReadSamples, caches: Sequence[Any], slots: int, ring: Ring, dtype: Any, compute: Compute
) -> tuple[Any, Any]:
    """Empty caches with the tokens of partial samples, as a loop that begins at position 0 reads them.

    The tokens before a sample's newest one are the last positions of the ring; the newest is yet to be written, at 0.

    Args:
      samples: whose tokens.
      caches: keys and values (`empty`).
      slots: of a row.
      ring, dtype: of the caches.
      compute: for the platform, and the mesh.
    """
    gpu, listed = compute.on_gpu, unrolls(compute)
    blocks, width = (1, ring.size) if gpu else ring

    def laid_out(x: Array, i: Scalar, samples: ReadSamples, *, across: bool) -> Any:
        """One sample's ``[layers, blocks, Hkv, width, d]``, or with the last two axes in the other order, as stored."""
        at = jnp.arange(ring.size) - ring.size + samples.counts[i] - 1  # which of its tokens each position has
        x = jax.lax.dynamic_index_in_dim(x, i, 1, keepdims=False)
        x = jnp.take(x, jnp.clip(samples.first[i] + at, 0, x.shape[1] - 1), 1)
        x = jnp.where((at >= 0)[:, None, None], x, jnp.zeros((), x.dtype))
        x = x.reshape(x.shape[0], blocks, width, *x.shape[2:]).transpose((0, 1, 3, 4, 2) if across else (0, 1, 3, 2, 4))
        return quantised.stored(x, dtype, -2 if across else -1)

    def of_shard(samples: ReadSamples, caches: tuple[Any, Any]) -> tuple[Any, Any]:
        def put(i: Scalar, caches: tuple[Any, Any]) -> tuple[Any, Any]:
            row, slot = jnp.divmod(samples.slots[i], slots)

            def into(cache: Array, new: Array) -> Array:
                at = (row, slot) if listed else (0, 0, row, 0, slot)
                new = jnp.expand_dims(new, (0, 1) if listed else (2, 4))
                return jax.lax.dynamic_update_slice(cache, new, (*at, *(0,) * (cache.ndim - len(at))))

            out = []
            for cache, x, across in zip(caches, samples.kv, (not gpu, False), strict=True):
                new = laid_out(x, i, samples, across=across)
                if listed:
                    new = [tuple(per_layer(layer, True)) for layer in per_layer(new, True)]
                out.append(jax.tree.map(into, cache, new))
            return out[0], out[1]

        if listed:
            return jax.lax.fori_loop(0, samples.used[0], put, caches)
        split = jax.tree.map(lambda x: x.reshape(*x.shape[:3], -1, slots, *x.shape[4:]), caches)
        done = jax.lax.fori_loop(0, samples.used[0], put, split)
        return jax.tree.map(lambda x, like: x.reshape(like.shape), done, caches)

    if compute.mesh is not None:
        shard, of_kv = spec(("shard",), TRAIN), spec((None, "shard", None, "kv_heads"), TRAIN)
        held = spec(("shard", None, "kv_heads") if listed else (None, None, "shard", "kv_heads"), TRAIN)
        takes = ReadSamples((of_kv, of_kv), shard, shard, shard, shard), held
        of_shard = jax.shard_map(of_shard, mesh=compute.mesh, in_specs=takes, out_specs=held, check_vma=False)
    with jax.named_scope("insert_partial"):
        return of_shard(samples, (caches[0], caches[1]))


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
        updated, axes = [], (-2 if compute.on_gpu else -1, -2)
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

    n = jax.tree.leaves(caches)[0].shape[0]
    return jax.lax.scan(step, (x, list(caches)), (jnp.arange(n), layers))[0]


def _axes(new: quantised.Matrix, axis: int) -> Any:
    """Along which axis the tokens of a cache follow each other: ``axis``, and the last one of scales."""
    return quantised.Int8(axis, -1) if isinstance(new, quantised.Int8) else axis


def _put(caches: Sequence[Any], kv: Sequence[Any], axes: Sequence[int], position: Scalar) -> list[tuple[Any, ...]]:
    """A token along ``axes`` of keys and values: into the array that has the position, the others stay as they are."""

    def put(array, new, axis, start):
        new, at = jnp.expand_dims(new, axis), [0] * array.ndim
        if start is None:
            at[axis] = position
            return jax.lax.dynamic_update_slice(array, new, at)
        width = array.shape[axis]
        at[axis] = jnp.clip(position - start, 0, width - 1)
        here = (start <= position) & (position < start + width)
        new = jnp.where(here, new, jax.lax.dynamic_slice(array, at, new.shape))
        return jax.lax.dynamic_update_slice(array, new, at)

    out = []
    for blocks, new, axis in zip(caches, kv, axes, strict=True):
        width, along = jax.tree.leaves(blocks)[0].shape[axis], _axes(new, axis)
        starts = [None] if len(blocks) == 1 else [j * width for j in range(len(blocks))]
        each = zip(blocks, starts, strict=True)
        out.append(tuple(jax.tree.map(functools.partial(put, start=start), a, new, along) for a, start in each))
    return out


def _put_stacked(caches: Sequence[Any], k: Any, v: Any, position: Scalar, layer: Scalar) -> list[Any]:
    """The same of caches of all layers and blocks."""
    block, within = jnp.divmod(position, jax.tree.leaves(caches[1])[0].shape[-2])

    def put(array, new, axis):
        at: list[Any] = [layer, block] + [0] * (array.ndim - 2)
        new = jnp.expand_dims(new.swapaxes(1, 2).reshape(1, 1, len(new), -1, *new.shape[3:]), axis)
        if array.ndim == 5:
            # Scales. For a column by itself the compiler would lay out all of them, and copy them for every layer.
            old = jax.lax.dynamic_slice(array, at, (1, 1, *array.shape[2:]))
            new = jnp.where(jnp.arange(array.shape[-1]) == within, new, old)
        else:
            at[axis] = within
        return jax.lax.dynamic_update_slice(array, new, at)

    return [jax.tree.map(put, c, new, _axes(new, axis)) for c, new, axis in zip(caches, (k, v), (-1, -2), strict=True)]


# ---------------------------------------------------------------------------------------------------- attention


class Cached(NamedTuple):
    """What one layer reads: its blocks of keys ``[R, S, Hkv, d, B]`` and values ``[R, S, Hkv, B, d]``, or where
    ``layer`` says which it is, those of all layers, ``[layers, blocks, R, Hkv * S, ...]``; on a GPU one array of each,
    ``[R, S, Hkv, T, d]``. Each an array or an `Int8`, with scales ``[R, S, Hkv, B]``."""

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
    q: Array, cached: Cached, prompt: Sequence[quantised.Matrix], prompt_mask: Array, seen: Seen, compute: Compute
) -> Array:
    """One query a slot over its prompt and its cached tokens, merged in one float32 softmax.

    q ``[R, S, Hkv, r, d]``; the query's own token is in the cache; prompt k ``[R, Hkv, d, L]`` and v
    ``[R, Hkv, L, d]``, its mask ``[R, L]``; compute says the platform, and of a GPU the mesh. What is in eight bits is
    multiplied in q's dtype.
    """
    p, g, k, r, d = q.shape
    q = q * d**-0.5
    by_prompt = q.swapaxes(1, 2).reshape(p, k, g * r, d)
    if compute.on_gpu:
        from grpojax.programs import decode_attention_gpu  # only here: some builds of jax come without Triton

        found = decode_attention_gpu.of_prompt(
            by_prompt, *prompt, prompt_mask.sum(-1, dtype=jnp.int32), mesh=compute.mesh
        )
        (keys,), (values,) = cached.keys, cached.values
        so_far = tuple(x.reshape(p, k, g, r, *x.shape[3:]) for x in found)
        given = q, keys, values, seen.position, seen.counts, so_far
        return decode_attention_gpu.attend(*given, block=seen.ring.width, mesh=compute.mesh)
    scores = quantised.scores(by_prompt, prompt[0])
    scores = jnp.where(prompt_mask[:, None, None], scores, -jnp.inf)
    if cached.layer is None:
        return _merged_with_branches(q, cached, scores, prompt[1], seen)
    return _merged_in_a_loop(q, cached, scores, prompt[1], seen, compute.mesh)


def _of_prompt(scores: Array, values: quantised.Matrix, dtype: DTypeLike) -> tuple[Array, Array, Array]:
    """The highest score, the sum of ``exp(score - highest)`` and that of the values, ``[R, Hkv, S * r, 1 or d]``."""
    top = scores.max(-1, keepdims=True)
    w = jnp.exp(scores - top)
    return top, w.sum(-1, keepdims=True), quantised.mixed(w, values, dtype)


def _by_slot(x: Array, like: Array) -> Array:
    """``[R, Hkv, S * r, n]`` as ``[R, S, Hkv, r, n]``."""
    p, g, k, r, _ = like.shape
    return x.reshape(p, k, g, r, -1).swapaxes(1, 2)


def _merged_with_branches(q: Array, cached: Cached, s_prompt: Array, v_prompt: quantised.Matrix, seen: Seen) -> Array:
    """All scores at once; a block that is not live has none."""
    p, g, k, r, d = q.shape
    mixed = functools.partial(quantised.mixed, dtype=q.dtype)

    def there(x):
        return x.swapaxes(1, 2).reshape(p, k, g * r, -1)

    width, live = seen.mask.shape[-1] // len(cached.keys), seen.live
    s_cache = _products(quantised.scores, [q] * len(cached.keys), cached.keys, live, width)
    s_cache = s_cache[0] if len(s_cache) == 1 else jnp.concatenate(s_cache, -1)
    s_cache = jnp.where(seen.mask[:, :, None, None], s_cache, -jnp.inf)
    top = jnp.maximum(_by_slot(s_prompt.max(-1, keepdims=True), q), s_cache.max(-1, keepdims=True))
    w_prompt, w_cache = jnp.exp(s_prompt - there(top)), jnp.exp(s_cache - top)
    total = _by_slot(w_prompt.sum(-1, keepdims=True), q) + w_cache.sum(-1, keepdims=True)
    out, w_cache = _by_slot(mixed(w_prompt / there(total), v_prompt), q), w_cache / total
    parts = [w_cache[..., j * width : (j + 1) * width] for j in range(len(cached.values))]
    return sum(_products(mixed, parts, cached.values, live, d), out)


def _as_written(x: Array, axis: int, mesh: Mesh | None) -> Array:
    """A block ``[R, Hkv * S, ...]`` with tokens along ``axis``, and not in another layout, for which the compiler would
    copy those of all layers, for each layer."""
    layout = Layout((axis % 4, *(i for i in range(4) if i != axis % 4)))
    pinned, cut = functools.partial(with_layout_constraint, layouts=layout), spec(("shard", "kv_heads"), TRAIN)
    if mesh is not None:  # a constraint on all parts at once would gather them
        pinned = jax.shard_map(pinned, mesh=mesh, in_specs=cut, out_specs=cut)
    return pinned(x)


def _merged_in_a_loop(
    q: Array, cached: Cached, s_prompt: Array, v_prompt: quantised.Matrix, seen: Seen, mesh: Mesh | None
) -> Array:
    """Block by live block: what was summed so far is scaled whenever a larger score turns up."""
    live, mask = seen.live, seen.mask.reshape(*seen.mask.shape[:2], len(seen.live), -1)
    which = jnp.nonzero(live, size=len(live), fill_value=0)[0]

    def block(cache, j, axis):
        def of(x, axis):
            of_layer = jax.lax.dynamic_slice_in_dim(x, cached.layer, 1)
            x = jax.lax.dynamic_slice_in_dim(of_layer, j, 1, 1)[0, 0]
            x = _as_written(x, axis, mesh) if x.ndim == 4 else x
            return x.reshape(len(x), q.shape[2], q.shape[1], *x.shape[2:]).swapaxes(1, 2)

        return jax.tree.map(of, cache, _axes(cache, axis))

    def add(n, so_far):
        (top, total, out), j = so_far, which[n]
        scores = quantised.scores(q, block(cached.keys, j, -1))
        mine = jax.lax.dynamic_index_in_dim(mask, j, 2, keepdims=False)
        scores = jnp.where(mine[:, :, None, None], scores, -jnp.inf)
        highest = jnp.maximum(top, scores.max(-1, keepdims=True))
        w, kept = jnp.exp(scores - highest), jnp.exp(top - highest)
        more = quantised.mixed(w, block(cached.values, j, -2), q.dtype)
        return highest, kept * total + w.sum(-1, keepdims=True), kept * out + more

    of_prompt = tuple(_by_slot(x, q) for x in _of_prompt(s_prompt, v_prompt, q.dtype))
    with jax.named_scope(LOOP):
        _, total, out = jax.lax.fori_loop(0, live.sum(), add, of_prompt)
    return out / total


def _products(
    product: Callable[..., Array], left: Sequence[Array], blocks: Sequence[Any], live: Array, columns: int
) -> list[Array]:
    """``product(left[j], blocks[j])`` of each block that is live; 0 of the others, which are not read."""
    if len(blocks) == 1:
        return [product(left[0], blocks[0])]

    def or_nothing(a, block, here):
        nothing = jnp.zeros((*a.shape[:-1], columns), jnp.float32)
        return jax.lax.cond(here, lambda: product(a, block), lambda: nothing)

    return [or_nothing(a, block, live[j]) for j, (a, block) in enumerate(zip(left, blocks, strict=True))]
