"""Weights of eight bits for the rollout: symmetric, one float32 scale an output channel, multiplied as they are.

``w ≈ values * scale`` with ``scale = max |w| / 127`` over the axis that a product sums over, as LLM.int8 rounds weights
(Dettmers et al., arXiv:2208.07339). Activations stay as they are: a decode step waits for bytes, not for products.
The scale comes after the sum: whole numbers up to 127 are exact in bfloat16.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from grpojax.types import Array


class Int8(NamedTuple):
    """A weight in eight bits, or that of all layers stacked; stands in a tree of weights where the weight does.

    Attributes:
      values: int8 in [-127, 127], the weight's shape.
      scale: float32, the weight's shape without the axis that a product sums over.
    """

    values: Array
    scale: Array


Matrix = Array | Int8


def quantise(w: Array, axis: int) -> Int8:
    """A float weight in eight bits; no entry is off by more than half a scale, and a channel of zeros stays one.

    Args:
      w: ``[..., n, ...]``, any float.
      axis: the one that a product sums over.

    Example:
      >>> q = quantise(jnp.array([[1.27, 0.0], [-0.5, 0.0]]), 0)
      >>> q.values.tolist(), [round(float(s), 4) for s in q.scale]
      ([[127, 0], [-50, 0]], [0.01, 0.0])
    """
    w = w.astype(jnp.float32)
    scale = jnp.abs(w).max(axis) / 127
    inverse = jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1), 0)
    values = jnp.clip(jnp.round(w * jnp.expand_dims(inverse, axis)), -127, 127)
    return Int8(values.astype(jnp.int8), scale)


def matmul(x: Array, w: Matrix) -> Array:
    """``x [n, in]`` times ``w [in, out]``, ``[n, out]`` in ``x``'s dtype; sums of eight-bit weights are float32.

    Example:
      >>> matmul(jnp.ones((1, 2)), quantise(jnp.array([[1.27, 2.54], [-0.5, 0.0]]), 0)).round(2).tolist()
      [[0.7699999809265137, 2.5399999618530273]]
    """
    if not isinstance(w, Int8):
        return x @ w
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
