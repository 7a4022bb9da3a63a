"""Tensors with all experts of a layer: as transformers has them in memory, and in four bits as gpt-oss is published."""

import re

import numpy as np
import pytest
import safetensors.numpy
import tiny_hf
from hf_compare import assert_same_weights, our_logps, their_logps
from with_torch import torch

from grpojax import models
from grpojax.host.errors import UserError
from grpojax.models.hf.weights import of_text

WEIGHTS = "model.safetensors"


def in_one(tensors):
    """Tensors ``[experts, out, in]``, with gates above ups."""
    out, parts = {}, {}
    for name, x in tensors.items():
        if found := re.match(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name):
            parts.setdefault(found[1], {})[int(found[2]), found[3]] = x
        else:
            out[name] = x
    for name, x in parts.items():
        experts = range(max(e for e, _ in x) + 1)
        out[f"{name}.gate_up_proj"] = np.stack([np.concatenate([x[e, "gate"], x[e, "up"]]) for e in experts])
        out[f"{name}.down_proj"] = np.stack([x[e, "down"] for e in experts])
    return out


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen2-moe", "olmoe", "glm4-moe"])
def test_a_tensor_may_have_all_experts_of_a_layer(tmp_path, name):
    tiny_hf.save(tmp_path, name)
    before = models.load(tmp_path)
    tensors = safetensors.numpy.load_file(tmp_path / WEIGHTS)
    joined = in_one(tensors)
    assert len(joined) < len(tensors)
    safetensors.numpy.save_file(joined, tmp_path / WEIGHTS)
    assert_same_weights(before, models.load(tmp_path))


def test_some_experts_in_one_tensor_and_some_not_are_refused(tmp_path):
    tiny_hf.save(tmp_path, "qwen3-moe")
    tensors = safetensors.numpy.load_file(tmp_path / WEIGHTS)
    joined = in_one(tensors)
    first = "model.layers.0.mlp.experts.gate_up_proj"
    joined |= {n: x for n, x in tensors.items() if n.startswith("model.layers.0.mlp.experts.")}
    del joined[first]
    safetensors.numpy.save_file(joined, tmp_path / WEIGHTS)
    with pytest.raises(UserError, match=f"missing weights: {first}"):
        models.load(tmp_path)


@pytest.mark.slow
def test_four_bits_are_read_as_transformers_reads_them(tmp_path):
    """Sizes are multiples of 32 here, which share a scale."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    made = tiny_hf.save(tmp_path, "gpt-oss", hidden_size=64, intermediate_size=96)
    tensors, rng = safetensors.numpy.load_file(tmp_path / WEIGHTS), np.random.default_rng(0)
    for name in [n for n in tensors if re.search(r"experts\.(gate_up|down)_proj$", n)]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
        scales = rng.integers(120, 125, blocks.shape[:3]).astype(np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
        with torch.no_grad():
            made.get_parameter(name).copy_(whole)
    safetensors.numpy.save_file(tensors, tmp_path / WEIGHTS)
    how = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    tiny_hf.edit_json(tmp_path / "config.json", quantization_config=how)
    model = models.load(tmp_path)
    for ours, theirs in zip(our_logps(model), their_logps(made), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)
    models.save(tmp_path / "out", model, source=tmp_path)
    assert_same_weights(model, models.load(tmp_path / "out"))
    tiny_hf.edit_json(tmp_path / "config.json", quantization_config={"quant_method": "fp8"})
    with pytest.raises(UserError, match="quantization_config="):
        models.load(tmp_path)


def test_layers_after_the_last_are_left_out():
    """Those of glm4_moe draw several tokens at once, which nothing here does; layer 2 of three layers stays."""
    found = dict.fromkeys(["model.layers.2.enorm.weight", "model.layers.3.enorm.weight", "lm_head.weight"])
    assert list(of_text("glm4_moe", found, 3)) == ["model.layers.2.enorm.weight", "lm_head.weight"]
