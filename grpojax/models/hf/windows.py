"""Which layers have a window, or no rotary positions: the ways in which families say it in ``config.json``."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.hf.fields import Fields, Sizes, shown

KINDS = ("full_attention", "sliding_attention")  # of layers, in layer_types


class Windows(NamedTuple):
    """Which layers have a window.

    Attributes:
      read: ``(fields, sizes) -> (window, layers)``, no layers where there is none; it raises `UserError` for kinds of
        layers that are not supported.
      write: ``(config, raw) -> fields``, on top of the fields ``raw`` that are written already, with those that stand
        for missing ones.
      own_rope: whether layers with a window have rotary positions of their own.
    """

    read: Callable[[Fields, Sizes], tuple[int, Sequence[int]]]
    write: Callable[[DecoderConfig, Mapping[str, Any]], dict[str, Any]]
    own_rope: bool = False


def _types(fields: Fields, sizes: Sizes, kinds: Sequence[str] = KINDS) -> list[str] | None:
    """The kind of each layer, one of these, if config.json says it."""
    if fields.flag("use_bidirectional_attention"):
        fields.refuse("use_bidirectional_attention", "not supported; supported: false")
    types = fields.raw.get("layer_types")
    if types is not None and not (
        isinstance(types, list) and len(types) == sizes.layers and all(kind in kinds for kind in types)
    ):
        supported = " or ".join(map(repr, kinds))
        fields.refuse("layer_types", f"not supported; supported: {supported} in each of the {sizes.layers} layers")
    return types


def _types_to_hf(config: DecoderConfig) -> list[str]:
    return [KINDS[i in config.windowed_layers] for i in range(config.num_layers)]


def _windowed(types: list[str]) -> list[int]:
    """The layers with a window."""
    return [i for i, kind in enumerate(types) if kind == KINDS[1]]


def _last(fields: Fields, sizes: Sizes, *, allowed: bool, strict: bool, types_count: bool) -> tuple[int, Sequence[int]]:
    types = _types(fields, sizes, KINDS if allowed else KINDS[:1])
    if not fields.flag("use_sliding_window") or fields.get("sliding_window") is None:
        if types is not None and _windowed(types):
            fields.refuse("layer_types", "layers with a window need use_sliding_window: true and sliding_window")
        return 0, ()
    if types is not None and types_count:
        return fields.whole("sliding_window") if _windowed(types) else 0, _windowed(types)
    window, first = fields.whole("sliding_window"), fields.get("max_window_layers")
    if type(first) is not int:
        fields.refuse("max_window_layers", "must be a whole number")
    if not allowed and (first < sizes.layers or strict):
        fields.refuse(
            "use_sliding_window",
            f"layers with a window (sliding_window={window}, max_window_layers={shown(first)}) are not supported in "
            f"this family;\nset it to false where no text is longer than {window} tokens, which gives the same",
        )
    return window, range(max(first, 0), sizes.layers)


def _write_last(config: DecoderConfig, raw: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if config.windowed_layers or raw.get("layer_types") is not None:  # of the source, which may have more layers
        fields["layer_types"] = _types_to_hf(config)
    if config.windowed_layers:
        fields |= {"use_sliding_window": True, "sliding_window": config.window}
        fields["max_window_layers"] = min(config.windowed_layers)
    return fields


def last(*, allowed: bool = False, strict: bool = False, types_count: bool = True) -> Windows:
    """use_sliding_window says whether the last layers have a window, from max_window_layers on, or those of
    layer_types.

    Args:
      allowed: whether such layers are supported.
      strict: whether windows are refused even if max_window_layers says that no layer has one.
      types_count: whether transformers heeds layer_types.
    """
    return Windows(functools.partial(_last, allowed=allowed, strict=strict, types_count=types_count), _write_last)


def _every(fields: Fields, sizes: Sizes) -> tuple[int, Sequence[int]]:
    types = _types(fields, sizes)
    if types is not None and len(set(types)) > 1:
        fields.refuse("layer_types", "layers of one kind are supported in this family; correct it")
    return fields.whole("sliding_window", null=sizes.positions), range(sizes.layers)


def _write_every(config: DecoderConfig, raw: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"sliding_window": config.window or None}
    if config.windowed_layers or raw.get("layer_types") is not None:
        fields["layer_types"] = _types_to_hf(config)
    return fields


# Every layer has a window unless sliding_window is null.
EVERY = Windows(_every, _write_every)


def alternating(period: int | str, *, own_rope: bool = False) -> Windows:
    """All layers but each ``period``-th have a window.

    Args:
      period: where layer_types is missing, or the field that says it.
      own_rope: of `Windows`.
    """

    def read(fields: Fields, sizes: Sizes) -> tuple[int, Sequence[int]]:
        types = _types(fields, sizes)
        window = fields.whole("sliding_window")
        if types is not None:
            return window, _windowed(types)
        each = fields.whole(period) if isinstance(period, str) else period
        return window, [i for i in range(sizes.layers) if (i + 1) % each]

    def write(config: DecoderConfig, raw: Mapping[str, Any]) -> dict[str, Any]:
        return {"layer_types": _types_to_hf(config), "sliding_window": config.window or raw["sliding_window"]}

    return Windows(read, write, own_rope)


def _none(fields: Fields, sizes: Sizes) -> tuple[int, Sequence[int]]:
    if _types(fields, sizes, KINDS[:1]) is None:
        fields.refuse("layer_types", f"must be 'full_attention' in each of the {sizes.layers} layers")
    if fields.get("sliding_window") is not None:
        fields.refuse("sliding_window", "layers with a window are not supported; supported: null")
    return 0, ()


# No layer has a window, and config.json has to say so: the family rotates only layers with one, if there is any.
NONE = Windows(_none, lambda config, _: {"layer_types": _types_to_hf(config), "sliding_window": None})
# Layers are of kinds without a window, which the family's own functions read.
OTHER_KINDS = Windows(lambda *_: (0, ()), lambda *_: {})


def read_unrotated(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    """The layers without rotary positions, whose place in SmolLM3's list has a 0."""
    layers = sizes.layers
    listed, interval = fields.raw.get("no_rope_layers"), fields.whole("no_rope_layer_interval")
    if listed is None:
        return {"unrotated_layers": tuple(range(interval - 1, layers, interval))}
    if (
        not isinstance(listed, list)
        or len(listed) < layers
        or any(type(x) is not int or x not in (0, 1) for x in listed)
    ):
        fields.refuse("no_rope_layers", f"must be a list with 1 (rotary) or 0 for each of the {layers} layers, or null")
    return {"unrotated_layers": tuple(i for i in range(layers) if not listed[i])}


def write_unrotated(config: DecoderConfig, _: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `read_unrotated`."""
    return {"no_rope_layers": [int(i not in config.unrotated_layers) for i in range(config.num_layers)]}
