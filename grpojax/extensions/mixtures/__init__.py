"""Mixtures of experts in place of the dense MLP: an MLP of layers, and the families of models that have it."""

from grpojax.extension import Names

NAMES = Names(
    families={
        "gpt_oss": "grpojax.extensions.mixtures.families:GPT_OSS",
        "glm4_moe": "grpojax.extensions.mixtures.families:GLM4",
        "qwen2_moe": "grpojax.extensions.mixtures.families:QWEN2",
        "qwen3_moe": "grpojax.extensions.mixtures.families:QWEN3",
        "olmoe": "grpojax.extensions.mixtures.families:OLMOE",
    },
    weights={"mixture": "grpojax.extensions.mixtures.weights:WEIGHTS"},
    axes={
        "experts": ("expert",),
        "expert_embed": ("fsdp",),  # the hidden size of experts, whose first axis takes ``expert``
        "expert_mlp": ("tensor",),
        "shared_mlp": ("tensor",),
        "choices": (),
    },
)
