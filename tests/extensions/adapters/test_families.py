"""Factors of other layers than dense ones: they learn, and leave as transformers and peft read them."""

import jax
import numpy as np
import pytest
from hf_compare import our_logps, their, their_logps
from runs import numbers
from tiny_run import make_hybrid, make_mixture

from grpojax import models
from grpojax.cli import main as cli


@pytest.fixture(scope="module")
def mixture(recipe, tmp_path_factory):
    return make_mixture(recipe.parent, tmp_path_factory.mktemp("mixture") / "model")


@pytest.fixture(scope="module")
def hybrid(recipe, tmp_path_factory):
    return make_hybrid(recipe.parent, tmp_path_factory.mktemp("hybrid") / "model")


@pytest.mark.slow
def test_factors_of_experts_learn_and_leave_for_peft_and_merged(recipe, mixture, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is absent: pip install 'grpojax[test-all]'")
    run, rank = tmp_path / "run", ["model.adapter.rank=4", "optimizer.learning_rate=0.02"]
    given = [f"model.path={mixture}", f"run.dir={run}", "train.steps=4", "train.eval_every=0", *rank]
    given += ["mesh.fsdp=2", "mesh.tensor=2", f"mesh.data={jax.device_count() // 4}"]
    assert cli.main(["train", str(recipe), *given]) == 0
    lines = [line for line in numbers(run) if "reward" in line]
    assert lines[-1]["reward"] > lines[0]["reward"] + 0.2
    assert max(line["sampling/logp_difference_max"] for line in lines) < 1e-4 and lines[-1]["kl"] > 1e-4
    for name, more in (("peft", []), ("whole", ["--merged"])):
        assert cli.main(["export", str(run), "--to", str(tmp_path / name), *more]) == 0
    ours = our_logps(models.load(tmp_path / "whole"))
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft", attn_implementation="eager").eval()
    for theirs in (their_logps(adapted), their_logps(their(tmp_path / "whole", dtype="auto"))):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_factors_beside_delta_nets_learn_and_leave_for_peft_and_merged(recipe, hybrid, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is absent: pip install 'grpojax[test-all]'")
    run = tmp_path / "run"
    given = [f"model.path={hybrid}", "train.eval_every=0", "optimizer.learning_rate=0.02", "model.adapter.rank=4"]
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
