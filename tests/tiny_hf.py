"""Tiny random models and tokenizers in Hugging Face form, made by transformers and tokenizers themselves."""

import copy
import json
from typing import Any

import tokenizers
import transformers

from grpojax.models.hf.families import FAMILIES

# Sizes differ wherever they may, so that swapped axes fail; over "tensor" and over "fsdp" all of them halve.
_SIZES = dict(
    vocab_size=94,
    hidden_size=24,
    intermediate_size=38,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    attention_dropout=0.0,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=None,
)
_ROPE = {"rope_type": "default", "rope_theta": 20_000.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 20_000.0, "factor": 2.5}
_ALPHA = {"rope_type": "dynamic", "rope_theta": 20_000.0, "alpha": 50.0, "factor": 1.0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
}

# torch multiplies by groups where rows are whole multiples of 16 bytes.
_EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20, tie_word_embeddings=False)

_HYBRID = dict(
    num_hidden_layers=4,
    head_dim=12,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=5,
    linear_value_head_dim=7,
    linear_conv_kernel_dim=3,
    rope_parameters=_ROPE | {"partial_rotary_factor": 0.5},
    layer_types=["linear_attention", "full_attention"] * 2,
    tie_word_embeddings=False,
)

# name -> (model_type, options beyond the sizes)
MODELS = {
    "qwen2-tied": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen2": ("qwen2", dict(tie_word_embeddings=False)),
    "qwen3-tied": ("qwen3", dict(tie_word_embeddings=True, head_dim=10)),
    "qwen3": ("qwen3", dict(tie_word_embeddings=False, head_dim=10)),
    "qwen3-bias": ("qwen3", dict(tie_word_embeddings=True, head_dim=10, attention_bias=True)),
    "llama-tied": ("llama", dict(tie_word_embeddings=True)),
    "llama": ("llama", dict(tie_word_embeddings=False)),
    "llama3": ("llama", dict(tie_word_embeddings=False, rope_parameters=_LLAMA3)),
    "llama-attention-bias": ("llama", dict(tie_word_embeddings=False, attention_bias=True)),
    "llama-mlp-bias": ("llama", dict(tie_word_embeddings=True, mlp_bias=True)),
    "mistral": ("mistral", dict(tie_word_embeddings=False, head_dim=10, sliding_window=None)),
    "mistral-tied": ("mistral", dict(tie_word_embeddings=True, sliding_window=256, rope_parameters=_YARN)),
    "smollm3": ("smollm3", dict(tie_word_embeddings=True, no_rope_layer_interval=2)),
    "smollm3-bias": (
        "smollm3",
        dict(tie_word_embeddings=False, no_rope_layers=[0, 1, 0], attention_bias=True, rope_parameters=_YARN),
    ),
    "granite": (
        "granite",
        dict(
            tie_word_embeddings=True,
            embedding_multiplier=3.0,
            attention_multiplier=0.3,
            residual_multiplier=0.4,
            logits_scaling=1.7,
        ),
    ),
    "granite-bias": ("granite", dict(tie_word_embeddings=False, attention_bias=True, mlp_bias=True)),
    "phi3": ("phi3", dict(tie_word_embeddings=False)),
    "olmo2": ("olmo2", dict(tie_word_embeddings=False)),
    "olmo2-bias": ("olmo2", dict(tie_word_embeddings=True, attention_bias=True, rope_parameters=_LINEAR)),
    "gemma3": (
        "gemma3_text",
        dict(
            tie_word_embeddings=True,
            head_dim=10,
            query_pre_attn_scalar=14,
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={"full_attention": _LINEAR, "sliding_attention": _ROPE | {"rope_theta": 300.0}},
        ),
    ),
    "gemma3-bias": (
        "gemma3_text",
        dict(
            tie_word_embeddings=False,
            head_dim=6,
            query_pre_attn_scalar=6,
            sliding_window=5,
            attention_bias=True,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            rope_parameters=None,
        ),
    ),
    "olmo3": (
        "olmo3",
        dict(
            tie_word_embeddings=False,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={"full_attention": _YARN, "sliding_attention": _ROPE | {"rope_theta": 500.0}},
        ),
    ),
    "mistral-window": ("mistral", dict(tie_word_embeddings=False, sliding_window=5)),
    "phi3-window": ("phi3", dict(tie_word_embeddings=False, sliding_window=6)),
    "qwen2-window": (
        "qwen2",
        dict(tie_word_embeddings=True, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    ),
    "qwen3-window": (
        "qwen3",
        dict(
            tie_word_embeddings=True,
            head_dim=10,
            use_sliding_window=True,
            sliding_window=3,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "glm": (
        "glm",
        dict(tie_word_embeddings=False, head_dim=12, rope_parameters=_ROPE | {"partial_rotary_factor": 2 / 3}),
    ),
    "glm4": ("glm4", dict(tie_word_embeddings=True, head_dim=12, attention_bias=False, rope_parameters=_YARN)),
    "gemma2": (
        "gemma2",
        dict(
            tie_word_embeddings=True,
            head_dim=10,
            query_pre_attn_scalar=14,
            sliding_window=5,
            attn_logit_softcapping=0.7,
            final_logit_softcapping=1.3,
        ),
    ),
    "gemma2-plain": (
        "gemma2",
        dict(
            tie_word_embeddings=False,
            head_dim=6,
            query_pre_attn_scalar=6,
            sliding_window=256,
            attention_bias=True,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
        ),
    ),
    "ministral3": (
        "ministral3",
        dict(tie_word_embeddings=False, head_dim=10, rope_parameters=_YARN | {"llama_4_scaling_beta": 0.7}),
    ),
    "ministral3-window": (
        "ministral3",
        dict(
            tie_word_embeddings=True,
            head_dim=10,
            sliding_window=5,
            rope_parameters=_LLAMA3 | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 3},
        ),
    ),
    "gpt-oss": (
        "gpt_oss",
        dict(
            head_dim=10,
            intermediate_size=20,
            num_local_experts=5,
            num_experts_per_tok=2,
            sliding_window=5,
            swiglu_limit=0.6,
            rope_parameters=_YARN | {"truncate": False},
        ),
    ),
    "gpt-oss-no-bias": (
        "gpt_oss",
        dict(
            head_dim=6,
            intermediate_size=20,
            num_local_experts=7,
            num_experts_per_tok=3,
            attention_bias=False,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            sliding_window=3,
            swiglu_alpha=1.1,
            tie_word_embeddings=True,
        ),
    ),
    "glm4-moe": (
        "glm4_moe",
        dict(
            n_routed_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=20,
            n_group=3,
            topk_group=2,
            routed_scaling_factor=1.7,
            head_dim=12,
            use_qk_norm=True,
            rope_parameters=_ROPE | {"partial_rotary_factor": 0.5},
        ),
    ),
    "glm4-moe-dense": (
        "glm4_moe",
        dict(
            n_routed_experts=5,
            num_experts_per_tok=3,
            moe_intermediate_size=20,
            n_shared_experts=2,
            first_k_dense_replace=2,
            norm_topk_prob=False,
            attention_bias=True,
            head_dim=8,
            rope_parameters=_YARN | {"partial_rotary_factor": 0.5},
        ),
    ),
    "glm4-moe-all": (
        "glm4_moe",
        dict(n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=20, first_k_dense_replace=0, head_dim=8),
    ),
    "exaone4": (
        "exaone4",
        dict(tie_word_embeddings=False, sliding_window=None, layer_types=["full_attention"] * 3, head_dim=10),
    ),
    "seed-oss": ("seed_oss", dict(tie_word_embeddings=False, head_dim=10, residual_dropout=0.0)),
    "seed-oss-bias": (
        "seed_oss",
        dict(tie_word_embeddings=True, head_dim=10, residual_dropout=0.0, attention_out_bias=True, mlp_bias=True),
    ),
    "hunyuan": ("hunyuan_v1_dense", dict(tie_word_embeddings=True, head_dim=10, rope_parameters=_ALPHA)),
    "hunyuan-bias": ("hunyuan_v1_dense", dict(tie_word_embeddings=False, head_dim=10, attention_bias=True)),
    "ernie4_5": ("ernie4_5", dict(tie_word_embeddings=True, head_dim=10)),
    "ernie4_5-bias": ("ernie4_5", dict(tie_word_embeddings=False, head_dim=10, use_bias=True, rope_parameters=_YARN)),
    "helium": ("helium", dict(tie_word_embeddings=False, head_dim=6, attention_bias=True, mlp_bias=True)),
    "qwen3_5": ("qwen3_5_text", _HYBRID),
    "qwen3_5-odd": (  # kinds of layers without a period, and one head of keys for each of values
        "qwen3_5_text",
        _HYBRID
        | dict(
            num_hidden_layers=5,
            layer_types=[*["linear_attention"] * 3, "full_attention", "linear_attention"],
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            tie_word_embeddings=True,
        ),
    ),
    "hyperclovax": (
        "hyperclovax",
        dict(
            tie_word_embeddings=False,
            embedding_multiplier=3.0,
            attention_multiplier=0.3,
            residual_multiplier=0.4,
            logits_scaling=0.49,
        ),
    ),
    "hyperclovax-plain": (
        "hyperclovax",
        dict(tie_word_embeddings=True, use_post_norm=False, attention_bias=True, mlp_bias=True, logits_scaling=49.0),
    ),
    "qwen2-linear": ("qwen2", dict(tie_word_embeddings=True, rope_parameters=_LINEAR)),
    "qwen3-yarn": ("qwen3", dict(tie_word_embeddings=True, head_dim=10, rope_parameters=_YARN | {"truncate": False})),
    "llama-yarn": (
        "llama",
        dict(tie_word_embeddings=True, rope_parameters=_YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}),
    ),
    "olmoe": ("olmoe", dict(num_experts=5, num_experts_per_tok=2, intermediate_size=20, tie_word_embeddings=False)),
    "olmoe-bias": (
        "olmoe",
        dict(num_experts=5, num_experts_per_tok=2, intermediate_size=20, attention_bias=True, norm_topk_prob=True),
    ),
    "qwen3-moe": ("qwen3_moe", dict(**_EXPERTS, head_dim=10, norm_topk_prob=True)),
    "qwen3-moe-bias": ("qwen3_moe", dict(**_EXPERTS, head_dim=10, attention_bias=True)),
    "qwen2-moe": ("qwen2_moe", dict(**_EXPERTS, shared_expert_intermediate_size=22)),
    "qwen2-moe-no-bias": (
        "qwen2_moe",
        dict(**_EXPERTS, shared_expert_intermediate_size=22, norm_topk_prob=True, qkv_bias=False),
    ),
}


MODELS = {name: given for name, given in MODELS.items() if given[0] in FAMILIES}  # an extension may not be there


def there(*names: Any) -> list:
    """Those of these parameters of a test that are, or have as their first value, the name of one of `MODELS`."""
    return [x for x in names if (x if isinstance(x, str) else x.values[0]) in MODELS]


def config(name: str, **changes):
    """The transformers config of one of `MODELS`."""
    kind, options = MODELS[name]
    given = copy.deepcopy({"rope_parameters": _ROPE, **_SIZES, **options, **changes})  # some write into what they get
    return transformers.AutoConfig.for_model(kind, **given)


def model(config, *, dtype: str = "float32", seed: int = 0, auto=transformers.AutoModelForCausalLM):
    """A transformers model in which every weight matters: random norms and biases too."""
    from with_torch import torch

    torch.manual_seed(seed)
    made = auto.from_config(config, attn_implementation="eager", dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        for name, p in made.named_parameters():
            if name.endswith(("sinks", "router.bias")):
                p.normal_(std=0.7)
            elif name.endswith("norm.weight"):
                adds_one = config.model_type.startswith("qwen3_5") and not name.endswith("linear_attn.norm.weight")
                p.uniform_(-0.5, 0.5) if adds_one else p.uniform_(0.5, 1.5)
            else:
                p.normal_(std=0.3 if name.endswith("bias") else p.shape[-1] ** -0.5)
        for name, x in made.named_buffers():
            if name.endswith("e_score_correction_bias"):
                x.normal_(std=0.2)
    return made


def save(folder, name: str = "qwen2", *, dtype: str = "float32", seed: int = 0, max_shard_size="5GB", **changes):
    """Saves one of `MODELS` with random weights into ``folder`` and returns it."""
    made = model(config(name, **changes), dtype=dtype, seed=seed)
    made.save_pretrained(folder, max_shard_size=max_shard_size)
    return made


def save_with_images(folder):
    """Saves a Qwen3.5 with images, whose text part is that of `MODELS`; returns it."""
    import with_torch  # noqa: F401

    vision = dict(
        depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=24, num_position_embeddings=16
    )
    whole = transformers.Qwen3_5Config(text_config=config("qwen3_5").to_dict(), vision_config=vision)
    made = transformers.Qwen3_5ForConditionalGeneration(whole).eval()
    made.save_pretrained(folder)
    return made


def logps(made, tokens: list[int]):
    """Log-probability of each token but the first, given those before it."""
    from with_torch import torch

    ids = torch.tensor([tokens])
    with torch.no_grad():
        scores = made(ids).logits.float().log_softmax(-1)
    return scores[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]


def edit_json(file, **changes):
    """Sets keys of a JSON file; None removes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


CHAT = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>\n{% endfor %}"
TEXTS = [
    "The answer to 12345.67 + 89 is 12434.67.\n\n\tIt's\r\n fine:   \\boxed{42}",
    "naïve A\u030angstro\u0308m 你好 мир 🙂",
    "<|user|>What is 7 x 6?<|end|>\n",
    " leading and trailing ",
]


def tokenizer(folder=None):
    """A byte-level BPE tokenizer that splits text as no model type does; written into ``folder`` if given.

    What is written claims to be Qwen 2's, as fine-tunes with their own vocabulary do.
    """
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\d{3}|\d"), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|pad|>", "<|end|>", "<|user|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 3, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<|pad|>", eos_token="<|end|>", chat_template=CHAT
    )
    if folder is not None:
        fast.save_pretrained(folder)
        edit_json(folder / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    return fast
