"""Decode attention on a GPU: Pallas kernels for Triton. The queries of slots attend to their prompt and to the cache.

There are two kernels. In the kernel for prompts (`of_prompt`), a program of the grid has one head of keys and values
and a tile of the queries of a prompt's slots, so that a tile reads its prompt once. In the kernel for the cache
(`attend`), a program has one slot and one head. It starts from the softmax over the prompt, and continues with the live
tokens of the slot, block by block. It reads nothing else of the ring. Keys and values of the cache are
``[R, S, Hkv, T, d]``, so that the numbers of a token are adjacent in memory. Sizes that are not a power of two are
masked.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import Mesh

from grpojax.models.attention import capped
from grpojax.sharding import TRAIN, spec
from grpojax.types import Array, Scalar

SHORTEST = 16  # the fewest rows and columns that a tensor core multiplies
_NEVER = 2**30  # a position behind all tokens
_LOWEST = -1e30  # the highest score among no tokens; not -inf, since -inf - -inf is NaN
_TILE = 16384  # bytes of keys read at a time, and as many of values; both are buffered twice: 64 KiB of shared memory
_dot = functools.partial(plgpu.dot, precision=jax.lax.Precision.HIGHEST)  # matters for float32 only, not for 16 bits


def _wider(a, b):
    """The dtype with more bits."""
    return max(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)


def _add(so_far, query, k, v, live, trans_b, cap):
    """Continues a softmax ``(top, total, out)`` over more keys, and rescales it when a larger score turns up. ``live``
    is ``[1, keys]``, or ``[queries, keys]``."""
    top, total, out = so_far
    scores = jnp.where(live, capped(_dot(query, k.astype(query.dtype), trans_b=trans_b), cap), -jnp.inf)
    highest = jnp.maximum(top, scores.max(1))
    w, kept = jnp.exp(scores - highest[:, None]), jnp.exp(top - highest)
    return highest, kept * total + w.sum(1), kept[:, None] * out + _dot(w.astype(v.dtype), v)


def _slot_kernel(position, count, q, keys, values, top, total, out, result, *, size, width, r, d, cap):
    """The queries of one slot and head, ``q [rows, columns]`` with ``[r, d]`` in use; ``keys [size, columns]``."""
    rows, columns = q.shape
    mine = jnp.arange(rows) < r

    def inside(rows):
        return rows[:, None] if d == columns else rows[:, None] & (jnp.arange(columns) < d)[None]

    newest, tokens = position[()], jnp.minimum(count[()], size)
    oldest = jax.lax.rem(newest - tokens + 1 + size, size)
    first, before = jax.lax.div(oldest, width), jax.lax.rem(oldest, width)
    blocks = jnp.minimum(jax.lax.div(before + tokens + width - 1, width), size // width)
    query = plgpu.load(q, mask=inside(mine), other=0.0).astype(_wider(q, keys))

    def add(n, so_far):
        start = jax.lax.rem(first + n, size // width) * width
        live = jax.lax.rem(newest - start - jnp.arange(width) + size, size) < tokens
        at, read = (pl.ds(start, width), slice(None)), inside(live)
        k, v = (plgpu.load(x.at[at], mask=read, other=0.0) for x in (keys, values))
        return _add(so_far, query, k, v, live[None], True, cap)

    of_prompt = (
        plgpu.load(top, mask=mine, other=0.0),
        plgpu.load(total, mask=mine, other=1.0),
        plgpu.load(out, mask=inside(mine), other=0.0),
    )
    _, total, out = jax.lax.fori_loop(0, jnp.where(tokens > 0, blocks, 0), add, of_prompt)
    plgpu.store(result, (out / total[:, None]).astype(result.dtype), mask=inside(mine))


def _prompt_kernel(length, q, keys, values, *rest, width: int, n: int, d: int, cap: float):
    """A tile of a prompt's ``n`` queries, ``q [rows, columns]`` with ``d`` columns in use; ``keys [columns, L]``.
    ``rest`` are the results, and before them, where layers have windows, the first token that each query sees."""
    *first, top, total, out = rest
    rows, columns = q.shape
    mine, real = pl.program_id(2) * rows + jnp.arange(rows) < n, jnp.arange(columns) < d
    inside, tokens = mine[:, None] & real[None], length[()]
    query = plgpu.load(q, mask=inside, other=0.0).astype(_wider(q, keys))

    def add(i, so_far):
        at, place = pl.ds(i * width, width), i * width + jnp.arange(width)
        live = place < tokens
        k = plgpu.load(keys.at[slice(None), at], mask=real[:, None] & live[None], other=0.0)
        v = plgpu.load(values.at[at, slice(None)], mask=live[:, None] & real[None], other=0.0)
        seen = [live[None] & (place[None] >= since[:, None]) for since in sees] or [live[None]]
        return _add(so_far, query, k, v, seen[0], False, cap)

    nothing = jnp.full(rows, _LOWEST), jnp.zeros(rows), jnp.zeros((rows, columns))
    sees = [plgpu.load(x, mask=mine, other=_NEVER) for x in first]
    start = [jax.lax.div(jnp.maximum(since.min(), 0), width) for since in sees] or [0]
    found = jax.lax.fori_loop(start[0], jax.lax.div(tokens + width - 1, width), add, nothing)
    for where, x, mask in zip((top, total, out), found, (mine, mine, inside), strict=True):
        plgpu.store(where, x, mask=mask)


def _width(block: int, head_dim: int, itemsize: int) -> int:
    """Positions that are read at a time: ``block``, or fewer if `_TILE` has no room for them."""
    room = max(SHORTEST, _TILE // (pl.next_power_of_2(head_dim) * itemsize))
    return min(block, room)


@functools.partial(jax.jit, static_argnames=("mesh", "width", "rows", "num_warps", "num_stages", "cap"))
def of_prompt(
    q: Array,
    keys: Array,
    values: Array,
    lengths: Array,
    first: Array | None = None,
    *,
    mesh: Mesh | None = None,
    width: int = 0,
    rows: int = 64,
    num_warps: int = 4,
    num_stages: int = 2,
    cap: float = 0.0,
) -> tuple[Array, Array, Array]:
    """The softmax over the prompts that `attend` continues: ``top``, ``sum(exp(s - top))``, ``sum(exp(s - top) v)``.

    Args:
      q: ``[R, Hkv, n, d]``, all queries of a prompt's slots, scaled.
      keys, values: ``[R, Hkv, d, L]`` and ``[R, Hkv, L, d]``.
      lengths: ``[R]`` int32, tokens of each prompt.
      first: ``[R, n]`` int32, the first token that each query sees, in a layer with a window; None if queries see all.
      mesh: as in `attend`.
      width: tokens read at a time, a power of two; 0 is 64, or fewer if fast memory has no room for them.
      rows: queries of a program, a power of two.
      num_warps, num_stages, cap: as in `attend`.

    Returns:
      Float32 ``[R, Hkv, n]`` twice, and ``[R, Hkv, n, d]``. For a query that sees no token, ``top`` is below any score
      and both sums are 0.

    Example:
      >>> key, value = jnp.zeros((1, 1, 4, 3)), jnp.arange(12.0).reshape(1, 1, 3, 4)
      >>> of_prompt(jnp.ones((1, 1, 1, 4)), key, value, jnp.full(1, 2))[2][0, 0]  # rows 0 and 1
      Array([[ 4.,  6.,  8., 10.]], dtype=float32)
    """
    n, d = q.shape[2:]
    rows, columns = min(rows, max(SHORTEST, pl.next_power_of_2(n))), max(SHORTEST, pl.next_power_of_2(d))
    sizes = {"width": width or _width(64, d, keys.dtype.itemsize), "n": n, "d": d, "cap": cap}
    tiles = pl.cdiv(n, rows)

    def tile(*last):
        return pl.BlockSpec((None, None, rows, *last), lambda i, h, t: (i, h, t, *[0] * len(last)))

    def whole(*shape):
        return pl.BlockSpec((None, None, *shape), lambda i, h, t: (i, h, 0, 0))

    def run(lengths, q, keys, values, *first, interpret=False):
        p, k, length = *q.shape[:2], values.shape[2]
        of_query = [pl.BlockSpec((None, rows), lambda i, h, t: (i, t)) for _ in first]
        return pl.pallas_call(
            functools.partial(_prompt_kernel, **sizes),
            grid=(p, k, tiles),
            in_specs=[pl.BlockSpec((None,), lambda i, h, t: (i,)), tile(columns), whole(columns, length)]
            + [whole(length, columns), *of_query],
            out_specs=[tile(), tile(), tile(columns)],
            out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(p, k, n)] * 2 + [(p, k, n, d)]],
            compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
            interpret=interpret,
            name="prompts",
        )(lengths, q, keys, values, *first)

    shards, heads = spec(("shard",), TRAIN), spec(("shard", "kv_heads"), TRAIN)
    given = (lengths, q, keys, values) if first is None else (lengths, q, keys, values, first)
    return _on_devices(run, mesh, (shards, heads, heads, heads, shards)[: len(given)], (heads,) * 3)(*given)


def _on_devices(run: Callable[..., Any], mesh: Mesh | None, takes: Any, gives: Any) -> Callable[..., Any]:
    """Runs ``run`` on each device of a mesh separately; on a CPU it is interpreted."""

    def on_device(*args):
        return jax.lax.platform_dependent(*args, cpu=functools.partial(run, interpret=True), default=run)

    if mesh is None:
        return on_device
    return jax.shard_map(on_device, mesh=mesh, in_specs=takes, out_specs=gives, check_vma=False)


@functools.partial(jax.jit, static_argnames=("block", "mesh", "width", "num_warps", "num_stages", "cap"))
def attend(
    q: Array,
    keys: Array,
    values: Array,
    position: Scalar,
    counts: Array,
    prompt: tuple[Array, Array, Array],
    *,
    block: int,
    mesh: Mesh | None = None,
    width: int = 0,
    num_warps: int = 2,
    num_stages: int = 2,
    cap: float = 0.0,
) -> Array:
    """Continues a softmax over the prompt with the tokens in the cache.

    The result is ``sum(exp(s - max) v) / sum(exp(s - max))`` over both. The sums are in float32, and are rescaled when
    a larger score turns up (FlashAttention-2, arXiv 2307.08691, section 3.1).

    Args:
      q: ``[R, Hkv, S, r, d]``, scaled.
      keys, values: ``[R, S, Hkv, T, d]``, rings of T positions, T a multiple of ``block``.
      position: [] int32, position of the newest token in all rings.
      counts: ``[R, S]`` int32, how many tokens each slot reads. These are the last ones up to ``position``.
      prompt: float32 softmax over the prompt: the highest score ``top`` and ``sum(exp(score - top))``, both
        ``[R, Hkv, S, r]``, and the sum of the values with these weights, ``[R, Hkv, S, r, d]``.
      block: positions of a block of the ring; a power of two, at least 16.
      mesh: cuts rows over its shards and heads over ``tensor``; each device runs the kernel separately. None on one
        device.
      width: positions read at a time, a power of two that divides ``block``. 0 is ``block``, or fewer if fast memory
        has no room for them because heads are wide.
      num_warps, num_stages: warps of a program, and blocks in flight at a time (`jax.experimental.pallas.triton`).
      cap: scores become ``cap * tanh(score / cap)``; 0 leaves them as they are.

    Returns:
      ``[R, S, Hkv, r, d]``, another order than that of ``q``, in its dtype. On a CPU the kernel is interpreted.

    Example:
      >>> q, cache = jnp.ones((1, 1, 1, 1, 4)), jnp.arange(64.0).reshape(1, 1, 1, 16, 4)
      >>> nothing = jnp.full((1, 1, 1, 1), -jnp.inf), jnp.zeros((1, 1, 1, 1)), jnp.zeros((1, 1, 1, 1, 4))
      >>> attend(q, 0 * cache, cache, jnp.int32(2), jnp.full((1, 1), 2), nothing, block=16)[0, 0, 0]  # rows 1 and 2
      Array([[6., 7., 8., 9.]], dtype=float32)
    """
    r, d = q.shape[3:]
    size = keys.shape[3]
    sizes = {"size": size, "width": width or _width(block, d, keys.dtype.itemsize), "r": r, "d": d, "cap": cap}
    rows, columns = (max(SHORTEST, pl.next_power_of_2(n)) for n in (r, d))

    def of_slot(*shape):
        return pl.BlockSpec((None, None, None, *shape), lambda i, j, h: (i, j, h, *[0] * len(shape)))

    def of_prompt(*shape):
        return pl.BlockSpec((None, None, None, *shape), lambda i, j, h: (i, h, j, *[0] * len(shape)))

    def run(position, counts, q, *args, interpret=False):
        p, k, s = q.shape[:3]
        one, slot = pl.BlockSpec((), lambda i, j, h: ()), pl.BlockSpec((None, None), lambda i, j, h: (i, j))
        of_cache = of_slot(size, columns), of_slot(size, columns)
        return pl.pallas_call(
            functools.partial(_slot_kernel, **sizes),
            grid=(p, s, k),
            in_specs=[one, slot, of_prompt(rows, columns), *of_cache, *[of_prompt(rows)] * 2, of_prompt(rows, columns)],
            out_specs=of_slot(rows, columns),
            out_shape=jax.ShapeDtypeStruct((p, s, k, r, d), q.dtype),
            compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
            interpret=interpret,
            name="slots",
        )(position, counts, q, *args)

    slots, heads = spec(("shard", None, "kv_heads"), TRAIN), spec(("shard", "kv_heads"), TRAIN)
    takes = jax.P(), spec(("shard",), TRAIN), heads, slots, slots, heads, heads, heads
    return _on_devices(run, mesh, takes, slots)(position, counts, q, keys, values, *prompt)
