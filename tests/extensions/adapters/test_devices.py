"""The programs of runs with adapters: what they are called with, and where their results lie."""

import collectives
import pytest
import run_calls

CASES = {
    "adapters": ["model.adapter={rank: 2}", "variant={name: grpo, kl_coef: 0.1}"],
    "adapters that are not merged": ["model.adapter={rank: 2, merged: false}", "mesh.data=2", "mesh.fsdp=1"],
}


@pytest.mark.slow
@pytest.mark.in_ci("adapters")
@pytest.mark.parametrize("name", CASES)
def test_a_runs_programs_are_called_with_what_is_said_of_them(recipe, tmp_path, monkeypatch, name):
    run_calls.check(run_calls.record(monkeypatch), recipe, tmp_path, CASES[name])


@pytest.mark.exhaustive("run/test_collectives.py::test_results_lie_where_they_are_said_to")
def test_results_lie_where_they_are_said_to(recipe, tmp_path):
    given = ("model.adapter={rank: 4}", "model.dtype=bfloat16")
    assert collectives.check(recipe, f"run.dir={tmp_path}", *given) == {"update", "score", "rollout", "reshard"}
