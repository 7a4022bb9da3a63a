"""What a weight may be besides an array.

A leaf in a tree of weights is an array, or a `Matrix`: a weight in another form, with products of its own. The forwards
multiply by the functions of this module, and do not ask which of the two a weight is.
"""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from grpojax.types import Array

Precision = Literal["highest"] | None  # of a product, as jax.numpy.matmul takes it
OfArray = Callable[[Array, tuple[str, ...], Any], Any]  # ``(array, logical axes, dtype)``


class Matrix(abc.ABC):
    """A weight in another form than one array, or those of several layers or experts stacked; a pytree. The products
    here are those of the merged weight. A form overrides those for which it has a better way.

    Attributes:
      ready: whether it was made for a rollout, from a weight that is gathered and cast. A layer takes it as it is.
    """

    ready: bool = False

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""

    @property
    def ndim(self) -> int:
        """Number of axes of the weight."""
        return len(self.shape)

    @abc.abstractmethod
    def merged(self) -> Array:
        """The weight as one array."""

    @abc.abstractmethod
    def map(self, f: OfArray, axes: tuple[str, ...], dtype: Any) -> Self:
        """Applies ``f(array, logical axes, dtype)`` to each of its arrays.

        Args:
          f: the function.
          axes: logical axes of the weight.
          dtype: for ``f``, of the arrays that have no dtype of their own.
        """

    def with_learned(self, name: str, learned: Mapping[str, Array]) -> "Matrix":
        """The weight called ``name`` with those of the ``learned`` arrays that change it; here there are none."""
        return self

    def matmul(self, x: Array, precision: Precision) -> Array:
        """``x [n, in]`` times the weight ``[in, out]``: ``[n, out]`` in ``x``'s dtype."""
        return jnp.matmul(x, self.merged().astype(x.dtype), precision=precision)

    def back(self, g: Array, precision: Precision) -> Array:
        """``g [n, out]`` times the transposed weight, ``[n, in]``: the gradient of `matmul` with respect to ``x``."""
        return jnp.matmul(g, self.merged().astype(g.dtype).T, precision=precision)

    def stacked(self, x: Array, times: "Times") -> Array:
        """``x`` times several weights ``[E, in, out]`` at once, as ``times`` says."""
        return times.array(x, self.merged().astype(x.dtype))

    def take(self, rows: Array, dtype: DTypeLike, **how: Any) -> Array:
        """Rows ``[...]`` of a table ``[V, D]`` as ``[..., D]`` in ``dtype``; ``how`` as in ``jnp.take``."""
        return jnp.take(self.merged(), rows, axis=0, **how).astype(dtype)

    def unembed(self, x: Array) -> Array:
        """``x [..., D]`` times the rows of a table ``[V, D]``: float32 ``[..., V]``."""
        return unembed(x, self.merged())


@dataclasses.dataclass(frozen=True)
class Times:
    """A product of several weights at once, each with rows of ``x`` of its own.

    Attributes:
      array: ``(x, w)``, by an array ``[E, in, out]``.
      scaled: ``(x, values, scale)``, by whole numbers ``[E, in, out]`` with a factor for each column, ``[E, out]``.
      first: the first of two products in a row, if that is another one.
    """

    array: Callable[[Array, Array], Array]
    scaled: Callable[[Array, Array, Array], Array]
    first: "Times | None" = None


Kernel = Array | Matrix


def is_matrix(x: Any) -> bool:
    """Whether ``x`` is a `Matrix`; for the ``is_leaf`` of jax's tree functions."""
    return isinstance(x, Matrix)


def is_ready(w: Kernel) -> bool:
    """Whether a layer takes a weight as it is (`Matrix.ready`)."""
    return isinstance(w, Matrix) and w.ready


def merged(w: Kernel) -> Array:
    """The weight as one array."""
    return w.merged() if isinstance(w, Matrix) else w


def each(w: Kernel, f: OfArray, axes: tuple[str, ...], dtype: Any = None) -> Any:
    """``f(array, logical axes, dtype)`` of a weight, or of each array that it consists of (`Matrix.map`)."""
    return w.map(f, axes, dtype) if isinstance(w, Matrix) else f(w, axes, dtype)


def matmul(x: Array, w: Kernel, precision: Precision = None) -> Array:
    """``x [n, in]`` times a weight ``[in, out]``: ``[n, out]`` in ``x``'s dtype."""
    return w.matmul(x, precision) if isinstance(w, Matrix) else jnp.matmul(x, w, precision=precision)


def stacked(x: Array, w: Kernel, times: Times) -> Array:
    """``x`` times several weights ``[E, in, out]`` at once, as ``times`` says."""
    return w.stacked(x, times) if isinstance(w, Matrix) else times.array(x, w)


def take(w: Kernel, rows: Array, dtype: DTypeLike, **how: Any) -> Array:
    """Rows ``[...]`` of a table ``[V, D]`` as ``[..., D]`` in ``dtype``; ``how`` as in ``jnp.take``."""
    return w.take(rows, dtype, **how) if isinstance(w, Matrix) else jnp.take(w, rows, axis=0, **how).astype(dtype)


def unembed(x: Array, w: Kernel) -> Array:
    """``x [..., D]`` times the rows of a table ``[V, D]``: float32 ``[..., V]``.

    Example:
      >>> unembed(jnp.ones((1, 2)), jnp.array([[1.0, 2.0], [0.5, 0.0], [0.0, -1.0]])).tolist()
      [[3.0, 0.5, -1.0]]
    """
    if isinstance(w, Matrix):
        return w.unembed(x)
    return jnp.einsum("...d,vd->...v", x, w.astype(x.dtype), preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def frozen_matmul(x: Array, w: Kernel, precision: Precision) -> Array:
    """`matmul` by a weight whose gradient is not computed, so that ``x`` is not kept for the backward pass."""
    return matmul(x, w, precision)


def _back(precision: Precision, w: Kernel, g: Array) -> tuple[Array, None]:
    return (w.back(g, precision) if isinstance(w, Matrix) else jnp.matmul(g, w.T, precision=precision)), None


frozen_matmul.defvjp(lambda x, w, precision: (frozen_matmul(x, w, precision), w), _back)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transposed(Matrix):
    """A weight stored as ``[out, in]`` that is the first factor of its products. A CPU multiplies it with a few rows in
    place; it would copy a weight ``[in, out]`` to another layout for each product.

    Attributes:
      values: ``[out, in]``.
    """

    values: Array
    ready = True

    @classmethod
    def of(cls, w: Array) -> "Transposed":
        """Transposes a weight ``[in, out]``."""
        return cls(jax.lax.optimization_barrier(w.T))

    @property
    def shape(self) -> tuple[int, ...]:
        """``[in, out]``."""
        return self.values.shape[::-1]

    def merged(self) -> Array:
        """``[in, out]``."""
        return self.values.T

    def map(self, f: OfArray, axes: tuple[str, ...], dtype: Any) -> "Transposed":
        """Applies ``f`` to the values."""
        return Transposed(f(self.values, axes[::-1], dtype))

    def matmul(self, x: Array, precision: Precision) -> Array:
        """As of a `Matrix`; ``precision`` is the default one."""
        y = jax.lax.dot_general(self.values, x, (((1,), (1,)), ((), ())))
        return jax.lax.optimization_barrier(y).T  # without it the compiler makes the weight the second factor again


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Joined(Matrix):
    """Several weights that multiply the same factor, side by side. A GPU multiplies by them in one kernel.

    Attributes:
      values: ``[in, out]``, the sum of the weights' own ``out``.
      bias: ``[out]``, added to the product; None if no weight has one.
      widths: the ``out`` of each weight.
    """

    values: Array
    bias: Array | None
    widths: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    ready = True

    @classmethod
    def of(cls, weights: Sequence[Array], biases: Sequence[Array | None], dtype: DTypeLike) -> "Joined":
        """Joins weights ``[in, out]``, each with its bias ``[out]`` or None, in a dtype.

        Example:
          >>> joined = Joined.of([jnp.ones((2, 1)), jnp.eye(2)], [None, jnp.ones(2)], jnp.float32)
          >>> [x.tolist() for x in joined.products(jnp.array([[3.0, 4.0]]))]
          [[[7.0]], [[4.0, 5.0]]]
        """
        widths = tuple(w.shape[1] for w in weights)
        bias = None
        if any(b is not None for b in biases):
            each = [jnp.zeros(n, dtype) if b is None else b for b, n in zip(biases, widths, strict=True)]
            bias = jnp.concatenate([b.astype(dtype) for b in each])
        return cls(jnp.concatenate([w.astype(dtype) for w in weights], 1), bias, widths)

    @property
    def shape(self) -> tuple[int, ...]:
        """``[in, out]``."""
        return self.values.shape

    def merged(self) -> Array:
        """``[in, out]``."""
        return self.values

    def map(self, f: OfArray, axes: tuple[str, ...], dtype: Any) -> "Joined":
        """Applies ``f`` to the values; it takes no bias, whose axes are others."""
        return dataclasses.replace(self, values=f(self.values, axes, dtype))

    def products(self, x: Array) -> list[Array]:
        """``x [n, in]`` times each weight, with its bias: ``[n, its out]``."""
        y = jnp.matmul(x, self.values)
        y = y if self.bias is None else y + self.bias
        return jnp.split(y, list(itertools.accumulate(self.widths))[:-1], 1)
