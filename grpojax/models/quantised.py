"""Eight bits for the rollout. Weights have one float32 scale for each output channel. Keys and values have one bfloat16
scale for each token and head. Both are symmetric.

``w ≈ values * scale`` with ``scale = max |w| / 127`` over the axis that a product sums over, as LLM.int8 rounds weights
(Dettmers et al., arXiv:2208.07339). Activations are not quantised, since reading memory limits a decode step and
multiplying does not. Products multiply the eight-bit values, since whole numbers up to 127 are exact in bfloat16, and
apply the scale after the sum. The scale of a token's values (in attention) is applied to the token's softmax weight.

KIVI (arXiv:2402.02750) stores values in the same way, but keys with one scale for each channel over many tokens. Eight
bits do not need that, and with a scale for each token, the stored numbers of a token never change.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from grpojax.models.matrix import Matrix, OfArray, Precision, Times, unembed
from grpojax.types import Array


class Int8(NamedTuple):
    """Numbers in eight bits.

    Attributes:
      values: int8 in [-127, 127].
      scale: float32 or bfloat16, with the shape of the values without the axis that shares one scale.
    """

    values: Array
    scale: Array


Stored = Array | Int8  # keys or values, as a cache has them

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


@functools.partial(jax.tree_util.register_dataclass, data_fields=("values", "scale"), meta_fields=("summed",))
@dataclasses.dataclass(frozen=True)
class Int8Matrix(Matrix):
    """A weight in eight bits, or those of several layers or experts stacked.

    Attributes:
      values: int8 in [-127, 127], with the weight's shape.
      scale: float32, without the axis that a product sums over.
      summed: that axis, from the end: -2 for a weight ``[in, out]``, -1 for a table ``[V, D]``.

    Example:
      >>> w = Int8Matrix.of(jnp.array([[1.27, 2.54], [-0.5, 0.0]]), 0)
      >>> w.matmul(jnp.ones((1, 2)), None).round(2).tolist()
      [[0.7699999809265137, 2.5399999618530273]]
      >>> table = Int8Matrix.of(jnp.array([[1.27, 0.5], [0.0, 2.54]]), 1)
      >>> table.take(jnp.array([1]), "float32").round(2).tolist()
      [[0.0, 2.5399999618530273]]
    """

    values: Array
    scale: Array
    summed: int = -2
    ready = True

    @classmethod
    def of(cls, w: Array, summed: int) -> "Int8Matrix":
        """Rounds a float weight (`quantise`), whose axis ``summed`` a product sums over."""
        return cls(*quantise(w, summed), summed if summed < 0 else summed - w.ndim)

    @property
    def shape(self) -> tuple[int, ...]:
        """As of a `Matrix`."""
        return self.values.shape

    def merged(self) -> Array:
        """In float32."""
        return self.values.astype(jnp.float32) * jnp.expand_dims(self.scale, self.summed)

    def map(self, f: OfArray, axes: tuple[str, ...], dtype: Any) -> "Int8Matrix":
        """Applies ``f`` to values and scale, which have dtypes of their own."""
        of_scale = axes[: self.summed] + axes[len(axes) + self.summed + 1 :]
        return Int8Matrix(f(self.values, axes, jnp.int8), f(self.scale, of_scale, jnp.float32), self.summed)

    def matmul(self, x: Array, precision: Precision) -> Array:
        """As of a `Matrix`; the sums are float32."""
        y = jnp.matmul(x, self.values.astype(x.dtype), preferred_element_type=jnp.float32)
        return (y * self.scale).astype(x.dtype)

    def back(self, g: Array, precision: Precision) -> Array:
        """As of a `Matrix`."""
        return (g.astype(jnp.float32) * self.scale).astype(g.dtype) @ self.values.astype(g.dtype).T

    def stacked(self, x: Array, times: Times) -> Array:
        """As of a `Matrix`."""
        return times.scaled(x, self.values, self.scale)

    def take(self, rows: Array, dtype: DTypeLike, **how: Any) -> Array:
        """As of a `Matrix`."""
        values = jnp.take(self.values, rows, axis=0, **how).astype(jnp.float32)
        return (values * jnp.take(self.scale, rows, axis=0, **how)[..., None]).astype(dtype)

    def unembed(self, x: Array) -> Array:
        """As of a `Matrix`."""
        return unembed(x, self.values) * self.scale


def scores(q: Array, keys: Stored) -> Array:
    """``q [..., r, d]`` times ``keys [..., d, n]``, n tokens: float32 ``[..., r, n]``.

    Example:
      >>> scores(jnp.ones((1, 2)), quantise(jnp.array([[1.27, 0.0], [-0.5, 0.0]]), 0)).round(2).tolist()
      [[0.7699999809265137, 0.0]]
    """
    if not isinstance(keys, Int8):
        return jnp.matmul(q, keys, preferred_element_type=jnp.float32)
    s = jnp.matmul(q, keys.values.astype(q.dtype), preferred_element_type=jnp.float32)
    return s * keys.scale[..., None, :].astype(jnp.float32)


def mixed(w: Array, values: Stored, dtype: DTypeLike) -> Array:
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


def stored(x: Array, dtype: jnp.dtype, axis: int = -1) -> Stored:
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


def is_scale(path: tuple[Any, ...]) -> bool:
    """Whether a leaf of a tree of weights is the scale of an `Int8Matrix`.

    Example:
      >>> tree = {"q": Int8Matrix.of(jnp.ones((2, 3)), 0)}
      >>> [is_scale(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
      [False, True]
    """
    return isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "scale"
