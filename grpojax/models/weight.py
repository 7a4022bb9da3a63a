"""One weight of a network, or those of all its layers: shape, sharding, first values, and names on disk."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from grpojax.models.layer_kinds import Kind
from grpojax.types import Array

# (source of keys, shape, size of every logical axis) -> a weight's first values, float32.
Initialiser = Callable[[nnx.Rngs, tuple[int, ...], Mapping[str, int]], Array]


class Weight(NamedTuple):
    """One weight, or those of all layers stacked.

    Attributes:
      axes: logical axes. Their `sizes` are the shape, and the sharding rules say how each axis is cut. The first axis
        of a stacked weight is "layers", and has the layers that `layers_with` names.
      init: makes its first values.
      name: name in a checkpoint, with ``{}`` for the layer and another ``{}`` for the expert. None if no checkpoint
        has the weight.
      transposed: whether the checkpoint stores it transposed, as ``[out, in]``.
      when: field that says whether a decoder has the weight; None if all of its kind have it. The field is the
        config's, or that of its `Mixer` or `Mlp` if the weight is theirs.
      exact: whether it multiplies in float32 whatever the compute dtype is, and is never in eight bits.
      mixer, mlp: the layers that have it: those with this mixer, or with this MLP (`Kind`). None: it does not matter.
    """

    axes: tuple[str, ...]
    init: Initialiser
    name: str | None = None
    transposed: bool = False
    when: str | None = None
    exact: bool = False
    mixer: str | None = None
    mlp: str | None = None

    @property
    def stacked(self) -> bool:
        """Whether one array has all layers, along its first axis."""
        return self.axes[0] == "layers"

    def of(self, kind: Kind) -> bool:
        """Whether layers of a kind have the weight, if the decoder has it."""
        return self.mixer in (None, kind.mixer) and self.mlp in (None, kind.mlp)

    @property
    def lead(self) -> int:
        """How many of the first axes are in a checkpoint's names. It has one tensor for each layer and expert."""
        return sum(axis in ("layers", "experts") for axis in self.axes[:2])

    @property
    def summed(self) -> int:
        """The number of the axis that products sum over; for a matrix."""
        return max(self.lead, 1)


WeightTable = Mapping[str, Weight]  # by the name that a weight has in a tree


def ones(rngs: nnx.Rngs, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Array:
    """Ones; draws nothing."""
    return jnp.ones(shape)


def zeros(rngs: nnx.Rngs, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Array:
    """Zeros; draws nothing."""
    return jnp.zeros(shape)


def unit_norm(rngs: nnx.Rngs, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Array:
    """Weights of a norm that leave normed values as they are: ones, or zeros if the norms add one (`initial`)."""
    return jnp.ones(shape)


def normal(fan_in: str, *, residual: bool = False) -> Initialiser:
    """Normal with variance 1 / size of the axis ``fan_in``. ``residual``, for outputs of blocks, also divides the
    variance by twice the number of layers."""

    def init(rngs: nnx.Rngs, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Array:
        fan = sizes[fan_in] * (2 * sizes["layers"] if residual else 1)
        return jax.random.normal(rngs.params(), shape) * fan**-0.5

    return init


def norm_row(axis: str, name: str, when: str | None = None, **more: Any) -> Weight:
    """A norm of each layer, called ``name`` in its layer; ``more`` are fields of the `Weight`."""
    return Weight(("layers", axis), unit_norm, f"model.layers.{{}}.{name}.weight", when=when, **more)


def matrix_row(rows: str, columns: str, name: str, *, residual: bool = False, **more: Any) -> Weight:
    """A matrix ``[rows, columns]`` of each layer, called ``name`` in its layer; ``residual`` is as of `normal`, and
    ``more`` are fields of the `Weight`."""
    init = normal(rows, residual=residual)
    return Weight(("layers", rows, columns), init, f"model.layers.{{}}.{name}.weight", transposed=True, **more)


def bias_row(axis: str, name: str, when: str, **more: Any) -> Weight:
    """A bias of each layer; ``name`` is that of its matrix, and ``more`` are fields of the `Weight`."""
    return Weight(("layers", axis), zeros, f"model.layers.{{}}.{name}.bias", when=when, **more)
