"""Rotary positions in ``config.json``, both ways."""

import math
from collections.abc import Mapping
from typing import Any

from grpojax.host.errors import UserError
from grpojax.models.decoder_config import DecoderConfig, LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from grpojax.models.hf.family import Family
from grpojax.models.hf.fields import Fields, Sizes, shown
from grpojax.models.hf.windows import KINDS

_ORIGINAL = "original_max_position_embeddings"
_PART = "partial_rotary_factor"  # of a head, that rotates
_LOCAL = "rope_local_base_freq"  # the base of layers with a window

# Rope scaling: rope_type -> the fields that it needs, and those that it may have.
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


def read_ropes(fields: Fields, family: Family, sizes: Sizes) -> tuple[float, RopeScaling | None, int, float | None]:
    """Base and stretching of the rotary positions, how many numbers of a head they rotate, and the base of windowed
    layers in families where that differs."""
    if not family.windows.own_rope:
        return *_rope(fields, family, sizes), None
    given = fields.raw.get("rope_parameters")
    given = {} if given is None else given
    if not isinstance(given, dict) or set(given) - set(KINDS):
        fields.refuse("rope_parameters", f"must have {' and '.join(map(repr, KINDS))}, or be null")

    def of(kind: str, above: Mapping[str, Any]) -> tuple[float, RopeScaling | None, int]:
        one = {**above, "rope_parameters": given.get(kind)}
        return _rope(Fields(one, fields.where, missing=fields.missing), family, sizes)

    usual = of(KINDS[0], fields.raw)
    above = {name: value for name, value in fields.raw.items() if name not in ("rope_theta", "rope_scaling")}
    if _LOCAL in fields.missing:
        above["rope_theta"] = fields.number(_LOCAL, "(0, inf)")
    theta, scaling, _ = of(KINDS[1], above)
    if scaling is not None:
        fields.refuse("rope_parameters", "a scaling of 'sliding_attention' is not supported; supported: 'default'")
    return *usual, theta


def _rope(fields: Fields, family: Family, sizes: Sizes) -> tuple[float, RopeScaling | None, int]:
    """Base and stretching of the rotary positions, and how many numbers of a head they rotate."""
    if fields.flag("use_mrope"):
        fields.refuse("use_mrope", "positions of images are not supported; supported: false")
    both = [key for key in ("rope_scaling", "rope_parameters") if fields.raw.get(key) not in (None, {})]
    found = [_one_rope(fields, key, family, sizes) for key in both or ["rope_parameters"]]
    if any(other != found[0] for other in found):
        other = shown(fields.raw["rope_parameters"])
        fields.refuse("rope_scaling", f"rope_parameters={other} says something else; correct one")
    return found[0]


def _one_rope(fields: Fields, key: str, family: Family, sizes: Sizes) -> tuple[float, RopeScaling | None, int]:
    """As one of the two fields has it."""
    given = fields.raw.get(key)
    if given is not None and not isinstance(given, dict):
        fields.refuse(key, "must be a mapping, or null")
    above = {name: fields.raw[name] for name in ("rope_theta", _PART) if name in fields.raw}
    given = given or fields.missing.get(key, {})
    top = {name: fields.where for name in above if name not in given}
    original = fields.raw.get(_ORIGINAL, sizes.positions)
    missing = {**fields.missing, "factor": 1.0, _ORIGINAL: original}
    rope = Fields({**above, **given}, f"{fields.where}: {key}", missing=missing, elsewhere=top)
    kind = rope.raw.get("rope_type", rope.raw.get("type", "default"))
    if kind not in family.scalings:
        supported = ", ".join(map(repr, family.scalings))
        raise UserError(f"{rope.where}: rope_type {shown(kind)} is not supported; supported: {supported}")
    if rope.raw.get("type") not in (None, kind):
        rope.refuse("type", f"rope_type is {kind!r}; correct one")
    rotated = _rotated(rope, sizes.head_dim)
    images = rope.raw.get("mrope_section") is not None and fields.raw.get("use_mrope") is not False
    if images and "mrope_section" not in family.rope_fields:
        rope.refuse("mrope_section", "positions of images are not supported; use_mrope: false says that there are none")
    theta = rope.number("rope_theta", "(0, inf)")
    needed, possible = _SCALINGS[kind]
    known = {"rope_type", "type", "rope_theta", _PART, "mrope_section", *needed, *possible, *family.rope_fields}
    if strange := [name for name, value in rope.raw.items() if value is not None and name not in known]:
        raise UserError(f"{rope.where}: rope_type {kind!r} has no {shown(strange[0])}; correct rope_type, or delete it")
    if missing := [theirs for theirs in needed if theirs not in rope.raw]:
        raise UserError(
            f"{rope.where}: rope scaling {kind!r} lacks {', '.join(missing)}; add what the model's makers have"
        )
    factor = rope.number("factor", "[1, inf)")
    if kind == "default" and factor != 1:
        rope.refuse("factor", "not supported with rope_type 'default'; supported: 1.0")
    if kind == "dynamic":  # which depends on no length where there is an alpha
        if (size := sizes.head_dim) < 4:
            rope.refuse("alpha", f"not defined with head_dim={size}")
        return theta * rope.number("alpha", "(0, 1e9]") ** (size / (size - 2)), None, rotated
    if kind == "default" or (kind == "linear" and factor == 1):
        return theta, None, rotated
    if kind == "linear":
        return theta, LinearScaling(factor=factor), rotated
    original = rope.whole(_ORIGINAL)
    if fields.raw.get(_ORIGINAL) not in (None, original):
        fields.refuse(_ORIGINAL, f"{key} has {original}; correct one")
    return theta, (_llama3 if kind == "llama3" else _yarn)(rope, factor, original), rotated


def _rotated(rope: Fields, head_dim: int) -> int:
    """How many numbers of a head rotate."""
    if _PART not in rope.missing:
        if rope.raw.get(_PART) not in (None, 1):
            rope.refuse(_PART, "not supported; supported: 1.0")
        return head_dim
    size = int(head_dim * rope.number(_PART, "(0, 1]"))
    if size < 2 or size % 2:
        rope.refuse(_PART, f"rotates {size} of head_dim={head_dim}; must be an even number over 0")
    return size


def _llama3(rope: Fields, factor: float, original: int) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=factor,
        low_freq_factor=rope.number("low_freq_factor", "(0, inf)"),
        high_freq_factor=rope.number("high_freq_factor", "(0, inf)"),
        original_positions=original,
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        rope.refuse("high_freq_factor", f"must be over low_freq_factor {scaling.low_freq_factor}")
    return scaling


def _yarn(rope: Fields, factor: float, original: int) -> YarnScaling:
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


def _attention_factor(rope: Fields, factor: float) -> float:
    """YaRN's where no field gives it: by the factor, or by the two fields that DeepSeek's models have."""
    given = [rope.raw.get(key) for key in ("mscale", "mscale_all_dim")]
    if not all(given):
        return _yarn_factor(factor)
    above, below = (rope.number(key, "(0, inf)") for key in ("mscale", "mscale_all_dim"))
    return _yarn_factor(factor, above) / _yarn_factor(factor, below)


def _yarn_factor(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1.0


def rope_to_hf(scaling: RopeScaling | None) -> dict[str, Any]:
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


def write_ropes(config: DecoderConfig, family: Family) -> dict[str, Any]:
    """The fields of rotary positions, in the spellings of transformers 4 and 5; undoes `read_ropes`."""
    rope, above = rope_to_hf(config.rope_scaling), {}
    if _PART in family.missing:
        above[_PART] = (config.rotary_dim or config.head_dim) / config.head_dim
    rope |= above
    full = {**rope, "rope_theta": config.rope_theta}
    if family.windows.own_rope:
        theta = config.window_theta or family.missing.get(_LOCAL, family.missing["rope_theta"])
        full = dict(zip(KINDS, (full, {"rope_type": "default", "rope_theta": theta}), strict=True))
        if _LOCAL in family.missing:
            above[_LOCAL] = theta
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if config.rope_scaling else None,
        **above,
        "rope_parameters": full,
    }
