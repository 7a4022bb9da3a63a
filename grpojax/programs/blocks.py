"""Blocks in a program: a reading of some prompts, then the blocks of rows that continue them, as many as hold a token.

`grpojax.programs.packing` lays a batch out in such blocks. A program reads the prompts once. Then a loop takes the rows
that continue them, block by block. The number of iterations is a value and not a shape, so one program serves batches
of any lengths, and its cost follows their tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from grpojax.types import Rows, Scalar


def after_reading(rows: Rows) -> int:
    """M for rows ``[C M, ...]``: how many blocks may follow each of C readings; 1 if there is no separate reading."""
    return rows.tokens.shape[0] // rows.prompts.shape[0]


def reading(rows: Rows, c: Any) -> Rows:
    """The part ``[M, ...]`` of rows ``[C M, ...]`` that belongs to reading ``c``."""
    n = after_reading(rows)
    prompts, rest = _prompts(rows)
    mine = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, c * n, n), rest)
    return dataclasses.replace(mine, **jax.tree.map(lambda x: x[c], prompts))


def block(rows: Rows, i: Any, read: Any = None) -> Rows:
    """Block ``i`` of one `reading`; ``read`` is the result of its prompts' forward."""
    prompts, rest = _prompts(rows)
    return dataclasses.replace(jax.tree.map(lambda x: x[i], rest), **prompts, read=read)


_OF_PROMPTS = ("prompts", "prompt_lengths", "prompt_choices")


def _prompts(rows: Rows) -> tuple[dict[str, Any], Rows]:
    """What rows say of their prompts, and the rows without it."""
    rest = dataclasses.replace(rows, prompts=None, prompt_lengths=None, prompt_choices=None)
    return {name: getattr(rows, name) for name in _OF_PROMPTS}, rest


def taken(rows: Rows) -> int | Scalar:
    """How many blocks of a `reading`, or micro-batches of rows ``[M, ...]``, to take. All if there is no ``live``;
    otherwise those up to the last live one, and at least one.

    Example:
      >>> import types
      >>> taken(types.SimpleNamespace(live=jnp.array([[0, 1], [0, 0], [1, 0], [0, 0]]))).item()
      3
    """
    return rows.tokens.shape[0] if rows.live is None else _last(rows.live.any(1))


def readings(rows: Rows) -> int | Scalar:
    """How many readings of rows ``[C M, ...]`` to take: those up to the last with a live block, and at least one."""
    if rows.live is None:
        return rows.prompts.shape[0]
    return _last(rows.live.reshape(rows.prompts.shape[0], -1).any(1))


def _last(live: Any) -> Scalar:
    return jnp.where(live, jnp.arange(1, len(live) + 1, dtype=jnp.int32), 1).max()


def loop(count: int, n: int | Scalar, body: Callable[[Any, Any], Any], start: Any) -> Any:
    """Applies ``body`` ``n`` times, at most ``count`` times. There is no loop if ``count`` is 1."""
    return body(0, start) if count == 1 else jax.lax.fori_loop(0, n, body, start)


def each(function: Callable[[Rows], Any], rows: Rows, read: Callable[[Rows], Any]) -> Any:
    """Results ``[C M, ...]`` of ``function`` on every block that is `taken`; 0 for the other blocks.

    Args:
      function: takes a block's rows.
      rows: ``[C M, ...]``.
      read: takes rows with a reading's prompts and returns the ``read`` of its blocks; called once for each reading.
    """
    count, n = rows.tokens.shape[0], after_reading(rows)

    def known(mine: Rows) -> Any:
        return read(block(mine, 0)) if n > 1 else None

    def of_reading(c: Any, out: Any) -> Any:
        mine = reading(rows, c)
        prompts = known(mine)

        def put(i: Any, out: Any) -> Any:
            new = function(block(mine, i, prompts))
            return jax.tree.map(lambda o, x: jax.lax.dynamic_update_index_in_dim(o, x, c * n + i, 0), out, new)

        return loop(n, taken(mine), put, out)

    first = jax.eval_shape(lambda rows: function(block(mine := reading(rows, 0), 0, known(mine))), rows)
    nothing = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), first)
    return loop(count // n, readings(rows), of_reading, nothing)
