"""Float32 reductions over the entries that count, and masks from lengths."""

import jax.numpy as jnp


def from_lengths(lengths, size: int):
    """``[...]`` lengths to a ``[..., size]`` bool mask of the first ``lengths`` positions."""
    lengths = jnp.asarray(lengths)
    return jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (*lengths.shape, size)) < lengths[..., None]


def total(x, mask, axis=None, keepdims=False):
    """Sum of ``x`` where ``mask``; what stands elsewhere, NaN included, has no part in value or gradient."""
    return jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0).sum(axis, keepdims=keepdims)


def mean(x, mask, axis=None, keepdims=False):
    """Mean where ``mask``; 0 where nothing is."""
    n = jnp.asarray(mask, jnp.float32).sum(axis, keepdims=keepdims)
    return total(x, mask, axis, keepdims) / jnp.maximum(n, 1.0)


def variance(x, mask, axis=None, keepdims=False, *, ddof: int = 0):
    """Variance where ``mask``, from centred values (``E[x²] - E[x]²`` cancels); 0 with ``ddof`` entries or fewer."""
    n = jnp.asarray(mask, jnp.float32).sum(axis, keepdims=keepdims)
    centred = jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0) - mean(x, mask, axis, keepdims=True)
    squares = total(jnp.square(centred), mask, axis, keepdims)
    return jnp.where(n > ddof, squares / jnp.maximum(n - ddof, 1.0), 0.0)


def all_equal(x, mask, axis=None, keepdims=False):
    """Whether the entries where ``mask`` are all the same number; true of one entry and of none.

    Compares the largest with the smallest: a variance of equal floats such as 0.1 need not be 0.
    """
    x = jnp.asarray(x, jnp.float32)
    high = jnp.where(mask, x, -jnp.inf).max(axis, keepdims=keepdims)
    low = jnp.where(mask, x, jnp.inf).min(axis, keepdims=keepdims)
    return high <= low
