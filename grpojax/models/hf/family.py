"""What one family of models has of its own in its folders, as a value that `grpojax.models.hf.families` lists."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.hf.fields import Fields, Sizes
from grpojax.models.hf.windows import Windows, last

# Fields of config.json -> what stands for them where they are missing, in a family that has nothing else: mostly as
# transformers' LlamaConfig. Null is a size that follows from the others: as many heads of keys and values as there are
# heads, and the hidden size over their number.
MISSING: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
# Fields of `DecoderConfig` -> those of config.json that say whether there are biases.
ATTENTION_BIASES: Mapping[str, str] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
BIASES: Mapping[str, str] = {**ATTENTION_BIASES, "mlp_bias": "mlp_bias"}


class WithImages(NamedTuple):
    """A model whose text part is of the family; its ``text_config`` describes that part.

    Attributes:
      architecture: the whole model's.
      unread: pattern of its tensors that are no part of the decoder: those that read images or predict further tokens.
      missing: fields of the text part where they are missing.
      text_wins: whether a field that both have is the text part's.
    """

    architecture: str
    unread: str
    missing: Mapping[str, Any] = {}
    text_wins: bool = False


class Tensors(NamedTuple):
    """How a folder's tensors differ from those that most families have.

    Attributes:
      names: what in a tensor's name stands for which in the family's folders, as patterns. If several of ours get one
        name, that tensor has their rows one below the other. If the name has one number less than ours, the tensor has
        all experts of a layer along its first axis.
      names_in_one: further ones, in folders that have such tensors of all experts. None is written.
      in_turn: whether a tensor of all experts is ``[experts, in, out]``, with the columns of gate and up in turn;
        otherwise it is ``[experts, out, in]``, with gate above up.
      further_layers: whether folders may have layers behind the last one, which predict further tokens.
      unpack: a quant_method that may be read -> what gives for the tensors of a folder, by name, those that they stand
        for (`grpojax.models.hf.tensor_part.OnDisk`).
    """

    names: Mapping[str, str] = {}
    names_in_one: Mapping[str, str] = {}
    in_turn: bool = False
    further_layers: bool = False
    unpack: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {}


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


def _any(fields: Fields, hidden: int, heads: int) -> None:
    """Every number of heads goes with every hidden size."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What is not given is as in most families.

    Attributes:
      architectures: names in config.json; the first is written.
      missing: fields of config.json -> what transformers' config class takes where they are missing, on top of
        `MISSING`. Of some fields it also says that the family has them: ``hidden_activation`` in place of
        ``hidden_act``, ``partial_rotary_factor`` if a part of a head rotates, and ``rope_local_base_freq``, the rotary
        base of layers with a window.
      nullable: those of num_key_value_heads and head_dim that may be null in config.json, as in `MISSING`.
      flags: fields of `DecoderConfig` that are true or false -> those of config.json that say it.
      traits: fields of `DecoderConfig` that all models of the family have.
      heads: ``(fields, hidden, heads)``, which raises `UserError` where they do not go together.
      windows: which layers have a window.
      scalings: types of rotary scaling (`grpojax.models.hf.ropes`).
      rope_fields: further fields of rope_parameters, which ``read`` knows or which change nothing for text.
      read: ``(fields, sizes) -> fields`` of `DecoderConfig` that only this family has.
      write: ``(config, base) -> fields`` of config.json, which undoes ``read``; ``base`` are the source's.
      with_images: the model with images whose text part it is; None if there is none.
      tensors: how a folder's tensors differ.
    """

    architectures: tuple[str, ...]
    missing: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    nullable: tuple[str, ...] = ("num_key_value_heads", "head_dim")
    flags: Mapping[str, str] = dataclasses.field(default_factory=lambda: ATTENTION_BIASES)
    traits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    heads: Callable[[Fields, int, int], None] = _any
    windows: Windows = last()
    scalings: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    rope_fields: tuple[str, ...] = ()
    read: Callable[[Fields, Sizes], dict[str, Any]] = _nothing
    write: Callable[[DecoderConfig, Mapping[str, Any]], dict[str, Any]] = _nothing
    with_images: WithImages | None = None
    tensors: Tensors = Tensors()

    def __post_init__(self):
        object.__setattr__(self, "missing", {**MISSING, **self.missing})
