"""What a layer is made of: a mixer, by which its tokens see each other, and an MLP, which takes each by itself.

Attention and the dense MLP are in `grpojax.models.layers`. An extension brings others: a `Mixer` or an `Mlp`, which is
a value in a `DecoderConfig`, and rows of the table of weights (`grpojax.extension.Names.weights`).
"""

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

from grpojax.models.compute import Compute
from grpojax.types import Array, Rows

# A function of what an `Mlp` tells of a layer's tokens, to any pytree of arrays.
Observe = Callable[[Any], Any]


class Kind(NamedTuple):
    """The mixer and the MLP of a layer: the core's, or `Mixer.name` and `Mlp.name`."""

    mixer: str = "attention"
    mlp: str = "dense"


class LayerProducts(Protocol):
    """What a mixer or an MLP uses of a layer (`grpojax.models.layers.Layer`).

    Attributes:
      config: the decoder's (`grpojax.models.decoder_config.DecoderConfig`).
      compute: how it runs.
      w: the layer's weights by name, gathered and in the compute dtype.
    """

    config: Any
    compute: Compute
    w: dict[str, Any]

    def linear(self, x: Array, name: str) -> Array:
        """``x [..., in]`` times the weight called ``name``, with its bias if it has one."""
        ...

    def linears(self, x: Array, *names: str) -> list[Array]:
        """`linear` by several weights."""
        ...

    def read(self, x: Array, name: str) -> Array:
        """The stream as the layer reads it; ``name`` is that of the norm before it."""
        ...


class Mixer(abc.ABC):
    """Mixes the tokens of some layers in place of attention. A frozen dataclass of its sizes.

    Where attention keeps keys and values of all tokens, it keeps a state: a pytree of arrays, whose size does not
    depend on the number of tokens. Every completion of a group starts from the state after its prompt.

    Attributes:
      name: its word, in `Kind` and in rows of the table of weights.
      state_axes: logical axes of the states of slots ``[P, S, ...]``, in the tree of a state; what is not named is not
        cut.
    """

    name: ClassVar[str]
    state_axes: ClassVar[Any]

    @abc.abstractmethod
    def sizes(self) -> Mapping[str, int]:
        """The size of each logical axis that only its weights have."""

    @abc.abstractmethod
    def cut(self) -> Mapping[str, tuple[int, str]]:
        """The sizes that a mesh must divide, with their logical axes, by their names in ``config.json``."""

    @abc.abstractmethod
    def project(self, layer: LayerProducts, x: Array) -> tuple[Any, Any]:
        """The products of a layer's weights with the stream ``x [..., D]``: what is mixed, and what `output` gets."""

    @abc.abstractmethod
    def of_prompts(self, layer: LayerProducts, projected: Any, lengths: Array) -> tuple[Array, Any]:
        """Outputs of prompts ``[B, K, L]`` of these ``lengths [B, K]``, and the states after them, ``[B, K, ...]``."""

    @abc.abstractmethod
    def of_rows(self, layer: LayerProducts, projected: Any, rows: Rows, states: Any) -> Array:
        """Outputs of the tokens ``[B, R, S]`` of ``rows``. Completions start from the ``states`` of their prompts."""

    @abc.abstractmethod
    def of_token(self, layer: LayerProducts, projected: Any, states: Any) -> tuple[Array, Any]:
        """Outputs of the newest token ``[P, S]`` of each slot, and the next states ``[P, S, ...]``."""

    @abc.abstractmethod
    def output(self, layer: LayerProducts, mixed: Array, kept: Any) -> Array:
        """What the layer adds to the stream, ``[..., D]``; ``kept`` is the second result of `project`."""

    @abc.abstractmethod
    def matrices(self, hidden: int) -> int:
        """Numbers of a layer's matrices, given the size D of the stream."""

    @abc.abstractmethod
    def products(self) -> int:
        """Multiply-adds of a token that multiply no weight of a matrix."""

    @abc.abstractmethod
    def state_bytes(self) -> int:
        """Bytes of a sample's state in a layer."""

    @abc.abstractmethod
    def working_bytes(self) -> float:
        """Bytes that a token takes while a layer mixes it."""


class Mlp(abc.ABC):
    """Takes each token by itself in some layers, in place of the dense MLP. A frozen dataclass of its sizes.

    It may choose, for each token, which of its weights it uses. A rollout can keep these choices, so that scores and
    updates choose the same (``rollout.router_replay``).

    Attributes:
      name: its word, in `Kind` and in rows of the table of weights.
      loops: how often its loops run whose length a compiled program does not say, by the name of their scope.
    """

    name: ClassVar[str]
    loops: ClassVar[Mapping[str, int]] = {}

    @abc.abstractmethod
    def sizes(self, hidden: int) -> Mapping[str, int]:
        """The size of each logical axis that only its weights have, given the size D of the stream."""

    @abc.abstractmethod
    def cut(self) -> Mapping[str, tuple[int, str]]:
        """As of a `Mixer`."""

    @abc.abstractmethod
    def check_axis(self, shards: int) -> None:
        """Raises `UserError` if it does not divide over so many devices of ``mesh.expert``."""

    @abc.abstractmethod
    def run(self, layer: LayerProducts, h: Array, kept: Array | None) -> tuple[Array, Any]:
        """The MLP of tokens.

        Args:
          layer: the layer's weights.
          h: ``[..., D]``, as the MLP reads the stream.
          kept: ``[..., k]``, choices of an earlier forward; None chooses.

        Returns:
          ``[..., D]``, and what `choices` and `observe` read.
        """

    @abc.abstractmethod
    def choices(self, seen: Any) -> Array:
        """The choices ``[..., k]`` of a forward as a later one takes them. The largest number of their dtype says that
        none was kept."""

    @abc.abstractmethod
    def choice(self) -> tuple[int, Any]:
        """How many choices a token makes in a layer, and their dtype."""

    @abc.abstractmethod
    def observe(self, rows: Rows, weights: Array | None) -> Observe:
        """What the loss takes of each layer's tokens ``[B, R, S]``: sums, which add up over micro-batches.

        ``weights [B, R, S]`` of the tokens add up to 1 over all micro-batches; None if the MLP has no loss.
        """

    @abc.abstractmethod
    def measured(self, observed: Any, rows: Rows, coef: float) -> tuple[Array, dict[str, Any]]:
        """Its part of the loss, of weight ``coef``, and metrics, out of `observe` of all layers, ``[layers, ...]``."""

    @abc.abstractmethod
    def matrices(self, hidden: int) -> int:
        """Numbers of a layer's matrices, given the size D of the stream."""

    @abc.abstractmethod
    def of_token(self, hidden: int) -> int:
        """Those of these numbers that a token is multiplied by."""

    @abc.abstractmethod
    def in_vain(self, hidden: int, compute: Compute, tokens: int) -> int:
        """Those that a token is multiplied by besides, if so many tokens of a device run at once."""

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """The widest product of a token."""

    @abc.abstractmethod
    def spread(self, hidden: int, shards: int, tensor: int) -> "Spread":
        """How a layer's weights and tokens lie on ``mesh.expert`` and ``mesh.tensor`` of these sizes."""


class Spread(NamedTuple):
    """What devices of ``mesh.expert`` have of one layer's MLP, for estimates of memory and time.

    Attributes:
      weights: numbers of the weights that the axis cuts, and which no device gathers over it.
      laid_out: those of them that decoding needs in another layout.
      inside: numbers of a token between the products, on one device.
      reads: how often a forward reads these weights besides once.
      rows: rows that a device receives for each of its tokens, when tokens go to their weights or come back.
    """

    weights: int
    laid_out: int
    inside: float
    reads: int
    rows: float
