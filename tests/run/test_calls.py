"""What is said of a run's programs without running any is what the trainer calls them with."""

import pytest
import run_calls

CASES = {
    "clip_cov": ["variant=clip_cov", "train.ppo_epochs=2"],
    "gtpo": ["variant=gtpo"],
    "adapters": ["model.adapter={rank: 2}", "variant={name: grpo, kl_coef: 0.1}"],
    "adapters that are not merged": ["model.adapter={rank: 2, merged: false}", "mesh.data=2", "mesh.fsdp=1"],
    "router_replay": ["model.path=MIXTURE", "rollout.router_replay=true", "train.ppo_epochs=2"],
}


@pytest.mark.slow
@pytest.mark.in_ci("clip_cov")
@pytest.mark.parametrize("name", CASES)
def test_a_runs_programs_are_called_with_what_is_said_of_them(recipe, tmp_path, monkeypatch, name):
    run_calls.check(run_calls.record(monkeypatch), recipe, tmp_path, CASES[name])
