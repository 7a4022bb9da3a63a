"""A tiny random model, a few sums to ask it, and rewards that need no learning to be above zero."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

LETTERS = ["<pad>", "<eos>", *"0123456789+-= ", *(chr(i) for i in range(97, 97 + 24))]
MODEL = Path(__file__).parent / "tiny_model"


def length(prompts, completions, tokens, **columns):
    """The longer the better."""
    return [float(len(ids)) for ids in tokens]


def parity(prompts, completions, tokens, **columns):
    """1 where the token ids have an odd sum."""
    return [float(sum(ids) % 2) for ids in tokens]


def even(prompts, completions, tokens, **columns):
    """1 for completions of an even number of tokens."""
    return [float(len(ids) % 2 == 0) for ids in tokens]


def low(prompts, completions, tokens, **columns):
    """1 where the first token has an id of the lower half."""
    return [float(ids[0] < 19) for ids in tokens]


def some(prompts, completions, tokens, *, gold, **columns):
    """The first token's id; where the ids and the answer have an odd sum there is no telling."""
    return [None if (sum(ids) + int(g)) % 2 else float(ids[0]) for ids, g in zip(tokens, gold, strict=True)]


def steps(prompts, completions, tokens, **columns):
    """A step for every two tokens: 1 where the first of them has an odd id. Of one token there is none."""
    return [[(t + 2, float(ids[t] % 2)) for t in range(0, len(ids) - 1, 2)] for ids in tokens]


def last_step(prompts, completions, tokens, **columns):
    """`parity` as the reward of a single step."""
    return [[(len(ids), float(sum(ids) % 2))] for ids in tokens]


def level(prompts, completions, tokens, *, level, **columns):
    """A column of the data, where it is there."""
    return level


def by_level(prompts, completions, tokens, *, always, **columns):
    """What a column says, where it says anything; else `parity`."""
    return [p if a is None else a for a, p in zip(always, parity(prompts, completions, tokens), strict=True)]


def dies_once(prompts, completions, tokens, *, marker, **columns):
    """`length`, but the first process that is asked is killed."""
    try:
        open(marker, "x").close()
    except FileExistsError:
        return length(prompts, completions, tokens)
    os.kill(os.getpid(), signal.SIGKILL)


def nothing(prompts, completions, tokens, **columns):
    """No sample can be judged."""
    return [None for _ in completions]


RECIPE = """\
model:     {{path: {folder}}}
data:      {{train: {folder}/sums.jsonl, validation: {folder}/sums.jsonl, max_prompt_tokens: 8}}
rewards:   [{{name: "tiny_run:length"}}]
rollout:   {{prompts: 8, group: 4, max_tokens: 8}}
variant:   {{name: grpo, kl_coef: 0.01}}
optimizer: {{learning_rate: 5.0e-3}}
mesh:      {{data: 1, fsdp: -1, tensor: 1}}
train:     {{steps: 12, checkpoint_every: 4, eval_every: 6, eval_limit: 8}}
run:       {{dir: {folder}/run}}
"""


def make_teacher(student: Path, folder: Path, seed: int = 1, **changes) -> Path:
    """Another random model with the tokenizer of a student's folder; ``changes`` are of its ``config.json``."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from grpojax.models import Decoder, hf

    raw = {"initializer_range": 0.02} | json.loads((student / "config.json").read_text()) | changes
    rng, model = np.random.default_rng(seed), Decoder(hf.from_hf(raw), rngs=nnx.Rngs(0))

    def some(path, x):
        norm = "norm" in jax.tree_util.keystr(path)
        return x if norm else jnp.asarray(rng.normal(0, raw["initializer_range"], x.shape), jnp.float32)

    nnx.update(model, jax.tree_util.tree_map_with_path(some, nnx.state(model, nnx.Param)))
    shutil.rmtree(folder, ignore_errors=True)
    hf.save(folder, model, source=student, tokenizer=hf.load_tokenizer(str(student)))
    return folder


def make_hybrid(folder, to):
    """A model with gated delta nets."""
    sizes = dict(
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=5, linear_value_head_dim=7, linear_conv_kernel_dim=3,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    return make_teacher(
        folder, to, model_type="qwen3_5_text", architectures=["Qwen3_5ForCausalLM"], initializer_range=0.3, **sizes
    )


def make_mixture(student: Path, folder: Path, **changes) -> Path:
    """A random Qwen3-MoE of 8 experts with the tokenizer of a student's folder."""
    sizes = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True)
    kind = dict(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], initializer_range=0.3)
    return make_teacher(student, folder, **sizes | kind | changes)


def make_model(folder: Path) -> None:
    """The weights of ``tests/tiny_model``, made anew by transformers. They are shipped, so that a run in the tests
    waits for no torch."""
    import transformers
    from with_torch import torch

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(LETTERS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight[0] = 6.0
        model.model.embed_tokens.weight[:, 0] = 0.3
    model.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        content.pop("transformers_version")
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def make_run(folder: Path, layers: int = 2, eos: float = 0.38) -> Path:
    """Writes model, tokenizer, data and recipe; returns the recipe's path.

    Samples end about every sixth token, and never with a far lower ``eos``: programs are then of one shape.
    """
    import transformers
    from safetensors.numpy import load_file, save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token="<pad>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    weights = load_file(MODEL / "model.safetensors")
    weights["model.embed_tokens.weight"][1, 0] = eos
    kept = {k: x for k, x in weights.items() if not (m := re.match(r"model\.layers\.(\d+)\.", k)) or int(m[1]) < layers}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((MODEL / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "layer_types": config["layer_types"][:layers]}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(MODEL / "generation_config.json", folder)
    tokenizer.save_pretrained(folder)
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(5)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder))
    return recipe
