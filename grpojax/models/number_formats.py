"""Formats of the numbers that a rollout reads: floats, or what an extension brings under a word, such as ``int8``."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from grpojax import extension
from grpojax.models.matrix import Matrix
from grpojax.types import Array

FLOATS = ("compute", "float32", "bfloat16")  # words that the core knows; "compute" is the dtype of ``model.dtype``


class Stored(abc.ABC):
    """Keys or values of a cache in another form than one array; a pytree."""

    @abc.abstractmethod
    def dot_keys(self, q: Array) -> Array:
        """``q [..., r, d]`` times the keys ``[..., d, n]`` of n tokens: float32 ``[..., r, n]``."""

    @abc.abstractmethod
    def mix_values(self, w: Array, dtype: DTypeLike) -> Array:
        """Float32 ``w [..., r, n]`` times the values ``[..., n, d]`` of n tokens: float32 ``[..., r, d]``. The factors
        have ``dtype`` in the product."""

    @abc.abstractmethod
    def token_axes(self, axis: int) -> Any:
        """The axis of tokens of each of its arrays, in the same tree, if that of keys and values is ``axis``."""


Kept = Array | Stored  # keys or values, as a cache has them


def dot_keys(q: Array, keys: Kept) -> Array:
    """``q [..., r, d]`` times ``keys [..., d, n]``, n tokens: float32 ``[..., r, n]``."""
    return keys.dot_keys(q) if isinstance(keys, Stored) else jnp.matmul(q, keys, preferred_element_type=jnp.float32)


def mix_values(w: Array, values: Kept, dtype: DTypeLike) -> Array:
    """Float32 ``w [..., r, n]`` times ``values [..., n, d]``, n tokens: float32 ``[..., r, d]``. The factors have the
    dtype of the values in the product, or ``dtype`` if the values are no floats."""
    if isinstance(values, Stored):
        return values.mix_values(w, dtype)
    return jnp.matmul(w.astype(values.dtype), values, preferred_element_type=jnp.float32)


def token_axes(kept: Kept, axis: int) -> Any:
    """The axis of the tokens in keys or values, ``axis``, for each of the arrays that they consist of."""
    return kept.token_axes(axis) if isinstance(kept, Stored) else axis


class CacheFormat(abc.ABC):
    """How a cache stores keys and values. Each token's numbers are stored once, when it is written."""

    @abc.abstractmethod
    def stored(self, x: Array, axis: int = -1) -> Kept:
        """Keys or values; ``axis`` is that of a head's numbers."""

    @abc.abstractmethod
    def zeros(self, make: Callable[..., Array], shape: tuple[int, ...], tokens: int) -> Kept:
        """An empty cache of so many tokens: ``make(*shape, dtype=)`` gives zeros with these last axes, which are those
        of tokens and of a head's numbers."""

    @abc.abstractmethod
    def bytes(self, size: int) -> int:
        """Bytes of a head's ``size`` numbers of one token."""


@dataclasses.dataclass(frozen=True)
class Floats(CacheFormat):
    """Keys and values as they are, in a dtype."""

    dtype: DTypeLike

    def stored(self, x: Array, axis: int = -1) -> Array:
        """As of a `CacheFormat`."""
        return x.astype(self.dtype)

    def zeros(self, make: Callable[..., Array], shape: tuple[int, ...], tokens: int) -> Array:
        """As of a `CacheFormat`."""
        return make(*shape, dtype=self.dtype)

    def bytes(self, size: int) -> int:
        """As of a `CacheFormat`."""
        return size * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """A format that an extension brings (`grpojax.extension.Names.formats`).

    Attributes:
      matrix: ``(weight, summed, place) -> Matrix``: a float weight in the format, whose axis ``summed`` a product sums
        over. ``place`` is applied to what has the weight's shape.
      cache: how a cache stores keys and values.
      bytes: of one weight; what several weights share is not counted.
    """

    matrix: Callable[[Array, int, Callable[[Array], Array]], Matrix]
    cache: CacheFormat
    bytes: int


def format_of(word: str, setting: str) -> NumberFormat:
    """The format of a word; raises `UserError` with the ``setting`` that asks for it if no extension brings it."""
    return extension.load("formats", word, f"{setting}={word}")


def weight_bytes(word: str, setting: str, floats: int) -> int:
    """Bytes of a weight in a format; ``floats`` if it stays a float."""
    return floats if word in FLOATS else format_of(word, setting).bytes
