"""Attention of rows on CPU. It runs some rows or queries after the others, so that their scores fit the CPU's cache.

It computes the same as `grpojax.models.attention.xla`, up to rounding, and has the same signature. The scores
``[R, S, L + S]`` are never in memory as a whole. A loop computes the scores of one block, and recomputes them for the
gradient from each query's ``log Σ exp``. This is FlashAttention-2 (arXiv 2307.08691) without its blocks of keys: a
block here attends to all keys of its rows.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from grpojax.types import Array

SAVED = "blocked_attention"  # name of what a checkpointed layer may keep: outputs, and log Σ exp of each query
_SCORES_BYTES = 4 * 2**20
_MASKED = -1e30


class _Cut(NamedTuple):
    """Size of a block: several whole rows, or some of the queries of a single row."""

    rows: int
    queries: int


def _cut(rows: int, queries: int, heads: int, keys: int) -> _Cut:
    """The largest block whose scores take about 4 MiB for each shard."""
    room = max(1, _SCORES_BYTES // (4 * heads * keys))
    if queries > room:
        return _Cut(1, -(-queries // -(-queries // room)))
    return _Cut(max(m for m in range(1, rows + 1) if rows % m == 0 and (m == 1 or m * queries <= room)), queries)


class _Block(NamedTuple):
    """The inputs of a block: q ``[B, m, Hkv, g n, d]``, k and v ``[B, m, Hkv, L + S, d]``, and the mask of visible keys
    ``[B, m, 1, 1, n, L + S]``."""

    q: Array
    k: Array
    v: Array
    visible: Array


class _Rows:
    """Rows with their prompts, and the place of each block in them."""

    def __init__(self, q: Array, k: Array, v: Array, segments: Array, prefix: Any, window: Any):
        self.q, self.k, self.v, self.segments, self.prefix, self.window = q, k, v, segments, prefix, window
        self.b, self.r, self.s, self.h, self.d = q.shape
        self.kv = k.shape[3]
        self.l = 0 if prefix is None else prefix.k.shape[2]
        self.cut = _cut(self.r, self.s, self.h, self.l + self.s)
        self.parts = -(-self.s // self.cut.queries)
        self.count = self.r // self.cut.rows * self.parts

    def place(self, i: Array) -> tuple[Array, Array]:
        """First row and first query of block ``i``."""
        return i // self.parts * self.cut.rows, i % self.parts * self.cut.queries

    def widen(self, x: Array) -> Array:
        """Pads the queries of ``x [B, R, S, ...]`` at the right, so that all blocks are full."""
        more = self.parts * self.cut.queries - self.s
        return jnp.pad(x, ((0, 0), (0, 0), (0, more)) + ((0, 0),) * (x.ndim - 3)) if more else x

    def of_queries(self, x: Array, i: Array) -> Array:
        """Block ``i`` of a widened ``x [B, R, S, H, d]``, heads first: ``[B, m, Hkv, g n, d]``."""
        row, at = self.place(i)
        m, n = self.cut
        x = jax.lax.dynamic_slice(x, (0, row, at, 0, 0), (self.b, m, n, self.h, self.d))
        x = x.reshape(self.b, m, n, self.kv, -1, self.d).transpose(0, 1, 3, 4, 2, 5)
        return x.reshape(self.b, m, self.kv, -1, self.d)

    def block(self, i: Array) -> _Block:
        """The inputs of block ``i``."""
        (row, at), (m, n) = self.place(i), self.cut

        def rows(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, row, m, 1)

        k, v, segments = rows(self.k), rows(self.v), rows(self.segments)
        mine = jax.lax.dynamic_slice(self.widen(self.segments), (0, row, at), (self.b, m, n))
        same = mine[..., None] == segments[:, :, None]
        key, place = jnp.arange(self.s), at + jnp.arange(n)[:, None]
        visible = same & (key <= place)
        if self.window is not None:
            visible &= place - key < self.window[0]
        if self.prefix is not None:
            prompt = rows(self.prefix.row_prompt)
            pk, pv, length = (_take(x, prompt) for x in (self.prefix.k, self.prefix.v, self.prefix.lengths))
            k, v = jnp.concatenate([pk, k], 2), jnp.concatenate([pv, v], 2)
            here = jnp.arange(self.l) < length[..., None, None]
            if self.window is not None:
                reach, offsets = self.window
                offsets = jax.lax.dynamic_slice(self.widen(offsets), (0, row, at), (self.b, m, n))
                here &= (length[..., None] + offsets)[..., None] - jnp.arange(self.l) < reach
            visible = jnp.concatenate([jnp.broadcast_to(here, (*visible.shape[:3], self.l)), visible], -1)
        k, v = k.swapaxes(2, 3), v.swapaxes(2, 3)
        return _Block(self.of_queries(self.q, i), k, v, visible[:, :, None, None])

    def scores(self, block: _Block, cap: float) -> tuple[Array, Array | None]:
        """Float32 ``[B, m, Hkv, g, n, L + S]``, and their derivatives by the products if there is a cap."""
        z, slope = _dot("bmknd,bmktd->bmknt", block.q, block.k), None
        z = z.reshape(*z.shape[:3], -1, self.cut.queries, z.shape[-1])
        if cap:
            tanh = jnp.tanh(z / cap)
            z, slope = cap * tanh, 1 - tanh * tanh
        return jnp.where(block.visible, z, _MASKED), slope

    def sinks(self, x: Array) -> Array:
        """Sinks ``[H]`` as ``[Hkv, g, 1]``."""
        return x.reshape(self.kv, -1, 1)

    def tokens(self, x: Array) -> Array:
        """Undoes `of_queries`: ``[B, m, Hkv, g n, d]`` to ``[B, m, n, H, d]``."""
        m, n = self.cut
        x = x.reshape(self.b, m, self.kv, -1, n, self.d).transpose(0, 1, 4, 2, 3, 5)
        return x.reshape(self.b, m, n, self.h, self.d)

    def whole(self, x: Array) -> Array:
        """Blocks ``[blocks, B, m, n, H, d]`` to ``[B, R, S, H, d]``."""
        x = jnp.moveaxis(x, 0, 1).reshape(self.b, self.r, -1, self.h, self.d)
        return x[:, :, : self.s]


def _dot(formula: str, a: Array, b: Array) -> Array:
    return jnp.einsum(formula, a, b, preferred_element_type=jnp.float32)


def _take(x: Array, prompt: Array) -> Array:
    """Picks the prompts ``[B, m]`` from ``x [B, K, ...]``."""
    return jax.vmap(lambda a, i: a[i])(x, prompt)


def blocked(
    q: Array, k: Array, v: Array, segments: Array, prefix: Any = None, window: Any = None, logits: Any = None
) -> Array:
    """Attention as `grpojax.models.attention` describes it.

    Example:
      >>> q = jnp.ones((1, 1, 2, 1, 4))
      >>> v = jnp.array([1.0, 3.0]).reshape(1, 1, 2, 1, 1) * q
      >>> blocked(q, q, v, jnp.ones((1, 1, 2), jnp.int32))[0, 0, :, 0, 0].tolist()  # itself; the mean of both
      [1.0, 2.0]
    """
    cap, sinks = (0.0, None) if logits is None else logits
    return _blocked(cap, q, k, v, segments, prefix, None if window is None else (window.reach, window.offsets), sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(cap, q, k, v, segments, prefix, window, sinks):
    return _forward(cap, q, k, v, segments, prefix, window, sinks)[0]


def _forward(cap, q, k, v, segments, prefix, window, sinks):
    scale = q.shape[-1] ** -0.5
    rows = _Rows(q, k, v, segments, prefix, window)
    rows.q = rows.widen(q * scale)

    def one(i):
        block = rows.block(i)
        z, _ = rows.scores(block, cap)
        top = z.max(-1) if sinks is None else jnp.maximum(z.max(-1), rows.sinks(sinks))
        p = jnp.exp(z - top[..., None])
        total = p.sum(-1) if sinks is None else p.sum(-1) + jnp.exp(rows.sinks(sinks) - top)
        p = p.reshape(*p.shape[:3], -1, p.shape[-1])
        out = _dot("bmknt,bmktd->bmknd", p.astype(v.dtype), block.v) / total.reshape(*p.shape[:-1], 1)
        return rows.tokens(out.astype(v.dtype)), top + jnp.log(total)

    out, lse = jax.lax.map(one, jnp.arange(rows.count))
    out, lse = checkpoint_name(rows.whole(out), SAVED), checkpoint_name(lse, SAVED)
    return out, (q, k, v, segments, prefix, window, sinks, out, lse)


def _backward(cap, saved, g):
    q, k, v, segments, prefix, window, sinks, out, lse = saved
    scale, f32 = q.shape[-1] ** -0.5, jnp.float32
    rows = _Rows(q, k, v, segments, prefix, window)
    rows.q, g, out = (rows.widen(x) for x in (q * scale, g, out))

    def one(carry, i_lse):
        i, lse = i_lse
        block, dout = rows.block(i), rows.of_queries(g, i)
        z, slope = rows.scores(block, cap)
        p = jnp.exp(z - lse[..., None])
        dp = _dot("bmknd,bmktd->bmknt", dout, block.v).reshape(p.shape)
        drift = (dout.astype(f32) * rows.of_queries(out, i).astype(f32)).sum(-1).reshape(lse.shape)
        dz = p * (dp - drift[..., None])
        dz = (dz if slope is None else dz * slope).astype(k.dtype).reshape(*dout.shape[:-1], p.shape[-1])
        d_sinks = None if sinks is None else -(jnp.exp(rows.sinks(sinks) - lse) * drift).sum((0, 1, -1))
        dq = rows.tokens(_dot("bmknt,bmktd->bmknd", dz, block.k).astype(k.dtype))
        dk = _dot("bmknt,bmknd->bmktd", dz, block.q)
        dv = _dot("bmknt,bmknd->bmktd", p.astype(v.dtype).reshape(dz.shape), dout)
        return _add(carry, rows, i, (dk, dv)), (dq, d_sinks)

    nothing = tuple(jnp.zeros(x.shape, f32) for x in (k, v))
    if prefix is not None:
        nothing += tuple(jnp.zeros(x.shape, f32) for x in (prefix.k, prefix.v))
    sums, (dq, d_sinks) = jax.lax.scan(one, nothing, (jnp.arange(rows.count), lse))
    dk, dv, *of_prefix = (x.astype(k.dtype) for x in sums)
    d_prefix = None if prefix is None else type(prefix)(*of_prefix, lengths=None, row_prompt=None)
    d_sinks = None if d_sinks is None else d_sinks.sum(0).reshape(-1)
    return rows.whole(dq) * scale, dk, dv, None, d_prefix, None, d_sinks


def _add(sums, rows: _Rows, i, grads):
    """Adds gradients of a block's keys and values ``[B, m, Hkv, L + S, d]`` to those of the rows and the prompts."""
    row, _ = rows.place(i)
    grads = [x.swapaxes(2, 3) for x in grads]
    done = []
    for total, x in zip(sums[:2], grads, strict=True):
        before = jax.lax.dynamic_slice_in_dim(total, row, rows.cut.rows, 1)
        done.append(jax.lax.dynamic_update_slice_in_dim(total, before + x[:, :, rows.l :], row, 1))
    if rows.prefix is not None:
        prompt = jax.lax.dynamic_slice_in_dim(rows.prefix.row_prompt, row, rows.cut.rows, 1)
        for total, x in zip(sums[2:], grads, strict=True):
            done.append(jax.vmap(lambda t, at, y: t.at[at].add(y))(total, prompt, x[:, :, : rows.l]))
    return tuple(done)


_blocked.defvjp(_forward, _backward)
