"""GGUF files as llama.cpp's converter lays them out, from models of transformers."""

import gguf
import numpy as np

# Endings of transformers' names -> those of GGUF.
STEMS = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
LETTERS = [*"abcdefghijklmnopqrstuvwxyz", *"0123456789", "Ġ", "Ċ", "!", "'", "ab", "Ġa", "Ġab", "bc"]
TOKENS = ["<|begin|>", "<|end|>", *LETTERS, "<tool>"]
TYPES = [3, 3, *[1] * len(LETTERS), 4]
MERGES = ["Ġ a", "a b", "Ġa b", "b c"]


def name_of(theirs: str) -> str:
    *_, layer, stem, ending = ["", "", *theirs.replace(".self_attn", "").replace(".mlp", "").split(".")]
    stem = STEMS["model.norm" if theirs == "model.norm.weight" else stem]
    return f"blk.{layer}.{stem}.{ending}" if layer.isdecimal() else f"{stem}.{ending}"


def side_by_side(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection, with the two of a rotary pair beside each other: row 2 i is row i, 2 i + 1 is i + d / 2."""
    out, d = np.empty_like(rows), len(rows) // heads
    for head in range(heads):
        for i in range(d // 2):
            out[head * d + 2 * i], out[head * d + 2 * i + 1] = rows[head * d + i], rows[head * d + i + d // 2]
    return out


def tensors(made) -> dict[str, np.ndarray]:
    """A model's weights in GGUF's names and order of rows."""
    c, found = made.config, {}
    for theirs, value in made.state_dict().items():
        ours, array = name_of(theirs), value.float().numpy()
        if c.model_type == "llama" and ours.split(".")[2:3] in (["attn_q"], ["attn_k"]):
            array = side_by_side(array, c.num_attention_heads if "attn_q" in ours else c.num_key_value_heads)
        if theirs != "lm_head.weight" or not c.tie_word_embeddings:
            found[ours] = array
    return found


def fields(made) -> dict[str, object]:
    """Metadata of a model: name to value."""
    c = made.config
    lengths = ("attention.key_length", "attention.value_length") if c.model_type == "qwen3" else ()
    own = {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "rope.freq_base": c.rope_parameters["rope_theta"],
        **{name: c.head_dim for name in lengths},
    }
    tokens = {
        "model": "gpt2",
        "pre": {"llama": "smollm"}.get(c.model_type, "qwen2"),
        "tokens": [*TOKENS, *(f"[PAD{i}]" for i in range(len(TOKENS), c.vocab_size))],
        "token_type": [*TYPES, *[5] * (c.vocab_size - len(TOKENS))],
        "merges": MERGES,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "padding_token_id": 1,
        "add_bos_token": False,
    }
    return (
        {f"{c.model_type}.{k}": v for k, v in own.items()}
        | {f"tokenizer.ggml.{k}": v for k, v in tokens.items()}
        | {"tokenizer.chat_template": "{% for m in messages %}<|begin|>{{ m['content'] }}<|end|>{% endfor %}"}
    )


def write(path, architecture: str, fields: dict, tensors: dict, quantised: dict | None = None):
    """A file of these; ``quantised`` names the type of those tensors that are not float32."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, array in tensors.items():
        kind = (quantised or {}).get(name)
        if kind is None:
            writer.add_tensor(name, np.ascontiguousarray(array))
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(path, made, *, quantised: dict | None = None, drop=(), add=None, **changes):
    """One of transformers' models; ``changes`` are metadata, with ``__`` for a dot, ``drop`` and ``add`` tensors."""
    given = fields(made) | {k.replace("__", "."): v for k, v in changes.items()}
    kept = {k: v for k, v in (tensors(made) | (add or {})).items() if k not in drop}
    return write(path, made.config.model_type, {k: v for k, v in given.items() if v is not None}, kept, quantised)
