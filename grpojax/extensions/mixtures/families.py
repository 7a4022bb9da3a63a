"""Families of mixtures of experts, and their ``config.json``, both ways."""

from collections.abc import Mapping
from typing import Any, cast

from grpojax.extensions.mixtures.experts import Experts
from grpojax.extensions.mixtures.four_bits import four_bits
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.hf import windows
from grpojax.models.hf.family import Family, Tensors
from grpojax.models.hf.fields import Fields, Sizes, shown


def _experts(config: DecoderConfig) -> Experts:
    return cast(Experts, config.mlp)


def _counts(experts: Experts) -> dict[str, Any]:
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "norm_topk_prob": experts.renormalised,
    }


def read_gpt_oss(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    """gpt-oss's, whose experts have the size of an MLP."""
    count = fields.whole("num_local_experts")
    experts = Experts(
        count=count,
        chosen=fields.whole("num_experts_per_tok", most=count),
        size=fields.whole("intermediate_size"),
        biased=True,
        limit=fields.number("swiglu_limit", "(0, inf)"),
        alpha=fields.number("swiglu_alpha", "(0, inf)"),
    )
    return {"mlp": experts}


def write_gpt_oss(config: DecoderConfig, base: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `read_gpt_oss`."""
    experts = _experts(config)
    raw = {
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "swiglu_limit": experts.limit,
        "swiglu_alpha": experts.alpha,
    }
    return raw | ({"num_experts": experts.count} if "num_experts" in base else {})


def read_glm4(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    """GLM-4's, whose first layers have an MLP."""
    names = [name for name in ("n_routed_experts", "num_local_experts") if name in fields.raw]
    count = fields.whole(names[0] if names else "n_routed_experts")
    if any(fields.whole(name) != count for name in names):
        fields.refuse("n_routed_experts", f"num_local_experts={shown(fields.raw['num_local_experts'])}; correct one")
    size, groups = fields.whole("moe_intermediate_size"), fields.whole("n_group")
    first = fields.get("first_k_dense_replace")
    if type(first) is not int or not 0 <= first < sizes.layers:
        fields.refuse("first_k_dense_replace", f"must be a whole number from 0 to {sizes.layers - 1}, one under layers")
    if count % groups or (groups > 1 and count // groups < 2):
        fields.refuse("n_group", f"must divide n_routed_experts={count} into groups of at least 2")
    chosen = fields.whole("topk_group", most=groups)
    experts = Experts(
        count=count,
        chosen=fields.whole("num_experts_per_tok", most=count // groups * chosen),
        size=size,
        renormalised=fields.flag("norm_topk_prob"),
        shared=size * fields.whole("n_shared_experts"),
        shared_gate=False,
        sigmoid=True,
        corrected=True,
        groups=groups,
        groups_chosen=chosen,
        scale=fields.number("routed_scaling_factor", "(0, inf)"),
    )
    return {"mlp": experts, "dense_layers": first, "qk_norm": fields.flag("use_qk_norm")}


def write_glm4(config: DecoderConfig, base: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `read_glm4`."""
    experts = _experts(config)
    raw = {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.size,
        "norm_topk_prob": experts.renormalised,
        "n_shared_experts": experts.shared // experts.size,
        "n_group": experts.groups,
        "topk_group": experts.groups_chosen,
        "routed_scaling_factor": experts.scale,
        "first_k_dense_replace": config.dense_layers,
        "use_qk_norm": config.qk_norm,
        "num_nextn_predict_layers": 0,
    }
    return raw | {name: value for name, value in (("num_local_experts", experts.count),) if name in base}


def read_olmoe(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    """OLMoE's, whose experts have the size of an MLP."""
    if fields.raw.get("clip_qkv") is not None:
        fields.refuse("clip_qkv", "queries, keys and values that are clipped are not supported; supported: null")
    count = fields.whole("num_experts")
    experts = Experts(
        count=count,
        chosen=fields.whole("num_experts_per_tok", most=count),
        size=fields.whole("intermediate_size"),
        renormalised=fields.flag("norm_topk_prob"),
    )
    return {"mlp": experts}


def write_olmoe(config: DecoderConfig, _: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `read_olmoe`."""
    return _counts(_experts(config))


def _read_qwen(fields: Fields, count: int, shared: int) -> dict[str, Any]:
    experts = Experts(
        count=count,
        chosen=fields.whole("num_experts_per_tok", most=count),
        size=fields.whole("moe_intermediate_size"),
        renormalised=fields.flag("norm_topk_prob"),
        shared=shared,
    )
    return {"mlp": experts}


def _every_layer(fields: Fields) -> None:
    """Raises `UserError` if some layer has an MLP of its own kind."""
    if fields.whole("decoder_sparse_step") != 1:
        fields.refuse("decoder_sparse_step", "layers without experts are not supported; supported: 1")
    if fields.raw.get("mlp_only_layers") not in (None, []):
        fields.refuse("mlp_only_layers", "layers without experts are not supported; supported: []")


def read_qwen2(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    """Qwen 2's, which have an expert that every token goes to."""
    _every_layer(fields)
    return _read_qwen(fields, fields.whole("num_experts"), fields.whole("shared_expert_intermediate_size"))


def write_qwen2(config: DecoderConfig, _: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `read_qwen2`."""
    return _write_qwen(config) | {"shared_expert_intermediate_size": _experts(config).shared}


def read_qwen3(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    """Qwen 3's. transformers 5 calls their number by another name than 4 and the hub."""
    _every_layer(fields)
    names = [name for name in ("num_experts", "num_local_experts") if name in fields.raw]
    count = fields.whole(names[0] if names else "num_experts")
    if any(fields.whole(name) != count for name in names):
        fields.refuse("num_experts", f"num_local_experts={shown(fields.raw['num_local_experts'])}; correct one")
    return _read_qwen(fields, count, 0)


def write_qwen3(config: DecoderConfig, _: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `read_qwen3`."""
    return _write_qwen(config) | {"num_local_experts": _experts(config).count}


def _write_qwen(config: DecoderConfig) -> dict[str, Any]:
    more = {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": _experts(config).size}
    return _counts(_experts(config)) | more


# As transformers 5 has experts in memory.
_IN_ONE = Tensors(
    names_in_one={
        r"\.mlp\.experts\.\d+\.(gate|up)_proj\.weight": ".mlp.experts.gate_up_proj",
        r"\.mlp\.experts\.\d+\.down_proj\.weight": ".mlp.experts.down_proj",
    }
)

GPT_OSS = Family(
    architectures=("GptOssForCausalLM",),
    missing={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "rope_theta": 1.5e5,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    },
    traits={"sinks": True},
    windows=windows.alternating(2),
    read=read_gpt_oss,
    write=write_gpt_oss,
    tensors=Tensors(
        names={
            r"\.mlp\.gate\.": ".mlp.router.",
            **_IN_ONE.names_in_one,
            r"\.mlp\.experts\.\d+\.(gate|up)_proj\.bias": ".mlp.experts.gate_up_proj_bias",
            r"\.mlp\.experts\.\d+\.down_proj\.bias": ".mlp.experts.down_proj_bias",
        },
        in_turn=True,
        unpack={"mxfp4": four_bits},
    ),
)
GLM4 = Family(
    architectures=("Glm4MoeForCausalLM",),
    missing={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
    },
    nullable=(),
    flags={"qkv_bias": "attention_bias"},
    read=read_glm4,
    write=write_glm4,
    tensors=_IN_ONE._replace(names={r"\.mlp\.shared_expert\.": ".mlp.shared_experts."}, further_layers=True),
)
QWEN2 = Family(
    architectures=("Qwen2MoeForCausalLM",),
    missing={
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "qkv_bias": True,
        "decoder_sparse_step": 1,
    },
    nullable=("head_dim",),
    flags={"qkv_bias": "qkv_bias"},
    windows=windows.last(strict=True),
    read=read_qwen2,
    write=write_qwen2,
    tensors=_IN_ONE,
)
QWEN3 = Family(
    architectures=("Qwen3MoeForCausalLM",),
    missing={"num_key_value_heads": 4, "max_position_embeddings": 32768, "decoder_sparse_step": 1},
    nullable=("head_dim",),
    traits={"qk_norm": True},
    windows=windows.last(strict=True, types_count=False),
    read=read_qwen3,
    write=write_qwen3,
    tensors=_IN_ONE,
)
OLMOE = Family(
    architectures=("OlmoeForCausalLM",),
    missing={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    traits={"wide_qk_norm": True},
    windows=windows.last(strict=True),
    read=read_olmoe,
    write=write_olmoe,
    tensors=_IN_ONE,
)
