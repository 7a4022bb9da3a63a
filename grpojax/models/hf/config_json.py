"""``config.json`` of Hugging Face folders, both ways, in the spellings of transformers 4 and 5.

What all families share is here; what each has of its own is in `grpojax.models.hf.families`.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from grpojax.host.errors import UserError
from grpojax.models.decoder_config import Activation, DecoderConfig
from grpojax.models.hf.families import ARCHITECTURES, FAMILIES
from grpojax.models.hf.family import Family
from grpojax.models.hf.fields import Fields, Sizes, shown
from grpojax.models.hf.folder import model_folder, read_json, refuse_adapter
from grpojax.models.hf.ropes import read_ropes, write_ropes
from grpojax.models.hf.unknown import strange

_TEXT = "text_config"
# Fields that a model with a text part has once, for all of it.
_OF_WHOLE = (
    *("tie_word_embeddings", "quantization_config", "compression_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
# Of an MLP's gate: our name -> theirs, and other names for it.
_ACTIVATIONS: Mapping[Activation, tuple[str, ...]] = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}
_MOST_LAYERS = 10_000  # a weight's name is made for each


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
    name = _family(raw, where)
    family = FAMILIES[name]
    fields = Fields(raw, where, missing=family.missing)
    vocab, hidden, mlp = (fields.whole(key) for key in ("vocab_size", "hidden_size", "intermediate_size"))
    layers, heads = fields.whole("num_hidden_layers", most=_MOST_LAYERS), fields.whole("num_attention_heads")
    kv_heads = _kv_heads(fields, family, heads)
    head_dim = _head_dim(fields, family, hidden, heads)
    gate, activation = _gate(family)
    if fields.get(gate) not in (names := _ACTIVATIONS[activation]):
        fields.refuse(gate, f"not supported; supported: {names[0]!r}")
    positions = fields.whole("max_position_embeddings")
    if raw.get("per_layer_config"):
        fields.refuse("per_layer_config", "layers that differ are not supported")
    sizes = Sizes(hidden, layers, heads, head_dim, positions)
    window, windowed = family.windows.read(fields, sizes)
    if not windowed or (window >= positions and not family.windows.own_rope):
        window, windowed = 0, ()  # a window over all positions makes no difference
    for key in ("quantization_config", "compression_config"):
        how = raw.get(key)
        if how and not (isinstance(how, dict) and how.get("quant_method") in list(family.tensors.unpack)):
            fields.refuse(key, "quantised weights are not read; delete the entry if the weights are bf16, f16 or f32")
    theta, scaling, rotary_dim, window_theta = read_ropes(fields, family, sizes)
    return DecoderConfig(
        family=name,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=fields.number("rms_norm_eps", "(0, 1)"),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        activation=activation,
        max_positions=positions,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        window=window,
        windowed_layers=tuple(windowed),
        window_theta=window_theta if windowed else None,
        **_flags(fields, family),
        **family.traits,
        **family.read(fields, sizes),
    )


def text_part(raw: Mapping[str, Any], where: str = "config.json") -> Mapping[str, Any]:
    """The config of the text part of a model that also reads images, as that of a model of its own; any other config
    as it is.

    Example:
      >>> text_part({"model_type": "gemma3", "text_config": {"hidden_size": 2560}})["model_type"]
      'gemma3_text'
    """
    names, kind = raw.get("architectures"), raw.get("model_type")
    for name, family in FAMILIES.items():
        images = family.with_images
        if images is None or _TEXT not in raw:
            continue
        if names in (images.architecture, [images.architecture]) or kind == name.removesuffix("_text"):
            text = raw[_TEXT]
            if not isinstance(text, dict):
                Fields(raw, where).refuse(_TEXT, "must be a mapping")
            above = {key: raw[key] for key in _OF_WHOLE if key in raw}
            both = above | text if images.text_wins else text | above
            return {**images.missing, **both, "architectures": [family.architectures[0]], "model_type": name}
    return raw


def _family(raw: Mapping[str, Any], where: str) -> str:
    """By ``architectures``, or where that is missing by ``model_type``."""
    names, kind = raw.get("architectures"), raw.get("model_type")
    names = [names] if isinstance(names, str) else names
    if not names:
        if kind in list(FAMILIES):
            return str(kind)
        what, reasons = "architecture: none is named", strange(raw)
    elif isinstance(names, list) and all(name in list(ARCHITECTURES) for name in names):
        families = {ARCHITECTURES[name] for name in names}
        if len(families) == 1 and kind in (None, *families):
            return families.pop()
        if kind in list(FAMILIES) or len(families) > 1 or not isinstance(kind, str):
            raise UserError(
                f"{where}: architectures={shown(names)} and model_type={shown(kind)} are different families; "
                "correct one"
            )
        what, reasons = f"family with architectures={shown(names)}", ["fields and weights may have other names"]
    else:
        what, reasons = f"architecture {shown(names)}", strange(raw) or ["layers of another kind"]
    why = f": {', '.join(reasons)}" if reasons else ""
    raise UserError(f"{where}: unknown {what}, model_type={shown(kind)}{why}\nknown: {', '.join(ARCHITECTURES)}")


def _flags(fields: Fields, family: Family) -> dict[str, Any]:
    return {ours: fields.flag(theirs) for ours, theirs in family.flags.items()}


def _gate(family: Family) -> tuple[str, Activation]:
    """The field that names the activation of an MLP's gate, and our name for the family's."""
    field = "hidden_activation" if "hidden_activation" in family.missing else "hidden_act"
    return field, next(ours for ours, theirs in _ACTIVATIONS.items() if family.missing[field] in theirs)


def _size(fields: Fields, family: Family, key: str, null: int) -> int:
    """A size that may follow from others: then it is ``null``."""
    refused = key in fields.raw and key not in family.nullable
    return fields.whole(key, null=None if refused else null)


def _kv_heads(fields: Fields, family: Family, heads: int) -> int:
    kv_heads = _size(fields, family, "num_key_value_heads", heads)
    if heads % kv_heads:
        why = "" if "num_key_value_heads" in fields.raw else ", which transformers takes where the field is missing"
        raise UserError(
            f"{fields.where}: num_attention_heads={heads} does not divide by num_key_value_heads={kv_heads}{why}; "
            "correct it"
        )
    return kv_heads


def _head_dim(fields: Fields, family: Family, hidden: int, heads: int) -> int:
    family.heads(fields, hidden, heads)
    size = _size(fields, family, "head_dim", hidden // heads)
    if size % 2:
        raise UserError(f"{fields.where}: head_dim={size}: rotary positions need an even size; correct it")
    return size


def to_hf(config: DecoderConfig, dtype: str, base: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json`` in the spelling of transformers 4 and 5 at once.

    Args:
      config: the decoder's.
      dtype: of the weights in the same folder, such as ``"bfloat16"``.
      base: fields that stay as they are where the decoder has no say.

    Raises:
      UserError: the family's ``config.json`` cannot express the config.
    """
    family, base = FAMILIES[config.family], text_part(base)
    raw = dict(base) | {
        "architectures": [family.architectures[0]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        _gate(family)[0]: _ACTIVATIONS[config.activation][0],
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        **write_ropes(config, family),
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    # Of several with one field, the first is written; that the others are like it is checked below.
    raw |= {family.flags[ours]: getattr(config, ours) for ours in reversed([*family.flags])}
    raw |= family.windows.write(config, {**family.missing, **raw})
    raw |= family.write(config, base)
    raw.pop("quantization_config", None)  # the weights are not written as they were read
    config = dataclasses.replace(config, unused_rows=())  # the tokenizer's files have them
    if (read := from_hf(raw)) != config:
        lost = [f for f, value in vars(config).items() if getattr(read, f) != value]
        raise UserError(f"a {config.family} config.json cannot express this model's {', '.join(lost)}")
    return raw
