"""The KV cache of the samples that are being decoded: what it has to do, on any platform.

A step writes a token's keys and values, then reads those of all live tokens. All slots write at the same position of a
ring. The ring is cut into blocks, and a block in which no slot has a live token is not read. The caches of prompts are
``[R, Hkv, d, L]`` (keys) and ``[R, Hkv, L, d]`` (values), in the order in which the matmul reads them.

How the slots' own tokens lie depends on the platform. Each has a file with its `Cache`: ``kv_cache_cpu``,
``kv_cache_tpu`` and ``kv_cache_gpu``. `of` takes the right one.

Keys and values are arrays, or in the form of an extension (`grpojax.models.number_formats.Stored`). Tokens are rounded
when they are written, and the matmul reads the rounded numbers.
"""

import abc
import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from grpojax.host.errors import UserError
from grpojax.models import kv_heads
from grpojax.models.attention import Logits, capped
from grpojax.models.compute import Compute
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.number_formats import FLOATS, CacheFormat, Floats, Kept, dot_keys, format_of, mix_values
from grpojax.sharding import TRAIN, constrain, spec
from grpojax.types import Array, Scalar

MOST = 8  # blocks of a ring
SHORTEST = {"cpu": 64, "tpu": 128}  # positions of a block; for a shorter one the test costs more than skipping saves
AT_ONCE = 64  # positions that the GPU kernel reads at a time
LOOP = "blocks_of_cache"  # scope of a loop over blocks; with it its iterations are found in a compiled program


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


def format_of_cache(cache_dtype: str, compute: Compute) -> CacheFormat:
    """How keys and values are stored by `grpojax.programs.sampler_config.SamplerConfig.cache_dtype`.

    Raises:
      UserError: another format than floats on a GPU, or one that no extension brings.

    Example:
      >>> format_of_cache("compute", Compute(dtype="bfloat16"))
      Floats(dtype=dtype(bfloat16))
    """
    if cache_dtype in FLOATS:
        return Floats(jnp.dtype(compute.dtype if cache_dtype == "compute" else cache_dtype))
    if compute.on_gpu:
        raise UserError(
            f"cache_dtype={cache_dtype}: the kernels that read keys and values on a GPU take floats; set "
            f"rollout.cache_dtype=compute (rollout.weights={cache_dtype} works there)"
        )
    return format_of(cache_dtype, "rollout.cache_dtype").cache


def per_layer(stacked: Any, unroll: bool) -> Any:
    """A stacked tree as it is, or with ``unroll`` as a list with one tree for each layer."""
    if not unroll:
        return stacked
    n = jax.tree.leaves(stacked)[0].shape[0]
    return [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(n)]


class Cached(NamedTuple):
    """The caches that one layer reads, as its `Cache` lays them out.

    Attributes:
      keys, values: the layer's own, or those of all layers.
      layer: number of the layer in those of all layers; None if they are its own.
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


class Cache(abc.ABC):
    """The keys and values of slots on one platform.

    Args:
      compute: has the platform and the mesh.

    Attributes:
      listed: whether layers are a list, and each has arrays of its own. CPUs and GPUs copy a layer's slice of a stacked
        array before they multiply, but read separate arrays in place. A TPU reads the slice in place.
      across: for keys and for values, whether a token's numbers are ``d`` rows of a block and not ``d`` columns.
    """

    listed: ClassVar[bool]
    across: ClassVar[tuple[bool, bool]] = (True, False)

    def __init__(self, compute: Compute):
        self.compute = compute

    def blocks(self, ring: Ring) -> Ring:
        """The arrays that a ring is cut into."""
        return ring

    @abc.abstractmethod
    def empty(self, c: DecoderConfig, rows: int, slots: int, ring: Ring, form: CacheFormat) -> tuple[Any, Any]:
        """Keys and values of all layers and slots, all 0."""

    @abc.abstractmethod
    def write(self, caches: Any, layer: Any, k: Any, v: Any, position: Scalar, writes: Array | None) -> Any:
        """Puts a token's keys and values ``[R, S, Hkv, d]`` at a position.

        Args:
          caches: keys and values of the layer, or of all layers.
          layer: number of the layer in ``caches``; None if these are its own.
          k, v: as they are stored (`grpojax.models.number_formats.CacheFormat`).
          position: of the ring.
          writes: ``[R, S]`` bool, the slots that are written; None for all.

        Returns:
          The caches.
        """

    @abc.abstractmethod
    def merged(
        self,
        q: Array,
        cached: Cached,
        prompt: Sequence[Kept],
        prompt_mask: Array,
        seen: "Seen",
        logits: Logits,
    ) -> Array:
        """`attend` with queries that are scaled, and sinks ``[Hkv, r]``."""

    # How blocks of one layer become ``[R, S, Hkv, T, d]`` and back, and where a sample of an earlier rollout goes.

    @abc.abstractmethod
    def whole(self, cache: Any, slots: int, across: bool) -> Array:
        """The cache of a layer as ``[R, S, Hkv, T, d]``, in one layout for all platforms."""

    @abc.abstractmethod
    def cut(self, cache: Array, ring: Ring, across: bool) -> Any:
        """Undoes `whole`."""

    @abc.abstractmethod
    def place(self, row: Scalar, slot: Scalar, cache: Array, new: Array) -> Array:
        """Puts one sample, as `apart` makes it, into a cache as `by_slots` makes it."""

    def apart(self, stacked: Any) -> Any:
        """``[layers, blocks, ...]`` as the caches are."""
        return stacked

    def by_slots(self, caches: Any, slots: int) -> Any:
        """The caches with an axis of slots."""
        return caches

    # The same on all platforms.

    def attend(
        self,
        q: Array,
        cached: Cached,
        prompt: Sequence[Kept],
        prompt_mask: Array,
        seen: "Seen",
        logits: Logits | None = None,
    ) -> Array:
        """Attention of one query for each slot over its prompt and its cached tokens, merged in one float32 softmax.

        Args:
          q: ``[R, S, Hkv, r, d]``; its own token is in the cache.
          cached: the layer's caches.
          prompt: keys ``[R, Hkv, d, L]`` and values ``[R, Hkv, L, d]`` of the prompts. Eight-bit arrays are multiplied
            in q's dtype.
          prompt_mask: ``[R, L]`` bool.
          seen: the positions that slots read.
          logits: what the layer does to them before the softmax.

        Returns:
          ``[R, S, Hkv, r, d]``.
        """
        (k, r), (cap, sinks) = q.shape[2:4], logits or Logits()
        logits = Logits(cap, None if sinks is None else sinks.reshape(k, r))
        return self.merged(q * q.shape[-1] ** -0.5, cached, prompt, prompt_mask, seen, logits)

    def one_token(self, position: Scalar, writes: Array | None = None) -> "Put":
        """``write(k, v)`` of `over_layers` puts a token at ``position``, and returns the `Cached` that `attend` reads.
        ``writes`` is as of `write`."""

        def put(caches: Any, i: Any, k: Any, v: Any) -> tuple[Any, Cached]:
            new = self.write(caches, i, k, v, position, writes)
            return new, Cached(new[0], new[1], i)

        return put

    def whole_layer(self, slots: int, ring: Ring) -> "Put":
        """``write(change)`` of `over_layers` replaces all keys and values of a layer by ``change(keys, values)``, and
        returns these. They are as of `whole`. Only one layer is in this layout at a time.

        Args:
          slots: number of slots of a row.
          ring: ring of the caches.
        """

        def put(caches: Any, i: Any, change: Callable[[Array, Array], tuple[Array, Array]]) -> tuple[Any, Any]:
            own = caches if i is None else [jax.lax.dynamic_index_in_dim(c, i, keepdims=False) for c in caches]
            made = change(*(self.whole(c, slots, across) for c, across in zip(own, self.across, strict=True)))
            new = [self.cut(c, ring, across) for c, across in zip(made, self.across, strict=True)]
            if i is None:
                return new, made
            placed = functools.partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
            return [placed(c, n) for c, n in zip(caches, new, strict=True)], made

        return put

    def zeros(
        self,
        c: DecoderConfig,
        ring: Ring,
        form: CacheFormat,
        rows: int,
        held: tuple[int, ...],
        axes: tuple[Any, ...],
        *,
        across: bool,
    ) -> Any:
        """Keys or values ``[layers, blocks, R, *held, ...]``, all 0; ``axes`` are the logical axes of ``held``."""
        blocks, width = self.blocks(ring)

        def zeros(*last, dtype):
            x = jnp.zeros((len(c.attending), blocks, rows, *held, *last), dtype)
            return constrain(x, self.compute.mesh, None, None, "shard", *axes, *(None,) * len(last))

        return form.zeros(zeros, (c.head_dim, width) if across else (width, c.head_dim), width)

    def heads(self, c: DecoderConfig) -> int:
        """Heads of keys and values on the mesh."""
        return kv_heads.on_mesh(c, self.compute.mesh)

    def insert(
        self, samples: "ReadSamples", caches: Sequence[Any], slots: int, ring: Ring, form: CacheFormat
    ) -> tuple[Any, Any]:
        """Puts the tokens of partial samples into empty caches, for a loop that begins at position 0.

        The tokens before a sample's newest one go to the last positions of the ring. The loop's first step writes the
        newest one at position 0.

        Args:
          samples: the samples.
          caches: keys and values (`empty`).
          slots: number of slots of a row.
          ring, form: ring and format of the caches.
        """
        blocks, width = self.blocks(ring)

        def of_shard(samples: ReadSamples, caches: tuple[Any, Any]) -> tuple[Any, Any]:
            def laid_out(x: Array, i: Scalar, *, across: bool) -> Any:
                at = jnp.arange(ring.size) - ring.size + samples.counts[i] - 1  # which of its tokens each position has
                x = jax.lax.dynamic_index_in_dim(x, i, 1, keepdims=False)
                x = jnp.take(x, jnp.clip(samples.first[i] + at, 0, x.shape[1] - 1), 1)
                x = jnp.where((at >= 0)[:, None, None], x, jnp.zeros((), x.dtype))
                order = (0, 1, 3, 4, 2) if across else (0, 1, 3, 2, 4)
                x = x.reshape(x.shape[0], blocks, width, *x.shape[2:]).transpose(order)
                return form.stored(x, -2 if across else -1)

            def put(i: Scalar, caches: tuple[Any, Any]) -> tuple[Any, Any]:
                into = functools.partial(self.place, *jnp.divmod(samples.slots[i], slots))
                keys, values = (
                    jax.tree.map(into, cache, self.apart(laid_out(x, i, across=across)))
                    for cache, x, across in zip(caches, samples.kv, self.across, strict=True)
                )
                return keys, values

            split = self.by_slots(caches, slots)
            done = jax.lax.fori_loop(0, samples.used[0], put, split)
            return jax.tree.map(lambda x, like: x.reshape(like.shape), done, caches)

        if (mesh := self.compute.mesh) is not None:
            shard, of_kv = spec(("shard",), TRAIN), spec((None, "shard", None, "kv_heads"), TRAIN)
            held = spec(("shard", None, "kv_heads") if self.listed else (None, None, "shard", "kv_heads"), TRAIN)
            takes = ReadSamples((of_kv, of_kv), shard, shard, shard, shard), held
            of_shard = jax.shard_map(of_shard, mesh=mesh, in_specs=takes, out_specs=held, check_vma=False)
        with jax.named_scope("insert_partial"):
            return of_shard(samples, (caches[0], caches[1]))


def of(compute: Compute) -> Cache:
    """The cache of the platform that programs are compiled for."""
    name = platform(compute)
    name = "gpu" if compute.on_gpu else name if name == "tpu" else "cpu"
    # Only the one that is needed: some builds of jax come without Triton, which the GPU's kernel imports.
    return importlib.import_module(f"grpojax.programs.kv_cache_{name}").KEPT(compute)


# ------------------------------------------------------------------------------------------------------- layers


Put = Callable[..., tuple[Any, Any]]  # changes the caches of a layer; `Cache.one_token` and `whole_layer` make some


def over_layers(
    body: Callable[..., Any], x: Any, layers: Any, caches: Sequence[Any], put: Put, *, listed: bool
) -> tuple[Any, Sequence[Any], Any]:
    """Runs ``body(x, layer, write) -> (x, kept)`` layer by layer, in a loop unless ``layers`` is a list.

    ``write(...)`` changes the layer's caches by ``put``, and returns what `put` says. Reads come after the write, so
    that caches are updated in place. In a list there may be layers that have no cache and do not write.

    Args:
      body: what to do with a layer.
      x: what goes from layer to layer.
      layers: what belongs to each layer.
      caches: keys and values (`Cache.empty`).
      put: ``(caches, i, ...) -> (caches, result)`` changes layer ``i`` in the caches of all layers. If ``i`` is None,
        the caches are of one layer only.
      listed: whether the caches are (`Cache.listed`).

    Returns:
      ``(x, caches, kept)``, with what each layer kept stacked.
    """
    if isinstance(layers, list):
        write_next, updated = _writer(caches, put, listed)
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


def _writer(caches: Sequence[Any], put: Put, listed: bool) -> tuple[Callable[..., Any], Callable[[], Sequence[Any]]]:
    """``write(...)``, which each layer with a cache calls in its turn, and what returns the caches after that."""
    if listed:
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


# ---------------------------------------------------------------------------------------------------- attention


LOWEST = -1e30  # the score of a prompt's token out of the window; not -inf, since a slot may see none of its prompt


def scores_of_prompt(q: Array, keys: Kept, prompt_mask: Array, seen: Seen, cap: float) -> Array:
    """Scores ``[R, Hkv, S * r, L]`` of the queries ``[R, S, Hkv, r, d]`` of slots with their prompt's tokens."""
    p, g, k, r, d = q.shape
    found = capped(dot_keys(q.swapaxes(1, 2).reshape(p, k, g * r, d), keys), cap)
    found = jnp.where(prompt_mask[:, None, None], found, -jnp.inf)
    if seen.oldest is not None:
        inside = jnp.arange(found.shape[-1]) >= jnp.repeat(seen.oldest, r, 1)[:, None, :, None]
        found = jnp.where(inside, found, LOWEST)
    return found


def with_sinks(top: Array, total: Array, sinks: Array) -> tuple[Array, Array, Array]:
    """A softmax's highest score and sum with sinks as one more score each, and what the sums so far are multiplied
    by."""
    highest = jnp.maximum(top, sinks)
    kept = jnp.exp(top - highest)
    return highest, total * kept + jnp.exp(sinks - highest), kept


def of_prompt(found: Array, values: Kept, dtype: DTypeLike) -> tuple[Array, Array, Array]:
    """The highest of the scores ``found``, the sum of ``exp(score - highest)``, and that of the values so weighed;
    ``[R, Hkv, S * r, 1 or d]``."""
    top = found.max(-1, keepdims=True)
    w = jnp.exp(found - top)
    return top, w.sum(-1, keepdims=True), mix_values(w, values, dtype)


def by_slot(x: Array, like: Array) -> Array:
    """``[R, Hkv, S * r, n]`` as ``[R, S, Hkv, r, n]``."""
    p, g, k, r, _ = like.shape
    return x.reshape(p, k, g, r, -1).swapaxes(1, 2)
