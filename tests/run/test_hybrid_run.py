"""A model with gated delta nets is trained, whole or by factors, and leaves as transformers and peft read it."""

import jax
import numpy as np
import pytest
from hf_compare import leaves, our_logps, their, their_logps
from runs import numbers
from tiny_run import make_teacher

from grpojax import models
from grpojax.cli import main as cli

SIZES = dict(
    layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=5, linear_value_head_dim=7, linear_conv_kernel_dim=3,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(recipe, tmp_path_factory):
    return make_teacher(
        recipe.parent, tmp_path_factory.mktemp("hybrid") / "model", model_type="qwen3_5_text",
        architectures=["Qwen3_5ForCausalLM"], initializer_range=0.3, **SIZES,
    )  # fmt: skip


def test_a_step_trains_every_part_and_the_export_scores_as_transformers_does(recipe, folder, tmp_path):
    given = [f"model.path={folder}", f"run.dir={tmp_path / 'run'}", "train.steps=1", "train.eval_every=0"]
    given += ["mesh.fsdp=1", "mesh.tensor=2", f"mesh.data={jax.device_count() // 2}"]
    assert cli.main(["train", str(recipe), *given]) == 0
    apart = [line["sampling/logp_difference_max"] for line in numbers(tmp_path / "run") if "reward" in line]
    assert len(apart) == 1 and max(apart) < 1e-4
    assert cli.main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    before, trained = models.load(folder), models.load(tmp_path / "out")
    assert trained.config == before.config
    for (name, a), b in zip(leaves(before).items(), leaves(trained).values(), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() > 1e-4, name
    for ours, theirs in zip(our_logps(trained), their_logps(their(tmp_path / "out", dtype="auto")), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


def test_factors_learn_and_leave_for_peft_and_merged(recipe, folder, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is absent: pip install 'grpojax[test-all]'")
    run = tmp_path / "run"
    given = [f"model.path={folder}", "train.eval_every=0", "optimizer.learning_rate=0.02", "model.adapter.rank=4"]
    given += ["mesh.fsdp=2", f"mesh.data={jax.device_count() // 2}"]
    assert cli.main(["train", str(recipe), f"run.dir={run}", "train.steps=5", *given]) == 0
    lines = [line for line in numbers(run) if "reward" in line]
    assert lines[-1]["reward"] > lines[0]["reward"] + 0.2  # rewarded for length, it writes longer
    assert max(line["sampling/logp_difference_max"] for line in lines) < 1e-4 and lines[-1]["kl"] > 1e-4
    assert not (run / "checkpoints" / "5" / "base_params").exists()
    for name, more in (("peft", []), ("whole", ["--merged"])):
        assert cli.main(["export", str(run), "--to", str(tmp_path / name), *more]) == 0
    ours = our_logps(models.load(tmp_path / "whole"))
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft", attn_implementation="eager").eval()
    for theirs in (their_logps(adapted), their_logps(their(tmp_path / "whole", dtype="auto"))):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)
    start = [f"run.dir={tmp_path / 'start'}", "train.steps=1", f"model.adapter.path={tmp_path / 'peft'}"]
    given = [x for x in given if not x.startswith("mesh.")]
    start += ["model.adapter.merged=false", "mesh.fsdp=1", f"mesh.data={jax.device_count()}"]
    assert cli.main(["train", str(recipe), *start, *given]) == 0
    line = next(line for line in numbers(tmp_path / "start") if "reward" in line)
    assert abs(line["kl"]) < 1e-6 and line["sampling/logp_difference_max"] < 1e-4  # the start is the reference
