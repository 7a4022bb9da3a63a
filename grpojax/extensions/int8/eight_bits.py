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
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from grpojax.models.matrix import Matrix, OfArray, Precision, Times, unembed
from grpojax.models.number_formats import CacheFormat, NumberFormat, Stored
from grpojax.types import Array

CACHE_SCALE = jnp.bfloat16  # half the bytes of float32; adds no error, since values are rounded with the rounded scale


def rounded(w: Array, axis: int, scale_dtype: DTypeLike = jnp.float32) -> tuple[Array, Array]:
    """Rounds floats to eight bits: int8 values in [-127, 127], and a scale without the axis that shares one.

    The error of an entry is at most half a scale; zero channels stay zero.

    Args:
      w: ``[..., n, ...]``, any float.
      axis: the axis that shares one scale. For weights, it is the axis that a product sums over.
      scale_dtype: dtype of the scale. The scale is rounded first, and the values are then rounded with the rounded
        scale. So the bound of half a scale holds in bfloat16 too: a scale that is up to ``2**-8`` too small leaves the
        largest value below 127.5.

    Example:
      >>> values, scale = rounded(jnp.array([[1.27, 0.0], [-0.5, 0.0]]), 0)
      >>> values.tolist(), [round(float(s), 4) for s in scale]
      ([[127, 0], [-50, 0]], [0.01, 0.0])
    """
    w = w.astype(jnp.float32)
    kept = (jnp.abs(w).max(axis) / 127).astype(scale_dtype)
    scale = kept.astype(jnp.float32)
    inverse = jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1), 0)
    values = jnp.clip(jnp.round(w * jnp.expand_dims(inverse, axis)), -127, 127)
    return values.astype(jnp.int8), kept


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
    def of(cls, w: Array, summed: int, place: Callable[[Array], Array] = lambda values: values) -> "Int8Matrix":
        """Rounds a float weight (`rounded`), whose axis ``summed`` a product sums over; ``place`` is applied to the
        values."""
        values, scale = rounded(w, summed)
        return cls(place(values), scale, summed if summed < 0 else summed - w.ndim)

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8(Stored):
    """Keys or values in eight bits.

    Attributes:
      values: int8 in [-127, 127], in the shape of the keys or values.
      scale: bfloat16, one for each token and head.

    Example:
      >>> keys = Int8(*rounded(jnp.array([[1.27, 0.0], [-0.5, 0.0]]), 0))
      >>> keys.dot_keys(jnp.ones((1, 2))).round(2).tolist()
      [[0.7699999809265137, 0.0]]
      >>> values = Int8(*rounded(jnp.array([[1.27, 0.64], [0.0, 254.0]]), 1))
      >>> values.mix_values(jnp.full((1, 2), 0.5), "float32").round(2).tolist()
      [[0.6399999856948853, 127.31999969482422]]
    """

    values: Array
    scale: Array

    def dot_keys(self, q: Array) -> Array:
        """As of `Stored`."""
        s = jnp.matmul(q, self.values.astype(q.dtype), preferred_element_type=jnp.float32)
        return s * self.scale[..., None, :].astype(jnp.float32)

    def mix_values(self, w: Array, dtype: DTypeLike) -> Array:
        """As of `Stored`."""
        w, values = w * self.scale[..., None, :].astype(jnp.float32), self.values.astype(dtype)
        return jnp.matmul(w.astype(values.dtype), values, preferred_element_type=jnp.float32)

    def token_axes(self, axis: int) -> Any:
        """As of `Stored`; the last axis of scales."""
        return Int8(axis, -1)  # pyrefly: ignore


class _Cache(CacheFormat):
    def stored(self, x: Array, axis: int = -1) -> Int8:
        return Int8(*rounded(x, axis, CACHE_SCALE))

    def zeros(self, make: Callable[..., Array], shape: tuple[int, ...], tokens: int) -> Int8:
        return Int8(make(*shape, dtype=jnp.int8), make(tokens, dtype=CACHE_SCALE))

    def bytes(self, size: int) -> int:
        return size + jnp.dtype(CACHE_SCALE).itemsize


INT8 = NumberFormat(matrix=Int8Matrix.of, cache=_Cache(), bytes=1)
