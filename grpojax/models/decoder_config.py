"""What distinguishes one decoder family from another, read from a Hugging Face ``config.json``."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from grpojax.host.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of the low rotary frequencies (``rope_type: llama3``).

    Frequencies with a wavelength over ``original_positions / low_freq_factor`` are divided by ``factor``,
    those under ``original_positions / high_freq_factor`` stay, the ones between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape and options of a decoder-only transformer with rotary positions, RMS norms and a SwiGLU MLP."""

    family: str  # "qwen2", "qwen3" or "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 32768

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_key_value_heads {self.num_kv_heads} does not divide num_attention_heads {self.num_heads}"
            )


# Architecture named in config.json -> family.
ARCHITECTURES = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
}


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

    def need(key):
        if raw.get(key) is None:
            raise UserError(f"{where}: {key!r} is missing")
        return raw[key]

    def refuse(key, value, allowed):
        if value not in allowed:
            raise UserError(f"{where}: {key}={value!r} is not supported; supported: {list(allowed)}")

    refuse("hidden_act", raw.get("hidden_act", "silu"), ("silu",))
    refuse("use_sliding_window", raw.get("use_sliding_window") or False, (False,))
    refuse("quantization_config", raw.get("quantization_config"), (None,))

    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if theta is None and family == "llama":
        theta = 1e4  # folders written before the field existed
    if theta is None:
        raise UserError(f"{where}: 'rope_theta' is missing")
    kind = rope.get("rope_type", rope.get("type", "default"))
    refuse("rope_type", kind, ("default", "llama3"))
    refuse(
        "partial_rotary_factor",
        rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)),
        (1.0,),
    )
    scaling = None
    if kind == "llama3":
        fields = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if missing := [f for f in fields if f not in rope]:
            raise UserError(f"{where}: rope scaling 'llama3' lacks {', '.join(missing)}")
        scaling = RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_positions=int(rope["original_max_position_embeddings"]),
        )

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
        rope_theta=float(theta),
        rope_scaling=scaling,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=family != "qwen2" and attention_bias,
        mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        max_positions=int(raw.get("max_position_embeddings", 32768)),
    )
