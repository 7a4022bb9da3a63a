"""What a ``config.json`` of an unknown family says that no decoder here has, for the error that refuses it."""

from collections.abc import Mapping
from typing import Any

# What the fields mean, in the order of an error: a field counts if it is there and neither null, false, 0 nor empty.
_FIELDS = {
    "models inside of the model": (
        *("text_config", "vision_config", "audio_config", "decoder_config", "depth_decoder_config", "decoder"),
        *("vq_config", "text_encoder", "audio_encoder"),
    ),
    "an encoder": ("is_encoder_decoder", "encoder_layers", "num_encoder_layers", "cross_attention_hidden_size"),
    "recurrent layers": (
        *("mamba_d_state", "mamba_d_conv", "mamba_num_heads", "ssm_state_size", "state_size", "lru_width"),
        *("linear_conv_kernel_dim", "conv_L_cache", "conv_kernel_size", "n_recurrent_layers", "rescale_every"),
        *("chunkwise_kernel", "linear_attn_alpha_factor"),
    ),
    "keys and values of low rank": ("kv_lora_rank",),
    "keys that an index chooses": ("index_topk", "index_topk_blocks", "indexer_n_heads"),
    "layers that run several times": ("H_cycles", "loop_num_passes"),
    "a mixture of experts of another kind": (
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok"),
        *("moe_topk", "ffn_config"),
    ),
    "layers of different sizes": ("per_layer_config", "global_head_dim"),
    "an embedding for each layer": ("hidden_size_per_layer_input",),
    "layers that share keys and values": ("num_kv_shared_layers",),
    "layers with a window": (
        *("sliding_window", "attention_window_size", "window_size", "attention_chunk_size", "local_attention"),
        *("local_attn_chunk_length", "keep_window_size"),
    ),
    "soft caps": ("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap"),
    "capped products": ("clip_qkv", "swiglu_limit"),
    "biases by distance": ("alibi", "relative_attention_num_buckets", "position_bias_num_buckets"),
    "learned positions": ("learned_pos_emb", "use_learned_position_embeddings", "axial_pos_embds"),
    "segments": ("type_vocab_size",),
    "layer norms": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_bias"),
}
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation", "ff_activation", "afn")


def strange(raw: Mapping[str, Any]) -> list[str]:
    """What the fields of a config stand for, out of what is known to be missing here; may be empty.

    Example:
      >>> strange({"sliding_window": 4096, "hidden_act": "gelu", "layer_norm_eps": 1e-5})
      ['layers with a window (sliding_window)', 'layer norms (layer_norm_eps)', "hidden_act='gelu'"]
    """
    found = []
    for meaning, names in _FIELDS.items():
        if named := [name for name in names if raw.get(name)]:
            found.append(f"{meaning} ({named[0]})")
    acts = [(name, raw[name]) for name in _ACTIVATIONS if isinstance(raw.get(name), str)]
    return found + [f"{name}={act!r}" for name, act in acts[:1] if act not in ("silu", "swish")]
