"""Families with delta nets, and their ``config.json``, both ways."""

from collections.abc import Mapping
from typing import Any, cast

from grpojax.extensions.delta.delta_net import DeltaNet
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.hf import windows
from grpojax.models.hf.family import Family, Tensors, WithImages
from grpojax.models.hf.fields import Fields, Sizes
from grpojax.models.hf.ropes import rope_to_hf

# Of positions of images. All three positions of a token of text are the same, so that they change nothing.
_SECTIONS = ("mrope_section", "mrope_interleaved")
_NAMES = {"attention": "full_attention", "delta": "linear_attention"}


def read_qwen3_5(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    """Qwen 3.5's."""
    if fields.flag("attention_bias"):
        fields.refuse("attention_bias", "not supported in this family; supported: false")
    return _delta(fields, sizes.layers)


def _delta(fields: Fields, layers: int) -> dict[str, Any]:
    """The delta nets, and which layers have one; nothing if no layer has."""
    kinds, interval = fields.raw.get("layer_types"), fields.whole("full_attention_interval")
    names = (_NAMES["delta"], _NAMES["attention"])
    if kinds is None:
        kinds = [names[(i + 1) % interval == 0] for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in names for kind in kinds):
        fields.refuse("layer_types", f"must be a list with one of {', '.join(names)} for each of the {layers} layers")
    if names[1] not in kinds:
        fields.refuse("layer_types", "models without a layer that attends are not supported")
    if names[0] not in kinds:
        return {}
    key_heads = fields.whole("linear_num_key_heads")
    value_heads = fields.whole("linear_num_value_heads")
    if value_heads % key_heads:
        fields.refuse("linear_num_value_heads", f"must be a multiple of linear_num_key_heads={key_heads}")
    if (taps := fields.whole("linear_conv_kernel_dim")) < 2:
        fields.refuse("linear_conv_kernel_dim", "must be at least 2")
    delta = DeltaNet(
        key_heads=key_heads,
        value_heads=value_heads,
        key_size=fields.whole("linear_key_head_dim"),
        value_size=fields.whole("linear_value_head_dim"),
        taps=taps,
    )
    return {"mixer": delta, "mixer_layers": tuple(i for i, kind in enumerate(kinds) if kind == names[0])}


def write_qwen3_5(config: DecoderConfig, base: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `read_qwen3_5`."""
    share = 1.0 if config.rotary_dim is None else config.rotary_dim / config.head_dim
    rope = {"rope_theta": config.rope_theta, "partial_rotary_factor": share}
    given = base.get("rope_parameters") or base.get("rope_scaling") or {}
    sections = {key: given[key] for key in _SECTIONS if key in given}
    raw: dict[str, Any] = {
        "layer_types": [_NAMES[kind.mixer] for kind in config.kinds],
        "partial_rotary_factor": share,
        "rope_parameters": sections | rope_to_hf(config.rope_scaling) | rope,
    }
    if config.mixer is None:
        return raw
    delta = cast(DeltaNet, config.mixer)
    return raw | {
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_size,
        "linear_value_head_dim": delta.value_size,
        "linear_conv_kernel_dim": delta.taps,
    }


QWEN3_5 = Family(
    architectures=("Qwen3_5ForCausalLM",),
    missing={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    nullable=(),
    traits={"qk_norm": True, "output_gate": True, "norms_add_one": True},
    windows=windows.OTHER_KINDS,
    rope_fields=_SECTIONS,
    read=read_qwen3_5,
    write=write_qwen3_5,
    with_images=WithImages("Qwen3_5ForConditionalGeneration", unread=r"(model\.)?(mtp|visual)\.", text_wins=True),
    tensors=Tensors(
        {
            r"\.linear_attn\.in_proj_[qkv]\.": ".linear_attn.in_proj_qkv.",
            r"\.linear_attn\.conv1d_[qkv]\.": ".linear_attn.conv1d.",
        }
    ),
)
