"""Shapes of published models, so that a plan needs no weights and no network."""

import logging
from pathlib import Path
from typing import Any

from grpojax import data
from grpojax.host.errors import UserError
from grpojax.models import DecoderConfig, hf

_log = logging.getLogger("grpojax")


def _shape(
    architecture: str, *, layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int, **more: Any
) -> DecoderConfig:
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


_QWEN, _TIED = "Qwen2ForCausalLM", {"tie_word_embeddings": True}
_LLAMA_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# The values of their makers' config.json.
SHAPES = {
    "qwen2.5-0.5b": _shape(_QWEN, layers=24, hidden=896, heads=14, kv_heads=2, mlp=4864, vocab=151936, **_TIED),
    "qwen2.5-1.5b": _shape(_QWEN, layers=28, hidden=1536, heads=12, kv_heads=2, mlp=8960, vocab=151936, **_TIED),
    "qwen2.5-3b": _shape(_QWEN, layers=36, hidden=2048, heads=16, kv_heads=2, mlp=11008, vocab=151936, **_TIED),
    "qwen2.5-7b": _shape(_QWEN, layers=28, hidden=3584, heads=28, kv_heads=4, mlp=18944, vocab=152064),
    "qwen3-8b": _shape(
        "Qwen3ForCausalLM", layers=36, hidden=4096, heads=32, kv_heads=8, mlp=12288, vocab=151936, head_dim=128
    ),
    "qwen3-30b-a3b": _shape(
        "Qwen3MoeForCausalLM",
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        mlp=6144,
        vocab=151936,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "qwen3.5-9b": _shape(
        "Qwen3_5ForCausalLM",
        layers=32,
        hidden=4096,
        heads=16,
        kv_heads=4,
        mlp=12288,
        vocab=248320,
        head_dim=256,
        rope_theta=1e7,
    ),
    "llama-3.1-8b": _shape(
        "LlamaForCausalLM",
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        mlp=14336,
        vocab=128256,
        rope_theta=5e5,
        rope_scaling=_LLAMA_ROPE,
        max_position_embeddings=131072,
    ),
}


def shape_of(path: str) -> DecoderConfig:
    """The shape of the model that a recipe's ``model.path`` names: from its folder or, if there is none, a published
    one.

    Args:
      path: a folder, ``builtin:tiny``, or a path that ends in the name of one of `SHAPES`, with or without
        ``-Instruct``.

    Raises:
      UserError: the path is neither.

    Example:
      >>> shape_of("/nowhere/Qwen2.5-3B-Instruct").num_layers
      36
    """
    name, folder = Path(path).name.lower().removesuffix("-instruct"), data.locate(path)
    try:
        return hf.read_config(folder)
    except UserError as e:
        if folder.exists():
            raise
        if name not in SHAPES:
            raise UserError(f"{e}, or planned by the name of a published shape: {', '.join(SHAPES)}") from None
    _log.info("no folder %s: planned with the published shape of %s", path, name)
    return SHAPES[name]
