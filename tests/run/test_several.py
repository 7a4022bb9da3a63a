"""Runs by two processes have the metrics of one process with as many devices, or start nothing."""

import pytest
import runs
import several_runs
from runs import start

RECIPES = {
    "grpo": ["variant={name: grpo, kl_coef: 0.01}", "train.minibatches=2"],
    "dapo": ["variant=dapo", "rollout.group=2"],
}


@pytest.mark.exhaustive("run/test_train.py::test_several_processes_train_as_one_stop_as_one_and_go_on")
def test_recipes_by_two_processes(recipe, tmp_path):
    several_runs.check_reinforced(recipe, tmp_path, RECIPES)


@pytest.mark.exhaustive("host/test_agreement.py::test_two_processes")
def test_processes_that_disagree_start_nothing(recipe, tmp_path):
    pair = [
        start(recipe, tmp_path / "run", f"train.seed={i}", "mesh.fsdp=2", env=env)
        for i, env in enumerate(runs.together(2))
    ]
    for process in pair:
        said = process.communicate(timeout=300)[0]
        assert process.returncode == 2 and "process 1" in said and "train.seed: 0 -> 1" in said, said
    assert not (tmp_path / "run" / "config.json").exists()
