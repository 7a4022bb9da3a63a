"""Eight bits for the rollout. Weights have one float32 scale for each output channel. Keys and values have one bfloat16
scale for each token and head. Both are symmetric.

``w ≈ values * scale`` with ``scale = max |w| / 127`` over the axis that a product sums over, as LLM.int8 rounds weights
(Dettmers et al., arXiv:2208.07339). Activations are not quantised, since reading memory limits a decode step and
multiplying does not. Products multiply the eight-bit values, since whole numbers up to 127 are exact in bfloat16, and
apply the scale after the sum. The scale of a token's values (in attention) is applied to the token's softmax weight.

KIVI (arXiv:2402.02750) stores values in the same way, but keys with one scale for each channel over many tokens. Eight
bits do not need that, and with a scale for each token, the stored numbers of a token never change.
"""

from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from grpojax.types import Array


class Int8(NamedTuple):
    """A weight in eight bits, or those of all layers stacked; it replaces the weight in a tree of weights. Also used
    for keys and values.

    Attributes:
      values: int8 in [-127, 127], with the weight's shape.
      scale: for a weight, float32 with its shape without the axis that a product sums over. For keys and values,
        bfloat16 with their shape without the axis of a head's numbers.
    """

    values: Array
    scale: Array


Matrix = Array | Int8
Precision = Literal["highest"] | None  # of a product, as jax.numpy.matmul takes it

CACHE_SCALE = jnp.bfloat16  # half the bytes of float32; adds no error, since values are rounded with the rounded scale


def quantise(w: Array, axis: int, scale_dtype: DTypeLike = jnp.float32) -> Int8:
    """Rounds a float weight to eight bits. The error of an entry is at most half a scale; zero channels stay zero.

    Args:
      w: ``[..., n, ...]``, any float.
      axis: the axis that shares one scale. For weights, it is the axis that a product sums over.
      scale_dtype: dtype of the scale. The scale is rounded first, and the values are then rounded with the rounded
        scale. So the bound of half a scale holds in bfloat16 too: a scale that is up to ``2**-8`` too small leaves the
        largest value below 127.5.

    Example:
      >>> q = quantise(jnp.array([[1.27, 0.0], [-0.5, 0.0]]), 0)
      >>> q.values.tolist(), [round(float(s), 4) for s in q.scale]
      ([[127, 0], [-50, 0]], [0.01, 0.0])
    """
    w = w.astype(jnp.float32)
    kept = (jnp.abs(w).max(axis) / 127).astype(scale_dtype)
    scale = kept.astype(jnp.float32)
    inverse = jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1), 0)
    values = jnp.clip(jnp.round(w * jnp.expand_dims(inverse, axis)), -127, 127)
    return Int8(values.astype(jnp.int8), kept)


def matmul(x: Array, w: Matrix, precision: Precision = None) -> Array:
    """``x [n, in]`` times ``w [in, out]``: ``[n, out]`` in ``x``'s dtype. Sums with eight-bit weights are float32.
    ``precision`` is that of other products.

    Example:
      >>> matmul(jnp.ones((1, 2)), quantise(jnp.array([[1.27, 2.54], [-0.5, 0.0]]), 0)).round(2).tolist()
      [[0.7699999809265137, 2.5399999618530273]]
    """
    if not isinstance(w, Int8):
        return jnp.matmul(x, w, precision=precision)
    y = jnp.matmul(x, w.values.astype(x.dtype), preferred_element_type=jnp.float32)
    return (y * w.scale).astype(x.dtype)


def unembed(x: Array, w: Matrix) -> Array:
    """``x [..., D]`` times the rows of ``w [V, D]``: float32 ``[..., V]``.

    Example:
      >>> unembed(jnp.ones((1, 2)), jnp.array([[1.0, 2.0], [0.5, 0.0], [0.0, -1.0]])).tolist()
      [[3.0, 0.5, -1.0]]
    """
    values = w.values if isinstance(w, Int8) else w
    y = jnp.einsum("...d,vd->...v", x, values.astype(x.dtype), preferred_element_type=jnp.float32)
    return y * w.scale if isinstance(w, Int8) else y


def scores(q: Array, keys: Matrix) -> Array:
    """``q [..., r, d]`` times ``keys [..., d, n]``, n tokens: float32 ``[..., r, n]``.

    Example:
      >>> scores(jnp.ones((1, 2)), quantise(jnp.array([[1.27, 0.0], [-0.5, 0.0]]), 0)).round(2).tolist()
      [[0.7699999809265137, 0.0]]
    """
    if not isinstance(keys, Int8):
        return jnp.matmul(q, keys, preferred_element_type=jnp.float32)
    s = jnp.matmul(q, keys.values.astype(q.dtype), preferred_element_type=jnp.float32)
    return s * keys.scale[..., None, :].astype(jnp.float32)


def mixed(w: Array, values: Matrix, dtype: DTypeLike) -> Array:
    """Float32 ``w [..., r, n]`` times ``values [..., n, d]``, n tokens: float32 ``[..., r, d]``. The factors have the
    dtype of the values in the product, or ``dtype`` if the values are in eight bits.

    Example:
      >>> values = quantise(jnp.array([[1.27, 0.64], [0.0, 254.0]]), 1)
      >>> mixed(jnp.full((1, 2), 0.5), values, "float32").round(2).tolist()
      [[0.6399999856948853, 127.31999969482422]]
    """
    if isinstance(values, Int8):
        w, values = w * values.scale[..., None, :].astype(jnp.float32), values.values.astype(dtype)
    return jnp.matmul(w.astype(values.dtype), values, preferred_element_type=jnp.float32)


def stored(x: Array, dtype: jnp.dtype, axis: int = -1) -> Matrix:
    """Keys or values in the form that a cache of ``dtype`` stores; ``axis`` is the axis of a head's numbers.

    Example:
      >>> stored(jnp.array([[1.27, 0.0], [0.0, 254.0]]), jnp.dtype("int8")).scale
      Array([0.0100098, 2], dtype=bfloat16)
    """
    if dtype == jnp.int8:
        return quantise(x, axis, CACHE_SCALE)
    return x.astype(dtype)


def exact(cache_dtype: str) -> Literal["compute", "float32", "bfloat16"]:
    """``cache_dtype``, with "compute" in place of "int8". For completions that must come from the policy itself without
    rounding, such as those of held-out problems.

    Example:
      >>> exact("int8"), exact("bfloat16")
      ('compute', 'bfloat16')
    """
    return "compute" if cache_dtype == "int8" else cast(Any, cache_dtype)


def take_rows(w: Matrix, rows: Array, dtype: DTypeLike, **how: Any) -> Array:
    """Rows ``[...]`` of ``w [V, D]`` as ``[..., D]`` in ``dtype``; ``how`` as in ``jnp.take``.

    Example:
      >>> take_rows(quantise(jnp.array([[1.27, 0.5], [0.0, 2.54]]), 1), jnp.array([1]), "float32").round(2).tolist()
      [[0.0, 2.5399999618530273]]
    """
    if not isinstance(w, Int8):
        return jnp.take(w, rows, axis=0, **how).astype(dtype)
    values = jnp.take(w.values, rows, axis=0, **how).astype(jnp.float32)
    return (values * jnp.take(w.scale, rows, axis=0, **how)[..., None]).astype(dtype)


def is_scale(path: tuple[Any, ...]) -> bool:
    """Whether a leaf of a tree of weights is the scale of an `Int8`.

    Example:
      >>> tree = {"q": quantise(jnp.ones((2, 3)), 0)}
      >>> [is_scale(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
      [False, True]
    """
    return isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == Int8._fields[1]
