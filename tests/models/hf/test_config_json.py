"""``config.json`` in both spellings, there and back."""

import json

import jax.numpy as jnp
import pytest
import tiny_hf
from hf_compare import their
from with_torch import torch

from grpojax import models
from grpojax.host.errors import UserError
from grpojax.models.hf import from_hf


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
        json.loads((tmp_path / "in/config.json").read_text())
        | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    )
    object.__setattr__(model.config, "mlp_bias", True)
    with pytest.raises(UserError, match="qwen2 config.json cannot express this model's mlp_bias"):
        models.save(tmp_path / "out", model)
    assert not (tmp_path / "out").exists()
