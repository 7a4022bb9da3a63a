"""Families of mixtures of experts, and their ``config.json``, both ways."""

from collections.abc import Mapping
from typing import Any, cast

from grpojax.extensions.mixtures.experts import Experts
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.hf.families import windows
from grpojax.models.hf.family import Family, Flag, Sizes
from grpojax.models.hf.fields import Fields, shown


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
    count = fields.whole("num_local_experts", missing=128)
    experts = Experts(
        count=count,
        chosen=fields.whole("num_experts_per_tok", missing=4, most=count),
        size=fields.whole("intermediate_size"),
        biased=True,
        limit=fields.number("swiglu_limit", "(0, inf)", missing=7.0),
        alpha=fields.number("swiglu_alpha", "(0, inf)", missing=1.702),
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
    count = fields.whole(names[0] if names else "n_routed_experts", missing=128)
    if any(fields.whole(name) != count for name in names):
        fields.refuse("n_routed_experts", f"num_local_experts={shown(fields.raw['num_local_experts'])}; correct one")
    size, groups = fields.whole("moe_intermediate_size", missing=1408), fields.whole("n_group", missing=1)
    first = fields.get("first_k_dense_replace", 1)
    if type(first) is not int or not 0 <= first < sizes.layers:
        fields.refuse("first_k_dense_replace", f"must be a whole number from 0 to {sizes.layers - 1}, one under layers")
    if count % groups or (groups > 1 and count // groups < 2):
        fields.refuse("n_group", f"must divide n_routed_experts={count} into groups of at least 2")
    chosen = fields.whole("topk_group", missing=1, most=groups)
    experts = Experts(
        count=count,
        chosen=fields.whole("num_experts_per_tok", missing=8, most=count // groups * chosen),
        size=size,
        renormalised=fields.flag("norm_topk_prob", missing=True),
        shared=size * fields.whole("n_shared_experts", missing=1),
        shared_gate=False,
        sigmoid=True,
        corrected=True,
        groups=groups,
        groups_chosen=chosen,
        scale=fields.number("routed_scaling_factor", "(0, inf)", missing=1.0),
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
    count = fields.whole("num_experts", missing=64)
    experts = Experts(
        count=count,
        chosen=fields.whole("num_experts_per_tok", missing=8, most=count),
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
    if fields.whole("decoder_sparse_step", missing=1) != 1:
        fields.refuse("decoder_sparse_step", "layers without experts are not supported; supported: 1")
    if fields.get("mlp_only_layers", None) not in (None, []):
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


GPT_OSS = Family(
    architectures=("GptOssForCausalLM",),
    windows=windows.alternating(2, missing=128),
    traits={"sinks": True},
    read=read_gpt_oss,
    write=write_gpt_oss,
    qkv_bias=Flag("attention_bias", missing=True),
    out_bias=Flag("attention_bias", missing=True),
    kv_heads=8,
    head_dim=64,
    rope={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    theta=1.5e5,
    eps=1e-5,
    positions=131072,
    names={
        r"\.mlp\.gate\.": ".mlp.router.",
        r"\.mlp\.experts\.\d+\.(gate|up)_proj\.weight": ".mlp.experts.gate_up_proj",
        r"\.mlp\.experts\.\d+\.(gate|up)_proj\.bias": ".mlp.experts.gate_up_proj_bias",
        r"\.mlp\.experts\.\d+\.down_proj\.weight": ".mlp.experts.down_proj",
        r"\.mlp\.experts\.\d+\.down_proj\.bias": ".mlp.experts.down_proj_bias",
    },
    experts_in_one=True,
    quantised="mxfp4",
)
GLM4 = Family(
    architectures=("Glm4MoeForCausalLM",),
    windows=windows.last(),
    read=read_glm4,
    write=write_glm4,
    out_bias=False,
    kv_heads=8,
    null_kv_heads=False,
    null_head_dim=False,
    rotated=0.5,
    eps=1e-5,
    positions=131072,
    names={r"\.mlp\.shared_expert\.": ".mlp.shared_experts."},
    further_layers=True,
)
QWEN2 = Family(
    architectures=("Qwen2MoeForCausalLM",),
    windows=windows.last(strict=True),
    read=read_qwen2,
    write=write_qwen2,
    qkv_bias=Flag("qkv_bias", missing=True),
    out_bias=False,
    kv_heads=16,
    null_kv_heads=False,
)
QWEN3 = Family(
    architectures=("Qwen3MoeForCausalLM",),
    windows=windows.last(strict=True, types_count=False),
    traits={"qk_norm": True},
    read=read_qwen3,
    write=write_qwen3,
    kv_heads=4,
    null_kv_heads=False,
)
OLMOE = Family(
    architectures=("OlmoeForCausalLM",),
    windows=windows.last(strict=True),
    traits={"wide_qk_norm": True},
    read=read_olmoe,
    write=write_olmoe,
    kv_heads=None,
    eps=1e-5,
    positions=4096,
)
