"""What may learn in place of a policy's weights: the protocol of a recipe's ``model.adapter``."""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
from etils import epath
from jax.sharding import Mesh

from grpojax import extension
from grpojax.device import Device, Program
from grpojax.models.compute import Compute, ModelConfig
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.matrix import Matrix, is_matrix
from grpojax.models.weight import WeightTable
from grpojax.models.weight_table import leaf_name
from grpojax.types import Array


class Adapter(Protocol):
    """A few weights, the factors, that learn on frozen ones, the base. `of` makes it from the section ``model.adapter``
    of a recipe, by the class of an extension. It is hashable.

    Both make the tree of weights that a forward takes (`joined`). In the base a `grpojax.models.matrix.Matrix` stands
    for each array that has factors. A checkpoint has the factors only.

    Attributes:
      path: folder with the factors that a run starts from; None if these change nothing at first.
      merged: whether a rollout samples with one array for each weight, of base and factors.
      table: the factors by name.
    """

    @property
    def path(self) -> str | None: ...

    @property
    def merged(self) -> bool: ...

    @property
    def table(self) -> WeightTable: ...

    @staticmethod
    def read(path: str) -> tuple[Any, str]:
        """The section that a folder of factors was made with, and the base that it names; "" where it names none."""
        ...

    def check_axes(self, *, fsdp: int, expert: int) -> None:
        """Raises `UserError` if a mesh with axes of these sizes cannot run it."""
        ...

    def check(self, decoder: DecoderConfig) -> None:
        """Raises `UserError` if ``path`` was made with other settings."""
        ...

    def check_start(self, decoder: DecoderConfig, folder: epath.PathLike) -> str:
        """Raises `UserError` if a run could not export what it learns; says why it can only export merged weights, or
        "". ``folder`` is that of the base."""
        ...

    def check_export(self, decoder: DecoderConfig, folder: epath.PathLike) -> None:
        """Raises `UserError` if `save` could not write factors of this base."""
        ...

    def abstract(self, decoder: DecoderConfig) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the factors, by the names in ``table``."""
        ...

    def on_base(self, params: Any) -> Any:
        """A decoder's weights as the frozen base."""
        ...

    def first(self, decoder: DecoderConfig, base: Any, seed: int, device: Device) -> dict[str, Array]:
        """The factors that a run starts with: those in ``path``, or `fresh` ones."""
        ...

    def fresh(self, decoder: DecoderConfig, base: Any, seed: int, mesh: Mesh | None) -> dict[str, Array]:
        """Factors that change nothing of the base yet, with random numbers of this seed."""
        ...

    def make_cast(self, compute: Compute) -> Program:
        """The program ``params -> factors`` that makes the factors in weights ready for a rollout that samples
        with the base as it is."""
        ...

    def save(self, path: str, params: Any, decoder: DecoderConfig, *, base: str, dtype: str) -> None:
        """Writes a folder with the factors in weights, for a base of that name. With several processes all of them
        call this."""
        ...


SETTING = "model.adapter"


def kind(asked: str = SETTING) -> Any:
    """The class of the installed `Adapter`; raises `UserError` without one, which says what ``asked`` for it."""
    return extension.load("settings", SETTING, asked)


def of(model: ModelConfig) -> Adapter | None:
    """The adapter of a recipe's model; None if every weight learns."""
    return None if model.adapter is None else kind()(model.adapter)


def joined(base: Any, factors: Mapping[str, Array]) -> Any:
    """The weights that a forward takes: the base with the factors in it. Copies nothing."""

    def place(path: Any, x: Any) -> Any:
        return x.with_learned(leaf_name(path), factors) if isinstance(x, Matrix) else x

    return jax.tree_util.tree_map_with_path(place, base, is_leaf=is_matrix)
