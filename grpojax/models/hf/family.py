"""What one family of models has of its own in its folders, as a value that `grpojax.models.hf.families` lists."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.hf.fields import Fields

KINDS = ("full_attention", "sliding_attention")  # of layers, in layer_types


class Flag(NamedTuple):
    """A field that is true or false, and what transformers takes where it is missing."""

    name: str
    missing: bool = False


class Sizes(NamedTuple):
    """The sizes of a model, which a family's own fields may depend on."""

    hidden: int
    layers: int
    heads: int
    head_dim: int
    positions: int


class WithImages(NamedTuple):
    """A model whose text part is of the family; its ``text_config`` describes that part.

    Attributes:
      architecture: the whole model's.
      missing: fields of the text part where they are missing.
      text_wins: whether a field that both have is the text part's.
    """

    architecture: str
    missing: Mapping[str, Any]
    text_wins: bool = False


class Windows(NamedTuple):
    """Which layers have a window.

    Attributes:
      read: ``(fields, layer_types, sizes) -> (window, layers)``, no layers where there is none.
      write: ``(config, raw) -> fields``, on top of the fields ``raw`` that are written already.
      kinds: of layers, that layer_types may have.
      theta: rotary base of windowed layers where it is missing, if they have rotary positions of their own.
      theta_field: a field for that base; none if there is only rope_parameters.
    """

    read: Callable[[Fields, list[str] | None, Sizes], tuple[int, Sequence[int]]]
    write: Callable[[DecoderConfig, Mapping[str, Any]], dict[str, Any]]
    kinds: tuple[str, ...] = KINDS
    theta: float | None = None
    theta_field: str | None = None


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What is not given is as in most families.

    Attributes:
      architectures: names in config.json; the first is written.
      with_images: the model with images whose text part it is.
      windows: which layers have a window; None if layers are of kinds that ``read`` knows.
      traits: fields of `DecoderConfig` that all models of the family have.
      read: ``(fields, sizes) -> fields`` of `DecoderConfig` that only this family has.
      write: ``(config, base) -> fields`` of config.json, which undoes ``read``; ``base`` are the source's.
      qkv_bias, out_bias, mlp_bias: whether there are biases, or the field that says so.
      kv_heads: number of heads of keys and values where it is missing; None is as many as there are heads.
      null_kv_heads: whether null is as many as there are heads; otherwise it is refused.
      head_dim: size of a head where it is missing; None is the hidden size over the number of heads.
      null_head_dim: whether null is the hidden size over the number of heads; otherwise it is refused.
      whole_heads: whether the number of heads must divide the hidden size: "always", "by default" if head_dim is
        missing, or "no". "exactly" says that all heads together have the hidden size.
      rotated: share of a head that rotates where it is missing; None if all of it always does.
      scalings: types of rotary scaling (`grpojax.models.hf.ropes`).
      sections: whether positions of images may be described, which change nothing for text.
      theta, eps, positions, tied: where the rotary base, the norms' epsilon, the number of positions and whether
        embeddings are tied are missing.
      activation_field: the field that names the activation of an MLP's gate.
      names: what in a tensor's name stands for which in the family's folders, as patterns. If several of ours get one
        name, that tensor has their rows one below the other.
      extra: pattern of tensors that are no part of the decoder: those that predict further tokens or read images.
      further_layers: whether folders may have layers behind the last one, which predict further tokens.
      experts_in_one: whether a tensor has all experts of a layer, as ``[experts, in, out]``, with the columns of gate
        and up in turn; otherwise each has its own, or ``[experts, out, in]`` with gate above up.
      rope: rotary positions where config.json says nothing of them, as rope_parameters.
      rope_fields: further fields of rope_parameters that ``read`` knows.
      quantised: the quant_method that may be read, if there is one.
    """

    architectures: tuple[str, ...]
    windows: Windows | None
    with_images: WithImages | None = None
    traits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    read: Callable[[Fields, Sizes], dict[str, Any]] = _nothing
    write: Callable[[DecoderConfig, Mapping[str, Any]], dict[str, Any]] = _nothing
    qkv_bias: Flag | bool = Flag("attention_bias")
    out_bias: Flag | bool = Flag("attention_bias")
    mlp_bias: Flag | bool = False
    kv_heads: int | None = 32
    null_kv_heads: bool = True
    head_dim: int | None = None
    null_head_dim: bool = True
    whole_heads: Literal["no", "by default", "always", "exactly"] = "no"
    rotated: float | None = None
    scalings: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    sections: bool = False
    theta: float = 1e4
    eps: float = 1e-6
    positions: int = 32768
    tied: bool = False
    activation_field: str = "hidden_act"
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    extra: str | None = None
    further_layers: bool = False
    experts_in_one: bool = False
    rope: Mapping[str, Any] | None = None
    rope_fields: tuple[str, ...] = ()
    quantised: str | None = None
