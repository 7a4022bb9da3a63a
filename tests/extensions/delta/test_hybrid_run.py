"""A model with gated delta nets is trained, and leaves as transformers reads it."""

import jax
import numpy as np
import pytest
from hf_compare import leaves, our_logps, their, their_logps
from runs import numbers
from tiny_run import make_hybrid

from grpojax import models
from grpojax.cli import main as cli


@pytest.fixture(scope="module")
def folder(recipe, tmp_path_factory):
    return make_hybrid(recipe.parent, tmp_path_factory.mktemp("hybrid") / "model")


@pytest.mark.slow
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
