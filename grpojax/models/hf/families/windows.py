"""Which layers have a window: the ways in which families say it in ``config.json``."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.hf.family import KINDS, Sizes, Windows
from grpojax.models.hf.fields import Fields, shown


def kinds_of(config: DecoderConfig) -> list[str]:
    """``layer_types`` of a decoder."""
    return [KINDS[i in config.windowed_layers] for i in range(config.num_layers)]


def _of_types(types: list[str]) -> list[int]:
    """The layers with a window."""
    return [i for i, kind in enumerate(types) if kind == KINDS[1]]


def _last(
    fields: Fields, types: list[str] | None, sizes: Sizes, *, allowed: bool, strict: bool, types_count: bool
) -> tuple[int, Sequence[int]]:
    if not fields.flag("use_sliding_window") or fields.raw.get("sliding_window", 4096) is None:
        if types is not None and _of_types(types):
            fields.refuse("layer_types", "layers with a window need use_sliding_window: true and sliding_window")
        return 0, ()
    if types is not None and types_count:
        return fields.whole("sliding_window", missing=4096) if _of_types(types) else 0, _of_types(types)
    window, first = fields.whole("sliding_window", missing=4096), fields.get("max_window_layers", 28)
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
        fields["layer_types"] = kinds_of(config)
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
    read = functools.partial(_last, allowed=allowed, strict=strict, types_count=types_count)
    return Windows(read, _write_last, KINDS if allowed else KINDS[:1])


def every(missing: int | None) -> Windows:
    """Every layer has a window unless sliding_window is null. ``missing`` stands for it where it is missing; None is
    all positions."""

    def read(fields: Fields, types: list[str] | None, sizes: Sizes) -> tuple[int, Sequence[int]]:
        if types is not None and len(set(types)) > 1:
            fields.refuse("layer_types", "layers of one kind are supported in this family; correct it")
        usual = missing or sizes.positions
        return fields.whole("sliding_window", missing=usual, null=sizes.positions), range(sizes.layers)

    def write(config: DecoderConfig, raw: Mapping[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {"sliding_window": config.window or None}
        if config.windowed_layers or raw.get("layer_types") is not None:
            fields["layer_types"] = kinds_of(config)
        return fields

    return Windows(read, write)


def alternating(period: int, *, pattern: str | None = None, missing: int = 4096, **more: Any) -> Windows:
    """All layers but each ``period``-th have a window.

    Args:
      period: where layer_types is missing.
      pattern: the field for it, if there is one.
      missing: the window where it is missing.
      more: of `Windows`.
    """

    def read(fields: Fields, types: list[str] | None, sizes: Sizes) -> tuple[int, Sequence[int]]:
        window = fields.whole("sliding_window", missing=missing)
        if types is not None:
            return window, _of_types(types)
        each = period if pattern is None else fields.whole(pattern, missing=period)
        return window, [i for i in range(sizes.layers) if (i + 1) % each]

    def write(config: DecoderConfig, raw: Mapping[str, Any]) -> dict[str, Any]:
        size = config.window or raw.get("sliding_window", missing)
        fields: dict[str, Any] = {"layer_types": kinds_of(config), "sliding_window": size}
        if more.get("theta_field"):
            fields[more["theta_field"]] = config.window_theta or more["theta"]
        return fields

    return Windows(read, write, **more)


def _none(fields: Fields, types: list[str] | None, sizes: Sizes) -> tuple[int, Sequence[int]]:
    if types is None:
        fields.refuse("layer_types", f"must be 'full_attention' in each of the {sizes.layers} layers")
    if fields.get("sliding_window", 4096) is not None:
        fields.refuse("sliding_window", "layers with a window are not supported; supported: null")
    return 0, ()


# The family rotates only the layers that have a window, if any has one.
NONE = Windows(_none, lambda config, _: {"layer_types": kinds_of(config), "sliding_window": None}, KINDS[:1])


def read_unrotated(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    """The layers without rotary positions, whose place in SmolLM3's list has a 0."""
    layers = sizes.layers
    listed, interval = fields.raw.get("no_rope_layers"), fields.whole("no_rope_layer_interval", missing=4)
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
