"""Adapters in and out: what peft reads of ours and writes for us, and what is refused by name."""

import atexit
import dataclasses
import functools
import json
import re
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_hf
from flax import nnx
from hf_compare import our_logps, their, their_logps
from safetensors.numpy import load_file, save_file

from grpojax import models
from grpojax.cli.targets import model_of, read_target
from grpojax.extensions.adapters import factors as lora
from grpojax.extensions.adapters import peft as folders
from grpojax.extensions.adapters.adapter_config import AdapterConfig
from grpojax.host.errors import UserError
from grpojax.models import hf
from grpojax.programs import adapter, state

DATA = "builtin:arithmetic/test.jsonl"
KINDS = {
    "lora": AdapterConfig(rank=4, alpha=8.0),
    "rslora": AdapterConfig(rank=3, alpha=1.5, target=("q_proj", "v_proj"), rslora=True),
    "dora": AdapterConfig(rank=4, target=("o_proj", "down_proj"), dora=True),
    "all dora": AdapterConfig(rank=3, dora=True),
}


def random_factors(config, model):
    graph, params = nnx.split(model)
    base = lora.on_base(params, config)
    rng = np.random.default_rng(0)
    first = lora.fresh(config, model.config, base, 0, None)
    return graph, base, {n: x + jnp.asarray(0.1 * rng.standard_normal(x.shape), jnp.float32) for n, x in first.items()}


@functools.cache
def base_of(name, model):
    """A folder, its model, and the model's base with random factors."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tiny_hf.save(folder, model)
    made = models.load(folder)
    return folder, made, random_factors(KINDS[name], made)


def saved(folder, name="lora", model="qwen2"):
    there, made, (graph, base, factors) = base_of(name, model)
    shutil.copytree(there, folder / "base")
    folders.save(folder / "peft", factors, KINDS[name], made.config, base=str(folder / "base"))
    return made, graph, base, factors


@pytest.mark.in_ci("qwen2-dora", "llama-rslora", "qwen3_5-all dora", "olmoe-lora")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"),
    [
        *((model, name) for model in ("qwen2", "llama") for name in ("lora", "rslora", "dora")),
        ("qwen3_5", "lora"),
        ("qwen3_5", "all dora"),
        ("qwen3-moe", "lora"),
        ("olmoe", "lora"),
    ],
)
def test_peft_scores_our_folder_as_we_do(tmp_path, name, model):
    peft = pytest.importorskip("peft", reason="peft is absent: pip install 'grpojax[test-all]'")
    _, graph, base, factors = saved(tmp_path, name, model)
    theirs = peft.PeftModel.from_pretrained(their(tmp_path / "base"), tmp_path / "peft").eval()
    merged = nnx.merge(graph, state.merged(adapter.joined(base, factors), "float32"))
    unmerged = nnx.merge(graph, adapter.joined(base, factors))
    want = their_logps(theirs)
    for ours in (our_logps(merged), our_logps(unmerged)):
        for a, b in zip(ours, want, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)
    start = their_logps(their(tmp_path / "base"))
    assert max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in zip(want, start, strict=True)) > 1e-2


@pytest.mark.slow
def test_a_folder_that_peft_wrote_is_read_and_written_alike(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is absent: pip install 'grpojax[test-all]'")
    made = tiny_hf.save(tmp_path / "base")
    settings = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    peft.get_peft_model(made, settings).save_pretrained(tmp_path / "theirs")
    config, _ = folders.read_config(tmp_path / "theirs")
    assert (config.rank, config.alpha, config.target, config.rslora, config.dora) == (
        4, 8.0, ("q_proj", "up_proj"), False, False,
    )  # fmt: skip
    decoder = models.load(tmp_path / "base").config
    factors = folders.load(config, decoder)
    folders.save(tmp_path / "ours", factors, config, decoder, base=str(tmp_path / "base"))
    a, b = (load_file(tmp_path / name / folders.WEIGHTS) for name in ("theirs", "ours"))
    assert a.keys() == b.keys()
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
def test_peft_reads_a_hybrid_without_its_images(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is absent: pip install 'grpojax[test-all]'")
    tiny_hf.save_with_images(tmp_path / "base")
    made, config = models.load(tmp_path / "base"), KINDS["lora"]
    graph, base, factors = random_factors(config, made)
    folders.check_modules(config, made.config, tmp_path / "base")
    folders.save(tmp_path / "peft", factors, config, made.config, base=str(tmp_path / "base"))
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft", attn_implementation="eager").eval()
    ours = our_logps(nnx.merge(graph, adapter.joined(base, factors)))
    for a, b in zip(ours, their_logps(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_three_products_of_a_delta_net_are_one_layer_with_one_a(tmp_path):
    *_, factors = saved(tmp_path, "lora", "qwen3_5")
    tensors = load_file(tmp_path / "peft" / folders.WEIGHTS)
    name = "base_model.model.model.layers.2.linear_attn.in_proj_qkv.lora_{}.weight"  # the second with a delta net
    np.testing.assert_array_equal(tensors[name.format("A")], factors["delta_qkv_a"][1].T)
    rows = np.concatenate([factors[f"delta_{x}_b"][1].T for x in "qkv"])
    np.testing.assert_array_equal(tensors[name.format("B")], rows)
    assert not any(".in_proj_q." in name for name in tensors)


@pytest.mark.parametrize(
    ("model", "name"), [*(("qwen2", name) for name in KINDS), ("qwen3_5", "all dora"), ("qwen3-moe", "lora")]
)
@pytest.mark.slow
def test_what_is_saved_comes_back(tmp_path, model, name):
    made, _, _, factors = saved(tmp_path, name, model)
    config, base = folders.read_config(tmp_path / "peft")
    assert base == str(tmp_path / "base")
    named = KINDS[name].layers(made.config)
    assert dataclasses.replace(config, path=None) == dataclasses.replace(KINDS[name], target=named)
    jax.tree.map(np.testing.assert_array_equal, folders.load(config, made.config), factors)
    every = dataclasses.replace(KINDS[name], path=str(tmp_path / "peft"))
    folders.check(every, made.config)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"peft_type": "VERA", "vera_dropout": 0.1, "d_initial": 0.1, "projection_prng_key": 3}, "peft_type='VERA'"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern="),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    ],
)
def test_what_is_not_known_of_an_adapter_is_refused(tmp_path, given, said):
    saved(tmp_path)
    file = tmp_path / "peft" / folders.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | given))
    with pytest.raises(UserError, match=f"{said}.*merge"):
        folders.read_config(tmp_path / "peft")


@pytest.mark.parametrize(("name", "value"), [("lora_alpha", 0), ("lora_alpha", "8"), ("r", 0), ("r", 4.0), ("r", True)])
def test_numbers_of_an_adapter_that_cannot_be_are_refused_with_file_and_key(tmp_path, name, value):
    saved(tmp_path)
    file = tmp_path / "peft" / folders.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    with pytest.raises(UserError, match=f"{folders.CONFIG}: {name}={value!r} must be .* over 0"):
        folders.read_config(tmp_path / "peft")


def rename(folder, change):
    """Writes an adapter's tensors under other names; returns the old ones."""
    file = folder / folders.WEIGHTS
    tensors = load_file(file)
    save_file({change(name): x for name, x in tensors.items()}, file)
    return tensors


@pytest.mark.parametrize(
    "change",
    [
        lambda name: name.removesuffix(".weight") + ".default.weight",
        lambda name: f"_orig_mod.{name}",
        lambda name: name.replace(".model.layers.", "._orig_mod.model.layers."),
    ],
)
def test_names_of_a_state_that_was_saved_without_peft_are_read(tmp_path, change):
    made, _, _, factors = saved(tmp_path, "dora")
    rename(tmp_path / "peft", change)
    config, _ = folders.read_config(tmp_path / "peft")
    jax.tree.map(np.testing.assert_array_equal, folders.load(config, made.config), factors)


def test_factors_that_are_not_finite_are_refused(tmp_path):
    made, *_ = saved(tmp_path)
    tensors = load_file(tmp_path / "peft" / folders.WEIGHTS)
    name = max(tensors)
    save_file(tensors | {name: np.full_like(tensors[name], np.inf)}, tmp_path / "peft" / folders.WEIGHTS)
    with pytest.raises(UserError, match=f"{folders.WEIGHTS}: {name} has NaN or infinity"):
        folders.load(folders.read_config(tmp_path / "peft")[0], made.config)


def test_two_adapters_in_a_file_are_refused(tmp_path):
    saved(tmp_path)
    tensors = rename(tmp_path / "peft", lambda name: name)
    other = {name.replace(".weight", ".reference.weight"): x for name, x in tensors.items()}
    save_file(tensors | other, tmp_path / "peft" / folders.WEIGHTS)
    with pytest.raises(UserError, match="are the same factor of two adapters; save each in a folder"):
        folders.read_config(tmp_path / "peft")


def test_the_tensors_say_which_layers_have_factors(tmp_path):
    made, _, _, factors = saved(tmp_path, "rslora")
    file = tmp_path / "peft" / folders.CONFIG
    patterns = {"target_modules": r".*\.[qv]_proj", "exclude_modules": ["lm_head"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | patterns))
    config, _ = folders.read_config(tmp_path / "peft")
    assert config.target == ("q_proj", "v_proj")
    jax.tree.map(np.testing.assert_array_equal, folders.load(config, made.config), factors)
    weights = load_file(tmp_path / "peft" / folders.WEIGHTS)
    save_file({name: x for name, x in weights.items() if ".1." not in name}, tmp_path / "peft" / folders.WEIGHTS)
    with pytest.raises(
        UserError, match=r"has no .*layers\.1\..*target_modules='.*exclude_modules=.*; merge the adapter"
    ):
        folders.load(config, made.config)


def test_a_folder_without_factors_that_can_be_read_says_what_to_do(tmp_path):
    saved(tmp_path)
    file = tmp_path / "peft" / folders.WEIGHTS
    file.rename(tmp_path / "peft" / "adapter_model.bin")
    with pytest.raises(UserError, match="adapter_model.bin is pickled, .*; convert:\npeft.*save_pretrained"):
        folders.read_config(tmp_path / "peft")
    (tmp_path / "peft" / "adapter_model.bin").unlink()
    with pytest.raises(UserError, match=f"peft has {folders.CONFIG} but no {folders.WEIGHTS}; copy"):
        folders.read_config(tmp_path / "peft")


def test_a_kind_of_adapter_that_cannot_be_merged_is_not_to_be_merged(tmp_path):
    (tmp_path / folders.CONFIG).write_text('{"num_virtual_tokens": 8, "token_dim": 64, "peft_type": "PROMPT_TUNING"}')
    with pytest.raises(UserError, match="peft_type='PROMPT_TUNING', and only 'LORA' is read; take a LoRA adapter"):
        folders.read_config(tmp_path)


def test_other_layers_and_other_models_are_refused(tmp_path):
    model, *_ = saved(tmp_path)
    config, _ = folders.read_config(tmp_path / "peft")
    file = tmp_path / "peft" / folders.WEIGHTS
    tensors = load_file(file)
    save_file(tensors | {"base_model.model.lm_head.lora_A.weight": np.zeros((4, 3), np.float32)}, file)
    with pytest.raises(UserError, match="adapts lm_head; adapters can be of q_proj"):
        folders.read_config(tmp_path / "peft")
    name = min(tensors)
    save_file(tensors | {name: tensors[name][:, :1]}, file)
    with pytest.raises(UserError, match="no adapter of this model.*\ntake the base"):
        folders.load(config, model.config)


def test_other_settings_than_the_folders_are_refused_with_those_to_set(tmp_path):
    made, *_ = saved(tmp_path, "rslora")
    with pytest.raises(UserError, match="\nset model.adapter.rank=3 model.adapter.rslora=true .*=\\[q_proj,v_proj\\]$"):
        folders.check(AdapterConfig(rank=4, alpha=1.5, path=str(tmp_path / "peft")), made.config)


def test_layers_that_peft_would_pass_over_are_refused(tmp_path):
    """Phi-3 joins queries, keys and values; a folder with images has its text model under another name."""
    tiny_hf.save(tmp_path / "phi3", "phi3")
    with pytest.raises(UserError, match="no q_proj, k_proj, v_proj, gate_proj, up_proj in .*\n.*--merged"):
        folders.check_modules(KINDS["lora"], hf.read_config(tmp_path / "phi3"), tmp_path / "phi3")
    folders.check_modules(KINDS["dora"], hf.read_config(tmp_path / "phi3"), tmp_path / "phi3")
    (tmp_path / "gemma3").mkdir()
    whole = {"model_type": "gemma3", "text_config": tiny_hf.config("gemma3").to_dict()}
    (tmp_path / "gemma3" / "config.json").write_text(json.dumps(whole))
    with pytest.raises(UserError, match="no o_proj, down_proj in .*\n.*--merged"):
        folders.check_modules(KINDS["dora"], hf.read_config(tmp_path / "gemma3"), tmp_path / "gemma3")
    why = folders.check_start(KINDS["dora"], hf.read_config(tmp_path / "gemma3"), tmp_path / "gemma3")
    assert "no o_proj, down_proj in" in why  # no target would do: the run starts, and exports merged weights


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        ("qwen2-moe", {}, "the expert that all tokens go to\n.*--merged"),
        ("qwen3-moe", {"target": ("gate_proj", "down_proj")}, "only one of gate_proj and up_proj .*\n.*--merged"),
        ("olmoe", {"rslora": True}, "rslora=true to experts.*\n.*--merged"),
    ],
)
def test_experts_that_peft_cannot_adapt_are_refused(tmp_path, model, given, said):
    tiny_hf.save(tmp_path, model)
    with pytest.raises(UserError, match=said):
        folders.check_modules(AdapterConfig(rank=2, **given), hf.read_config(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        (
            "phi3",
            {},
            "no q_proj, k_proj, v_proj, gate_proj, up_proj in .*\nset model.adapter.target=.o_proj,down_proj.$",
        ),
        ("glm4", {"target": ("up_proj",)}, "finds no up_proj in .*\nset .*=.q_proj,k_proj,v_proj,o_proj,down_proj.$"),
        ("gpt-oss", {}, "finds no gate_proj, up_proj, down_proj in .*\nset .*=.q_proj,k_proj,v_proj,o_proj.$"),
        ("qwen2-moe", {}, "the expert that all tokens go to\nset .*=.q_proj,k_proj,v_proj,o_proj.$"),
        ("olmoe", {"rslora": True}, "rslora=true to experts.*\nset .*=.q_proj,k_proj,v_proj,o_proj,down_proj.$"),
    ],
)
def test_a_run_whose_adapters_cannot_be_exported_is_refused_with_layers_that_can(tmp_path, model, given, said):
    tiny_hf.config(model).save_pretrained(tmp_path)
    decoder = hf.from_hf(json.loads((tmp_path / "config.json").read_text()))
    config = AdapterConfig(rank=2, **given)
    with pytest.raises(UserError, match=f"^model.adapter: peft .*{said}") as e:
        folders.check_start(config, decoder, tmp_path)
    left = str(e.value).partition("=[")[2].rstrip("]").split(",")
    folders.check_start(dataclasses.replace(config, target=left), decoder, tmp_path)


@pytest.mark.parametrize(
    ("base", "said"),
    [("./nowhere/tiny", "\n"), ("me/no", "; from the hub: hf download me/no\n")],
)
def test_a_base_that_is_not_there_is_answered_with_key_and_option(base, said, tmp_path):
    tensor = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.zeros((2, 3), np.float32)}
    save_file(tensor, tmp_path / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 2, "base_model_name_or_path": base}
    (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    said = re.escape(f"base_model_name_or_path={base!r}: no such folder here{said}")
    with pytest.raises(UserError, match=f"{said}give the base's folder by model.path=FOLDER$"):
        read_target(str(tmp_path), sets=[DATA])
    with pytest.raises(UserError, match=f"{said}give the base's folder by --base FOLDER$"):
        model_of(str(tmp_path))
    assert read_target(str(tmp_path), ["model.path=builtin:tiny"], sets=[DATA]).recipe.model.path == "builtin:tiny"
    assert model_of(str(tmp_path), base="builtin:tiny")[0].path == "builtin:tiny"
