"""Methods that need more than the core, by two processes: the metrics of one."""

import pytest
import several_runs

RECIPES = {
    "token_critic": ["variant=token_critic", "critic={optimizer: {learning_rate: 1.0e-3, eps: 1.0e-3}}"],
    "xrpo": ["variant=xrpo"],
    "lp_reg": ["variant=lp_reg"],
    "the answer's gradient": [
        "variant={name: gt_likelihood, groups: all, likelihood: log, relative_to: no_reasoning, train_on: spliced, "
        "answer_term: 1.0}"
    ],
}


@pytest.mark.exhaustive("run/test_train.py::test_several_processes_train_as_one_stop_as_one_and_go_on")
def test_recipes_by_two_processes(recipe, tmp_path):
    several_runs.check_reinforced(recipe, tmp_path, RECIPES)
