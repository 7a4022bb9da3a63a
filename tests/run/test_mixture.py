"""A mixture of experts is trained, and leaves as transformers reads it."""

import jax
import numpy as np
import pytest
from hf_compare import leaves, our_logps, their, their_logps
from runs import numbers
from tiny_run import make_teacher

from grpojax import models
from grpojax.tools import cli

SIZES = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True)


@pytest.fixture(scope="module")
def folder(recipe, tmp_path_factory):
    return make_teacher(
        recipe.parent, tmp_path_factory.mktemp("mixture") / "model", model_type="qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"], initializer_range=0.3, **SIZES,
    )  # fmt: skip


def test_a_step_trains_every_part_and_the_export_scores_as_transformers_does(recipe, folder, tmp_path):
    given = [
        f"model.path={folder}",
        f"run.dir={tmp_path / 'run'}",
        "train.steps=2",
        "train.eval_every=0",
        "mesh.fsdp=1",
    ]
    given += [f"mesh.data={jax.device_count()}", "train.balance_coef=0.01"]
    assert cli.main(["train", str(recipe), *given]) == 0
    apart = [line["sampling/logp_difference_max"] for line in numbers(tmp_path / "run") if "reward" in line]
    assert len(apart) == 2 and max(apart) < 1e-4
    for line in numbers(tmp_path / "run"):
        assert "reward" not in line or 0.2 <= line["router/busiest_share"] <= 0.5
        assert "reward" not in line or (0 < line["router/entropy"] < np.log(5) and line["balance_loss"] > 1.5)
    assert cli.main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    before, trained = models.load(folder), models.load(tmp_path / "out")
    assert trained.config.experts == before.config.experts
    for (name, a), b in zip(leaves(before).items(), leaves(trained).values(), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() > 1e-4, name
    for ours, theirs in zip(our_logps(trained), their_logps(their(tmp_path / "out", dtype="auto")), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


def test_a_policy_without_experts_has_nothing_to_balance(recipe, tmp_path, capsys):
    assert cli.main(["train", str(recipe), f"run.dir={tmp_path}", "train.balance_coef=0.01"]) == 2
    assert "train.balance_coef=0.01" in capsys.readouterr().err
