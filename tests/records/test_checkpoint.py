"""What is on disk, and that what an older version wrote is known for what it is."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from runs import Trainer

from grpojax.host.errors import UserError
from grpojax.models import hf
from grpojax.records.checkpoint import FORMAT, Checkpoints
from grpojax.run import recipe as config
from grpojax.tools import cli


@pytest.fixture
def old_run(recipe, tmp_path):
    """A run whose checkpoint has one network without a role, as format 1 had it; and its weights."""
    directory = tmp_path / "old"
    overrides = [f"run.dir={directory}", "train.steps=1", "data.eval=null", "rewards.0.name=answer_format"]
    trainer = Trainer(config.load(recipe, overrides))
    params = jax.tree.map(lambda x: np.asarray(x) + 0.5, nnx.to_pure_dict(trainer.learner.state["policy"].params))
    trainer.close()
    manager = ocp.CheckpointManager(directory / "checkpoints")
    manager.save(1, args=ocp.args.Composite(
        params=ocp.args.StandardSave(params), opt_state=ocp.args.StandardSave({"0000": np.int32(1)}),
        meta=ocp.args.JsonSave({"step": 1}),
    ))  # fmt: skip
    manager.close()
    return directory, overrides, params


def test_a_run_of_an_older_format_is_refused_by_name(recipe, old_run):
    directory, overrides, _ = old_run
    with pytest.raises(UserError, match=f"checkpoints of format 1.*format {FORMAT}\nexport its policy"):
        Trainer(config.load(recipe, [*overrides, "train.steps=2"]))


def test_a_run_of_an_older_format_can_be_exported(old_run, tmp_path, capsys):
    directory, _, params = old_run
    assert cli.main(["export", str(directory), "--to", str(tmp_path / "policy")]) == 0
    capsys.readouterr()
    exported = nnx.to_pure_dict(nnx.state(hf.load(tmp_path / "policy")))
    jax.tree.map(np.testing.assert_array_equal, exported, params)


def test_items_are_named_by_role(recipe, tmp_path):
    overrides = [f"run.dir={tmp_path / 'run'}", "train.steps=1", "data.eval=null", "rewards.0.name=answer_format"]
    assert Trainer(config.load(recipe, overrides)).run()
    saved = tmp_path / "run" / "checkpoints" / "1"
    assert {p.name for p in saved.iterdir() if p.is_dir()} == {"policy_params", "policy_opt_state", "meta"}
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    with pytest.raises(UserError, match="no checkpoint of step 7"):
        checkpoints.restore_params({}, 7)
    checkpoints.close()
