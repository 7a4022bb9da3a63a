"""What a ``config.json`` may say: read as transformers reads it, or refused in two lines that name the field."""

import copy
import math
import random

import pytest
import transformers
import with_torch  # noqa: F401
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from grpojax.host.errors import UserError
from grpojax.models.decoder_config import (
    DecoderConfig,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)
from grpojax.models.hf import from_hf
from grpojax.models.hf.families import FAMILIES

SIZES = dict(
    vocab_size=118,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    hidden_act="silu",
    max_position_embeddings=640,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)
LLAMA3 = dict(factor=4.0, low_freq_factor=1.0, high_freq_factor=5.0, original_max_position_embeddings=160)
YARN = dict(factor=4.0, original_max_position_embeddings=160)

# As on the hub, and as transformers 5 writes them.
CONFIGS = {
    "qwen2": dict(
        SIZES, architectures=["Qwen2ForCausalLM"], model_type="qwen2", rope_theta=3e5, use_sliding_window=False,
        sliding_window=96, max_window_layers=2, use_mrope=False, torch_dtype="bfloat16",
    ),
    "qwen3": dict(
        SIZES, architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=10, attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 2e5}, layer_types=["full_attention"] * 3,
        use_sliding_window=False, sliding_window=None, max_window_layers=3, dtype="bfloat16",
    ),
    "llama": dict(
        SIZES, architectures=["LlamaForCausalLM"], model_type="llama", head_dim=None, attention_bias=False,
        mlp_bias=False, pretraining_tp=1, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3},
    ),
    "llama 5": dict(
        SIZES, architectures=["LlamaForCausalLM"], model_type="llama", head_dim=8, attention_bias=True, mlp_bias=True,
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, dtype="float32",
    ),
    "mistral": dict(
        SIZES, architectures=["MistralForCausalLM"], model_type="mistral", head_dim=14, sliding_window=None,
        rope_theta=4e5, torch_dtype="bfloat16",
    ),
    "mistral 5": dict(
        SIZES, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=640,
        rope_parameters={"rope_type": "yarn", "rope_theta": 4e5, **YARN}, dtype="bfloat16",
    ),
    "smollm3": dict(
        SIZES, architectures=["SmolLM3ForCausalLM"], model_type="smollm3", rope_theta=5e6, attention_bias=False,
        mlp_bias=False, no_rope_layers=[1, 0, 1], no_rope_layer_interval=4, use_sliding_window=False,
        sliding_window=None, max_window_layers=3, layer_types=["full_attention"] * 3, pretraining_tp=2,
    ),
    "granite": dict(
        SIZES, architectures=["GraniteForCausalLM"], model_type="granite", rope_theta=1e7, attention_bias=False,
        mlp_bias=False, embedding_multiplier=12.0, attention_multiplier=0.015625, residual_multiplier=0.22,
        logits_scaling=8, rope_scaling=None,
    ),
    "phi3": dict(
        SIZES, architectures=["Phi3ForCausalLM"], model_type="phi3", original_max_position_embeddings=640,
        rope_theta=250000, rope_scaling=None, partial_rotary_factor=1.0, sliding_window=None, resid_pdrop=0.0,
    ),
    "olmo2": dict(
        SIZES, architectures=["Olmo2ForCausalLM"], model_type="olmo2", rope_theta=500000, attention_bias=False,
        rope_scaling=None, torch_dtype="float32",
    ),
    "glm": dict(
        SIZES, architectures=["GlmForCausalLM"], model_type="glm", head_dim=12, attention_bias=True, rope_theta=2e4,
        partial_rotary_factor=0.5, attention_dropout=0.0, torch_dtype="bfloat16",
    ),
    "glm4": dict(
        SIZES, architectures=["Glm4ForCausalLM"], model_type="glm4", head_dim=16, attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.25}, dtype="bfloat16",
    ),
    "exaone4": dict(
        SIZES, architectures=["Exaone4ForCausalLM"], model_type="exaone4", head_dim=10, rope_theta=1e6,
        rope_scaling={"rope_type": "llama3", **LLAMA3}, layer_types=["full_attention"] * 3, sliding_window=None,
        sliding_window_pattern=None,
    ),
    "seed_oss": dict(
        SIZES, architectures=["SeedOssForCausalLM"], model_type="seed_oss", head_dim=10, attention_bias=True,
        attention_out_bias=False, mlp_bias=False, rope_theta=1e7, rope_scaling={"rope_type": "default"},
        attention_dropout=0.1, residual_dropout=0.1,
    ),
    "hunyuan": dict(
        SIZES, architectures=["HunYuanDenseV1ForCausalLM"], model_type="hunyuan_v1_dense", head_dim=10, rope_theta=1e4,
        rope_scaling={
            "type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }, attention_bias=False, use_qk_norm=True, use_cla=False,
    ),
    "ernie4_5": dict(
        SIZES, architectures=["Ernie4_5_ForCausalLM"], model_type="ernie4_5", head_dim=10, use_bias=False,
        rope_theta=5e5,
    ),
    "helium": dict(
        SIZES, architectures=["HeliumForCausalLM"], model_type="helium", head_dim=8, attention_bias=False,
        mlp_bias=False, rope_theta=1e5,
    ),
    "hyperclovax": dict(
        SIZES, architectures=["HyperCLOVAXForCausalLM"], model_type="hyperclovax", head_dim=8, attention_bias=False,
        mlp_bias=False, rope_theta=1e8, embedding_multiplier=10.0, attention_multiplier=0.0078125,
        residual_multiplier=0.5, logits_scaling=0.125, use_post_norm=True,
    ),
    "qwen3_moe": dict(
        SIZES, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", head_dim=10, attention_bias=False,
        rope_theta=3e5, use_sliding_window=False, sliding_window=None, max_window_layers=3, decoder_sparse_step=1,
        mlp_only_layers=[], num_experts=7, num_experts_per_tok=3, moe_intermediate_size=18, norm_topk_prob=True,
    ),
    "olmo3": dict(
        SIZES, architectures=["Olmo3ForCausalLM"], model_type="olmo3", rope_theta=500000, attention_bias=False,
        sliding_window=96, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_scaling={"rope_type": "yarn", "attention_factor": 1.2, **YARN}, torch_dtype="bfloat16",
    ),
    "gemma3_text": dict(
        SIZES, architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", head_dim=10, attention_bias=False,
        hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=None, final_logit_softcapping=None,
        cache_implementation="hybrid", query_pre_attn_scalar=14, sliding_window=96, sliding_window_pattern=2,
        rope_theta=1000000, rope_local_base_freq=10000, rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "gemma3_text 5": dict(
        SIZES, architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", head_dim=10, tie_word_embeddings=True,
        layer_types=["sliding_attention", "full_attention", "full_attention"], query_pre_attn_scalar=10,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 3e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
        use_bidirectional_attention=False, sliding_window=700, _sliding_window_pattern=6,
    ),
    "qwen2_moe": dict(
        SIZES, architectures=["Qwen2MoeForCausalLM"], model_type="qwen2_moe", rope_theta=3e5, decoder_sparse_step=1,
        mlp_only_layers=None, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=18, norm_topk_prob=False,
        shared_expert_intermediate_size=34, qkv_bias=True, use_sliding_window=False,
    ),
    "qwen3_5_text": dict(
        SIZES, architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", head_dim=20, attention_bias=False,
        linear_num_key_heads=3, linear_num_value_heads=6, linear_key_head_dim=5, linear_value_head_dim=7,
        linear_conv_kernel_dim=3, full_attention_interval=2, mtp_num_hidden_layers=1, attn_output_gate=True,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        rope_parameters=dict(
            rope_type="default", rope_theta=3e5, partial_rotary_factor=0.5, mrope_section=[2, 2, 1],
            mrope_interleaved=True,
        ),
    ),
    "olmoe": dict(
        SIZES, architectures=["OlmoeForCausalLM"], model_type="olmoe", rope_theta=2e4, rope_scaling=None, clip_qkv=None,
        attention_bias=False, num_experts=7, num_experts_per_tok=3, norm_topk_prob=False, torch_dtype="bfloat16",
    ),
}  # fmt: skip
CONFIGS["qwen3_5"] = dict(
    architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", text_config=CONFIGS["qwen3_5_text"],
    vision_config={"model_type": "qwen3_5_vision", "depth": 2}, image_token_id=5, tie_word_embeddings=False,
)  # fmt: skip
CONFIGS |= {
    "gemma2": dict(
        SIZES, architectures=["Gemma2ForCausalLM"], model_type="gemma2", head_dim=10, attention_bias=False,
        hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=14, sliding_window=96, rope_theta=1e4,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
    ),
    "ministral3": dict(
        SIZES, architectures=["Ministral3ForCausalLM"], model_type="ministral3", head_dim=10, sliding_window=None,
        rope_parameters=dict(YARN, rope_type="yarn", rope_theta=7e5, mscale=1.0, mscale_all_dim=1.0,
                             llama_4_scaling_beta=0.1),
    ),
    "gpt_oss": dict(
        SIZES, architectures=["GptOssForCausalLM"], model_type="gpt_oss", head_dim=10, attention_bias=True,
        num_local_experts=7, num_experts_per_tok=3, sliding_window=96, swiglu_limit=7.0, rope_theta=150000,
        rope_scaling=dict(YARN, rope_type="yarn", beta_fast=32.0, beta_slow=1.0, truncate=False),
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], initial_context_length=160,
    ),
    "glm4_moe": dict(
        SIZES, architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", head_dim=16, attention_bias=True,
        n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, n_shared_experts=1, n_group=3,
        topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True, first_k_dense_replace=1, use_qk_norm=True,
        partial_rotary_factor=0.5, rope_theta=1000000, rope_scaling=None, num_nextn_predict_layers=1,
    ),
}  # fmt: skip

# Those of an extension that is not installed are not read.
CONFIGS = {name: raw for name, raw in CONFIGS.items() if raw.get("text_config", raw)["model_type"] in FAMILIES}

GONE = object()  # the field is missing

CLASSES = {
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "olmo2": transformers.Olmo2Config,
    "olmoe": transformers.OlmoeConfig,
    "phi3": transformers.Phi3Config,
    "granite": transformers.GraniteConfig,
    "smollm3": transformers.SmolLM3Config,
    "olmo3": transformers.Olmo3Config,
    "gemma3_text": transformers.Gemma3TextConfig,
    "glm": transformers.GlmConfig,
    "glm4": transformers.Glm4Config,
    "exaone4": transformers.Exaone4Config,
    "seed_oss": transformers.SeedOssConfig,
    "hunyuan_v1_dense": transformers.HunYuanDenseV1Config,
    "ernie4_5": transformers.Ernie4_5Config,
    "helium": transformers.HeliumConfig,
    "hyperclovax": transformers.HyperCLOVAXConfig,
    "qwen2_moe": transformers.Qwen2MoeConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "gemma2": transformers.Gemma2Config,
    "ministral3": transformers.Ministral3Config,
    "gpt_oss": transformers.GptOssConfig,
    "glm4_moe": transformers.Glm4MoeConfig,
    "qwen3_5_text": transformers.Qwen3_5TextConfig,
    "qwen3_5": transformers.Qwen3_5Config,
}


def changed(name: str, changes: dict) -> dict:
    raw = copy.deepcopy(CONFIGS[name]) | changes
    return {key: value for key, value in raw.items() if value is not GONE}


TWO_ROPES = ("gemma3_text", "olmo3")


def their_scaling(c, rope) -> RopeScaling | None:
    if (rope["rope_type"], rope.get("factor", 1)) in [("default", 1), ("linear", 1)] or rope["rope_type"] == "dynamic":
        return None
    if rope["rope_type"] == "linear":
        return LinearScaling(factor=rope["factor"])
    if rope["rope_type"] == "yarn":
        of_kind = {"layer_type": "full_attention"} if c.model_type in TWO_ROPES else {}
        _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](c, "cpu", **of_kind)
        return YarnScaling(
            factor=rope["factor"],
            original_positions=rope["original_max_position_embeddings"],
            fast=rope.get("beta_fast") or 32.0,
            slow=rope.get("beta_slow") or 1.0,
            whole=rope.get("truncate", True),
            attention_factor=attention_factor,
        )
    assert rope["rope_type"] == "llama3"
    return Llama3Scaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_positions=rope["original_max_position_embeddings"],
    )


def their_config(raw: dict) -> DecoderConfig:
    """The numbers that the forward of transformers takes from a config."""
    c = CLASSES[raw["model_type"]].from_dict(copy.deepcopy(raw))
    c = c.text_config if c.model_type == "qwen3_5" else c
    family, rope, window_theta = c.model_type, c.rope_parameters, None
    gemma, olmo = family in ("gemma2", "gemma3_text"), family in ("olmo2", "olmo3")
    oss, moe = family == "gpt_oss", family == "glm4_moe"
    if family in TWO_ROPES:
        rope, local = rope["full_attention"], rope["sliding_attention"]
        assert local["rope_type"] == "default" and local.get("partial_rotary_factor") in (None, 1)
        window_theta = local["rope_theta"]
    if family == "gemma3_text":
        assert c.attn_logit_softcapping is c.final_logit_softcapping is None
    assert c.hidden_activation == "gelu_pytorch_tanh" if gemma else c.hidden_act in ("silu", "swish")
    glm, hybrid = family in ("glm", "glm4", "glm4_moe"), family == "qwen3_5_text"
    assert glm or hybrid or rope.get("partial_rotary_factor") in (None, 1)
    head_dim, theta = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads, rope["rope_theta"]
    if rope["rope_type"] == "dynamic":
        assert family == "hunyuan_v1_dense"
        theta *= rope["alpha"] ** (head_dim / (head_dim - 2))
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0)) if glm or hybrid else head_dim
    windowed, mixer = [], {}
    if hybrid:
        assert not c.attention_bias
        there = [i for i, kind in enumerate(c.layer_types) if kind == "full_attention"]
        if len(there) < len(c.layer_types):
            from grpojax.extensions.delta.delta_net import DeltaNet

            mixer["mixer_layers"] = [i for i in range(c.num_hidden_layers) if i not in there]
            mixer["mixer"] = DeltaNet(
                key_heads=c.linear_num_key_heads,
                value_heads=c.linear_num_value_heads,
                key_size=c.linear_key_head_dim,
                value_size=c.linear_value_head_dim,
                taps=c.linear_conv_kernel_dim,
            )
    if family == "qwen3_moe":
        assert c.sliding_window is None
    elif family in ("mistral", "phi3", "ministral3"):
        windowed = [] if c.sliding_window is None else range(c.num_hidden_layers)
    elif family == "exaone4":
        assert c.sliding_window is None and set(c.layer_types) == {"full_attention"}
    elif not hybrid and hasattr(CLASSES[family](), "layer_types"):
        windowed = [i for i, kind in enumerate(c.layer_types) if kind == "sliding_attention"]
        assert family in ("qwen2", "qwen3", "gemma2", "gpt_oss", *TWO_ROPES) or not windowed
    if windowed and family not in TWO_ROPES and c.sliding_window >= c.max_position_embeddings:
        windowed = []
    if family == "ernie4_5":
        biased = c.use_bias
    else:
        without = ("qwen2", "qwen2_moe", "mistral", "ministral3", "phi3", "exaone4")
        biased = family not in without and c.attention_bias
    out_biased = c.attention_out_bias if family == "seed_oss" else biased and not glm and family != "helium"
    experts = None
    if family in ("olmoe", "gpt_oss") or family.endswith("_moe"):
        from grpojax.extensions.mixtures.experts import Experts
    if family == "olmoe":
        assert c.clip_qkv is None
        experts = Experts(
            count=c.num_experts, chosen=c.num_experts_per_tok, size=c.intermediate_size, renormalised=c.norm_topk_prob
        )
    if oss:
        experts = Experts(
            count=c.num_local_experts, chosen=c.num_experts_per_tok, size=c.intermediate_size, biased=True,
            limit=c.swiglu_limit, alpha=c.swiglu_alpha,
        )  # fmt: skip
    elif moe:
        experts = Experts(
            count=c.n_routed_experts, chosen=c.num_experts_per_tok, size=c.moe_intermediate_size,
            renormalised=c.norm_topk_prob, shared=c.n_shared_experts * c.moe_intermediate_size, shared_gate=False,
            sigmoid=True, corrected=True, groups=c.n_group, groups_chosen=c.topk_group, scale=c.routed_scaling_factor,
        )  # fmt: skip
    elif family.endswith("_moe"):
        assert c.decoder_sparse_step == 1 and not c.mlp_only_layers
        experts = Experts(
            count=c.num_experts,
            chosen=c.num_experts_per_tok,
            size=c.moe_intermediate_size,
            renormalised=c.norm_topk_prob,
            shared=c.shared_expert_intermediate_size if family == "qwen2_moe" else 0,
        )
    multipliers = {}
    if family == "hyperclovax":
        multipliers = dict(
            embedding_multiplier=c.embedding_multiplier,
            attention_multiplier=None if c.attention_multiplier == head_dim**-0.5 else c.attention_multiplier,
            residual_multiplier=c.residual_multiplier,
            logits_divisor=1 / c.logits_scaling,
        )
    if family == "granite":
        multipliers = dict(
            embedding_multiplier=c.embedding_multiplier,
            attention_multiplier=c.attention_multiplier,
            residual_multiplier=c.residual_multiplier,
            logits_divisor=c.logits_scaling,
        )
    if family == "ministral3":
        multipliers = dict(query_growth=rope["llama_4_scaling_beta"])
    if gemma:
        multipliers = dict(
            attention_cap=c.attn_logit_softcapping or 0.0 if family == "gemma2" else 0.0,
            logits_cap=c.final_logit_softcapping or 0.0 if family == "gemma2" else 0.0,
            embedding_multiplier=c.hidden_size**0.5,
            attention_multiplier=None if c.query_pre_attn_scalar == c.head_dim else c.query_pre_attn_scalar**-0.5,
        )
    return DecoderConfig(
        family=family,
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_layers=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=their_scaling(c, rope),
        norm_eps=c.rms_norm_eps,
        tie_embeddings=c.tie_word_embeddings,
        qkv_bias=family == "qwen2" or biased or (family == "qwen2_moe" and c.qkv_bias),
        out_bias=out_biased,
        mlp_bias=biased
        if family == "ernie4_5"
        else getattr(CLASSES[family](), "mlp_bias", None) is not None and c.mlp_bias,
        sinks=oss,
        dense_layers=c.first_k_dense_replace if moe else 0,
        qk_norm=family == "gemma3_text" or (moe and c.use_qk_norm) or family.startswith("qwen3") or family == "exaone4",
        qk_norm_rotated=family == "hunyuan_v1_dense",
        wide_qk_norm=olmo or family == "olmoe",
        norms_before=not olmo and family != "exaone4",
        norms_after=gemma or olmo or family in ("exaone4", "glm4") or (family == "hyperclovax" and c.use_post_norm),
        norms_add_one=gemma or hybrid,
        output_gate=hybrid,
        **mixer,
        activation="gelu_tanh" if gemma else "silu",
        rotary_dim=None if rotated == head_dim else rotated,
        rotary_neighbours=(glm and not moe) or family in ("ernie4_5", "helium"),
        window=c.sliding_window if windowed else 0,
        windowed_layers=windowed,
        window_theta=window_theta if windowed else None,
        max_positions=c.max_position_embeddings,
        unrotated_layers=[i for i in range(c.num_hidden_layers) if family == "smollm3" and not c.no_rope_layers[i]],
        mlp=experts,
        **multipliers,
    )


SLIDING = dict(use_sliding_window=True, sliding_window=96)

MISSING = dict(
    num_key_value_heads=GONE, head_dim=GONE, rms_norm_eps=GONE, max_position_embeddings=GONE, num_attention_heads=8
)  # fmt: skip

# config, changes of it
READ = {
    "architectures missing": ("qwen2", dict(architectures=GONE)),
    "architectures null": ("qwen3", dict(architectures=None)),
    "architectures empty": ("llama", dict(architectures=[])),
    "architectures a text": ("llama", dict(architectures="LlamaForCausalLM")),
    "head_dim null": ("llama", dict(head_dim=None)),
    "head_dim null, qwen2": ("qwen2", dict(head_dim=None)),
    "head_dim given, qwen2": ("qwen2", dict(head_dim=20)),
    "head_dim missing, qwen3": ("qwen3", dict(head_dim=GONE)),
    "heads that hidden_size does not divide by, qwen3": ("qwen3", dict(num_attention_heads=10)),
    "key-value heads null": ("qwen2", dict(num_key_value_heads=None)),
    "key-value heads missing": ("llama", dict(num_key_value_heads=GONE)),
    "key-value heads missing, 32": ("qwen2", dict(num_key_value_heads=GONE, num_attention_heads=32, hidden_size=64)),
    "theta missing, qwen2": ("qwen2", dict(rope_theta=GONE)),
    "theta missing, qwen3": ("qwen3", dict(rope_parameters=None)),
    "theta missing, llama": ("llama", dict(rope_theta=GONE)),
    "theta a whole number": ("qwen2", dict(rope_theta=1000000)),
    "theta in both places": ("qwen3", dict(rope_theta=7.0)),
    "positions missing, llama": ("llama", dict(max_position_embeddings=GONE)),
    "positions missing, qwen2": ("qwen2", dict(max_position_embeddings=GONE)),
    "eps missing": ("qwen2", dict(rms_norm_eps=GONE)),
    "tie missing": ("qwen2", dict(tie_word_embeddings=GONE)),
    "swish": ("qwen2", dict(hidden_act="swish")),
    "linear by 1": ("llama", dict(rope_scaling={"type": "linear", "factor": 1.0})),
    "default by 1": ("qwen2", dict(rope_scaling={"type": "default", "factor": 1})),
    "linear": ("llama", dict(rope_scaling={"type": "linear", "factor": 2.5})),
    "yarn": ("qwen2", dict(rope_scaling={"type": "yarn", **YARN})),
    "yarn, all of its fields": (
        "qwen3",
        dict(rope_parameters=dict(YARN, rope_type="yarn", rope_theta=7e5, beta_fast=20, beta_slow=2.0, truncate=False)),
    ),
    "yarn with a factor of attention": ("llama", dict(rope_scaling=dict(YARN, type="yarn", attention_factor=1.25))),
    "yarn as DeepSeek's": ("llama", dict(rope_scaling=dict(YARN, type="yarn", mscale=1.5, mscale_all_dim=0.5))),
    "yarn with one scale": ("llama", dict(rope_scaling=dict(YARN, type="yarn", mscale_all_dim=0.5, beta_fast=None))),
    "yarn, positions missing": ("qwen2", dict(rope_scaling={"type": "yarn", "factor": 4.0})),
    "yarn, positions above": (
        "qwen2",
        dict(rope_scaling={"type": "yarn", "factor": 4.0}, original_max_position_embeddings=100),
    ),
    "yarn, mixture": ("qwen3_moe", dict(rope_scaling={"type": "yarn", **YARN})),
    "window as long as positions": ("mistral", dict(sliding_window=640)),
    "window missing, short positions": ("mistral", dict(sliding_window=GONE)),
    "key-value heads missing, 8": (
        "mistral",
        dict(num_key_value_heads=GONE, num_attention_heads=16, hidden_size=64, head_dim=None),
    ),
    "positions missing, mistral": ("mistral", dict(max_position_embeddings=GONE)),
    "biases that mistral does not have": ("mistral", dict(attention_bias=True, mlp_bias=True)),
    "heads that hidden_size does not divide by, mistral": (
        "mistral",
        dict(num_attention_heads=10, head_dim=GONE),
    ),
    "no rotary by the interval": ("smollm3", dict(no_rope_layers=None, no_rope_layer_interval=2)),
    "no rotary by default": ("smollm3", dict(no_rope_layers=GONE, layer_types=GONE, num_hidden_layers=9)),
    "theta missing, smollm3": ("smollm3", dict(rope_theta=GONE)),
    "tie missing, smollm3": ("smollm3", dict(tie_word_embeddings=GONE)),
    "key-value heads missing, smollm3": ("smollm3", dict(num_key_value_heads=GONE, num_attention_heads=8)),
    "biases, smollm3": ("smollm3", dict(attention_bias=True, mlp_bias=True)),
    "multipliers missing": ("granite", dict(embedding_multiplier=GONE, attention_multiplier=GONE, logits_scaling=GONE)),
    "positions missing, granite": ("granite", dict(max_position_embeddings=GONE, num_key_value_heads=GONE)),
    "eps missing, phi3": ("phi3", dict(rms_norm_eps=GONE, max_position_embeddings=GONE)),
    "key-value heads missing, phi3": ("phi3", dict(num_key_value_heads=GONE, sliding_window=GONE)),
    "eps and others missing, olmo2": (
        "olmo2",
        dict(rms_norm_eps=GONE, max_position_embeddings=GONE, num_key_value_heads=GONE, attention_bias=True),
    ),
    "all fields missing, glm": ("glm", dict(MISSING, attention_bias=GONE, partial_rotary_factor=GONE, rope_theta=GONE)),
    "rotated as a whole, glm": ("glm", dict(partial_rotary_factor=1.0)),
    "rotated, in both places": (
        "glm4",
        dict(partial_rotary_factor=0.5, rope_parameters={"rope_type": "yarn", "partial_rotary_factor": 0.75, **YARN}),
    ),
    "all fields missing, exaone4": ("exaone4", dict(MISSING, head_dim=GONE, num_attention_heads=32, hidden_size=128)),
    "all fields missing, seed_oss": ("seed_oss", dict(MISSING, attention_bias=GONE, attention_out_bias=True)),
    "biases, seed_oss": ("seed_oss", dict(attention_out_bias=True, attention_bias=False, mlp_bias=True)),
    "nulls, seed_oss": ("seed_oss", dict(num_key_value_heads=None, head_dim=None)),
    "all fields missing, hunyuan": ("hunyuan", dict(MISSING, rope_scaling=GONE, attention_bias=True)),
    "all fields missing, ernie4_5": ("ernie4_5", dict(MISSING, rope_theta=GONE, tie_word_embeddings=GONE)),
    "biases, ernie4_5": ("ernie4_5", dict(use_bias=True, head_dim=None, num_key_value_heads=None)),
    "all fields missing, hyperclovax": (
        "hyperclovax",
        dict(
            MISSING,
            embedding_multiplier=GONE,
            attention_multiplier=GONE,
            residual_multiplier=GONE,
            logits_scaling=GONE,
            use_post_norm=GONE,
            attention_bias=True,
            mlp_bias=True,
        ),  # fmt: skip
    ),
    "null and others, hyperclovax": ("hyperclovax", dict(attention_multiplier=None, use_post_norm=False)),
    "all fields missing, helium": (
        "helium",
        dict(MISSING, num_attention_heads=20, hidden_size=2560, rope_theta=GONE, attention_bias=True, mlp_bias=True),
    ),
    "experts and others missing, olmoe": (
        "olmoe",
        dict(num_experts=GONE, num_experts_per_tok=GONE, norm_topk_prob=True, num_key_value_heads=None, clip_qkv=GONE),
    ),
    "eps and others missing, olmoe": (
        "olmoe",
        dict(rms_norm_eps=GONE, max_position_embeddings=GONE, num_key_value_heads=GONE, attention_bias=True),
    ),
    "llama3 in qwen2": ("qwen2", dict(rope_scaling={"type": "llama3", **LLAMA3})),
    "both spellings": ("qwen2", dict(rope_scaling={"type": "default"}, rope_parameters={"rope_theta": 3e5})),
    "no rotation left out": ("llama", dict(partial_rotary_factor=1.0)),
    "sections of images off": ("qwen2", dict(rope_scaling={"type": "default", "mrope_section": [2, 1, 1]})),
    "window beyond the layers": ("qwen2", dict(SLIDING, max_window_layers=3)),
    "window after 28 layers": ("qwen2", dict(SLIDING, max_window_layers=GONE)),
    "window of the last layers": ("qwen2", dict(SLIDING, max_window_layers=1)),
    "window of all layers": ("qwen2", dict(SLIDING, max_window_layers=-1)),
    "window by layer_types": (
        "qwen3",
        dict(SLIDING, layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    ),
    "window of all layers, mistral": ("mistral", dict(sliding_window=96)),
    "window by default, mistral": ("mistral", dict(sliding_window=GONE, max_position_embeddings=8192)),
    "window of all layers, phi3": ("phi3", dict(sliding_window=96)),
    "defaults, gemma2": (
        "gemma2",
        MISSING
        | dict.fromkeys(
            ("query_pre_attn_scalar", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping"), GONE
        )
        | dict(rope_theta=GONE, tie_word_embeddings=GONE),
    ),
    "no caps, gemma2": ("gemma2", dict(attn_logit_softcapping=None, final_logit_softcapping=None)),
    "windows by default, gpt-oss": ("gpt_oss", dict(layer_types=GONE, sliding_window=GONE)),
    "defaults, gpt-oss": (
        "gpt_oss",
        MISSING
        | dict.fromkeys(("rope_theta", "rope_scaling", "swiglu_limit", "attention_bias", "num_experts_per_tok"), GONE)
        | dict(tie_word_embeddings=GONE, num_local_experts=GONE),
    ),
    "defaults, ministral3": ("ministral3", MISSING | dict(rope_parameters=GONE, sliding_window=GONE)),
    "window, ministral3": ("ministral3", dict(sliding_window=96)),
    "llama3, ministral3": (
        "ministral3",
        dict(rope_parameters=dict(LLAMA3, rope_type="llama3", rope_theta=5e5, llama_4_scaling_beta=0.3)),
    ),
    "defaults, glm4-moe": (
        "glm4_moe",
        MISSING
        | dict.fromkeys(("n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob", "use_qk_norm"), GONE)
        | dict.fromkeys(("first_k_dense_replace", "n_shared_experts", "attention_bias", "rope_theta"), GONE)
        | dict(n_routed_experts=GONE, num_experts_per_tok=GONE, hidden_size=64, moe_intermediate_size=GONE),
    ),
    "no layer without experts, glm4-moe": ("glm4_moe", dict(first_k_dense_replace=0)),
    "yarn, gemma3": ("gemma3_text", dict(rope_scaling={"rope_type": "yarn", **YARN})),
    "window of no layer, gemma3": ("gemma3_text", dict(layer_types=["full_attention"] * 3)),
    "defaults, gemma3": (
        "gemma3_text",
        dict(
            num_hidden_layers=13,
            sliding_window_pattern=GONE,
            rope_theta=GONE,
            rope_local_base_freq=GONE,
            rope_scaling=None,
            query_pre_attn_scalar=GONE,
            head_dim=GONE,
            max_position_embeddings=GONE,
            num_key_value_heads=GONE,
            num_attention_heads=8,
            tie_word_embeddings=GONE,
            hidden_activation=GONE,
            sliding_window=GONE,
        ),
    ),
    "defaults, olmo3": (
        "olmo3",
        dict(
            num_hidden_layers=9,
            layer_types=GONE,
            sliding_window=GONE,
            rope_scaling=GONE,
            rope_theta=GONE,
            rms_norm_eps=GONE,
            max_position_embeddings=GONE,
            num_key_value_heads=GONE,
        ),
    ),
    "one base for all layers, olmo3": ("olmo3", dict(rope_theta=3e5, rope_scaling=None)),
    "biases, gemma3": ("gemma3_text", dict(attention_bias=True)),
    "half of the bases, gemma3": (
        "gemma3_text",
        dict(rope_scaling=None, rope_parameters={"sliding_attention": {"rope_theta": 3e4}}),
    ),
    "window by default": ("qwen2", dict(use_sliding_window=True, sliding_window=GONE, max_position_embeddings=8192)),
    "window null": ("qwen2", dict(use_sliding_window=True, sliding_window=None, max_window_layers=0)),
    "window off by layer_types": ("qwen3", dict(SLIDING, max_window_layers=0)),
    "biases that qwen2 does not have": ("qwen2", dict(attention_bias=True, mlp_bias=True)),
    "quantization_config empty": ("qwen2", dict(quantization_config={})),
    "quantization_config null": ("llama", dict(quantization_config=None)),
    "per_layer_config empty": ("llama", dict(per_layer_config=None)),
    "experts as transformers 5 has them": ("qwen3_moe", dict(num_experts=GONE, num_local_experts=7)),
    "experts in both spellings": ("qwen3_moe", dict(num_local_experts=7)),
    "experts beside another family's": ("qwen2_moe", dict(num_local_experts=5)),
    "as probable as they are": ("qwen3_moe", dict(norm_topk_prob=GONE)),
    "head_dim missing, mixture": ("qwen3_moe", dict(head_dim=GONE)),
    "key-value heads missing, 4": ("qwen3_moe", dict(num_key_value_heads=GONE, num_attention_heads=8)),
    "key-value heads missing, 16": (
        "qwen2_moe",
        dict(num_key_value_heads=GONE, num_attention_heads=16, hidden_size=64),
    ),
    "mixture with biases": ("qwen3_moe", dict(attention_bias=True)),
    "mixture without biases": ("qwen2_moe", dict(qkv_bias=False)),
    "mixture, biases missing": ("qwen2_moe", dict(qkv_bias=GONE)),
    "window null, mixture": ("qwen3_moe", dict(use_sliding_window=True, sliding_window=None)),
    "hybrid": ("qwen3_5_text", {}),
    "hybrid, layers by the interval": ("qwen3_5_text", dict(layer_types=GONE)),
    "hybrid, layers by default": (
        "qwen3_5_text",
        dict(layer_types=GONE, full_attention_interval=GONE, num_hidden_layers=8),
    ),
    "hybrid, no layer with a delta net": ("qwen3_5_text", dict(layer_types=["full_attention"] * 3)),
    "hybrid, sizes missing": (
        "qwen3_5_text",
        {f"linear_{name}": GONE for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")}
        | dict(linear_conv_kernel_dim=GONE, head_dim=GONE, rope_parameters=GONE),
    ),
    "hybrid, yarn": (
        "qwen3_5_text",
        dict(rope_parameters=dict(YARN, rope_type="yarn", rope_theta=7e5, partial_rotary_factor=0.5)),
    ),
    "hybrid, all of a head rotates": (
        "qwen3_5_text",
        dict(rope_parameters=dict(rope_type="default", rope_theta=7e5), partial_rotary_factor=1.0),
    ),
    "text part": ("qwen3_5", {}),
    "fields that mean nothing": ("llama", dict(note="x", auto_map={}, pretraining_tp=2, sliding_window=4)),
}


@pytest.mark.parametrize("case", [case for case in READ if READ[case][0] in CONFIGS])
def test_a_config_is_read_as_transformers_reads_it(case):
    name, changes = READ[case]
    raw = changed(name, changes)
    assert from_hf(raw) == their_config(raw)


# Sizes with which all families' numbers of heads go, and what else some have to give.
REQUIRED = dict(
    vocab_size=118, hidden_size=20480, intermediate_size=80, num_hidden_layers=9, num_attention_heads=160
)  # fmt: skip
ALSO = {
    "exaone4": dict(layer_types=["full_attention"] * 9, sliding_window=None),
    "qwen2_moe": dict(
        num_experts=7, num_experts_per_tok=3, moe_intermediate_size=18, shared_expert_intermediate_size=34
    ),
    "qwen3_moe": dict(num_experts=7, num_experts_per_tok=3, moe_intermediate_size=18),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_of_sizes_only_is_read_as_transformers_reads_it(name):
    """So each value that stands for a missing field is that of the config class."""
    raw = REQUIRED | ALSO.get(name, {}) | {"model_type": name}
    assert from_hf(raw) == their_config(raw)


NULL_FLAGS = [
    "tie_word_embeddings",
    "use_sliding_window",
    "attention_bias",
    "mlp_bias",
    "norm_topk_prob",
    "qkv_bias",
    "use_bias",
    "attention_out_bias",
    "use_post_norm",
]


@pytest.mark.parametrize("flag", NULL_FLAGS)
def test_a_flag_that_is_null_is_off(flag):
    """Transformers 4 reads it so; 5 refuses it."""
    read = from_hf(changed("llama 5", {flag: None}))
    assert read == from_hf(changed("llama 5", {flag: False}))


def scaled(kind: str, **fields) -> dict:
    return dict(rope_scaling={"rope_type": kind, **LLAMA3, **fields})


LACKS = dict(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0})

# config, changes of it, what the error says
REFUSED = {
    "hybrid with biases": ("qwen3_5_text", dict(attention_bias=True), "attention_bias=True"),
    "hybrid of other layers": ("qwen3_5_text", dict(layer_types=["sliding_attention"] * 3), "layer_types=.*sliding"),
    "hybrid of too few layers": ("qwen3_5_text", dict(layer_types=["full_attention"]), "layer_types=.*each of the 3"),
    "no layer that attends": ("qwen3_5_text", dict(layer_types=["linear_attention"] * 3), "layer_types=.*attends"),
    "delta heads that do not divide": ("qwen3_5_text", dict(linear_num_key_heads=4), "linear_num_value_heads=6.*=4"),
    "no convolution": ("qwen3_5_text", dict(linear_conv_kernel_dim=1), "linear_conv_kernel_dim=1"),
    "an odd share of a head": (
        "qwen3_5_text",
        dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.25)),
        "partial_rotary_factor=0.25.*even",
    ),
    "text part that is none": ("qwen3_5", dict(text_config=[]), r"text_config=\[\]"),
    "trunk": (
        "qwen2",
        dict(architectures=["Qwen2Model"]),
        "unknown architecture .*Qwen2Model.*known: Qwen2ForCausalLM",
    ),
    "classifier": ("qwen3", dict(architectures=["Qwen3ForSequenceClassification"]), "Qwen3ForSequenceClassification"),
    "gpt": ("llama", dict(architectures=["GPT2LMHeadModel"], model_type="gpt2"), "GPT2LMHeadModel.*known: .*Llama"),
    "model_type only, unknown": (
        "llama",
        dict(architectures=GONE, model_type="gpt2"),
        "model_type='gpt2'.*known",
    ),
    "neither": ("llama", dict(architectures=GONE, model_type=GONE), "none is named, model_type=None"),
    "two families": ("llama", dict(architectures=["LlamaForCausalLM", "Qwen2ForCausalLM"]), "different families"),
    "another model_type": ("llama", dict(model_type="qwen2"), "LlamaForCausalLM.* model_type='qwen2' are different"),
    "architectures a number": ("llama", dict(architectures=5), "unknown architecture 5"),
    "model_type a list": ("llama", dict(model_type=["llama"]), r"model_type=\['llama'\] are different families"),
    "architectures nested": ("llama", dict(architectures=[["LlamaForCausalLM"]]), "unknown architecture"),
    "quantised": ("qwen2", dict(quantization_config={"quant_method": "gptq", "bits": 4}), "gptq.*delete the entry if"),
    "quantised, compressed": (
        "llama",
        dict(compression_config={"format": "x"}),
        "compression_config=.*delete the entry",
    ),
    "gelu": ("llama", dict(hidden_act="gelu"), "hidden_act='gelu': not supported; supported: 'silu'"),
    "no activation": ("llama", dict(hidden_act=None), "hidden_act=None"),
    "heads": ("llama", dict(num_attention_heads=10), "hidden_size=48 does not divide by num_attention_heads=10"),
    "heads, qwen2": ("qwen2", dict(num_attention_heads=10), "hidden_size=48 does not divide by num_attention_heads=10"),
    "heads of size 0": ("hunyuan", dict(head_dim=None, hidden_size=4), "head_dim=None: must be a whole number from 1"),
    "key-value heads": (
        "llama",
        dict(num_key_value_heads=4),
        "num_attention_heads=6 .*by num_key_value_heads=4; correct",
    ),
    "key-value heads by default": ("qwen2", dict(num_key_value_heads=GONE), "heads=32, which transformers takes where"),
    "odd heads": ("qwen3", dict(head_dim=7), "head_dim=7: .* even"),
    "no head_dim": ("qwen3", dict(head_dim=None), "head_dim=None"),
    "text": ("llama", dict(hidden_size="48"), "hidden_size='48': must be a whole number"),
    "number in words": ("llama", dict(num_attention_heads="six"), "num_attention_heads='six': must be a whole number"),
    "fraction": ("llama", dict(hidden_size=48.5), "hidden_size=48.5: must be a whole number"),
    "whole fraction": ("llama", dict(intermediate_size=80.0), "intermediate_size=80.0: must be a whole number"),
    "nothing": ("llama", dict(vocab_size=0), "vocab_size=0: must be a whole number from 1"),
    "negative": ("qwen2", dict(num_hidden_layers=-3), "num_hidden_layers=-3: must be a whole number from 1"),
    "true": ("qwen2", dict(num_key_value_heads=True), "num_key_value_heads=True: must be a whole number"),
    "list": ("llama", dict(intermediate_size=[80, 80, 80]), r"intermediate_size=\[80, 80, 80\]: must be"),
    "too many layers": ("llama", dict(num_hidden_layers=10**12), "num_hidden_layers=1000000000000: .* to 10000"),
    "missing": ("qwen3", dict(vocab_size=GONE), "'vocab_size' is missing; add it"),
    "eps": ("qwen3", dict(rms_norm_eps=-1e-6), "rms_norm_eps=-1e-06: must be over 0"),
    "eps a text": ("qwen3", dict(rms_norm_eps="1e-6"), "rms_norm_eps='1e-6': must be a number"),
    "eps infinite": ("qwen3", dict(rms_norm_eps=math.inf), "rms_norm_eps=inf"),
    "tied by a text": (
        "qwen3",
        dict(tie_word_embeddings="false"),
        "tie_word_embeddings='false': must be true or false",
    ),
    "theta": ("qwen2", dict(rope_theta="1000000"), "rope_theta='1000000': must be a number"),
    "theta null": ("qwen2", dict(rope_theta=None), "rope_theta=None: must be a number"),
    "theta negative": ("qwen3", dict(rope_parameters={"rope_theta": -1.0}), "rope_theta=-1.0: must be over 0"),
    "dynamic": ("llama", scaled("dynamic"), "rope_type 'dynamic' is not supported"),
    "yarn without factor": ("qwen2", dict(rope_scaling={"type": "yarn"}), "'yarn' lacks factor"),
    "yarn, factor null": ("qwen2", dict(rope_scaling={"type": "yarn", "factor": None}), "factor=None: must be a num"),
    "yarn turned round": (
        "qwen3",
        dict(rope_parameters=dict(YARN, rope_type="yarn", beta_fast=1.0, beta_slow=2.0)),
        "beta_fast=1.0: must be at least beta_slow 2.0",
    ),
    "yarn, a factor of attention of 0": (
        "llama",
        dict(rope_scaling=dict(YARN, type="yarn", attention_factor=0.0)),
        "attention_factor=0.0: must be over 0",
    ),
    "yarn twice": (
        "llama",
        dict(rope_scaling=dict(YARN, type="yarn"), original_max_position_embeddings=320),
        "=320: rope_scaling has 160; correct one",
    ),
    "yarn with a base of 1": (
        "llama",
        dict(rope_scaling=dict(YARN, type="yarn"), rope_theta=1.0),
        "rope_theta=1.0: must be over 1",
    ),
    "queries that grow with positions": (
        "mistral",
        dict(rope_scaling=dict(YARN, type="yarn", llama_4_scaling_beta=0.1)),
        "rope_type 'yarn' has no 'llama_4_scaling_beta'",
    ),
    "window, smollm3": (
        "smollm3",
        dict(layer_types=None, use_sliding_window=True, sliding_window=96),
        "sliding_window=96.* not supported",
    ),
    "too few layers' rotary": ("smollm3", dict(no_rope_layers=[1, 0]), r"no_rope_layers=\[1, 0\]: .* 3 layers"),
    "rotary by a text": ("smollm3", dict(no_rope_layers="110"), "no_rope_layers='110': must be a list"),
    "logits by nothing": ("granite", dict(logits_scaling=0), "logits_scaling=0: must be over 0"),
    "multiplier a text": ("granite", dict(residual_multiplier="0.2"), "residual_multiplier='0.2': must be a number"),
    "capped logits, gemma3": ("gemma3_text", dict(final_logit_softcapping=30.0), "final_logit_softcapping=30.0: not"),
    "capped attention, gemma3": ("gemma3_text", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0: not"),
    "both ways, gemma3": ("gemma3_text", dict(use_bidirectional_attention=True), "use_bidirectional_attention=True"),
    "relu, gemma3": ("gemma3_text", dict(hidden_activation="relu"), "hidden_activation='relu': .*'gelu_pytorch_tanh'"),
    "no window, gemma3": ("gemma3_text", dict(sliding_window=None), "sliding_window=None: must be a whole number"),
    "one base, gemma3": (
        "gemma3_text",
        dict(rope_parameters={"rope_theta": 1e6}),
        "rope_parameters=.*must have 'full_attention' and 'sliding_attention'",
    ),
    "scaled windows, gemma3": (
        "gemma3_text",
        dict(rope_parameters={"sliding_attention": {"rope_type": "linear", "factor": 2.0}}),
        "a scaling of 'sliding_attention' is not supported",
    ),
    "window by layer_types, off": (
        "qwen2",
        dict(layer_types=["sliding_attention"] * 3),
        "layer_types=.*need use_sliding_window: true",
    ),
    "windows of some layers, mistral": (
        "mistral",
        dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
        "layer_types=.*layers of one kind",
    ),
    "half rotated, phi3": (  # where the file has it, not in rope_parameters
        "phi3",
        dict(partial_rotary_factor=0.75),
        r"^[^ ]+: partial_rotary_factor=0.75: not supported",
    ),
    "a base of 0, gemma3": ("gemma3_text", dict(rope_local_base_freq=0), "^[^ ]+: rope_local_base_freq=0: must be"),
    "longrope, phi3": (
        "phi3",
        dict(rope_scaling={"type": "longrope", "long_factor": [1.0] * 4, "short_factor": [1.0] * 4}),
        "rope_type 'longrope' is not supported; supported: 'default'",
    ),
    "yarn, phi3": ("phi3", dict(rope_scaling={"type": "yarn", **YARN}), "rope_type 'yarn' is not supported"),
    "window, exaone4": ("exaone4", dict(sliding_window=1024), "sliding_window=1024: layers with a window"),
    "window by default, exaone4": ("exaone4", dict(sliding_window=GONE), "sliding_window=None: layers with a window"),
    "layers missing, exaone4": ("exaone4", dict(layer_types=GONE), "layer_types=None: must be 'full_attention'"),
    "rotated by an odd number": (
        "glm",
        dict(partial_rotary_factor=0.25),
        "partial_rotary_factor=0.25: rotates 3 of head_dim=12",
    ),
    "dynamic, hunyuan": (
        "hunyuan",
        dict(rope_scaling={"type": "dynamic", "factor": 2.0}),
        "rope scaling 'dynamic' lacks alpha",
    ),
    "heads, helium": ("helium", dict(head_dim=10), "head_dim=10: times num_attention_heads=6 must be hidden_size=48"),
    "longrope": ("qwen3", dict(rope_parameters={"rope_type": "longrope"}), "rope_type 'longrope' is not supported"),
    "mrope": ("qwen2", dict(rope_scaling={"type": "mrope"}), "rope_type 'mrope' is not supported"),
    "rope_type null": ("qwen2", dict(rope_scaling={"rope_type": None}), "rope_type None is not supported"),
    "rope_type a list": (
        "qwen2",
        dict(rope_scaling={"rope_type": ["llama3"]}),
        "rope_type .'llama3'. is not supported",
    ),
    "rope a text": ("qwen2", dict(rope_scaling="default"), "rope_scaling='default': must be a mapping"),
    "rope a list": ("qwen2", dict(rope_parameters=[]), r"rope_parameters=\[\]: must be a mapping"),
    "rope by layers": ("qwen3", dict(rope_parameters={"full_attention": {"rope_theta": 1.0}}), "no 'full_attention'"),
    "two rope types": (
        "qwen2",
        dict(rope_scaling={"type": "yarn", "rope_type": "default"}),
        "type='yarn': rope_type is",
    ),
    "two ropes": ("qwen3", dict(rope_scaling={"type": "default"}), "rope_parameters=.*200000.0.* says something else"),
    "default by 2": (
        "llama",
        dict(rope_scaling={"type": "default", "factor": 2.0}),
        "factor=2.0: not supported .*'def",
    ),
    "linear without factor": ("llama", dict(rope_scaling={"type": "linear"}), "'linear' lacks factor"),
    "factor without a type": ("llama", dict(rope_scaling=LLAMA3), "rope_type 'default' has no 'low_freq_factor'"),
    "llama3 lacks": ("llama", LACKS, "lacks original_max_position_embeddings"),
    "llama3 texts": ("llama", scaled("llama3", factor="8.0"), "factor='8.0': must be a number"),
    "llama3 twice": ("llama", dict(original_max_position_embeddings=320), "=320: rope_scaling has 160; correct one"),
    "llama3 turned round": (
        "llama",
        scaled("llama3", low_freq_factor=5.0),
        "high_freq_factor=5.0: must be over .* 5.0",
    ),
    "images": (
        "qwen2",
        dict(rope_scaling={"type": "default", "mrope_section": [1, 3]}, use_mrope=GONE),
        "mrope_section",
    ),
    "images on": ("qwen2", dict(use_mrope=True), "use_mrope=True"),
    "half rotated": ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5: not supported"),
    "half rotated, 5": ("qwen3", dict(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5"),
    "window of text": ("qwen2", dict(SLIDING, sliding_window="96"), "sliding_window='96': must be a whole number"),
    "first window a text": ("qwen2", dict(SLIDING, max_window_layers="1"), "max_window_layers='1': must be a whole"),
    "window, a text": ("qwen2", dict(use_sliding_window="false"), "use_sliding_window='false': must be true or false"),
    "sliding layers": ("qwen3", dict(layer_types=["full_attention", "sliding_attention"] * 2), "layer_types=.*sliding"),
    "one sliding layer": (
        "qwen2",
        dict(layer_types=["full_attention"] * 2 + ["sliding_attention"]),
        "layer_types=.*sliding",
    ),
    "too few layers": ("qwen3", dict(layer_types=["full_attention"] * 2), "'full_attention' .*in each of the 3 layers"),
    "window, mixture": ("qwen3_moe", dict(SLIDING), "use_sliding_window=True: layers with a window"),
    "window beside layer_types": ("qwen3_moe", dict(SLIDING, layer_types=["full_attention"] * 3), "sliding_window=96"),
    "first layers' window": ("qwen2_moe", dict(SLIDING), "use_sliding_window=True: layers with a window"),
    "every other layer": ("qwen3_moe", dict(decoder_sparse_step=2), "decoder_sparse_step=2: layers without experts"),
    "some layers": ("qwen2_moe", dict(mlp_only_layers=[0]), r"mlp_only_layers=\[0\]: layers without experts"),
    "no experts": ("qwen3_moe", dict(num_experts=0), "num_experts=0: must be a whole number from 1"),
    "two numbers of experts": ("qwen3_moe", dict(num_local_experts=5), "num_experts=7: num_local_experts=5; correct"),
    "experts missing": ("qwen2_moe", dict(num_experts=GONE), "'num_experts' is missing"),
    "more chosen than there are": ("qwen3_moe", dict(num_experts_per_tok=8), "num_experts_per_tok=8: .* 1 to 7"),
    "no width of an expert": ("qwen3_moe", dict(moe_intermediate_size=GONE), "'moe_intermediate_size' is missing"),
    "no layer with experts": ("glm4_moe", dict(first_k_dense_replace=3), "first_k_dense_replace=3: .* 0 to 2"),
    "groups that do not divide": ("glm4_moe", dict(n_group=4), "n_group=4: must divide n_routed_experts=6"),
    "more groups than there are": ("glm4_moe", dict(topk_group=4), "topk_group=4: .* 1 to 3"),
    "more than the groups have": ("glm4_moe", dict(topk_group=1, num_experts_per_tok=3), "num_experts_per_tok=3"),
    "growth missing": ("ministral3", dict(rope_parameters={"rope_type": "yarn", **YARN}), "'llama_4_scaling_beta' is"),
    "growth without a scaling": (
        "ministral3",
        dict(rope_parameters={"rope_type": "default", "llama_4_scaling_beta": 0.1}),
        "llama_4_scaling_beta=0.1: needs rope_type",
    ),
    "growth elsewhere": ("llama", scaled("llama3", llama_4_scaling_beta=0.1), "has no 'llama_4_scaling_beta'"),
    "no cap": ("gemma2", dict(attn_logit_softcapping=0), "attn_logit_softcapping=0"),
    "no limit": ("gpt_oss", dict(swiglu_limit=0), "swiglu_limit=0"),
    "four bits of another kind": ("gpt_oss", dict(quantization_config={"quant_method": "fp8"}), "quantization_config="),
    "four bits elsewhere": ("qwen3_moe", dict(quantization_config={"quant_method": "mxfp4"}), "quantization_config="),
    "clipped": ("olmoe", dict(clip_qkv=8.0), "clip_qkv=8.0: .* not supported"),
    "no shared expert": ("qwen2_moe", dict(shared_expert_intermediate_size=0), "shared_expert_intermediate_size=0"),
    "layers that differ": ("llama", dict(per_layer_config={"0": {"head_dim": 4}}), "per_layer_config="),
}


@pytest.mark.parametrize("case", [case for case in REFUSED if REFUSED[case][0] in CONFIGS])
def test_a_config_that_is_not_read_is_refused_by_name(case):
    name, changes, message = REFUSED[case]
    with pytest.raises(UserError, match=f"(?s){message}") as e:
        from_hf(changed(name, changes), "in/config.json")
    assert str(e.value).startswith("in/config.json: ") and str(e.value).count("\n") <= 1


def mutate(rng: random.Random, raw: dict) -> list[str]:
    """Changes one to three fields, also of nested ones; returns which."""
    names = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        place = raw
        nested = [key for key in ("rope_scaling", "rope_parameters") if isinstance(raw.get(key), dict)]
        if nested and rng.random() < 0.4:
            place = raw[rng.choice(nested)]
        extra = [
            "rope_scaling",
            "rope_parameters",
            "rope_theta",
            "rope_type",
            "type",
            "factor",
            "head_dim",
            "layer_types",
        ]
        key = rng.choice([*place, *place, *extra])
        names.append(key)
        value = place.get(key)
        changes = [GONE, None, str(value), "x", 0, 1, -1, 2, 0.5, 1.0, -2.5, True, False, [], [value], {}, {"a": 1}]
        changes += [math.nan, math.inf, 10**400, "default", "llama3", "linear", "yarn", "silu", ["full_attention"] * 3]
        if isinstance(value, int | float) and abs(value) < 1e300:
            changes += [value + 1, value * 2, value / 2, value * 1.0, -value]
        if isinstance(value, list | dict):
            changes += [copy.deepcopy(value) * 2 if isinstance(value, list) else [value]]
        new = rng.choice(changes)
        if new is GONE:
            place.pop(key, None)
        else:
            place[key] = copy.deepcopy(new)
    return names


def test_a_config_with_anything_in_it_is_read_as_transformers_does_or_refused():
    rng, counts = random.Random(26), {"read": 0, "refused": 0}
    for _ in range(1500):
        raw = copy.deepcopy(CONFIGS[rng.choice([name for name in CONFIGS if name != "qwen3_5"])])
        named = mutate(rng, raw)
        try:
            ours = from_hf(copy.deepcopy(raw))
        except UserError as e:
            counts["refused"] += 1
            assert str(e).count("\n") <= 1 and len(str(e)) < 1000, named
            continue
        counts["read"] += 1
        assert ours == their_config(without_what_only_they_refuse(raw | {"model_type": ours.family})), (named, raw)
    assert min(counts.values()) > 150, counts


def without_what_only_they_refuse(raw: dict) -> dict:
    """Without null flags and without values of fields that have no effect, which transformers 5 refuses."""
    void = {"dtype", "torch_dtype", "pretraining_tp", "resid_pdrop", "attention_dropout", "residual_dropout"}
    if raw["model_type"] not in ("mistral", "phi3", "exaone4", "gemma2", "ministral3", "gpt_oss", *TWO_ROPES):
        types = raw.get("layer_types")
        void |= {"max_window_layers"} if types is not None or not raw.get("use_sliding_window") else set()
        void |= {"sliding_window"} if not raw.get("use_sliding_window") or types == ["full_attention"] * 3 else set()
    if raw["model_type"] != "gemma3_text":
        void |= {"sliding_window_pattern"}
    if raw["model_type"] == "phi3":
        void |= {"original_max_position_embeddings"}
    flags = [*NULL_FLAGS, "use_qk_norm"]
    off = {flag: False for flag in flags if flag in raw and raw[flag] is None}
    floats = ("attention_multiplier", "routed_scaling_factor", "attn_logit_softcapping", "final_logit_softcapping")
    off |= {name: float(raw[name]) for name in floats if type(raw.get(name)) is int}
    return {key: value for key, value in (raw | off).items() if key not in void}
