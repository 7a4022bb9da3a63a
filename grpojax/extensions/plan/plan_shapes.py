"""Shapes of published models, so that a plan needs no weights and no network."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from grpojax import data
from grpojax.host.errors import UserError
from grpojax.models import DecoderConfig, hf
from grpojax.models.hf.families import ARCHITECTURES

_log = logging.getLogger("grpojax")


def _shape(
    architecture: str, *, layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int, **more: Any
) -> DecoderConfig | None:
    if architecture not in ARCHITECTURES:  # the family's extension is not installed
        return None
    raw = {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "rope_theta": 1e6,
    }
    return hf.from_hf(raw | more)


_TIED = {"tie_word_embeddings": True}


def _qwen2(layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, **more: Any) -> DecoderConfig | None:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "mlp": mlp}
    return _shape("Qwen2ForCausalLM", **sizes, **({"vocab": 152064, "max_position_embeddings": 32768} | more))


def _qwen3(layers: int, hidden: int, heads: int, mlp: int, *, kv_heads: int = 8, **more: Any) -> DecoderConfig | None:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "mlp": mlp, "vocab": 151936}
    usual = {"head_dim": 128, "max_position_embeddings": 40960}
    return _shape("Qwen3MoeForCausalLM" if "num_experts" in more else "Qwen3ForCausalLM", **sizes, **usual, **more)


def _llama(layers: int, hidden: int, heads: int, mlp: int, *, factor: float, **more: Any) -> DecoderConfig | None:
    rope = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    usual = {"rope_theta": 5e5, "rope_scaling": rope, "max_position_embeddings": 131072}
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 8, "mlp": mlp, "vocab": 128256}
    return _shape("LlamaForCausalLM", **sizes, **usual, **more)


def _smollm2(layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, theta: float) -> DecoderConfig | None:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "mlp": mlp, "vocab": 49152}
    more = {"rope_theta": theta, "max_position_embeddings": 8192}
    return _shape("LlamaForCausalLM", **sizes, **more, **_TIED)


def _gemma3(layers: int, hidden: int, heads: int, mlp: int, *, window: int, positions: int) -> DecoderConfig | None:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 1, "mlp": mlp, "vocab": 262144}
    more = {"sliding_window": window, "max_position_embeddings": positions, "query_pre_attn_scalar": 256}
    return _shape("Gemma3ForCausalLM", **sizes, **more, head_dim=256, **_TIED)


def _qwen3_5(layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, **more: Any) -> DecoderConfig | None:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "mlp": mlp, "vocab": 248320}
    usual = {"head_dim": 256, "rope_theta": 1e7, "linear_num_value_heads": 16, "max_position_embeddings": 262144}
    return _shape("Qwen3_5ForCausalLM", **sizes, **(usual | more))


_EXPERTS = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}

# The values of their makers' config.json; of those with "-Instruct" or "-it" too.
_PUBLISHED = {
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, vocab=151936, **_TIED),
    "qwen2.5-1.5b": _qwen2(28, 1536, 12, 2, 8960, vocab=151936, **_TIED),
    "qwen2.5-3b": _qwen2(36, 2048, 16, 2, 11008, vocab=151936, **_TIED),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944),
    "qwen2.5-14b": _qwen2(48, 5120, 40, 8, 13824),
    "qwen2.5-32b": _qwen2(64, 5120, 40, 8, 27648),
    "qwen2.5-72b": _qwen2(80, 8192, 64, 8, 29568),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, **_TIED),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, **_TIED),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, **_TIED),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 6144, kv_heads=4, **_EXPERTS),
    "llama-3.2-1b": _llama(16, 2048, 32, 8192, factor=32.0, **_TIED),
    "llama-3.2-3b": _llama(28, 3072, 24, 8192, factor=32.0, **_TIED),
    "llama-3.1-8b": _llama(32, 4096, 32, 14336, factor=8.0),
    "llama-3.1-70b": _llama(80, 8192, 64, 28672, factor=8.0),
    "llama-3.3-70b": _llama(80, 8192, 64, 28672, factor=8.0),
    "smollm2-135m": _smollm2(30, 576, 9, 3, 1536, 1e5),
    "smollm2-360m": _smollm2(32, 960, 15, 5, 2560, 1e5),
    "smollm2-1.7b": _smollm2(24, 2048, 32, 32, 8192, 13e4),
    "gemma-3-270m": _gemma3(18, 640, 4, 2048, window=512, positions=32768),
    "gemma-3-1b": _gemma3(26, 1152, 4, 6912, window=512, positions=32768),
    "qwen3.5-0.8b": _qwen3_5(24, 1024, 8, 2, 3584, **_TIED),
    "qwen3.5-9b": _qwen3_5(32, 4096, 16, 4, 12288, linear_num_value_heads=32),
    "smollm3-3b": _shape(
        "SmolLM3ForCausalLM",
        layers=36,
        hidden=2048,
        heads=16,
        kv_heads=4,
        mlp=11008,
        vocab=128256,
        rope_theta=5e6,
        max_position_embeddings=65536,
        **_TIED,
    ),
}
SHAPES = {name: shape for name, shape in _PUBLISHED.items() if shape is not None}


def shape_of(path: str, layers: int | None = None) -> DecoderConfig:
    """The shape of the model that a recipe's ``model.path`` names: from its folder or, if there is none, a published
    one.

    Args:
      path: a folder, ``builtin:tiny``, or a path that ends in the name of one of `SHAPES`, with or without
        ``-Instruct`` or ``-it``.
      layers: number of layers in place of the model's own.

    Raises:
      UserError: the path is neither.

    Example:
      >>> shape_of("/nowhere/Qwen2.5-3B-Instruct").num_layers
      36
    """
    found = _found(path)
    return found if layers is None else dataclasses.replace(found, num_layers=layers)


def _found(path: str) -> DecoderConfig:
    name, folder = Path(path).name.lower().removesuffix("-instruct").removesuffix("-it"), data.locate(path)
    try:
        return hf.read_config(folder)
    except UserError as e:
        if folder.exists():
            raise
        if name not in SHAPES:
            raise UserError(f"{e}, or planned by the name of a published shape: {', '.join(SHAPES)}") from None
    if path.lower() != name:
        _log.info("no folder %s: planned with the published shape of %s", path, name)
    return SHAPES[name]
