"""``config.json`` of Hugging Face folders, both ways, in the spellings of transformers 4 and 5."""

import dataclasses
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from etils import epath

from grpojax.host import files, ranges
from grpojax.host.errors import UserError
from grpojax.models.decoder_config import DecoderConfig, RopeScaling

# Architecture named in config.json -> family.
ARCHITECTURES = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
}

# Llama 3's rope scaling: a field of ours -> theirs.
_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}


def read_config(path: str | os.PathLike) -> DecoderConfig:
    """The decoder that a folder's ``config.json`` describes; the weights need not be there."""
    file = model_folder(path) / "config.json"
    return from_hf(read_json(file), str(file))


def from_hf(raw: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """Reads a Hugging Face config, in the spelling of transformers 4 (as on the hub) or 5.

    Args:
      raw: the parsed ``config.json``.
      where: what to call it in errors.

    Raises:
      UserError: an architecture or an option that this decoder does not have, or a missing field.
    """
    names = raw.get("architectures") or []
    family = next((ARCHITECTURES[n] for n in names if n in ARCHITECTURES), None)
    if family is None:
        raise UserError(f"{where}: unknown architecture {names}; known: {', '.join(ARCHITECTURES)}")

    def need(key: str) -> Any:
        if raw.get(key) is None:
            raise UserError(f"{where}: {key!r} is missing")
        return raw[key]

    _refuse(where, "hidden_act", raw.get("hidden_act", "silu"), ("silu",))
    _refuse(where, "use_sliding_window", raw.get("use_sliding_window") or False, (False,))
    _refuse(where, "quantization_config", raw.get("quantization_config"), (None,))
    theta, scaling = _rope(raw, family, where)
    heads = int(need("num_attention_heads"))
    hidden = int(need("hidden_size"))
    attention_bias = bool(raw.get("attention_bias", False))
    return DecoderConfig(
        family=family,
        vocab_size=int(need("vocab_size")),
        hidden_size=hidden,
        intermediate_size=int(need("intermediate_size")),
        num_layers=int(need("num_hidden_layers")),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or (128 if family == "qwen3" else hidden // heads)),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=family != "qwen2" and attention_bias,
        mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        max_positions=int(raw.get("max_position_embeddings", 32768)),
    )


def _refuse(where: str, key: str, value: Any, allowed: Collection[Any]) -> None:
    if value not in allowed:
        raise UserError(f"{where}: {key}={value!r} is not supported; supported: {list(allowed)}")


def _rope(raw: Mapping[str, Any], family: str, where: str) -> tuple[float, RopeScaling | None]:
    """Base and stretching of the rotary positions."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if theta is None and family == "llama":
        theta = 1e4  # folders written before the field existed
    if theta is None:
        raise UserError(f"{where}: 'rope_theta' is missing")
    kind = rope.get("rope_type", rope.get("type", "default"))
    _refuse(where, "rope_type", kind, ("default", "llama3"))
    turned = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    _refuse(where, "partial_rotary_factor", turned, (1.0,))
    if kind == "default":
        return float(theta), None
    if missing := [theirs for theirs in _SCALING.values() if theirs not in rope]:
        raise UserError(f"{where}: rope scaling 'llama3' lacks {', '.join(missing)}")
    scaling = RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_positions=int(rope["original_max_position_embeddings"]),
    )
    return float(theta), scaling


def to_hf(config: DecoderConfig, dtype: str, base: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json`` in the spelling of transformers 4 and 5 at once.

    Args:
      config: the decoder's.
      dtype: of the weights beside it, such as ``"bfloat16"``.
      base: fields that stay as they are where the decoder has no say.

    Raises:
      UserError: the family's ``config.json`` cannot express the config.
    """
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        scaling = {theirs: getattr(config.rope_scaling, ours) for ours, theirs in _SCALING.items()}
        rope = {"rope_type": "llama3", **scaling}
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
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if config.rope_scaling else None,
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if config.family != "qwen2":
        raw["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        raw["mlp_bias"] = config.mlp_bias
    config = dataclasses.replace(config, unused_rows=())  # the tokenizer's files have them
    if (read := from_hf(raw)) != config:
        lost = [f for f, value in vars(config).items() if getattr(read, f) != value]
        raise UserError(f"a {config.family} config.json cannot express this model's {', '.join(lost)}")
    return raw


def model_folder(path: str | os.PathLike) -> epath.Path:
    """The folder, local or in a bucket; raises `UserError` where there is none."""
    path = files.path(path)
    if files.in_bucket(path):
        with ranges.naming(path):
            if not path.is_dir():
                raise UserError(f"{path}: no such folder in the bucket")
    elif not path.is_dir():
        raise UserError(
            f"{path}: no such folder; a model of the hub is downloaded first: hf download OWNER/NAME --local-dir FOLDER"
        )
    return path


def read_json(file: Path | epath.Path) -> dict[str, Any]:
    """The JSON object in a file; raises `UserError` where there is none."""
    try:
        content = json.loads(files.read(file))
    except FileNotFoundError:
        raise UserError(f"{file.parent} has no {file.name}") from None
    except ValueError as e:
        raise UserError(f"{file} is damaged: {e}") from None
    except OSError as e:
        raise UserError(f"{file} cannot be read: {e}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} is damaged: it holds no JSON object")
    return content


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON object as the hub's files have it."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
