"""Folders out: what transformers reads back, dtypes, shards, and an export that appears whole or not at all."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny_hf
from flax import nnx
from hf_compare import assert_same_torch, assert_same_weights, leaves, our_logps, sequences, their, their_logps
from with_torch import torch

from grpojax import models
from grpojax.host.errors import UserError
from grpojax.models.hf import writing


@pytest.mark.parametrize("name", tiny_hf.MODELS)
@pytest.mark.slow
def test_a_model_scores_as_transformers_does_and_comes_back_unchanged(tmp_path, name):
    made = tiny_hf.save(tmp_path / "in", name)
    model = models.load(tmp_path / "in")
    for ours, theirs in zip(our_logps(model), their_logps(made), strict=True):
        # Logits that a family multiplies make log-probs of -120, whose last bits are the order of a processor's sums.
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=2e-6)

    models.save(tmp_path / "out", model)
    back = their(tmp_path / "out", dtype="auto")
    assert_same_torch(made, back)
    tokens = torch.tensor([sequences(94)[3]])
    with torch.no_grad():
        assert torch.equal(made(tokens).logits, back(tokens).logits)
    assert_same_weights(model, models.load(tmp_path / "out"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_files(tmp_path, dtype):
    made = tiny_hf.save(tmp_path / "in", "llama-tied", dtype=dtype)
    wide = models.load(tmp_path / "in")
    models.save(tmp_path / "wide", wide)
    assert_same_torch(their(tmp_path / "wide", dtype="auto"), made.float())
    half = models.load(tmp_path / "in", dtype=dtype)
    assert {x.dtype.name for x in leaves(half).values()} == {dtype}
    models.save(tmp_path / "half", half)
    models.save(tmp_path / "cast", wide, dtype=dtype)
    for folder in ("half", "cast"):
        assert_same_torch(their(tmp_path / folder, dtype="auto"), their(tmp_path / "in", dtype="auto"))


@pytest.mark.parametrize("name", tiny_hf.there("qwen2-moe"))
def test_a_router_is_read_in_float32_whatever_the_others_are(tmp_path, name):
    """Another rounding of its weights could choose another expert."""
    tiny_hf.save(tmp_path, name)
    found = leaves(models.load(tmp_path, dtype="bfloat16"))
    exact = {str(name) for name, x in found.items() if x.dtype == jnp.float32}
    assert len(exact) == 2 and all("router" in name for name in exact) and len(found) > 10


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


def test_dtypes_that_weights_cannot_have(tmp_path):
    tiny_hf.save(tmp_path / "in")
    with pytest.raises(UserError, match="weights cannot be int8; they can be float32, bfloat16, float16"):
        models.load(tmp_path / "in", dtype="int8")
    with pytest.raises(UserError, match="weights cannot be int8"):
        models.save(tmp_path / "out", models.load(tmp_path / "in"), dtype="int8")


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
    fetch = writing._fetch

    def failing(leaf, tensor, dtype):
        assert not (tmp_path / "out").exists()
        if tensor.ours == "head":
            raise OSError("disk full")
        return fetch(leaf, tensor, dtype)

    monkeypatch.setattr(writing, "_fetch", failing)
    with pytest.raises(OSError, match="disk full"):
        models.save(tmp_path / "out", model)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    monkeypatch.undo()
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/model-00001-of-00009.safetensors").write_text("half")
    models.save(tmp_path / "out", model)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]
