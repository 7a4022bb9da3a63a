"""Multipliers of embeddings, attention, residuals and logits in ``config.json``, both ways."""

import math
from collections.abc import Mapping
from typing import Any

from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.hf.fields import Fields, Sizes
from grpojax.models.hf.ropes import rope_to_hf

# A field of ours -> theirs.
_MULTIPLIERS = {
    "embedding_multiplier": "embedding_multiplier",
    "attention_multiplier": "attention_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_divisor": "logits_scaling",
}


def read_granite(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    """Granite's."""
    return {ours: fields.number(theirs, "(0, inf)") for ours, theirs in _MULTIPLIERS.items()}


def write_granite(config: DecoderConfig, _: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `read_granite`."""
    return {theirs: getattr(config, ours) for ours, theirs in _MULTIPLIERS.items()}


def read_hyperclovax(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    """HyperCLOVA X's, whose logits are multiplied."""
    usual = sizes.head_dim**-0.5  # also in place of null
    given = fields.raw.get("attention_multiplier") is not None
    attention = fields.number("attention_multiplier", "(0, inf)") if given else usual
    return {
        "embedding_multiplier": fields.number("embedding_multiplier", "(0, inf)"),
        "attention_multiplier": None if attention == usual else attention,
        "residual_multiplier": fields.number("residual_multiplier", "(0, inf)"),
        "logits_divisor": 1 / fields.number("logits_scaling", "(1e-9, 1e9)"),
        "norms_after": fields.flag("use_post_norm"),
    }


def write_hyperclovax(config: DecoderConfig, base: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `read_hyperclovax`."""
    more = {"logits_scaling": _inverse(config.logits_divisor), "use_post_norm": config.norms_after}
    return write_granite(config, base) | more


_GROWTH = "llama_4_scaling_beta"


def read_ministral3(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    """Ministral 3's, whose queries grow with positions."""
    key = next((key for key in ("rope_parameters", "rope_scaling") if fields.raw.get(key)), None)
    if key is None:
        return {"query_growth": fields.missing["rope_parameters"][_GROWTH]}
    rope = Fields(fields.raw[key], f"{fields.where}: {key}")
    growth = rope.number(_GROWTH, "[0, inf)")
    if rope.raw.get("rope_type", rope.raw.get("type")) not in ("yarn", "llama3"):
        rope.refuse(_GROWTH, "needs rope_type 'yarn' or 'llama3', which have original positions")
    return {"query_growth": growth}


def write_ministral3(config: DecoderConfig, base: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `read_ministral3`."""
    rope = rope_to_hf(config.rope_scaling) | {_GROWTH: config.query_growth}
    return {
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
        "rope_scaling": rope if config.rope_scaling else None,
    }


def _inverse(x: float) -> float:
    """The number whose inverse is ``x``; it exists where ``x`` is an inverse."""
    near = 1 / x
    return next((y for y in (near, math.nextafter(near, 0), math.nextafter(near, math.inf)) if 1 / y == x), near)


_CAPS = {"attention_cap": "attn_logit_softcapping", "logits_cap": "final_logit_softcapping"}


def read_gemma2(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    """Gemma 2's, which has soft caps."""
    caps = {
        ours: 0.0 if fields.get(theirs) is None else fields.number(theirs, "(0, inf)") for ours, theirs in _CAPS.items()
    }
    return {**_of_gemma(fields, sizes), **caps}


def write_gemma2(config: DecoderConfig, base: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `read_gemma2`."""
    caps = {theirs: getattr(config, ours) or None for ours, theirs in _CAPS.items()}
    return write_gemma3(config, base) | caps


def read_gemma3(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    """Gemma 3's."""
    for key in _CAPS.values():
        if fields.raw.get(key) is not None:
            fields.refuse(key, "not supported; supported: null")
    return _of_gemma(fields, sizes)


def _of_gemma(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    scalar = fields.whole("query_pre_attn_scalar")
    attention = None if scalar == sizes.head_dim else scalar**-0.5
    return {"embedding_multiplier": sizes.hidden**0.5, "attention_multiplier": attention}


def write_gemma3(config: DecoderConfig, _: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `read_gemma3`."""
    multiplier = config.attention_multiplier
    return {"query_pre_attn_scalar": config.head_dim if multiplier is None else round(multiplier**-2)}
