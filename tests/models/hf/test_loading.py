"""Folders in: onto a mesh, without ever holding the model twice, and what a damaged one says."""

import json
import subprocess
import sys
from pathlib import Path

import bucket
import jax
import numpy as np
import pytest
import safetensors.numpy
import tiny_hf
from flax import nnx
from hf_compare import assert_same_torch, assert_same_weights, leaves, our_logps, their, their_logps

from grpojax import models
from grpojax.host.errors import UserError
from grpojax.models.hf import loading
from grpojax.models.weight_table import axes_of
from grpojax.sharding import MeshConfig, make_mesh, named


@pytest.fixture
def mesh():
    return make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))


@pytest.mark.parametrize(
    "name",
    [
        *tiny_hf.there("qwen3", "llama-attention-bias", "qwen2-tied", "qwen2-moe", "phi3", "olmo2"),
        *tiny_hf.there("gemma3", "glm4", "qwen3_5", "olmoe", "gpt-oss", "glm4-moe"),
    ],
)
def test_a_mesh_cuts_weights_by_the_rules_and_changes_no_value(tmp_path, mesh, name):
    tiny_hf.save(tmp_path / "in", name, max_shard_size="20KB")
    whole, cut = models.load(tmp_path / "in"), models.load(tmp_path / "in", mesh=mesh)
    assert_same_weights(whole, cut)
    for path, x in jax.tree_util.tree_leaves_with_path(nnx.state(cut)):
        assert x.sharding == named(mesh, axes_of(path, x)), path
    shard = leaves(cut)["['embed'].value"].addressable_shards[0]
    assert shard.data.shape == (47, 12)
    models.save(tmp_path / "out", cut)
    assert_same_torch(their(tmp_path / "in", dtype="auto"), their(tmp_path / "out", dtype="auto"))


@pytest.mark.parametrize("name", tiny_hf.there("qwen3", "gemma3", "gemma2", "gpt-oss", "glm4-moe"))
def test_a_model_on_a_mesh_scores_as_transformers_does(tmp_path, mesh, name):
    made = tiny_hf.save(tmp_path / "in", name)
    cut = models.load(tmp_path / "in", mesh=mesh)
    for ours, theirs in zip(our_logps(cut, mesh=mesh), their_logps(made), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


def test_devices_that_hold_a_part_together_read_it_once(tmp_path, mesh, monkeypatch):
    tiny_hf.save(tmp_path / "in")
    read, fill = [], loading._fill

    def note(parts, at, tensor, weight):
        read.append((weight.name, at, list(parts)))
        fill(parts, at, tensor, weight)

    monkeypatch.setattr(loading, "_fill", note)
    models.load(tmp_path / "in", mesh=mesh)
    assert all(len(parts) == len(set(parts)) for _, _, parts in read)
    query = [(at, sorted(parts)) for name, at, parts in read if name.endswith("q_proj.weight")]
    cut = [((0, 3), d, h) for d in ((0, 12), (12, 24)) for h in ((0, 12), (12, 24))]
    assert query == [((0,), cut), ((1,), cut), ((2,), cut)]


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        ((1, 1, 8), {}, "num_attention_heads 4 does not divide over 8 shards"),
        ((2, 2, 2), {"intermediate_size": 39}, "intermediate_size 39 does not"),
        ((2, 2, 2), {"vocab_size": 95}, "vocab_size 95 does not"),
        ((1, 8, 1), {"hidden_size": 20, "num_attention_heads": 2}, "hidden_size 20 does not divide over 8 shards"),
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
from grpojax.models import decoder, hf, weight_table
from grpojax.sharding import MeshConfig, make_mesh, named

def status(field):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(field + ":"))

def naive(folder, mesh):
    state = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        state |= {k: np.asarray(v, np.float32) for k, v in load_file(file).items()}
    def put(path, leaf):
        key = weight_table.DECODER[weight_table.leaf_name(path)]
        names = [key.name.format(i) for i in range(leaf.shape[0])] if key.stacked else [key.name]
        x = np.stack([state[n].T if key.transposed else state[n] for n in names])
        return jax.device_put(x if key.stacked else x[0], named(mesh, weight_table.axes_of(path, leaf)))
    graph, abstract = decoder.abstract(hf.read_config(folder))
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


@pytest.mark.in_ci("disk")
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.slow
@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_loading_never_holds_the_model_twice(tmp_path, where):
    """What the peak is above the arrays: files are bfloat16, so that the largest tensor is a ninth of the model."""
    tiny_hf.save(tmp_path / "small", "qwen2", dtype="bfloat16")
    large = dict(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=1536,
        num_hidden_layers=10,
        num_attention_heads=16,
    )
    tiny_hf.save(tmp_path / "large", "qwen2", dtype="bfloat16", max_shard_size="110MB", **large)
    assert len(list((tmp_path / "large").glob("*.safetensors"))) == 2

    places = [str(tmp_path / name) for name in ("small", "large")]

    def extra(loader):  # what the peak is above the arrays, in models of float32
        command = [sys.executable, "-c", MEASURE, *places, loader]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    if where == "disk":
        assert extra("ours") < 0.4
        assert extra("naive") > 0.8
        return
    with bucket.clients(tmp_path / "server"):
        places = [bucket.put_folder(Path(place), Path(place).name) for place in places]
        assert extra("ours") < 0.4


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
    "folder": (lambda folder: folder.rename(folder.with_name("gone")), "in: no such folder\n.* hf download"),
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
    "layers": (edit_config(num_hidden_layers=2, layer_types=None), r"unknown weights: model.layers.2.* and 9 more$"),
    "integers": (
        put(**{NORM: np.ones(24, np.int8)}),
        r"weights other than F32, BF16, F16: model.norm.weight I8$",
    ),
    "untied": (edit_config(tie_word_embeddings=False), "missing weights: lm_head.weight$"),
    "NaN": (
        put(**{NORM: np.array([np.nan] + 23 * [1], np.float32)}),
        "model.safetensors: model.norm.weight has NaN or infinity in it$",
    ),
    "infinity": (
        put(model__embed_tokens__weight=np.array([[-np.inf] + 23 * [1]] * 94, np.float16)),
        "model.safetensors: model.embed_tokens.weight has NaN or infinity in it$",
    ),
    "truncated": (truncate("model.safetensors", 9000), "model.safetensors is damaged"),
    "no header": (truncate("model.safetensors", 5), "model.safetensors is damaged"),
    "shard gone": (
        shards(remove("b.safetensors")),
        "b.safetensors named in model.safetensors.index.json but not",
    ),
    "shard truncated": (shards(truncate("b.safetensors", 9000)), "b.safetensors is damaged"),
    "index damaged": (shards(truncate("model.safetensors.index.json", 99)), "index.json is damaged"),
    "index empty": (
        shards(lambda folder: (folder / "model.safetensors.index.json").write_text("{}")),
        "index.json is damaged: it has no 'weight_map' of files",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_folder_is_refused_by_name(tmp_path, case):
    damage, message = DAMAGE[case]
    tiny_hf.save(tmp_path / "in", "qwen2-tied")
    models.load(tmp_path / "in")
    damage(tmp_path / "in")
    with pytest.raises(UserError, match=f"(?m){message}") as e:
        models.load(tmp_path / "in")
    assert str(tmp_path) in str(e.value) and str(e.value).count("\n") <= 1


def test_a_tied_head_that_is_the_embedding_and_rotary_buffers_change_nothing(tmp_path):
    tiny_hf.save(tmp_path / "in", "qwen2-tied")
    plain = models.load(tmp_path / "in")
    embed = np.array(plain.embed[...])
    rotary = {f"model__layers__{i}__self_attn__rotary_emb__inv_freq": embed[0] for i in range(3)}
    put(lm_head__weight=embed, **rotary)(tmp_path / "in")
    assert_same_weights(plain, models.load(tmp_path / "in"))
    rewrite(tmp_path / "in/model.safetensors", lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert_same_weights(plain, models.load(tmp_path / "in"))  # transformers 5 ties them the other way round
