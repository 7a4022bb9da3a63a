"""Hugging Face folders in and out, against transformers' own models, files and tokenizers."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny_hf
import tokenizers
import torch
import transformers
from flax import nnx

from grpojax import models
from grpojax.host.errors import UserError
from grpojax.models import Compute, hf
from grpojax.models.decoder import axes_of
from grpojax.models.decoder_config import from_hf
from grpojax.models.sharding import MeshConfig, make_mesh, named
from grpojax.types import Rows

# (prompt length, completion length) of four sequences.
LENGTHS = [(3, 11), (5, 4), (1, 7), (17, 9)]


def sequences(vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, p + c).tolist() for p, c in LENGTHS]


def plain_rows(tokens: list[list[int]]) -> Rows:
    """One sequence a lane: the first tokens are the prompt, the rest its one completion."""
    prompts, rows, segments = (np.zeros((len(LENGTHS), 1, n), np.int32) for n in (19, 13, 13))
    for i, (p, c) in enumerate(LENGTHS):
        prompts[i, 0, :p], rows[i, 0, :c], segments[i, 0, :c] = tokens[i][:p], tokens[i][p:], 1
    offsets = np.broadcast_to(np.arange(13, dtype=np.int32), rows.shape) * segments
    lengths = np.array([[p] for p, _ in LENGTHS], np.int32)
    return Rows(
        prompts=prompts, prompt_lengths=lengths, tokens=rows, segments=segments, offsets=offsets,
        row_prompt=np.zeros((len(LENGTHS), 1), np.int32),
    )  # fmt: skip


def our_logps(model, *, mesh=None) -> list[np.ndarray]:
    """Log-probs of the completions of `sequences`."""
    compute = Compute(mesh=mesh)
    rows = plain_rows(sequences(model.config.vocab_size))
    graph, params = nnx.split(model)
    score = jax.jit(
        lambda params: models.score(graph, params, rows, compute).logps,
        compiler_options={"xla_backend_optimization_level": 0},  # compiles in half the time
    )
    out = score(params)
    return [np.asarray(out)[i, 0, :c] for i, (_, c) in enumerate(LENGTHS)]


def their_logps(made) -> list[np.ndarray]:
    tokens = sequences(made.config.vocab_size)
    return [tiny_hf.logps(made, t)[p - 1 :].numpy() for t, (p, _) in zip(tokens, LENGTHS, strict=True)]


def leaves(model) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(nnx.state(model))}


def assert_same_weights(a, b):
    a, b = leaves(a), leaves(b)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        np.testing.assert_array_equal(np.asarray(a[name]), np.asarray(b[name]), err_msg=name)


def assert_same_torch(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def their(folder, **kwargs):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **kwargs).eval()


@pytest.fixture
def mesh():
    return make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))


@pytest.mark.parametrize("name", tiny_hf.MODELS)
def test_a_model_scores_as_transformers_does_and_comes_back_unchanged(tmp_path, name):
    made = tiny_hf.save(tmp_path / "in", name)
    model = models.load(tmp_path / "in")
    for ours, theirs in zip(our_logps(model), their_logps(made), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)

    models.save(tmp_path / "out", model)
    back = their(tmp_path / "out", dtype="auto")
    assert_same_torch(made, back)
    tokens = torch.tensor([sequences(94)[3]])
    with torch.no_grad():
        assert torch.equal(made(tokens).logits, back(tokens).logits)
    assert_same_weights(model, models.load(tmp_path / "out"))


# ----------------------------------------------------------------------------------------------- config


def as_transformers_4(raw: dict) -> dict:
    rope = dict(raw.pop("rope_parameters"))
    raw["rope_theta"], raw["torch_dtype"] = rope.pop("rope_theta"), raw.pop("dtype")
    raw["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    return raw


@pytest.mark.parametrize("name", ["qwen2", "qwen3-tied", "llama3"])
def test_a_config_reads_alike_in_both_spellings(tmp_path, name):
    tiny_hf.save(tmp_path / "in", name)
    raw = json.loads((tmp_path / "in/config.json").read_text())
    old = as_transformers_4(dict(raw))
    assert "rope_theta" not in raw and "rope_parameters" not in old
    (tmp_path / "in/config.json").write_text(json.dumps(old))
    model = models.load(tmp_path / "in")
    assert model.config == from_hf(raw)

    models.save(tmp_path / "out", model)
    written = json.loads((tmp_path / "out/config.json").read_text())
    new_only = {k: v for k, v in written.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    old_only = {k: v for k, v in written.items() if k not in ("rope_parameters", "dtype")}
    assert from_hf(new_only) == from_hf(old_only) == model.config
    assert old_only.items() >= {k: old[k] for k in ("rope_theta", "rope_scaling", "torch_dtype")}.items()
    assert new_only["dtype"] == "float32" and new_only["rope_parameters"] == raw["rope_parameters"]


def test_unknown_fields_and_the_generation_config_of_the_source_survive(tmp_path):
    tiny_hf.save(tmp_path / "in")
    tiny_hf.edit_json(tmp_path / "in/config.json", note="kept", eos_token_id=[1, 5])
    (tmp_path / "in/generation_config.json").write_text('{"eos_token_id": [1, 7],  "top_k": 20}')
    models.save(tmp_path / "out", models.load(tmp_path / "in"), source=tmp_path / "in", dtype=jnp.bfloat16)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["note"], written["eos_token_id"]) == ("kept", [1, 5])
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    same = "generation_config.json"
    assert (tmp_path / "out" / same).read_bytes() == (tmp_path / "in" / same).read_bytes()
    assert their(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


def test_a_config_that_the_family_cannot_express_is_refused(tmp_path):
    tiny_hf.save(tmp_path / "in", "llama-mlp-bias")
    model = models.load(tmp_path / "in")
    model.config = from_hf(
        json.loads((tmp_path / "in/config.json").read_text()) | {"architectures": ["Qwen2ForCausalLM"]}
    )
    object.__setattr__(model.config, "mlp_bias", True)
    with pytest.raises(UserError, match="qwen2 config.json cannot express this model's mlp_bias"):
        models.save(tmp_path / "out", model)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------ dtypes, shards


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_files(tmp_path, dtype):
    made = tiny_hf.save(tmp_path / "in", "llama-tied", dtype=getattr(torch, dtype))
    wide = models.load(tmp_path / "in")
    models.save(tmp_path / "wide", wide)
    assert_same_torch(their(tmp_path / "wide", dtype="auto"), made.float())
    half = models.load(tmp_path / "in", dtype=dtype)
    assert {x.dtype.name for x in leaves(half).values()} == {dtype}
    models.save(tmp_path / "half", half)
    models.save(tmp_path / "cast", wide, dtype=dtype)
    for folder in ("half", "cast"):
        assert_same_torch(their(tmp_path / folder, dtype="auto"), their(tmp_path / "in", dtype="auto"))


def test_weights_of_several_dtypes_are_written_as_they_are(tmp_path):
    tiny_hf.save(tmp_path / "in")
    model = models.load(tmp_path / "in")
    model.layers.q_bias = nnx.Param(model.layers.q_bias[...].astype(jnp.float16))
    models.save(tmp_path / "out", model)
    halves = [f"model.layers.{i}.self_attn.q_proj.bias" for i in range(3)]
    with safetensors.safe_open(tmp_path / "out/model.safetensors", framework="np") as f:
        assert f.offset_keys()[-3:] == halves  # behind the wider ones, so that an odd size misaligns none of those
    tensors = safetensors.numpy.load_file(tmp_path / "out/model.safetensors")
    assert [n for n in sorted(tensors) if tensors[n].dtype == np.float16] == halves
    np.testing.assert_array_equal(tensors["model.layers.1.self_attn.q_proj.bias"], model.layers.q_bias[1])
    np.testing.assert_array_equal(tensors["model.layers.2.mlp.up_proj.weight"], model.layers.up[2].T)


def test_several_shards_and_their_index(tmp_path):
    made = tiny_hf.save(tmp_path / "in", max_shard_size="20KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 3
    model = models.load(tmp_path / "in")
    models.save(tmp_path / "out", model, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert {f.name for f in files} == set(index["weight_map"].values()) and len(files) > 3
    assert all(f.stat().st_size < 25_000 for f in files)
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in made.parameters())
    assert not (tmp_path / "out/model.safetensors").exists()
    assert_same_torch(made, their(tmp_path / "out", dtype="auto"))
    assert_same_weights(model, models.load(tmp_path / "out"))
    with safetensors.safe_open(files[0], framework="np") as f:
        assert f.metadata() == {"format": "pt"}


# ------------------------------------------------------------------------------------------------ meshes


@pytest.mark.parametrize("name", ["qwen3", "llama-attention-bias", "qwen2-tied"])
def test_a_mesh_cuts_weights_by_the_rules_and_changes_no_value(tmp_path, mesh, name):
    tiny_hf.save(tmp_path / "in", name, max_shard_size="20KB")
    whole, cut = models.load(tmp_path / "in"), models.load(tmp_path / "in", mesh=mesh)
    assert_same_weights(whole, cut)
    for path, x in jax.tree_util.tree_leaves_with_path(nnx.state(cut)):
        assert x.sharding == named(mesh, axes_of(path, x)), path
    shard = leaves(cut)["['layers']['gate'].value"].addressable_shards[0]
    assert shard.data.shape == (3, 12, 19)
    models.save(tmp_path / "out", cut)
    assert_same_torch(their(tmp_path / "in", dtype="auto"), their(tmp_path / "out", dtype="auto"))


def test_a_model_on_a_mesh_scores_as_transformers_does(tmp_path, mesh):
    made = tiny_hf.save(tmp_path / "in", "qwen3")
    cut = models.load(tmp_path / "in", mesh=mesh)
    for ours, theirs in zip(our_logps(cut, mesh=mesh), their_logps(made), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


def test_devices_that_hold_a_part_together_read_it_once(tmp_path, mesh, monkeypatch):
    tiny_hf.save(tmp_path / "in")
    parts, fill = [], hf._fill
    monkeypatch.setattr(hf, "_fill", lambda *args: parts.append((args[1].name, args[3])) or fill(*args))
    models.load(tmp_path / "in", mesh=mesh)
    assert len(parts) == len(set(parts))
    assert sorted(b for name, b in parts if name.endswith("q_proj.weight")) == [
        ((0, 3), d, h) for d in ((0, 12), (12, 24)) for h in ((0, 12), (12, 24))
    ]


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        ((1, 1, 8), {}, "num_attention_heads 4 does not divide over 8 shards"),
        ((2, 1, 4), {}, "num_key_value_heads 2 does not divide over 4 shards"),
        ((2, 2, 2), {"intermediate_size": 39}, "intermediate_size 39 does not"),
        ((2, 2, 2), {"vocab_size": 95}, "vocab_size 95 does not"),
        ((1, 8, 1), {"hidden_size": 20}, "hidden_size 20 does not divide over 8 shards"),
    ],
)
def test_sizes_that_do_not_divide_over_the_mesh_are_refused(tmp_path, sizes, changes, message):
    tiny_hf.save(tmp_path / "in", **changes)
    data, fsdp, tensor = sizes
    with pytest.raises(UserError, match=message):
        models.load(tmp_path / "in", mesh=make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor)))


MEASURE = """
import sys
import jax, numpy as np
from flax import nnx
from pathlib import Path
from safetensors.numpy import load_file
from grpojax.models import hf
from grpojax.models.sharding import MeshConfig, make_mesh, named

def status(field):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(field + ":"))

def naive(folder, mesh):
    state = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        state |= {k: np.asarray(v, np.float32) for k, v in load_file(file).items()}
    def put(path, leaf):
        key = hf.KEYS[hf._name(path)]
        names = [key.name.format(i) for i in range(leaf.shape[0])] if key.stacked else [key.name]
        x = np.stack([state[n].T if key.transposed else state[n] for n in names])
        return jax.device_put(x if key.stacked else x[0], named(mesh, hf.decoder.axes_of(path, leaf)))
    graph, abstract = hf.decoder.abstract(hf.from_hf(hf._read_json(Path(folder) / "config.json")))
    return nnx.merge(graph, jax.tree_util.tree_map_with_path(put, abstract))

small, folder, loader = sys.argv[1:]
mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
load = {"naive": naive, "ours": lambda folder, mesh: hf.load(folder, mesh=mesh)}[loader]
jax.block_until_ready(nnx.state(load(small, mesh)))  # imports and compiles what there is
Path("/proc/self/clear_refs").write_text("5")  # the peak starts over
before = status("VmRSS")
assert status("VmHWM") < before * 1.1
model = load(folder, mesh)
arrays = jax.tree.leaves(nnx.state(model))
held = {s.data.unsafe_buffer_pointer(): s.data.nbytes for x in arrays for s in x.addressable_shards}
size = sum(x.size * 4 for x in arrays)
print((status("VmHWM") - before - sum(held.values())) / size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_loading_never_holds_the_model_twice(tmp_path):
    tiny_hf.save(tmp_path / "small", "qwen2", dtype=torch.bfloat16)
    large = dict(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=1536,
        num_hidden_layers=10,
        num_attention_heads=16,
    )
    tiny_hf.save(tmp_path / "large", "qwen2", dtype=torch.bfloat16, max_shard_size="110MB", **large)
    assert len(list((tmp_path / "large").glob("*.safetensors"))) == 2

    def extra(loader):  # what the peak is above the arrays, in models of float32
        command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large"), loader]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert extra("ours") < 0.4
    assert extra("naive") > 0.8


# ------------------------------------------------------------------------------------------------ errors


def rewrite(file, change):
    tensors = safetensors.numpy.load_file(file)
    change(tensors)
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})


def drop(count):
    def change(tensors):
        for name in sorted(n for n in tensors if "layers" in n)[:count]:
            del tensors[name]

    return lambda folder: rewrite(folder / "model.safetensors", change)


def put(**arrays):
    arrays = {name.replace("__", "."): x for name, x in arrays.items()}
    return lambda folder: rewrite(folder / "model.safetensors", lambda tensors: tensors.update(arrays))


def truncate(file, size):
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:size])


def remove(*files):
    return lambda folder: [(folder / f).unlink() for f in files]


def only_pickles(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def edit_config(**changes):
    return lambda folder: tiny_hf.edit_json(folder / "config.json", **changes)


def shards(then):
    def damage(folder):
        tensors = safetensors.numpy.load_file(folder / "model.safetensors")
        names = sorted(tensors)
        parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
        for file, part in parts.items():
            safetensors.numpy.save_file({n: tensors[n] for n in part}, folder / file)
        index = {"weight_map": {n: file for file, part in parts.items() for n in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "model.safetensors").unlink()
        then(folder)

    return damage


NORM = "model__norm__weight"
DAMAGE = {
    "folder": (lambda folder: folder.rename(folder.with_name("gone")), "in: no such folder; .* hf download"),
    "config missing": (remove("config.json"), "in has no config.json"),
    "config damaged": (truncate("config.json", 40), "config.json is damaged"),
    "config a list": (lambda folder: (folder / "config.json").write_text("[]"), "config.json is damaged"),
    "architecture": (
        edit_config(architectures=["GemmaForCausalLM"]),
        "unknown architecture .*GemmaForCausalLM",
    ),
    "no weights": (remove("model.safetensors"), "in has neither model.safetensors nor"),
    "pickles": (only_pickles, "pickled weights .pytorch_model.bin.*not read; convert"),
    "one missing": (drop(1), r"missing weights: model.layers.0.input_layernorm.weight$"),
    "many missing": (drop(11), r"missing weights: model.layers.0.\S*, model.layers.0.\S*, \S* and 8 more$"),
    "extra": (put(adapter__weight=np.ones(3, np.float32)), r"unknown weights: adapter.weight$"),
    "shape": (
        put(**{NORM: np.ones(25, np.float32)}),
        r"weights of another shape: model.norm.weight \[25\] \(config: \[24\]\)$",
    ),
    "layers": (edit_config(num_hidden_layers=2), r"unknown weights: model.layers.2.* and 9 more$"),
    "integers": (
        put(**{NORM: np.ones(24, np.int8)}),
        r"weights other than F32, BF16, F16: model.norm.weight I8$",
    ),
    "untied": (edit_config(tie_word_embeddings=False), "missing weights: lm_head.weight$"),
    "truncated": (truncate("model.safetensors", 9000), "model.safetensors is truncated or damaged"),
    "no header": (truncate("model.safetensors", 5), "model.safetensors is truncated or damaged"),
    "shard gone": (
        shards(remove("b.safetensors")),
        "b.safetensors named in model.safetensors.index.json but not",
    ),
    "shard truncated": (shards(truncate("b.safetensors", 9000)), "b.safetensors is truncated or damaged"),
    "index damaged": (shards(truncate("model.safetensors.index.json", 99)), "index.json is damaged"),
    "index empty": (
        shards(lambda folder: (folder / "model.safetensors.index.json").write_text("{}")),
        "index.json is damaged: it has no 'weight_map'",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_folder_is_refused_by_name(tmp_path, case):
    damage, message = DAMAGE[case]
    tiny_hf.save(tmp_path / "in", "qwen2-tied")
    models.load(tmp_path / "in")
    damage(tmp_path / "in")
    with pytest.raises(UserError, match=message) as e:
        models.load(tmp_path / "in")
    assert str(tmp_path) in str(e.value) and str(e.value).count("\n") <= 1


def test_a_tied_head_and_rotary_buffers_are_ignored(tmp_path):
    tiny_hf.save(tmp_path / "in", "qwen2-tied")
    plain = models.load(tmp_path / "in")
    head = np.zeros((94, 24), np.float32)
    put(
        lm_head__weight=head,
        **{f"model__layers__{i}__self_attn__rotary_emb__inv_freq": head[0] for i in range(3)},
    )(tmp_path / "in")
    assert_same_weights(plain, models.load(tmp_path / "in"))


def test_dtypes_that_weights_cannot_have(tmp_path):
    tiny_hf.save(tmp_path / "in")
    with pytest.raises(UserError, match="weights cannot be int8; they can be float32, bfloat16, float16"):
        models.load(tmp_path / "in", dtype="int8")
    with pytest.raises(UserError, match="weights cannot be int8"):
        models.save(tmp_path / "out", models.load(tmp_path / "in"), dtype="int8")


# ------------------------------------------------------------------------------------------------ export


def test_an_export_replaces_nothing(tmp_path):
    tiny_hf.save(tmp_path / "in")
    model = models.load(tmp_path / "in")
    (tmp_path / "empty").mkdir()
    models.save(tmp_path / "empty", model)
    models.save(tmp_path / "new/parents/out", model)
    assert_same_weights(models.load(tmp_path / "empty"), models.load(tmp_path / "new/parents/out"))
    before = sorted((tmp_path / "in").iterdir())
    (tmp_path / "file").write_text("mine")
    for taken in ("in", "file"):
        with pytest.raises(UserError, match=f"{taken} already exists and is not an empty folder"):
            models.save(tmp_path / taken, model)
    assert sorted((tmp_path / "in").iterdir()) == before and (tmp_path / "file").read_text() == "mine"
    with pytest.raises(UserError, match="nowhere: no such folder"):
        models.save(tmp_path / "out", model, source=tmp_path / "nowhere")


def test_a_failed_export_leaves_nothing_and_a_killed_one_does_not_block_the_next(tmp_path, monkeypatch):
    tiny_hf.save(tmp_path / "in")
    model = models.load(tmp_path / "in")
    fetch = hf._fetch

    def failing(leaf, tensor, dtype):
        assert not (tmp_path / "out").exists()
        if tensor.ours == "head":
            raise OSError("disk full")
        return fetch(leaf, tensor, dtype)

    monkeypatch.setattr(hf, "_fetch", failing)
    with pytest.raises(OSError, match="disk full"):
        models.save(tmp_path / "out", model)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    monkeypatch.undo()
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/model-00001-of-00009.safetensors").write_text("half")
    models.save(tmp_path / "out", model)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


# --------------------------------------------------------------------------------------------- tokenizer


def assert_same_tokenizer(loaded, saved):
    for text in tiny_hf.TEXTS:
        assert loaded.encode(text) == saved.encode(text).ids
        assert loaded.decode(loaded.encode(text)) == text
    chat = [{"role": "user", "content": "7 x 6?"}]
    assert loaded.apply_chat_template(chat, tokenize=False) == "<|user|>7 x 6?<|end|>\n"
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)


def test_a_tokenizer_round_trips_token_for_token(tmp_path):
    tiny_hf.save(tmp_path / "in", vocab_size=400)
    tiny_hf.tokenizer(tmp_path / "in")
    saved = tokenizers.Tokenizer.from_file(str(tmp_path / "in/tokenizer.json"))
    loaded = models.load_tokenizer(tmp_path / "in")
    assert_same_tokenizer(loaded, saved)

    model = models.load(tmp_path / "in")
    models.save(tmp_path / "copied", model, source=tmp_path / "in")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "copied" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
    models.save(tmp_path / "saved", model, tokenizer=loaded)
    for folder in ("copied", "saved"):
        assert_same_tokenizer(models.load_tokenizer(tmp_path / folder), saved)
    described = json.loads((tmp_path / "saved/tokenizer_config.json").read_text())
    assert described["tokenizer_class"] == "PreTrainedTokenizerFast"  # the one name that both transformers know
    written = json.loads((tmp_path / "saved/config.json").read_text())
    assert (written["eos_token_id"], written["pad_token_id"], written["bos_token_id"]) == (1, 0, None)


def test_a_folder_without_tokenizer_json_goes_to_auto_tokenizer(tmp_path):
    tiny_hf.save(tmp_path, vocab_size=400)
    made = tiny_hf.tokenizer(tmp_path)
    made.backend_tokenizer.model.save(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    loaded = models.load_tokenizer(tmp_path)
    assert isinstance(loaded, transformers.Qwen2Tokenizer)
    assert loaded.get_vocab().items() >= made.get_vocab().items()


def test_tokenizers_that_cannot_be_loaded(tmp_path):
    tiny_hf.save(tmp_path, vocab_size=400)
    with pytest.raises(UserError, match="holds no tokenizer"):
        models.load_tokenizer(tmp_path)
    tiny_hf.tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer_config.json").read_text())
    content["added_tokens_decoder"] = {"400": {"content": "def", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="makes transformers split text unlike tokenizer.json"):
        models.load_tokenizer(tmp_path)
    truncate("tokenizer.json", 999)(tmp_path)
    with pytest.raises(UserError, match="tokenizer.json is damaged"):
        models.load_tokenizer(tmp_path)


def test_eos_ids_are_those_of_every_file(tmp_path):
    tokenizer = tiny_hf.tokenizer()
    assert hf.eos_ids(tmp_path, tokenizer) == (1,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert hf.eos_ids(tmp_path, tokenizer) == (1, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 4]}')
    assert hf.eos_ids(tmp_path, tokenizer) == (1, 4, 9)
    tokenizer.eos_token = None
    (tmp_path / "config.json").write_text("{}")
    assert hf.eos_ids(tmp_path, tokenizer) == (4, 9)
