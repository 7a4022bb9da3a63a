"""Brings tokens to their experts and back if a mesh has an axis ``expert``, inside of a `jax.shard_map`.

Each shard of the axis has its own tokens, and its own part of the experts. Nothing is dropped, however uneven the
routing is. The shards see each other's tokens in one of two ways:

* `everywhere` sends every token to every shard. It suits few tokens, all of which every expert reads anyway.
* `exchanged` sends a token only to the shards of its experts, in rounds of `jax.lax.all_to_all`. A round moves as much
  between any two shards, so that its arrays have a fixed size: an eighth of what a shard sends if all experts get the
  same. Rounds go on until every shard has sent all that it has. An even load takes eight or nine rounds, and the worst,
  where all tokens of some shard have experts on the same shard, eight times as many as the axis has shards.

So no buffer has to hold the worst case, which is all tokens of all shards, once for each expert that they go to. A
`jax.lax.ragged_all_to_all` would need such a buffer, and XLA has none for a CPU.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpojax.sharding import AXES, TRAIN
from grpojax.types import Array

LOOP = "expert_rounds"  # the scope of the loop over rounds
AXIS = "expert"
EVEN_ROUNDS = 8  # in which an even load would be sent
_TILE = 16  # rows; a multiple of what a TPU stores together

# (tokens [n, D], experts [n, k] out of those of the shard, weights [n, k], matrices) -> outputs [n, D] float32
Run = Callable[[Array, Array, Array, Any], Array]


def everywhere(run: Run, h: Array, chosen: Array, weights: Array, matrices: Any) -> Array:
    """The outputs ``[n, D]`` of a shard's tokens: gathers the tokens of all shards, and adds up what the shards give.

    Args:
      run: runs experts of the shard on tokens. What has weight 0 adds nothing.
      h: ``[n, D]``, the shard's tokens.
      chosen: ``[n, k]`` int32, the experts of each token, out of those of all shards.
      weights: ``[n, k]`` float32.
      matrices: the shard's experts, arrays ``[E / shards, ...]``.
    """
    count = jax.tree.leaves(matrices)[0].shape[0]
    h, chosen, weights = (jax.lax.all_gather(x, AXIS, tiled=True) for x in (h, chosen, weights))
    mine = chosen - count * jax.lax.axis_index(AXIS)
    here = (mine >= 0) & (mine < count)
    y = run(h, jnp.where(here, mine, 0), jnp.where(here, weights, 0.0), matrices).astype(h.dtype)
    return jax.lax.psum_scatter(y, AXIS, tiled=True)


class _Rounds(NamedTuple):
    """What a shard sends to each of ``N`` shards, in pieces of equal size.

    Attributes:
      first: ``[N]`` int32, the number of the first piece for each shard.
      pieces: ``[N]`` int32, how many there are for it.
      rounds: int32, rounds until the shard with most pieces for one other has sent them.
      expert: ``[M]`` int32, the expert of each row, out of those of the shard that it goes to.
    """

    first: Array
    pieces: Array
    rounds: Array
    expert: Array


def exchanged(run: Run, h: Array, chosen: Array, weights: Array, matrices: Any) -> Array:
    """As `everywhere`, but a token moves only to the shards of its experts, once for each expert."""
    (n, k), shards = chosen.shape, jax.lax.axis_size(AXIS)
    count, expert, m = jax.tree.leaves(matrices)[0].shape[0], chosen.reshape(-1), n * k
    size = piece(m, shards)
    order = jnp.argsort(expert)
    owner = expert // count
    sizes = (owner[:, None] == jnp.arange(shards, dtype=jnp.int32)).sum(0, dtype=jnp.int32)
    starts, pieces = jnp.cumsum(sizes) - sizes, -(-sizes // size)
    first = jnp.cumsum(pieces) - pieces
    # Rows for each shard are together, sorted by expert. They begin with a new piece, so some rows are empty.
    slot = jnp.arange((-(-m // size) + shards) * size, dtype=jnp.int32)
    to = (slot[:, None] >= (first + pieces) * size).sum(1, dtype=jnp.int32).clip(max=shards - 1)
    number = slot - first[to] * size
    there = number < sizes[to]
    entry = order[jnp.minimum(starts[to] + number, m - 1)]
    place = first[owner] * size + jnp.argsort(order) - starts[owner]
    local = jnp.where(there, expert[entry] - to * count, count - 1)  # what is empty comes last
    x = _moved(jnp.broadcast_to(h[:, None], (n, k, h.shape[-1])).reshape(m, -1), entry, place)
    w = jnp.where(there, _moved(weights.reshape(-1), entry, place), 0.0)
    rounds = jax.lax.pmax(pieces.max(), TRAIN["shard"])  # the same for all, so that all meet in each round
    y = _in_rounds(functools.partial(_round, run), size, _Rounds(first, pieces, rounds, local), x, w, matrices)
    return _moved(y, place, entry).reshape(n, k, -1).astype(jnp.float32).sum(1)


def piece(choices: int, shards: int) -> int:
    """Rows that a shard sends to another in a round.

    Example:
      >>> piece(147_456, 8), piece(33, 2)
      (2304, 16)
    """
    size = -(-choices // (EVEN_ROUNDS * shards))
    return size + -size % _TILE


@jax.custom_vjp
def _moved(x, source, back):
    """``x[source]``, whose gradient is a gather too: row i of ``x`` gets that of row ``back[i]``, and no other one."""
    return x[source]


_moved.defvjp(lambda x, source, back: (x[source], back), lambda back, g: (g[back], None, None))


def _round(run: Run, x: Array, w: Array, matrices: Any, expert: Array) -> Array:
    """The outputs of rows ``[N, size, D]``, the first of which go to the first shard."""
    there = [jax.lax.all_to_all(a, AXIS, 0, 0) for a in (x, expert, w)]
    rows, expert, w = (a.reshape(-1, *a.shape[2:]) for a in there)
    y = run(rows, expert[:, None], w[:, None], matrices).astype(x.dtype)
    return jax.lax.all_to_all(y.reshape(x.shape), AXIS, 0, 0)


def _take(x: Array, size: int, plan: _Rounds, r: Array) -> Array:
    """The pieces ``[N, size, ...]`` of a round; zeros where a shard has no more."""
    which = jnp.minimum(plan.first + r, x.shape[0] // size - 1)
    pieces = x.reshape(-1, size, *x.shape[1:])[which]
    here = (r < plan.pieces).reshape(-1, *(1 for _ in pieces.shape[1:]))
    return jnp.where(here, pieces, jnp.zeros((), x.dtype))


def _put(x: Array, size: int, plan: _Rounds, r: Array, pieces: Array) -> Array:
    """Writes the pieces of a round to where `_take` takes them."""
    split = x.reshape(-1, size, *x.shape[1:])
    which = jnp.where(r < plan.pieces, plan.first + r, len(split))
    return split.at[which].set(pieces, mode="drop").reshape(x.shape)


def _zeros(x: Array, dtype: Any = None) -> Array:
    return jax.lax.pcast(jnp.zeros(x.shape, dtype or x.dtype), AXES, to="varying")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_rounds(one, size, plan, x, w, matrices):
    """``one(rows, weights, matrices, experts)`` of all rows ``x [M, D]``, round by round; its gradient takes the same
    rounds again, and keeps nothing of them."""

    def body(r, y):
        rows, weights, expert = (_take(a, size, plan, r) for a in (x, w, plan.expert))
        return _put(y, size, plan, r, one(rows, weights, matrices, expert))

    with jax.named_scope(LOOP):
        return jax.lax.fori_loop(0, plan.rounds, body, _zeros(x))


def _in_rounds_fwd(one, size, plan, x, w, matrices):
    return _in_rounds(one, size, plan, x, w, matrices), (plan, x, w, matrices)


def _in_rounds_bwd(one, size, saved, g):
    plan, x, w, matrices = saved

    def body(r, sums):
        dx, dw, dm = sums
        rows, weights, expert, up = (_take(a, size, plan, r) for a in (x, w, plan.expert, g))
        pull = jax.vjp(lambda *given: one(*given, expert), rows, weights, matrices)[1]
        d_rows, d_weights, d_matrices = pull(up)
        dm = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), dm, d_matrices)
        return _put(dx, size, plan, r, d_rows), _put(dw, size, plan, r, d_weights), dm

    start = _zeros(x), _zeros(w), jax.tree.map(lambda a: _zeros(a, jnp.float32), matrices)
    with jax.named_scope(LOOP):
        dx, dw, dm = jax.lax.fori_loop(0, plan.rounds, body, start)
    return None, dx, dw, jax.tree.map(lambda a, b: a.astype(b.dtype), dm, matrices)


_in_rounds.defvjp(_in_rounds_fwd, _in_rounds_bwd)
