"""A mixture of experts is trained, and leaves as transformers reads it."""

import dataclasses

import jax
import numpy as np
import pytest
from hf_compare import leaves, our_logps, their, their_logps
from runs import numbers
from tiny_run import make_mixture

from grpojax import models
from grpojax.cli import main as cli
from grpojax.programs.policy import Policy


@pytest.fixture(scope="module")
def folder(recipe, tmp_path_factory):
    return make_mixture(recipe.parent, tmp_path_factory.mktemp("mixture") / "model")


@pytest.mark.slow
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
        assert "reward" not in line or 0.125 <= line["router/busiest_share"] <= 0.5
        assert "reward" not in line or (0 < line["router/entropy"] < np.log(8) and line["balance_loss"] > 1.5)
    assert cli.main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    before, trained = models.load(folder), models.load(tmp_path / "out")
    assert trained.config.mlp == before.config.mlp
    for (name, a), b in zip(leaves(before).items(), leaves(trained).values(), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() > 1e-4, name
    for ours, theirs in zip(our_logps(trained), their_logps(their(tmp_path / "out", dtype="auto")), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_run_learns_with_the_experts_that_its_sampler_chose(recipe, folder, tmp_path, monkeypatch):
    """Experts and groups are split over shards, and updates take minibatches.
    Every choice is replaced by another between sampler and trainer, so that log-probs differ: the trainer chooses
    nothing by itself."""
    given = [f"model.path={folder}", "train.steps=2", "train.eval_every=0", "rollout.router_replay=true"]
    given += ["mesh.expert=4", f"mesh.fsdp={jax.device_count() // 4}", "train.minibatches=2"]
    assert cli.main(["train", str(recipe), f"run.dir={tmp_path / 'run'}", *given]) == 0
    first, _ = [line["sampling/logp_difference_max"] for line in numbers(tmp_path / "run") if "reward" in line]
    assert first < 1e-4
    fetch = Policy.fetch

    def others(self, rollout, n):
        out = fetch(self, rollout, n)
        return out if out.choices is None else dataclasses.replace(out, choices=(out.choices + 1) % 8)

    monkeypatch.setattr(Policy, "fetch", others)
    assert cli.main(["train", str(recipe), f"run.dir={tmp_path / 'other'}", *given, "train.steps=1"]) == 0
    (other,) = [line["sampling/logp_difference_max"] for line in numbers(tmp_path / "other") if "reward" in line]
    assert other > 0.01
