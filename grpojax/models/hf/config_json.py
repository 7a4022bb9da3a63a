"""``config.json`` of Hugging Face folders, both ways, in the spellings of transformers 4 and 5."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from etils import epath

from grpojax.host import files
from grpojax.host.errors import UserError, require
from grpojax.models.decoder_config import (
    DecoderConfig,
    DeltaNet,
    Experts,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)
from grpojax.models.hf.unknown import strange

# Architecture named in config.json -> family, which is also its model_type.
ARCHITECTURES = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "SmolLM3ForCausalLM": "smollm3",
    "GraniteForCausalLM": "granite",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "Gemma3ForCausalLM": "gemma3_text",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
    "Exaone4ForCausalLM": "exaone4",
    "SeedOssForCausalLM": "seed_oss",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_ForCausalLM": "ernie4_5",  # as its makers call it
    "HeliumForCausalLM": "helium",
    "HyperCLOVAXForCausalLM": "hyperclovax",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "OlmoeForCausalLM": "olmoe",
}
# Architecture with images, whose model_type lacks "_text" -> family of its text part, which "text_config" describes.
_WITH_IMAGES = {"Gemma3ForConditionalGeneration": "gemma3_text", "Qwen3_5ForConditionalGeneration": "qwen3_5_text"}
_TEXT = "text_config"
# Fields that a model with a text part has once, for all of it.
_OF_WHOLE = (
    *("tie_word_embeddings", "quantization_config", "compression_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
_HYBRID = "qwen3_5_text"
_MIXTURES = ("qwen2_moe", "qwen3_moe", "olmoe")
_WINDOWED = ("mistral", "phi3")  # every layer has a window, unless sliding_window is null; none has a bias
_PARTLY_WINDOWED = ("qwen2", "qwen3")  # the last layers may have one
_ALTERNATING = {"gemma3_text": 6, "olmo3": 4}  # all but each so many-th have one
_KINDS = ("full_attention", "sliding_attention")  # of layers, in layer_types
_MLP_BIAS = ("llama", "smollm3", "granite", "hyperclovax", "seed_oss", "helium")  # whose config.json has a field for it
_GLM, _HUNYUAN = ("glm", "glm4"), "hunyuan_v1_dense"
_TIED = ("smollm3", "ernie4_5", "gemma3_text")  # where the field is missing

# What transformers takes where a field is missing; of key-value heads None stands for as many as there are heads.
_KV_HEADS = {
    "llama": None,
    "granite": None,
    "hyperclovax": None,
    "olmo2": None,
    "olmo3": None,
    "olmoe": None,
    "phi3": None,
    "hunyuan_v1_dense": None,
    "ernie4_5": 2,
    "glm": 2,
    "glm4": 2,
    "helium": 20,
    "seed_oss": 8,
    "mistral": 8,
    "smollm3": 4,
    "gemma3_text": 4,
    "qwen2_moe": 16,
    "qwen3_moe": 4,
    _HYBRID: 4,
}
_NO_NULL_KV_HEADS = ("qwen2_moe", "qwen3_moe", *_GLM, "mistral", "exaone4", "helium", _HYBRID)
_HEAD_DIM = dict.fromkeys(("qwen3", *_GLM, "ernie4_5", "helium", "seed_oss"), 128)  # elsewhere by the number of heads
_HEAD_DIM |= dict.fromkeys(("gemma3_text", _HYBRID), 256)
_NO_NULL_HEAD_DIM = ("qwen3", *_GLM, "helium", "gemma3_text", _HYBRID)
_PARTLY_ROTATED = {**dict.fromkeys(_GLM, 0.5), _HYBRID: 0.25}  # the share of a head that rotates where it is missing
_THETA = {"smollm3": 2e6, "ernie4_5": 5e5, "helium": 1e5, "gemma3_text": 1e6, "olmo3": 5e5}
_WINDOW_THETA = {"gemma3_text": 1e4, "olmo3": 5e5}  # families whose windowed layers have rotary positions of their own
_EPS = {
    **dict.fromkeys(("olmo2", "olmo3", "olmoe", "phi3", "exaone4", "hunyuan_v1_dense", "ernie4_5"), 1e-5),
    **dict.fromkeys(_GLM, 1.5625e-7),
    "helium": 1e-8,
}
_POSITIONS = {
    **dict.fromkeys(("llama", "granite", "hyperclovax", "olmo2", "olmo3", "exaone4", "hunyuan_v1_dense"), 2048),
    **dict.fromkeys(("mistral", *_GLM, "ernie4_5", "gemma3_text"), 131072),
    **dict.fromkeys(("phi3", "helium", "olmoe"), 4096),
    "seed_oss": 524288,
}

# Of an MLP's gate: our name -> theirs, and other names for it.
_ACTIVATIONS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}

# In what all models of a family differ from Llama.
_TRAITS: dict[str, dict[str, Any]] = {
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "olmo2": {"wide_qk_norm": True, "norms_before": False, "norms_after": True},
    "olmo3": {"wide_qk_norm": True, "norms_before": False, "norms_after": True},
    "gemma3_text": {"qk_norm": True, "norms_after": True, "norms_add_one": True, "activation": "gelu_tanh"},
    "olmoe": {"wide_qk_norm": True},
    "exaone4": {"qk_norm": True, "norms_before": False, "norms_after": True},
    "hunyuan_v1_dense": {"qk_norm_rotated": True},
    "glm": {"rotary_neighbours": True},
    "glm4": {"rotary_neighbours": True, "norms_after": True},
    "ernie4_5": {"rotary_neighbours": True},
    "helium": {"rotary_neighbours": True},
    _HYBRID: {"qk_norm": True, "output_gate": True, "norms_add_one": True},
}

# Multipliers of Granite and HyperCLOVA X: a field of ours -> theirs, each 1 where it is missing.
_MULTIPLIERS = {
    "embedding_multiplier": "embedding_multiplier",
    "attention_multiplier": "attention_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_divisor": "logits_scaling",
}

# Rope scaling: rope_type -> the fields that it needs, and those that it may have.
_ORIGINAL = "original_max_position_embeddings"
_SCALINGS = {
    "default": ((), ("factor",)),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
    "yarn": (
        ("factor",),
        (_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "dynamic": (("factor", "alpha"), ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")),  # Hunyuan's
}

_LARGEST = 2**31 - 1  # sizes are counted in int32 on devices
_MOST_LAYERS = 10_000  # a weight's name is made for each
_LFS = b"version https://git-lfs.github.com/spec/"  # how a pointer of Git LFS begins
MERGE = "peft.AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload().save_pretrained(NEW_FOLDER)"


def read_config(path: str | os.PathLike) -> DecoderConfig:
    """The decoder that a folder's ``config.json`` describes; the weights need not be there.

    Raises:
      UserError: there is no such folder or file, it is damaged, it is an adapter's, or as `from_hf`.
    """
    folder = model_folder(path)
    refuse_adapter(folder)
    file = folder / "config.json"
    if not file.exists():
        inside = [f.parent for pattern in ("*", "snapshots/*") for f in folder.glob(f"{pattern}/config.json")]
        hint = (
            f"give one of its folders: {', '.join(map(str, sorted(inside)[:3]))}" if inside else "give a model's folder"
        )
        raise UserError(f"{folder} has no config.json; {hint}")
    return from_hf(read_json(file), str(file))


def from_hf(raw: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """Reads a Hugging Face config, in the spelling of transformers 4 (as on the hub) or 5.

    A field that is missing has the default of the family's config class in transformers, except for the sizes that
    every model has to give. Fields that transformers ignores are ignored.

    Args:
      raw: the parsed ``config.json``.
      where: what to call it in errors.

    Raises:
      UserError: an architecture or an option that this decoder does not have, a missing size, or a value that the
        field cannot have.

    Example:
      >>> sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
      >>> from_hf({"model_type": "llama", **sizes}).rope_theta
      10000.0
      >>> from_hf({"model_type": "llama", **sizes, "hidden_size": "16"})
      Traceback (most recent call last):
      grpojax.host.errors.UserError: config.json: hidden_size='16': must be a whole number from 1 to 2147483647
    """
    raw = text_part(raw, where)
    family = _family(raw, where)
    fields = _Fields(raw, where)
    vocab, hidden, mlp = (fields.whole(key) for key in ("vocab_size", "hidden_size", "intermediate_size"))
    layers, heads = fields.whole("num_hidden_layers", most=_MOST_LAYERS), fields.whole("num_attention_heads")
    kv_heads = _KV_HEADS.get(family, 32) or heads
    null = _REQUIRED if family in _NO_NULL_KV_HEADS else heads
    kv_heads = fields.whole("num_key_value_heads", missing=kv_heads, null=null)
    if heads % kv_heads:
        why = "" if "num_key_value_heads" in raw else ", which transformers takes where the field is missing"
        raise UserError(
            f"{where}: num_attention_heads={heads} does not divide by num_key_value_heads={kv_heads}{why}; correct it"
        )
    head_dim = _head_dim(fields, family, hidden, heads)
    traits = _TRAITS.get(family, {})
    names = _ACTIVATIONS[traits.get("activation", "silu")]
    if fields.get(_activation_key(family), names[0]) not in names:
        fields.refuse(_activation_key(family), f"not supported; supported: {names[0]!r}")
    positions = fields.whole("max_position_embeddings", missing=_POSITIONS.get(family, 32768))
    if raw.get("per_layer_config"):
        fields.refuse("per_layer_config", "layers that differ are not supported")
    if family == _HYBRID and fields.flag("attention_bias"):
        fields.refuse("attention_bias", "not supported in this family; supported: false")
    window, windowed = (0, ()) if family == _HYBRID else _windows(fields, family, layers, positions)
    for key in ("quantization_config", "compression_config"):
        if raw.get(key):
            fields.refuse(key, "quantised weights are not read; delete the entry if the weights are bf16, f16 or f32")
    if family == "olmoe" and raw.get("clip_qkv") is not None:
        fields.refuse("clip_qkv", "queries, keys and values that are clipped are not supported; supported: null")
    theta, scaling, rotary_dim, window_theta = _ropes(fields, positions, family, head_dim)
    qkv_bias, out_bias, mlp_bias = _biases(fields, family)
    return DecoderConfig(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=fields.number("rms_norm_eps", "(0, 1)", missing=_EPS.get(family, 1e-6)),
        tie_embeddings=fields.flag("tie_word_embeddings", missing=family in _TIED),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        delta=_delta(fields, layers) if family == _HYBRID else None,
        max_positions=positions,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        window=window,
        windowed_layers=windowed,
        window_theta=window_theta if windowed else None,
        **traits,
        **_multipliers(fields, family, hidden, head_dim),
        unrotated_layers=_unrotated(fields, layers) if family == "smollm3" else (),
        experts=_experts(fields, family) if family in _MIXTURES else None,
    )


_REQUIRED: Any = object()  # in place of a default: there is none


class _Fields:
    """The fields of a JSON object, each as the kind that it must have, or refused by name."""

    def __init__(self, raw: Mapping[str, Any], where: str):
        self.raw, self.where = raw, where

    def get(self, key: str, missing: Any = _REQUIRED) -> Any:
        """A field as it stands; ``missing`` where there is none."""
        if key not in self.raw and missing is _REQUIRED:
            raise UserError(f"{self.where}: {key!r} is missing; add it, or download the file again")
        return self.raw.get(key, missing)

    def whole(self, key: str, *, missing: Any = _REQUIRED, null: Any = _REQUIRED, most: int = _LARGEST) -> int:
        """A whole number from 1 on; ``missing`` where there is no such field, ``null`` where it is null."""
        value = self.get(key, missing)
        if value is None and null is not _REQUIRED:
            return null
        if type(value) is not int or not 1 <= value <= most:
            self.refuse(key, f"must be a whole number from 1 to {most}")
        return value

    def number(self, key: str, interval: str, *, missing: Any = _REQUIRED) -> float:
        """A finite number in an interval, as `grpojax.host.errors.require` has it."""
        value = self.get(key, missing)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
            self.refuse(key, "must be a number")
        try:
            require(SimpleNamespace(**{key: value}), **{key: interval})
        except UserError as e:
            raise UserError(f"{self.where}: {e}") from None
        return float(value)

    def flag(self, key: str, *, missing: bool = False) -> bool:
        """True or false; ``missing`` where there is no such field, false where it is null."""
        value = self.raw.get(key, missing)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, "must be true or false")
        return bool(value)

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raises the `UserError` for a field."""
        raise UserError(f"{self.where}: {key}={_shown(self.raw.get(key))}: {why}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def text_part(raw: Mapping[str, Any], where: str = "config.json") -> Mapping[str, Any]:
    """The config of the text part of a model that also reads images, as that of a model of its own; any other config
    as it is.

    Example:
      >>> text_part({"model_type": "gemma3", "text_config": {"hidden_size": 2560}})["model_type"]
      'gemma3_text'
    """
    names, kind = raw.get("architectures"), raw.get("model_type")
    named = [family for name, family in _WITH_IMAGES.items() if names in (name, [name]) or kind == _whole(family)]
    family = next(iter(named), None)
    if family is None or _TEXT not in raw:
        return raw
    text = raw[_TEXT]
    if not isinstance(text, dict):
        _Fields(raw, where).refuse(_TEXT, "must be a mapping")
    above = {key: raw[key] for key in _OF_WHOLE if key in raw}
    # Gemma 3 ties its embeddings as the whole says, Qwen 3.5 as the text part does if it says so.
    both = above | text if family == _HYBRID else {"vocab_size": 262208, "num_attention_heads": 8} | text | above
    architecture = next(name for name, mine in ARCHITECTURES.items() if mine == family)
    return both | {"architectures": [architecture], "model_type": family}


def _whole(family: str) -> str:
    """The model_type of the model that has this text part."""
    return family.removesuffix("_text")


def _family(raw: Mapping[str, Any], where: str) -> str:
    """By ``architectures``, or where that is missing by ``model_type``."""
    names, kind = raw.get("architectures"), raw.get("model_type")
    names = [names] if isinstance(names, str) else names
    if not names:
        if kind in ARCHITECTURES.values():
            return str(kind)
        what, reasons = "architecture: none is named", strange(raw)
    elif isinstance(names, list) and all(name in list(ARCHITECTURES) for name in names):
        families = {ARCHITECTURES[name] for name in names}
        if len(families) == 1 and kind in (None, *families):
            return families.pop()
        if kind in ARCHITECTURES.values() or len(families) > 1 or not isinstance(kind, str):
            raise UserError(
                f"{where}: architectures={_shown(names)} and model_type={_shown(kind)} are different families; "
                "correct one"
            )
        what, reasons = f"family with architectures={_shown(names)}", ["fields and weights may have other names"]
    else:
        what, reasons = f"architecture {_shown(names)}", strange(raw) or ["layers of another kind"]
    why = f": {', '.join(reasons)}" if reasons else ""
    raise UserError(f"{where}: unknown {what}, model_type={_shown(kind)}{why}\nknown: {', '.join(ARCHITECTURES)}")


def _biases(fields: _Fields, family: str) -> tuple[bool, bool, bool]:
    """Whether there are biases of queries, keys and values, of the attention's output, and of the MLP."""
    mlp = family in _MLP_BIAS and fields.flag("mlp_bias")
    if family == "qwen2_moe":
        return fields.flag("qkv_bias", missing=True), False, mlp
    if family in ("qwen2", *_WINDOWED, "exaone4"):  # which have no field for it
        return family == "qwen2", False, mlp
    if family == "ernie4_5":
        all_of_them = fields.flag("use_bias")
        return all_of_them, all_of_them, all_of_them
    attention = fields.flag("attention_bias", missing=family in (*_GLM, "seed_oss"))
    if family == "seed_oss":
        return attention, fields.flag("attention_out_bias"), mlp
    return attention, attention and family not in (*_GLM, "helium"), mlp


def _experts(fields: _Fields, family: str) -> Experts:
    """The mixture that every layer has; raises `UserError` where some layer has an MLP of its own kind."""
    if family == "olmoe":
        count = fields.whole("num_experts", missing=64)
        return Experts(
            count=count,
            chosen=fields.whole("num_experts_per_tok", missing=8, most=count),
            size=fields.whole("intermediate_size"),
            renormalised=fields.flag("norm_topk_prob"),
        )
    if fields.whole("decoder_sparse_step", missing=1) != 1:
        fields.refuse("decoder_sparse_step", "layers without experts are not supported; supported: 1")
    if fields.get("mlp_only_layers", None) not in (None, []):
        fields.refuse("mlp_only_layers", "layers without experts are not supported; supported: []")
    # transformers 5 calls the number of a Qwen 3's experts by another name than 4 and the hub.
    names = [name for name in ("num_experts", "num_local_experts") if name in fields.raw]
    names = names if family == "qwen3_moe" else []
    count = fields.whole(names[0] if names else "num_experts")
    if any(fields.whole(name) != count for name in names):
        fields.refuse("num_experts", f"num_local_experts={_shown(fields.raw['num_local_experts'])}; correct one")
    return Experts(
        count=count,
        chosen=fields.whole("num_experts_per_tok", most=count),
        size=fields.whole("moe_intermediate_size"),
        renormalised=fields.flag("norm_topk_prob"),
        shared=fields.whole("shared_expert_intermediate_size") if family == "qwen2_moe" else 0,
    )


def _delta(fields: _Fields, layers: int) -> DeltaNet | None:
    """The delta nets, and which layers have one; None if no layer has."""
    kinds, interval = fields.raw.get("layer_types"), fields.whole("full_attention_interval", missing=4)
    names = ("linear_attention", "full_attention")
    if kinds is None:
        kinds = [names[(i + 1) % interval == 0] for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in names for kind in kinds):
        fields.refuse("layer_types", f"must be a list with one of {', '.join(names)} for each of the {layers} layers")
    if names[1] not in kinds:
        fields.refuse("layer_types", "models without a layer that attends are not supported")
    if names[0] not in kinds:
        return None
    key_heads = fields.whole("linear_num_key_heads", missing=16)
    value_heads = fields.whole("linear_num_value_heads", missing=32)
    if value_heads % key_heads:
        fields.refuse("linear_num_value_heads", f"must be a multiple of linear_num_key_heads={key_heads}")
    if (taps := fields.whole("linear_conv_kernel_dim", missing=4)) < 2:
        fields.refuse("linear_conv_kernel_dim", "must be at least 2")
    return DeltaNet(
        key_heads=key_heads,
        value_heads=value_heads,
        key_size=fields.whole("linear_key_head_dim", missing=128),
        value_size=fields.whole("linear_value_head_dim", missing=128),
        taps=taps,
        attention_layers=tuple(i for i, kind in enumerate(kinds) if kind == names[1]),
    )


def _activation_key(family: str) -> str:
    return "hidden_activation" if family.startswith("gemma") else "hidden_act"


def _multipliers(fields: _Fields, family: str, hidden: int, head_dim: int) -> dict[str, Any]:
    if family == "gemma3_text":
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if fields.raw.get(key) is not None:
                fields.refuse(key, "not supported; supported: null")
        scalar = fields.whole("query_pre_attn_scalar", missing=256)
        attention = None if scalar == head_dim else scalar**-0.5
        return {"embedding_multiplier": hidden**0.5, "attention_multiplier": attention}
    if family == "granite":
        return {ours: fields.number(theirs, "(0, inf)", missing=1.0) for ours, theirs in _MULTIPLIERS.items()}
    if family != "hyperclovax":
        return {}
    usual = head_dim**-0.5  # also in place of null
    given = fields if fields.raw.get("attention_multiplier") is not None else _Fields({}, fields.where)
    attention = given.number("attention_multiplier", "(0, inf)", missing=usual)
    return {
        "embedding_multiplier": fields.number("embedding_multiplier", "(0, inf)", missing=1.0),
        "attention_multiplier": None if attention == usual else attention,
        "residual_multiplier": fields.number("residual_multiplier", "(0, inf)", missing=1.0),
        "logits_divisor": 1 / fields.number("logits_scaling", "(1e-9, 1e9)", missing=1.0),  # which multiplies them
        "norms_after": fields.flag("use_post_norm", missing=True),
    }


def _inverse(x: float) -> float:
    """The number whose inverse is ``x``; it exists where ``x`` is an inverse."""
    near = 1 / x
    return next((y for y in (near, math.nextafter(near, 0), math.nextafter(near, math.inf)) if 1 / y == x), near)


def _unrotated(fields: _Fields, layers: int) -> tuple[int, ...]:
    """The layers without rotary positions, whose place in SmolLM3's list has a 0."""
    listed, interval = fields.raw.get("no_rope_layers"), fields.whole("no_rope_layer_interval", missing=4)
    if listed is None:
        return tuple(range(interval - 1, layers, interval))
    if (
        not isinstance(listed, list)
        or len(listed) < layers
        or any(type(x) is not int or x not in (0, 1) for x in listed)
    ):
        fields.refuse("no_rope_layers", f"must be a list with 1 (rotary) or 0 for each of the {layers} layers, or null")
    return tuple(i for i in range(layers) if not listed[i])


def _head_dim(fields: _Fields, family: str, hidden: int, heads: int) -> int:
    """Given, or by default of a fixed size in some families and hidden_size over the number of heads elsewhere."""
    given = fields.raw.get("head_dim") is not None
    if hidden % heads and (family in ("llama", "hyperclovax", "gemma3_text") or (family == "qwen2" and not given)):
        raise UserError(
            f"{fields.where}: hidden_size={hidden} does not divide by num_attention_heads={heads}; correct it"
        )
    null = _REQUIRED if family in _NO_NULL_HEAD_DIM else hidden // heads
    size = fields.whole("head_dim", missing=_HEAD_DIM.get(family, hidden // heads), null=null)
    if family == "helium" and size * heads != hidden:
        fields.refuse("head_dim", f"times num_attention_heads={heads} must be hidden_size={hidden}")
    if size % 2:
        raise UserError(f"{fields.where}: head_dim={size}: rotary positions need an even size; correct it")
    return size


def _windows(fields: _Fields, family: str, layers: int, positions: int) -> tuple[int, tuple[int, ...]]:
    """The window and the layers that have it, or 0 and none; raises `UserError` for kinds of layers that are not
    supported. A window over all positions is none, where it makes no other difference."""
    if fields.flag("use_bidirectional_attention"):
        fields.refuse("use_bidirectional_attention", "not supported; supported: false")
    types, kinds = fields.raw.get("layer_types"), _KINDS if _may_have_windows(family) else _KINDS[:1]
    if types is not None and not (
        isinstance(types, list) and len(types) == layers and all(kind in kinds for kind in types)
    ):
        supported = " or ".join(map(repr, kinds))
        fields.refuse("layer_types", f"not supported; supported: {supported} in each of the {layers} layers")
    if family == "exaone4":  # where layers rotate by whether there is a window
        if types is None:
            fields.refuse("layer_types", f"must be 'full_attention' in each of the {layers} layers")
        if fields.get("sliding_window", 4096) is not None:
            fields.refuse("sliding_window", "layers with a window are not supported; supported: null")
        return 0, ()
    if family in _WINDOWED:
        if types is not None and len(set(types)) > 1:
            fields.refuse("layer_types", "layers of one kind are supported in this family; correct it")
        usual = 4096 if family == "mistral" else positions
        window, which = fields.whole("sliding_window", missing=usual, null=positions), range(layers)
    elif family in _ALTERNATING:
        window, which = fields.whole("sliding_window", missing=4096), _alternating(fields, family, types, layers)
    else:
        window, which = _last_windows(fields, family, types, layers)
    if not which or (window >= positions and family not in _WINDOW_THETA):
        return 0, ()
    return window, tuple(which)


def _may_have_windows(family: str) -> bool:
    return family in (*_WINDOWED, *_PARTLY_WINDOWED, *_ALTERNATING)


def _of_types(types: list[str]) -> list[int]:
    """The layers with a window."""
    return [i for i, kind in enumerate(types) if kind == _KINDS[1]]


def _alternating(fields: _Fields, family: str, types: list[str] | None, layers: int) -> list[int]:
    """The layers with a window in a family where all but each so many-th have one."""
    if types is not None:
        return _of_types(types)
    every = _ALTERNATING[family]
    if family == "gemma3_text":
        every = fields.whole("sliding_window_pattern", missing=every)
    return [i for i in range(layers) if (i + 1) % every]


def _last_windows(fields: _Fields, family: str, types: list[str] | None, layers: int) -> tuple[int, Sequence[int]]:
    """The window and its layers in a family where use_sliding_window says whether the last layers have one."""
    if not fields.flag("use_sliding_window") or fields.raw.get("sliding_window", 4096) is None:
        if types is not None and _of_types(types):
            fields.refuse("layer_types", "layers with a window need use_sliding_window: true and sliding_window")
        return 0, ()
    if types is not None and family != "qwen3_moe":  # which ignores them
        return fields.whole("sliding_window", missing=4096) if _of_types(types) else 0, _of_types(types)
    window, first = fields.whole("sliding_window", missing=4096), fields.get("max_window_layers", 28)
    if type(first) is not int:
        fields.refuse("max_window_layers", "must be a whole number")
    if family not in _PARTLY_WINDOWED and (first < layers or family in (*_MIXTURES, "smollm3")):
        fields.refuse(
            "use_sliding_window",
            f"layers with a window (sliding_window={window}, max_window_layers={_shown(first)}) are not supported in "
            f"this family;\nset it to false where no text is longer than {window} tokens, which gives the same",
        )
    return window, range(max(first, 0), layers)


def _ropes(
    fields: _Fields, positions: int, family: str, head_dim: int
) -> tuple[float, RopeScaling | None, int, float | None]:
    """Base and stretching of the rotary positions, how many numbers of a head they rotate, and the base of windowed
    layers in families where that differs."""
    if family not in _WINDOW_THETA:
        return *_rope(fields, positions, family, head_dim), None
    given = fields.raw.get("rope_parameters")
    given = {} if given is None else given
    if not isinstance(given, dict) or set(given) - set(_KINDS):
        fields.refuse("rope_parameters", f"must have {' and '.join(map(repr, _KINDS))}, or be null")
    full, windowed = (given.get(kind) for kind in _KINDS)
    usual = _rope(_Fields({**fields.raw, "rope_parameters": full}, fields.where), positions, family, head_dim)
    above = _WINDOW_THETA[family]
    if family == "gemma3_text":
        above = fields.raw.get("rope_local_base_freq", above)
    own = {"rope_theta": above, "rope_scaling": None, "rope_parameters": windowed}
    theta, scaling, _ = _rope(_Fields({**fields.raw, **own}, fields.where), positions, family, head_dim)
    if scaling is not None:
        fields.refuse("rope_parameters", "a scaling of 'sliding_attention' is not supported; supported: 'default'")
    return *usual, theta


def _rope(fields: _Fields, positions: int, family: str, head_dim: int) -> tuple[float, RopeScaling | None, int]:
    """Base and stretching of the rotary positions, and how many numbers of a head they rotate."""
    if fields.flag("use_mrope"):
        fields.refuse("use_mrope", "positions of images are not supported; supported: false")
    both = [key for key in ("rope_scaling", "rope_parameters") if fields.raw.get(key) not in (None, {})]
    found = [_one_rope(fields, key, positions, family, head_dim) for key in both or ["rope_parameters"]]
    if any(other != found[0] for other in found):
        other = _shown(fields.raw["rope_parameters"])
        fields.refuse("rope_scaling", f"rope_parameters={other} says something else; correct one")
    return found[0]


def _one_rope(
    fields: _Fields, key: str, positions: int, family: str, head_dim: int
) -> tuple[float, RopeScaling | None, int]:
    """As one of the two fields has it."""
    given = fields.raw.get(key)
    if given is not None and not isinstance(given, dict):
        fields.refuse(key, "must be a mapping, or null")
    above = {name: fields.raw[name] for name in ("rope_theta", "partial_rotary_factor") if name in fields.raw}
    rope = _Fields({**above, **(given or {})}, f"{fields.where}: {key}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    kinds = ["default"] if family == "phi3" else [k for k in _SCALINGS if k != "dynamic" or family == _HUNYUAN]
    if kind not in kinds:
        supported = ", ".join(map(repr, kinds))
        raise UserError(f"{rope.where}: rope_type {_shown(kind)} is not supported; supported: {supported}")
    if rope.raw.get("type") not in (None, kind):
        rope.refuse("type", f"rope_type is {kind!r}; correct one")
    rotated = _rotated(rope, family, head_dim)
    # Of a token of text all three positions are the same, so that the sections of Qwen 3.5 change nothing.
    if family != _HYBRID and rope.raw.get("mrope_section") is not None and fields.raw.get("use_mrope") is not False:
        rope.refuse("mrope_section", "positions of images are not supported; use_mrope: false says that there are none")
    theta = rope.number("rope_theta", "(0, inf)", missing=_THETA.get(family, 1e4))
    needed, possible = _SCALINGS[kind]
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", *needed, *possible}
    known |= {"mrope_interleaved"} if family == _HYBRID else set()
    if strange := [name for name, value in rope.raw.items() if value is not None and name not in known]:
        raise UserError(
            f"{rope.where}: rope_type {kind!r} has no {_shown(strange[0])}; correct rope_type, or delete it"
        )
    if missing := [theirs for theirs in needed if theirs not in rope.raw]:
        raise UserError(
            f"{rope.where}: rope scaling {kind!r} lacks {', '.join(missing)}; add what the model's makers have"
        )
    factor = rope.number("factor", "[1, inf)", missing=1.0)
    if kind == "default" and factor != 1:
        rope.refuse("factor", "not supported with rope_type 'default'; supported: 1.0")
    if kind == "dynamic":  # which depends on no length where there is an alpha
        if head_dim < 4:
            rope.refuse("alpha", f"not defined with head_dim={head_dim}")
        return theta * rope.number("alpha", "(0, 1e9]") ** (head_dim / (head_dim - 2)), None, rotated
    if kind == "default" or (kind == "linear" and factor == 1):
        return theta, None, rotated
    if kind == "linear":
        return theta, LinearScaling(factor=factor), rotated
    original = rope.whole(_ORIGINAL, missing=fields.raw.get(_ORIGINAL, positions))
    if fields.raw.get(_ORIGINAL) not in (None, original):
        fields.refuse(_ORIGINAL, f"{key} has {original}; correct one")
    return theta, (_llama3 if kind == "llama3" else _yarn)(rope, factor, original), rotated


def _rotated(rope: _Fields, family: str, head_dim: int) -> int:
    """How many numbers of a head rotate."""
    if family not in _PARTLY_ROTATED:
        if rope.raw.get("partial_rotary_factor") not in (None, 1):
            rope.refuse("partial_rotary_factor", "not supported; supported: 1.0")
        return head_dim
    size = int(head_dim * rope.number("partial_rotary_factor", "(0, 1]", missing=_PARTLY_ROTATED[family]))
    if size < 2 or size % 2:
        rope.refuse("partial_rotary_factor", f"rotates {size} of head_dim={head_dim}; must be an even number over 0")
    return size


def _llama3(rope: _Fields, factor: float, original: int) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=factor,
        low_freq_factor=rope.number("low_freq_factor", "(0, inf)"),
        high_freq_factor=rope.number("high_freq_factor", "(0, inf)"),
        original_positions=original,
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        rope.refuse("high_freq_factor", f"must be over low_freq_factor {scaling.low_freq_factor}")
    return scaling


def _yarn(rope: _Fields, factor: float, original: int) -> YarnScaling:
    def number(key: str, interval: str, missing: float) -> float:
        return missing if rope.raw.get(key) is None else rope.number(key, interval)

    if rope.raw.get("rope_theta", 1e4) <= 1:
        rope.refuse("rope_theta", "must be over 1 with rope_type 'yarn'")
    scaling = YarnScaling(
        factor=factor,
        original_positions=original,
        fast=number("beta_fast", "(0, inf)", 32.0),
        slow=number("beta_slow", "(0, inf)", 1.0),
        whole="truncate" not in rope.raw or rope.flag("truncate"),
        attention_factor=number("attention_factor", "(0, inf)", _attention_factor(rope, factor)),
    )
    if scaling.fast < scaling.slow:
        rope.refuse("beta_fast", f"must be at least beta_slow {scaling.slow}")
    return scaling


def _attention_factor(rope: _Fields, factor: float) -> float:
    """YaRN's where no field gives it: by the factor, or by the two fields that DeepSeek's models have."""
    given = [rope.raw.get(key) for key in ("mscale", "mscale_all_dim")]
    if not all(given):
        return _yarn_factor(factor)
    above, below = (rope.number(key, "(0, inf)") for key in ("mscale", "mscale_all_dim"))
    return _yarn_factor(factor, above) / _yarn_factor(factor, below)


def _yarn_factor(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1.0


def _rope_to_hf(scaling: RopeScaling | None) -> dict[str, Any]:
    match scaling:
        case None:
            return {"rope_type": "default"}
        case LinearScaling():
            return {"rope_type": "linear", "factor": scaling.factor}
        case Llama3Scaling():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                _ORIGINAL: scaling.original_positions,
            }
    raw = {"rope_type": "yarn", "factor": scaling.factor, _ORIGINAL: scaling.original_positions}
    more = {
        "beta_fast": (scaling.fast, 32.0),
        "beta_slow": (scaling.slow, 1.0),
        "truncate": (scaling.whole, True),
        "attention_factor": (scaling.attention_factor, _yarn_factor(scaling.factor)),
    }
    return raw | {key: value for key, (value, usual) in more.items() if value != usual}


def to_hf(config: DecoderConfig, dtype: str, base: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json`` in the spelling of transformers 4 and 5 at once.

    Args:
      config: the decoder's.
      dtype: of the weights in the same folder, such as ``"bfloat16"``.
      base: fields that stay as they are where the decoder has no say.

    Raises:
      UserError: the family's ``config.json`` cannot express the config.
    """
    rope, base = _rope_to_hf(config.rope_scaling), text_part(base)
    if config.family in _PARTLY_ROTATED:
        rope["partial_rotary_factor"] = (config.rotary_dim or config.head_dim) / config.head_dim
    raw = dict(base) | {
        "architectures": [next(name for name, family in ARCHITECTURES.items() if family == config.family)],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        _activation_key(config.family): _ACTIVATIONS[config.activation][0],
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if config.rope_scaling else None,
        **({"partial_rotary_factor": rope["partial_rotary_factor"]} if config.family in _PARTLY_ROTATED else {}),
        "rope_parameters": _rope_parameters(config, rope),
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if config.family == "qwen2_moe":
        raw["qkv_bias"] = config.qkv_bias
    elif config.family == "ernie4_5":
        raw["use_bias"] = config.qkv_bias
    elif config.family not in ("qwen2", *_WINDOWED, "exaone4"):
        raw["attention_bias"] = config.qkv_bias
    if config.family == "seed_oss":
        raw["attention_out_bias"] = config.out_bias
    raw |= _hybrid_to_hf(config, base) if config.family == _HYBRID else _windows_to_hf(config, raw)
    if config.family in _MLP_BIAS:
        raw["mlp_bias"] = config.mlp_bias
    if config.family == "gemma3_text":
        multiplier = config.attention_multiplier
        raw["query_pre_attn_scalar"] = config.head_dim if multiplier is None else round(multiplier**-2)
    if config.family == "granite":
        raw |= {theirs: getattr(config, ours) for ours, theirs in _MULTIPLIERS.items()}
    if config.family == "hyperclovax":
        raw |= {theirs: getattr(config, ours) for ours, theirs in _MULTIPLIERS.items()}
        raw |= {"logits_scaling": _inverse(config.logits_divisor), "use_post_norm": config.norms_after}
    if config.family == "smollm3":
        raw["no_rope_layers"] = [int(i not in config.unrotated_layers) for i in range(config.num_layers)]
    if config.experts is not None:
        raw |= _experts_to_hf(config.family, config.experts)
    config = dataclasses.replace(config, unused_rows=())  # the tokenizer's files have them
    if (read := from_hf(raw)) != config:
        lost = [f for f, value in vars(config).items() if getattr(read, f) != value]
        raise UserError(f"a {config.family} config.json cannot express this model's {', '.join(lost)}")
    return raw


def _rope_parameters(config: DecoderConfig, rope: Mapping[str, Any]) -> dict[str, Any]:
    full = {**rope, "rope_theta": config.rope_theta}
    if config.family not in _WINDOW_THETA:
        return full
    windowed = {"rope_type": "default", "rope_theta": config.window_theta or _WINDOW_THETA[config.family]}
    return dict(zip(_KINDS, (full, windowed), strict=True))


def _windows_to_hf(config: DecoderConfig, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that say which layers have a window, on top of ``raw``."""
    of_layer = [_KINDS[i in config.windowed_layers] for i in range(config.num_layers)]
    fields: dict[str, Any] = {}
    if config.windowed_layers or raw.get("layer_types") is not None:  # of the source, which may have more layers
        fields["layer_types"] = of_layer
    if config.family in _WINDOWED:
        fields["sliding_window"] = config.window or None
    elif config.family == "exaone4":
        fields |= {"layer_types": of_layer, "sliding_window": None}
    elif config.family in _ALTERNATING:
        fields |= {"layer_types": of_layer, "sliding_window": config.window or raw.get("sliding_window", 4096)}
        if config.family == "gemma3_text":
            fields["rope_local_base_freq"] = config.window_theta or _WINDOW_THETA[config.family]
    elif config.windowed_layers:
        fields |= {"use_sliding_window": True, "sliding_window": config.window}
        fields["max_window_layers"] = min(config.windowed_layers)
    return fields


def _hybrid_to_hf(config: DecoderConfig, base: Mapping[str, Any]) -> dict[str, Any]:
    names = {"attention": "full_attention", "delta": "linear_attention"}
    share = 1.0 if config.rotary_dim is None else config.rotary_dim / config.head_dim
    rope = {"rope_theta": config.rope_theta, "partial_rotary_factor": share}
    given = base.get("rope_parameters") or base.get("rope_scaling") or {}
    sections = {key: given[key] for key in ("mrope_section", "mrope_interleaved") if key in given}
    raw: dict[str, Any] = {
        "layer_types": [names[kind] for kind in config.kinds],
        "partial_rotary_factor": share,
        "rope_parameters": sections | _rope_to_hf(config.rope_scaling) | rope,
    }
    if (delta := config.delta) is None:
        return raw
    return raw | {
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_size,
        "linear_value_head_dim": delta.value_size,
        "linear_conv_kernel_dim": delta.taps,
    }


def _experts_to_hf(family: str, experts: Experts) -> dict[str, Any]:
    raw = {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "norm_topk_prob": experts.renormalised,
    }
    if family == "olmoe":
        return raw
    raw |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": experts.size}
    more = {"num_local_experts": experts.count}
    return raw | (more if family == "qwen3_moe" else {"shared_expert_intermediate_size": experts.shared})


def model_folder(path: str | os.PathLike) -> epath.Path:
    """The folder, local or in a bucket; raises `UserError` where there is none."""
    path = files.path(path)
    if files.in_bucket(path):
        with files.naming(path):
            if not path.is_dir():
                raise UserError(f"{path}: no such folder in the bucket")
    elif path.is_file():
        convert = f": grpojax convert {path} --to FOLDER" if path.suffix == ".gguf" else ""
        raise UserError(f"{path} is a file; give a folder with config.json and weights{convert}")
    elif not path.is_dir():
        raise UserError(
            f"{path}: no such folder; a model of the hub is downloaded first: hf download OWNER/NAME --local-dir FOLDER"
        )
    return path


def refuse_adapter(folder: epath.Path) -> None:
    """Raises `UserError` where the folder holds an adapter (LoRA and the like), as peft saves them."""
    file = folder / "adapter_config.json"
    if not file.exists():
        return
    base = _shown(read_json(file).get("base_model_name_or_path"))
    merged = ", or remove adapter_* if it is merged already" if (folder / "config.json").exists() else ""
    raise UserError(
        f"{folder} holds an adapter of {base}, which is not a whole model; name it by model.adapter.path, or merge "
        f"it{merged}:\n{MERGE}"
    )


def read_json(file: Path | epath.Path) -> dict[str, Any]:
    """The JSON object in a file; raises `UserError` where there is none."""
    try:
        content = json.loads(files.read(file))
    except FileNotFoundError:
        raise UserError(f"{file.parent} has no {file.name}") from None
    except (ValueError, RecursionError) as e:
        raise damaged(file, e) from None
    except OSError as e:
        raise UserError(f"{file} cannot be read: {e}") from None
    if not isinstance(content, dict):
        raise damaged(file, "it holds no JSON object")
    return content


def damaged(file: Path | epath.Path, why: object) -> UserError:
    """The error for a file that cannot be what its name says, or that is only the pointer to it of Git LFS."""
    if is_lfs_pointer(file):
        return UserError(f"{file} is a pointer of Git LFS in place of the file; in its folder run: git lfs pull")
    return UserError(f"{file} is damaged: {' '.join(str(why).split())[:200]}; restore it, or download it again")


def is_lfs_pointer(file: Path | epath.Path) -> bool:
    """Whether a file is what a clone without Git LFS has in place of a large one."""
    if files.in_bucket(file):
        head = files.read_part(file, 0, min(len(_LFS), files.size(file))).tobytes()
    else:
        with Path(file).open("rb") as f:
            head = f.read(len(_LFS))
    return head == _LFS


def check_tokenizer_files(named: epath.Path, path: Path) -> None:
    """Raises `UserError`, which names the file, where one that transformers reads for a tokenizer is damaged, or is a
    pointer of Git LFS, or names ends that are no tokens' numbers.

    Args:
      named: the folder as the user has it.
      path: its files on this machine.
    """
    jsons = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
    for name in (*jsons, "added_tokens.json"):
        content = read_json(named / name) if (path / name).exists() else {}
        ends = content.get("eos_token_id") if name in jsons[:2] else None
        listed = ends if isinstance(ends, list) else [ends]
        if ends is not None and not all(type(i) is int and i >= 0 for i in listed):
            what = f"{named / name}: eos_token_id={repr(ends)[:200]}"
            raise UserError(f"{what}: must be a token's number, a list of them or null")
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"):
        if (path / name).exists() and is_lfs_pointer(path / name):
            raise damaged(named / name, "a pointer")


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON object as the hub's files have it."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
