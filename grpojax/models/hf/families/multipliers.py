"""Multipliers of embeddings, attention, residuals and logits in ``config.json``, both ways."""

import math
from collections.abc import Mapping
from typing import Any

from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.hf.family import Sizes
from grpojax.models.hf.fields import Fields

# A field of ours -> theirs, each 1 where it is missing.
_MULTIPLIERS = {
    "embedding_multiplier": "embedding_multiplier",
    "attention_multiplier": "attention_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_divisor": "logits_scaling",
}


def read_granite(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    """Granite's."""
    return {ours: fields.number(theirs, "(0, inf)", missing=1.0) for ours, theirs in _MULTIPLIERS.items()}


def write_granite(config: DecoderConfig, _: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `read_granite`."""
    return {theirs: getattr(config, ours) for ours, theirs in _MULTIPLIERS.items()}


def read_hyperclovax(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    """HyperCLOVA X's, whose logits are multiplied."""
    usual = sizes.head_dim**-0.5  # also in place of null
    given = fields if fields.raw.get("attention_multiplier") is not None else Fields({}, fields.where)
    attention = given.number("attention_multiplier", "(0, inf)", missing=usual)
    return {
        "embedding_multiplier": fields.number("embedding_multiplier", "(0, inf)", missing=1.0),
        "attention_multiplier": None if attention == usual else attention,
        "residual_multiplier": fields.number("residual_multiplier", "(0, inf)", missing=1.0),
        "logits_divisor": 1 / fields.number("logits_scaling", "(1e-9, 1e9)", missing=1.0),
        "norms_after": fields.flag("use_post_norm", missing=True),
    }


def write_hyperclovax(config: DecoderConfig, base: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `read_hyperclovax`."""
    more = {"logits_scaling": _inverse(config.logits_divisor), "use_post_norm": config.norms_after}
    return write_granite(config, base) | more


def _inverse(x: float) -> float:
    """The number whose inverse is ``x``; it exists where ``x`` is an inverse."""
    near = 1 / x
    return next((y for y in (near, math.nextafter(near, 0), math.nextafter(near, math.inf)) if 1 / y == x), near)


def read_gemma3(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    """Gemma 3's."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.raw.get(key) is not None:
            fields.refuse(key, "not supported; supported: null")
    scalar = fields.whole("query_pre_attn_scalar", missing=256)
    attention = None if scalar == sizes.head_dim else scalar**-0.5
    return {"embedding_multiplier": sizes.hidden**0.5, "attention_multiplier": attention}


def write_gemma3(config: DecoderConfig, _: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `read_gemma3`."""
    multiplier = config.attention_multiplier
    return {"query_pre_attn_scalar": config.head_dim if multiplier is None else round(multiplier**-2)}
