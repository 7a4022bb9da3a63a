"""The KV cache of the samples that are being decoded. A step writes a token's keys and values, then reads those of all
live tokens.

All slots write at the same position of a ring. The ring is cut into blocks, and a block in which no slot has a live
token is not read. The caches of prompts are ``[R, Hkv, d, L]`` (keys) and ``[R, Hkv, L, d]`` (values). A block of a row
of slots is ``[R, S, Hkv, d, B]`` and ``[R, S, Hkv, B, d]``. Both are in the order in which the matmul reads them.

The layout depends on the platform:

* CPU: every block is an array of its own, and a branch skips the blocks that are not live.
* TPU: all layers and blocks are one array, and a loop over the live blocks brings each into fast memory; a branch would
  copy whole caches. Heads and slots are one axis, ``[R, Hkv * S, ...]``. A token's numbers are adjacent in memory, and
  arrays are stored in tiles over that axis and these numbers. In eight bits a tile has at least four rows, so that two
  heads without the slots would leave half of it empty.
* GPU: the whole ring of a layer is one array, ``[R, S, Hkv, T, d]`` for keys and for values. A kernel reads only the
  tokens of each slot (`grpojax.programs.decode_attention_gpu`).

In eight bits an array is a `grpojax.models.quantised.Int8`, whose scales have all its axes except d. Tokens are rounded
when they are written, and the matmul reads the rounded numbers.
"""

import functools
import itertools
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
from grpojax.models.attention import Logits, capped
from grpojax.models.compute import Compute
from grpojax.models.decoder_config import DecoderConfig
from grpojax.sharding import TRAIN, constrain, spec
from grpojax.types import Array, Scalar

MOST = 8  # blocks of a ring
SHORTEST = {"cpu": 64, "tpu": 128}  # positions of a block; for a shorter one the test costs more than skipping saves
AT_ONCE = 64  # positions that the GPU kernel reads at a time
LOOP = "blocks_of_cache"  # scope of the loop over blocks; with it its iterations are found in a compiled program


class Ring(NamedTuple):
    """How the positions of a slot are cut into blocks.

    Attributes:
      blocks: number of blocks.
      width: positions of each block.
    """

    blocks: int
    width: int

    @property
    def size(self) -> int:
        """Positions of the whole ring."""
        return self.blocks * self.width

    def live(self, position: Scalar, longest: Scalar) -> Array:
        """``[blocks]`` bool: which blocks hold one of the ``longest`` newest positions; the newest is ``position``."""
        last = (jnp.arange(self.blocks) + 1) * self.width - 1
        age = jnp.where(last - self.width < position, jnp.maximum(position - last, 0), position - last + self.size)
        return age < longest

    def mean_live(self, tokens: int, rounds: int) -> float:
        """Average share of the blocks that a step reads, if all slots draw ``tokens`` tokens, ``rounds`` times in
        succession."""
        step = np.arange(max(1, rounds * (tokens - 1)))
        first = step - step % max(1, tokens - 1)
        return float(np.minimum(step // self.width - first // self.width + 1, self.blocks).mean()) / self.blocks


def ring(tokens: int, compute: Compute) -> Ring:
    """The ring for samples of at most ``tokens`` tokens. The platform decides the size of its blocks.

    On a CPU or a TPU there are at most 8 blocks, and fewer if skipping such a short block would cost more than reading
    it. On a GPU a block has 64 positions, which the kernel reads at a time.

    Args:
      tokens: T.
      compute: has the platform.

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
    """The platform that programs are compiled for."""
    return compute.platform or jax.default_backend()


def unrolls(compute: Compute) -> bool:
    """Whether layers are a list instead of stacked. CPUs and GPUs copy a layer's slice of a stacked array before they
    multiply, but read separate arrays in place. A TPU reads the slice in place."""
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
    """A stacked tree as it is, or with ``unroll`` as a list with one tree for each layer."""
    if not unroll:
        return stacked
    n = jax.tree.leaves(stacked)[0].shape[0]
    return [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(n)]


def empty(c: DecoderConfig, rows: int, slots: int, ring: Ring, dtype: Any, compute: Compute) -> tuple[Any, Any]:
    """Keys and values of all layers and slots, all 0. Each is an array ``[layers, blocks, R, Hkv * S, ...]``, or a list
    with a tuple for each layer; the tuple has one array for each block (on a GPU one array in all)."""
    gpu = compute.on_gpu
    blocks, width = (1, ring.size) if gpu else ring
    heads, unrolled = kv_heads.on_mesh(c, compute.mesh), unrolls(compute)
    shape, axes = ((slots, heads), (None, "kv_heads")) if unrolled else ((heads * slots,), ("kv_heads",))

    def zeros(*last, dtype=dtype):
        x = jnp.zeros((len(c.layers_of("attention")), blocks, rows, *shape, *last), dtype)
        return constrain(x, compute.mesh, None, None, "shard", *axes, *(None,) * len(last))

    def all_of(*last):
        x = zeros(*last)
        if dtype == jnp.int8:
            x = quantised.Int8(x, zeros(width, dtype=quantised.CACHE_SCALE))
        return [tuple(per_layer(layer, True)) for layer in per_layer(x, True)] if unrolled else x

    return all_of(*((width, c.head_dim) if gpu else (c.head_dim, width))), all_of(width, c.head_dim)


# ---------------------------------------------------------------------------------- samples of an earlier rollout


class ReadSamples(NamedTuple):
    """Unfinished samples of an earlier rollout after a forward over them: K for each data-parallel shard.

    Attributes:
      kv: keys and values of the prompts and of the samples' tokens, ``[layers, K, N, Hkv, d]`` each.
      first: ``[K]`` int32, where in N a sample's own tokens begin.
      counts: ``[K]`` int32, number of its own tokens; the last of them has no keys and values yet.
      slots: ``[K]`` int32, its slot in the shard, ``row * S + slot``.
      used: ``[1]`` int32, how many of the K entries hold a sample.
    """

    kv: tuple[Array, Array]
    first: Array
    counts: Array
    slots: Array
    used: Array


def insert(
    samples: ReadSamples, caches: Sequence[Any], slots: int, ring: Ring, dtype: Any, compute: Compute
) -> tuple[Any, Any]:
    """Puts the tokens of partial samples into empty caches, for a loop that begins at position 0.

    The tokens before a sample's newest one go to the last positions of the ring. The loop's first step writes the
    newest one at position 0.

    Args:
      samples: the samples.
      caches: keys and values (`empty`).
      slots: number of slots of a row.
      ring, dtype: ring and dtype of the caches.
      compute: has the platform and the mesh.
    """
    gpu, listed = compute.on_gpu, unrolls(compute)
    blocks, width = (1, ring.size) if gpu else ring

    def laid_out(x: Array, i: Scalar, samples: ReadSamples, *, across: bool) -> Any:
        """One sample as stored: ``[layers, blocks, Hkv, width, d]``, or with ``across`` the last two axes swapped."""
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


# ------------------------------------------------------------------------------- caches that more text is added to


# ------------------------------------------------------------------------------------------------------- layers


Put = Callable[..., tuple[Any, Any]]  # changes the caches of a layer; `one_token` and `whole_layer` make some


def over_layers(
    body: Callable[..., Any], x: Any, layers: Any, caches: Sequence[Any], put: Put, compute: Compute
) -> tuple[Any, Sequence[Any], Any]:
    """Runs ``body(x, layer, write) -> (x, kept)`` layer by layer, in a loop unless ``layers`` is a list.

    ``write(...)`` changes the layer's caches by ``put``, and returns what `put` says. Reads come after the write, so
    that caches are updated in place. In a list there may be layers that have no cache and do not write.

    Args:
      body: what to do with a layer.
      x: what goes from layer to layer.
      layers: what belongs to each layer.
      caches: keys and values (`empty`).
      put: ``(caches, i, ...) -> (caches, result)`` changes layer ``i`` in the caches of all layers. If ``i`` is None,
        the caches are of one layer only.
      compute: has the platform.

    Returns:
      ``(x, caches, kept)``, with what each layer kept stacked.
    """
    if isinstance(layers, list):
        write_next, updated = _writer(caches, put, compute)
        every = []
        for layer in layers:
            x, kept = body(x, layer, write_next)
            every += [] if kept is None else [kept]
        return x, updated(), jax.tree.map(lambda *layers: jnp.stack(layers), *every) if every else None

    def step(carry, i_layer):
        (x, caches), (i, layer) = carry, i_layer

        def write(*given):
            nonlocal caches
            caches, result = put(caches, i, *given)
            return result

        x, kept = body(x, layer, write)
        return (x, caches), kept

    n = jax.tree.leaves(caches)[0].shape[0]
    (x, caches), kept = jax.lax.scan(step, (x, list(caches)), (jnp.arange(n), layers))
    return x, caches, kept


def _writer(
    caches: Sequence[Any], put: Put, compute: Compute
) -> tuple[Callable[..., Any], Callable[[], Sequence[Any]]]:
    """``write(...)``, which each layer with a cache calls in its turn, and what returns the caches after that."""
    if unrolls(compute):
        own, updated = zip(*caches, strict=True), []

        def write(*given):
            new, result = put(next(own), None, *given)
            updated.append(new)
            return result

        return write, lambda: [list(column) for column in zip(*updated, strict=True)]
    stacked, numbers = [list(caches)], itertools.count()

    def write_stacked(*given):
        stacked[0], result = put(stacked[0], next(numbers), *given)
        return result

    return write_stacked, lambda: stacked[0]


def one_token(position: Scalar, compute: Compute, writes: Array | None = None) -> Put:
    """``write(k, v)`` puts a token's keys and values into the layer's caches at ``position``, and returns the `Cached`
    that `decode_attention` reads. Only the slots ``writes [R, S]`` bool are written; None writes all."""
    axes = (-2 if compute.on_gpu else -1, -2)

    def put(caches: Any, i: Any, k: Any, v: Any) -> tuple[Any, Cached]:
        if i is None:
            new = _put(caches, (k, v), axes, position, writes)
            return new, Cached(*new)
        new = _put_stacked(caches, k, v, position, i if isinstance(i, jax.Array) else jnp.int32(i), writes)
        return new, Cached(new[0], new[1], i)

    return put


def whole_layer(slots: int, ring: Ring, compute: Compute) -> Put:
    """``write(change)`` replaces all keys and values of a layer by ``change(keys, values)``, and returns these.

    They have one layout for all platforms, ``[R, S, Hkv, T, d]``. Only one layer is in this layout at a time.

    Args:
      slots: number of slots of a row.
      ring: ring of the caches.
      compute: has the platform.
    """
    listed, across = unrolls(compute), (not compute.on_gpu, False)
    blocks, width = (1, ring.size) if compute.on_gpu else ring

    def whole(cache: Any, across: bool) -> Array:
        if listed:
            return jnp.concatenate([b.swapaxes(-1, -2) if across else b for b in cache], -2)
        cache = cache.reshape(*cache.shape[:2], -1, slots, *cache.shape[3:])
        cache = (cache.swapaxes(-1, -2) if across else cache).transpose(1, 3, 2, 0, 4, 5)
        return cache.reshape(*cache.shape[:3], -1, cache.shape[-1])

    def cut(cache: Array, across: bool) -> Any:
        if listed:
            each = jnp.split(cache, blocks, -2)
            return tuple(b.swapaxes(-1, -2) if across else b for b in each)
        cache = cache.reshape(*cache.shape[:3], blocks, width, cache.shape[-1]).transpose(3, 0, 2, 1, 4, 5)
        cache = cache.swapaxes(-1, -2) if across else cache
        return cache.reshape(*cache.shape[:2], -1, *cache.shape[4:])

    def put(caches: Any, i: Any, change: Callable[[Array, Array], tuple[Array, Array]]) -> tuple[Any, Any]:
        own = caches if i is None else [jax.lax.dynamic_index_in_dim(c, i, keepdims=False) for c in caches]
        made = change(*map(whole, own, across))
        new = list(map(cut, made, across))
        if i is None:
            return new, made
        placed = functools.partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
        return [placed(c, n) for c, n in zip(caches, new, strict=True)], made

    return put


def _axes(new: quantised.Stored, axis: int) -> Any:
    """The axis of the tokens in a cache: ``axis``, and for scales the last axis."""
    return quantised.Int8(axis, -1) if isinstance(new, quantised.Int8) else axis


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
        width, along = jax.tree.leaves(blocks)[0].shape[axis], _axes(new, axis)
        starts = [None] if len(blocks) == 1 else [j * width for j in range(len(blocks))]
        each = zip(blocks, starts, strict=True)
        out.append(tuple(jax.tree.map(functools.partial(put, start=start), a, new, along) for a, start in each))
    return out


def _put_stacked(
    caches: Sequence[Any], k: Any, v: Any, position: Scalar, layer: Scalar, writes: Array | None
) -> list[Any]:
    """`_put` for caches in which all layers and blocks are one array."""
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

    return [jax.tree.map(put, c, new, _axes(new, axis)) for c, new, axis in zip(caches, (k, v), (-1, -2), strict=True)]


# ---------------------------------------------------------------------------------------------------- attention


class Cached(NamedTuple):
    """The caches that one layer reads. Each is an array, or an `Int8` with scales ``[R, S, Hkv, B]``.

    * CPU: the layer's blocks of keys ``[R, S, Hkv, d, B]`` and values ``[R, S, Hkv, B, d]``.
    * TPU: the blocks of all layers, ``[layers, blocks, R, Hkv * S, ...]``; ``layer`` is the number of this layer.
    * GPU: one array of keys and one of values, ``[R, S, Hkv, T, d]``.
    """

    keys: Any
    values: Any
    layer: Any = None


class Seen(NamedTuple):
    """Which positions slots read, in the three forms that the platforms need.

    Attributes:
      mask: ``[R, S, T]`` bool.
      live: ``[blocks]`` bool, the blocks that are read. For the others the matmuls are skipped, and nothing else reads
        a block.
      counts: ``[R, S]`` int32, number of the slot's tokens, or 0 if the slot is not active. Only a GPU uses it.
      position: [] int32, position of the newest token.
      ring: the ring of these positions.
      oldest: ``[R, S]`` int32, the first position of its prompt that a slot reads; None if slots read whole prompts.
    """

    mask: Array
    live: Array
    counts: Array
    position: Scalar
    ring: Ring
    oldest: Array | None = None

    def within(self, reach: Any, prompt_lengths: Array) -> "Seen":
        """What is left of it for a layer whose queries see ``reach`` tokens, itself included."""
        age = (self.position - jnp.arange(self.ring.size)) % self.ring.size
        return self._replace(
            mask=self.mask & (age < reach),
            live=self.live & self.ring.live(self.position, reach),
            counts=jnp.minimum(self.counts, reach),
            oldest=prompt_lengths[:, None] + self.counts - reach,
        )


_LOWEST = -1e30  # the score of a prompt's token out of the window; not -inf, since a slot may see none of its prompt


def decode_attention(
    q: Array,
    cached: Cached,
    prompt: Sequence[quantised.Stored],
    prompt_mask: Array,
    seen: Seen,
    compute: Compute,
    logits: Logits | None = None,
) -> Array:
    """Attention of one query for each slot over its prompt and its cached tokens, merged in one float32 softmax.

    q is ``[R, S, Hkv, r, d]``, and its own token is in the cache. The prompt's k is ``[R, Hkv, d, L]``, its v
    ``[R, Hkv, L, d]`` and its mask ``[R, L]``. ``compute`` has the platform and the mesh. Eight-bit arrays are
    multiplied in q's dtype. ``logits`` are what the layer does to them before the softmax.
    """
    (p, g, k, r, d), (cap, sinks) = q.shape, logits or Logits()
    sinks = None if sinks is None else sinks.reshape(k, r)
    q = q * d**-0.5
    by_prompt = q.swapaxes(1, 2).reshape(p, k, g * r, d)
    if compute.on_gpu:
        from grpojax.programs import decode_attention_gpu  # only here: some builds of jax come without Triton

        first = None if seen.oldest is None else jnp.repeat(seen.oldest, r, 1)
        found = decode_attention_gpu.of_prompt(
            by_prompt, *prompt, prompt_mask.sum(-1, dtype=jnp.int32), first, mesh=compute.mesh, cap=cap
        )
        (keys,), (values,) = cached.keys, cached.values
        so_far = tuple(x.reshape(p, k, g, r, *x.shape[3:]) for x in found)
        if sinks is not None:
            top, total, out = so_far
            top, total, kept = _with_sinks(top, total, sinks[:, None])
            so_far = top, total, out * kept[..., None]
        given = q, keys, values, seen.position, seen.counts, so_far
        return decode_attention_gpu.attend(*given, block=seen.ring.width, mesh=compute.mesh, cap=cap)
    scores = capped(quantised.scores(by_prompt, prompt[0]), cap)
    scores = jnp.where(prompt_mask[:, None, None], scores, -jnp.inf)
    if seen.oldest is not None:
        inside = jnp.arange(scores.shape[-1]) >= jnp.repeat(seen.oldest, r, 1)[:, None, :, None]
        scores = jnp.where(inside, scores, _LOWEST)
    if cached.layer is None:
        return _merged_with_branches(q, cached, scores, prompt[1], seen, Logits(cap, sinks))
    return _merged_in_a_loop(q, cached, scores, prompt[1], seen, compute.mesh, Logits(cap, sinks))


def _with_sinks(top: Array, total: Array, sinks: Array) -> tuple[Array, Array, Array]:
    """A softmax's highest score and sum with sinks as one more score each, and what the sums so far are multiplied
    by."""
    highest = jnp.maximum(top, sinks)
    kept = jnp.exp(top - highest)
    return highest, total * kept + jnp.exp(sinks - highest), kept


def _of_prompt(scores: Array, values: quantised.Stored, dtype: DTypeLike) -> tuple[Array, Array, Array]:
    """The highest score, the sum of ``exp(score - highest)``, and the sum of the values with these weights;
    ``[R, Hkv, S * r, 1 or d]``."""
    top = scores.max(-1, keepdims=True)
    w = jnp.exp(scores - top)
    return top, w.sum(-1, keepdims=True), quantised.mixed(w, values, dtype)


def _by_slot(x: Array, like: Array) -> Array:
    """``[R, Hkv, S * r, n]`` as ``[R, S, Hkv, r, n]``."""
    p, g, k, r, _ = like.shape
    return x.reshape(p, k, g, r, -1).swapaxes(1, 2)


def _merged_with_branches(
    q: Array, cached: Cached, s_prompt: Array, v_prompt: quantised.Stored, seen: Seen, logits: Logits
) -> Array:
    """Attention with all scores at once; the scores of blocks that are not live are not computed."""
    p, g, k, r, d = q.shape
    mixed = functools.partial(quantised.mixed, dtype=q.dtype)

    def there(x):
        return x.swapaxes(1, 2).reshape(p, k, g * r, -1)

    width, live = seen.mask.shape[-1] // len(cached.keys), seen.live
    s_cache = _products(quantised.scores, [q] * len(cached.keys), cached.keys, live, width)
    s_cache = s_cache[0] if len(s_cache) == 1 else jnp.concatenate(s_cache, -1)
    s_cache = jnp.where(seen.mask[:, :, None, None], capped(s_cache, logits.cap), -jnp.inf)
    top = jnp.maximum(_by_slot(s_prompt.max(-1, keepdims=True), q), s_cache.max(-1, keepdims=True))
    if logits.sinks is not None:
        top = jnp.maximum(top, logits.sinks[..., None])
    w_prompt, w_cache = jnp.exp(s_prompt - there(top)), jnp.exp(s_cache - top)
    total = _by_slot(w_prompt.sum(-1, keepdims=True), q) + w_cache.sum(-1, keepdims=True)
    if logits.sinks is not None:
        total = total + jnp.exp(logits.sinks[..., None] - top)
    out, w_cache = _by_slot(mixed(w_prompt / there(total), v_prompt), q), w_cache / total
    parts = [w_cache[..., j * width : (j + 1) * width] for j in range(len(cached.values))]
    return sum(_products(mixed, parts, cached.values, live, d), out)


def _as_written(x: Array, axis: int, mesh: Mesh | None) -> Array:
    """Pins a block ``[R, Hkv * S, ...]`` with tokens along ``axis`` to the layout that it was written in. For another
    layout the compiler would copy the blocks of all layers in every layer."""
    layout = Layout((axis % 4, *(i for i in range(4) if i != axis % 4)))
    pinned, cut = functools.partial(with_layout_constraint, layouts=layout), spec(("shard", "kv_heads"), TRAIN)
    if mesh is not None:  # a constraint on all parts at once would gather them
        pinned = jax.shard_map(pinned, mesh=mesh, in_specs=cut, out_specs=cut)
    return pinned(x)


def _merged_in_a_loop(
    q: Array,
    cached: Cached,
    s_prompt: Array,
    v_prompt: quantised.Stored,
    seen: Seen,
    mesh: Mesh | None,
    logits: Logits,
) -> Array:
    """Attention block by block over the live blocks; the sums so far are rescaled when a larger score turns up."""
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
        scores = capped(quantised.scores(q, block(cached.keys, j, -1)), logits.cap)
        mine = jax.lax.dynamic_index_in_dim(mask, j, 2, keepdims=False)
        scores = jnp.where(mine[:, :, None, None], scores, -jnp.inf)
        highest = jnp.maximum(top, scores.max(-1, keepdims=True))
        w, kept = jnp.exp(scores - highest), jnp.exp(top - highest)
        more = quantised.mixed(w, block(cached.values, j, -2), q.dtype)
        return highest, kept * total + w.sum(-1, keepdims=True), kept * out + more

    top, total, out = (_by_slot(x, q) for x in _of_prompt(s_prompt, v_prompt, q.dtype))
    if logits.sinks is not None:
        top, total, kept = _with_sinks(top, total, logits.sinks[..., None])
        out = out * kept
    with jax.named_scope(LOOP):
        _, total, out = jax.lax.fori_loop(0, live.sum(), add, (top, total, out))
    return out / total


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
