"""Float32 reductions over the entries that count, and masks from lengths."""

import jax.numpy as jnp

from grpojax.types import AnyTokens, Array, PerPrompt, Samples

Axis = int | tuple[int, ...] | None


def from_lengths(lengths: Array, size: int) -> Array:
    """``[...]`` lengths to a ``[..., size]`` bool mask of the first ``lengths`` positions.

    ``mask_t = t < length``; int32 lengths in tokens.

    Example:
      >>> from_lengths(jnp.array([2, 0]), 3).tolist()
      [[True, True, False], [False, False, False]]
    """
    lengths = jnp.asarray(lengths)
    return jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (*lengths.shape, size)) < lengths[..., None]


def float32(*arrays: Array) -> tuple[Array, ...]:
    """The arrays as float32, a tuple of them.

    Example:
      >>> [x.dtype.name for x in float32(jnp.array([1.0], jnp.bfloat16), 2)]
      ['float32', 'float32']
    """
    return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


def as_mask(mask: Array) -> Array:
    """A mask as bool: not 0, for masks of 0 and 1 in numbers, as other code has them.

    ``mask != 0``, of any shape.

    Example:
      >>> as_mask(jnp.array([1.0, 0.0])).tolist()
      [True, False]
    """
    mask = jnp.asarray(mask)
    return mask if mask.dtype == bool else mask != 0


def total(x: Array, mask: Array, axis: Axis = None, keepdims: bool = False) -> Array:
    """Sum of ``x`` where ``mask``. Other entries, also NaN, change neither value nor gradient.

    ``Σ m x``, float32: ``x`` and ``mask`` of one shape ``[...]``, reduced over ``axis`` as in numpy.

    Example:
      >>> float(total(jnp.array([1.0, jnp.nan, 3.0]), jnp.array([True, False, True])))
      4.0
    """
    return jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0).sum(axis, keepdims=keepdims)


def mean(x: Array, mask: Array, axis: Axis = None, keepdims: bool = False) -> Array:
    """Mean where ``mask``; 0 if the mask is empty.

    ``Σ m x / Σ m``, shapes as in `total`.

    Example:
      >>> float(mean(jnp.array([1.0, jnp.nan, 3.0]), jnp.array([True, False, True])))
      2.0
    """
    n = as_mask(mask).sum(axis, keepdims=keepdims).astype(jnp.float32)
    return total(x, mask, axis, keepdims) / jnp.maximum(n, 1.0)


def variance(x: Array, mask: Array, axis: Axis = None, keepdims: bool = False, *, ddof: int = 0) -> Array:
    """Variance where ``mask``, from centred values (``E[x²] - E[x]²`` cancels); 0 with ``ddof`` entries or fewer.

    ``Σ m (x - mean)² / (Σ m - ddof)``, shapes as in `total`.

    Example:
      >>> x, mask = jnp.array([1.0, jnp.nan, 3.0]), jnp.array([True, False, True])
      >>> float(variance(x, mask)), float(variance(x, mask, ddof=1))
      (1.0, 2.0)
    """
    n = as_mask(mask).sum(axis, keepdims=keepdims).astype(jnp.float32)
    centred = jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0) - mean(x, mask, axis, keepdims=True)
    squares = total(jnp.square(centred), mask, axis, keepdims)
    return jnp.where(n > ddof, squares / jnp.maximum(n - ddof, 1.0), 0.0)


def all_equal(x: Array, mask: Array, axis: Axis = None, keepdims: bool = False) -> Array:
    """Whether the entries where ``mask`` are all the same number; True for one entry and for none.

    Compares the largest with the smallest: a variance of equal floats such as 0.1 need not be 0.

    ``max x <= min x`` where ``mask``, bool; shapes as in `total`.

    Example:
      >>> x = jnp.array([[0.1, 0.1, 0.5], [0.1, 0.2, 0.5]])
      >>> all_equal(x, jnp.array([[True, True, False]] * 2), 1).tolist()
      [True, False]
    """
    x = jnp.asarray(x, jnp.float32)
    high = jnp.where(mask, x, -jnp.inf).max(axis, keepdims=keepdims)
    low = jnp.where(mask, x, jnp.inf).min(axis, keepdims=keepdims)
    return high <= low


def sequence_total(x: AnyTokens, mask: AnyTokens, segments: AnyTokens | None = None) -> AnyTokens:
    """Sum of ``x`` over the tokens of a sequence, given to every token of it: ``[..., T]`` to ``[..., T]``.

    ``y_t = Σ_s m_s x_s`` over the s of t's sequence, float32.

    Args:
      x: ``[..., T]``.
      mask: ``[..., T]`` bool, the tokens that count.
      segments: None if the last axis is one sequence. Otherwise ``[..., T]`` int32 in ``[0, T]``, a number for each
        sequence that shares it (`grpojax.types.Rows`).

    Example:
      >>> x, segments = jnp.array([1.0, 2.0, 4.0]), jnp.array([1, 1, 2])
      >>> sequence_total(x, x > 0, segments).tolist()
      [3.0, 3.0, 4.0]
    """
    x = jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0)
    if segments is None:
        return jnp.broadcast_to(x.sum(-1, keepdims=True), x.shape)
    size = x.shape[-1]
    flat, ids = x.reshape(-1, size), jnp.asarray(segments).reshape(-1, size)
    rows = jnp.arange(flat.shape[0], dtype=ids.dtype)[:, None]
    sums = jnp.zeros((flat.shape[0], size + 1), jnp.float32).at[rows, ids].add(flat)
    return sums[rows, ids].reshape(x.shape)


def sequence_mean(x: AnyTokens, mask: AnyTokens, segments: AnyTokens | None = None) -> AnyTokens:
    """Mean of ``x`` over the tokens of a sequence, given to every token of it; 0 where none counts.

    ``Σ m x / Σ m`` of t's sequence, ``[..., T]`` to ``[..., T]``; arguments as in `sequence_total`.

    Example:
      >>> x, segments = jnp.array([1.0, 2.0, 4.0]), jnp.array([1, 1, 2])
      >>> sequence_mean(x, x > 0, segments).tolist()
      [1.5, 1.5, 4.0]
    """
    n = sequence_total(jnp.ones(jnp.shape(mask), jnp.float32), mask, segments)
    return sequence_total(x, mask, segments) / jnp.maximum(n, 1.0)


def deviation(x: Array, mask: Array, axis: Axis = None, ddof: int = 0) -> tuple[Array, Array]:
    """``(std, dead)``: the deviation where ``mask``, and whether there is none: all equal, or no more than ``ddof``.

    ``sqrt(variance)`` and bool, shapes as in `total` with the reduced dimensions kept. Numbers may have any size and
    offset: they are taken from the smallest on, and in units of a power of two, which costs no digits.

    Example:
      >>> std, dead = deviation(jnp.array([[1.0, 3.0], [0.1, 0.1]]), jnp.ones((2, 2), bool), 1)
      >>> std[0].tolist(), dead.tolist()
      ([1.0], [[False], [True]])
    """
    n = as_mask(mask).sum(axis, keepdims=True)
    x = jnp.where(mask, jnp.asarray(x, jnp.float32), jnp.inf)
    above = jnp.where(mask, x - x.min(axis, keepdims=True), 0.0)
    exponent = jnp.frexp(above.max(axis, keepdims=True))[1] - 1
    units = jnp.ldexp(above, -exponent)
    std = jnp.ldexp(jnp.sqrt(variance(units, mask, axis, keepdims=True, ddof=ddof)), exponent)
    return std, all_equal(x, mask, axis, keepdims=True) | (n <= ddof)


def all_fail(rewards: Samples, valid: Samples, fail_reward: float = 0.0) -> PerPrompt:
    """``[P]`` bool: whether a group of ``[P, G]`` has valid samples, and none with a reward over ``fail_reward``.

    The groups that NGRPO (arXiv 2509.18851) and the fourth and fifth experiments in `grpojax.variants` are about.

    Example:
      >>> all_fail(jnp.array([[0.0, 0.0], [0.0, 1.0]]), jnp.ones((2, 2), bool)).tolist()
      [True, False]
    """
    valid = as_mask(valid)
    return valid.any(1) & ~(valid & (rewards > fail_reward)).any(1)
