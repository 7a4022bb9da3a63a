"""The families of models that are read, by their model_type: one line or a few for each.

A new family is an entry here. What its config.json has of its own is read and written by functions of the modules of
this package, if no other family's fit. A weight that no other family has gets a line in
`grpojax.models.weight_table`. Families with layers of another kind are those of an extension
(`grpojax.extension.Names.families`).
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from grpojax import extension
from grpojax.models.hf import windows
from grpojax.models.hf.families import heads, multipliers
from grpojax.models.hf.family import BIASES, Family, Tensors, WithImages

T = TypeVar("T")

_GATE_UP = {r"\.mlp\.(gate|up)_proj\.": ".mlp.gate_up_proj."}
_AFTER = {"post_self_attn_layernorm": "post_attention_layernorm"}
_BEFORE_AND_AFTER = {"post_attention_layernorm": "pre_feedforward_layernorm", **_AFTER}
_BEHIND = {"norms_before": False, "norms_after": True}
_GLM = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}

_FAMILIES: Mapping[str, Family] = {
    "qwen2": Family(
        architectures=("Qwen2ForCausalLM",),
        missing={"num_key_value_heads": 32, "max_position_embeddings": 32768},
        flags={},
        traits={"qkv_bias": True},
        heads=heads.whole_by_default,
        windows=windows.last(allowed=True),
    ),
    "qwen3": Family(
        architectures=("Qwen3ForCausalLM",),
        missing={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
        nullable=("num_key_value_heads",),
        traits={"qk_norm": True},
        windows=windows.last(allowed=True),
    ),
    "llama": Family(architectures=("LlamaForCausalLM",), flags=BIASES, heads=heads.whole),
    "mistral": Family(
        architectures=("MistralForCausalLM",),
        missing={"num_key_value_heads": 8, "max_position_embeddings": 131072},
        nullable=("head_dim",),
        flags={},
        windows=windows.EVERY,
    ),
    "smollm3": Family(
        architectures=("SmolLM3ForCausalLM",),
        missing={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        flags=BIASES,
        windows=windows.last(strict=True),
        read=windows.read_unrotated,
        write=windows.write_unrotated,
    ),
    "granite": Family(
        architectures=("GraniteForCausalLM",),
        missing={
            "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        flags=BIASES,
        read=multipliers.read_granite,
        write=multipliers.write_granite,
    ),
    "phi3": Family(
        architectures=("Phi3ForCausalLM",),
        missing={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None},
        flags={},
        windows=windows.EVERY,
        scalings=("default",),
        tensors=Tensors({r"\.self_attn\.[qkv]_proj\.": ".self_attn.qkv_proj.", **_GATE_UP}),
    ),
    "olmo2": Family(
        architectures=("Olmo2ForCausalLM",),
        missing={"rms_norm_eps": 1e-5},
        traits={"wide_qk_norm": True, **_BEHIND},
        tensors=Tensors(_AFTER),
    ),
    "olmo3": Family(
        architectures=("Olmo3ForCausalLM",),
        missing={"rms_norm_eps": 1e-5, "rope_theta": 5e5},
        traits={"wide_qk_norm": True, **_BEHIND},
        windows=windows.alternating(4, own_rope=True),
        tensors=Tensors(_AFTER),
    ),
    "gemma3_text": Family(
        architectures=("Gemma3ForCausalLM",),
        missing={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "query_pre_attn_scalar": 256,
            "sliding_window_pattern": 6,
        },
        nullable=("num_key_value_heads",),
        traits={"qk_norm": True, "norms_after": True, "norms_add_one": True},
        heads=heads.whole,
        windows=windows.alternating("sliding_window_pattern", own_rope=True),
        read=multipliers.read_gemma3,
        write=multipliers.write_gemma3,
        with_images=WithImages(
            "Gemma3ForConditionalGeneration",
            unread=r"(model\.)?(vision_tower|multi_modal_projector)\.",
            missing={"vocab_size": 262208, "num_attention_heads": 8},
        ),
        tensors=Tensors(_BEFORE_AND_AFTER),
    ),
    "gemma2": Family(
        architectures=("Gemma2ForCausalLM",),
        missing={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        nullable=(),
        traits={"norms_after": True, "norms_add_one": True},
        heads=heads.whole,
        windows=windows.alternating(2),
        read=multipliers.read_gemma2,
        write=multipliers.write_gemma2,
        tensors=Tensors(_BEFORE_AND_AFTER),
    ),
    "ministral3": Family(
        architectures=("Ministral3ForCausalLM",),
        missing={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        nullable=("head_dim",),
        flags={},
        windows=windows.EVERY,
        rope_fields=("llama_4_scaling_beta", "max_position_embeddings"),
        read=multipliers.read_ministral3,
        write=multipliers.write_ministral3,
    ),
    "glm": Family(
        architectures=("GlmForCausalLM",),
        missing=_GLM,
        nullable=(),
        flags={"qkv_bias": "attention_bias"},
        traits={"rotary_neighbours": True},
        tensors=Tensors(_GATE_UP),
    ),
    "glm4": Family(
        architectures=("Glm4ForCausalLM",),
        missing=_GLM,
        nullable=(),
        flags={"qkv_bias": "attention_bias"},
        traits={"rotary_neighbours": True, "norms_after": True},
        tensors=Tensors({**_GATE_UP, "post_feedforward_layernorm": "post_mlp_layernorm"}),
    ),
    "exaone4": Family(
        architectures=("Exaone4ForCausalLM",),
        missing={"num_key_value_heads": 32, "rms_norm_eps": 1e-5},
        nullable=("head_dim",),
        flags={},
        traits={"qk_norm": True, **_BEHIND},
        windows=windows.NONE,
        tensors=Tensors(_AFTER),
    ),
    "seed_oss": Family(
        architectures=("SeedOssForCausalLM",),
        missing={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
        },
        flags={**BIASES, "out_bias": "attention_out_bias"},
    ),
    "hunyuan_v1_dense": Family(
        architectures=("HunYuanDenseV1ForCausalLM",),
        missing={"rms_norm_eps": 1e-5},
        traits={"qk_norm_rotated": True},
        scalings=("default", "linear", "llama3", "yarn", "dynamic"),
    ),
    "ernie4_5": Family(
        architectures=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),  # the second as its makers call it
        missing={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_theta": 5e5,
        },
        flags=dict.fromkeys(BIASES, "use_bias"),
        traits={"rotary_neighbours": True},
    ),
    "helium": Family(
        architectures=("HeliumForCausalLM",),
        missing={
            "num_key_value_heads": 20,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-8,
            "rope_theta": 1e5,
        },
        nullable=(),
        flags={"qkv_bias": "attention_bias", "mlp_bias": "mlp_bias"},
        traits={"rotary_neighbours": True},
        heads=heads.exact,
    ),
    "hyperclovax": Family(
        architectures=("HyperCLOVAXForCausalLM",),
        missing={
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
            "use_post_norm": True,
        },
        flags=BIASES,
        heads=heads.whole,
        read=multipliers.read_hyperclovax,
        write=multipliers.write_hyperclovax,
        tensors=Tensors({r"\.post_self_attn_layernorm": ".post_norm1", r"\.post_feedforward_layernorm": ".post_norm2"}),
    ),
}


class _Lazy(Mapping[str, T]):
    """A mapping that is made when it is first read: families of extensions import this package themselves."""

    def __init__(self, make: Callable[[], Mapping[str, T]]):
        self._make = functools.cache(make)

    def __getitem__(self, name: str) -> T:
        return self._make()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._make())

    def __len__(self) -> int:
        return len(self._make())


def _all() -> dict[str, Family]:
    return {**_FAMILIES, **{name: extension.imported(path) for name, path in extension.words("families").items()}}


FAMILIES: Mapping[str, Family] = _Lazy(_all)
# Architecture named in config.json -> family, which is also its model_type.
ARCHITECTURES: Mapping[str, str] = _Lazy(
    lambda: {name: family for family, its in FAMILIES.items() for name in its.architectures}
)
