"""What a run calls on devices that compute nothing is what it calls on real ones."""

import collections

import pytest
import run_calls
import spies
from runs import opened

from grpojax.run import dry
from grpojax.run import recipe as recipes
from grpojax.train import train

CASES = {
    "clip_cov": ["variant=clip_cov", "train.ppo_epochs=2"],
    "gtpo": ["variant=gtpo"],
    "router_replay": ["model.path=MIXTURE", "rollout.router_replay=true", "train.ppo_epochs=2"],
}


@pytest.mark.slow
@pytest.mark.in_ci("clip_cov")
@pytest.mark.parametrize("name", CASES)
def test_a_runs_programs_are_called_with_what_is_said_of_them(recipe, tmp_path, monkeypatch, name):
    run_calls.check(run_calls.record(monkeypatch), recipe, tmp_path, CASES[name])


@pytest.mark.in_ci("grpo")
@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["variant={name: grpo, kl_coef: 0.1}", "train.minibatches=2", "train.ppo_epochs=2"],
        ["variant=gtpo"],
        ["variant={name: clip_cov, kl_coef: 0.1}", "train.ppo_epochs=2"],
        ["variant={name: rloo, kl_coef: 0.1}"],
    ],
    ids=["grpo", "gtpo", "clip_cov", "rloo"],
)
def test_a_dry_step_calls_each_program_as_often_as_a_real_one(recipe, tmp_path, monkeypatch, more):
    keep = [f"run.dir={tmp_path}", "data.validation=null", "rewards.0.name=tiny_run:parity", "train.steps=1"]
    config = recipes.load(recipe, [*keep, *more])
    seen, trainer = spies.record(monkeypatch), opened(config, eos_ids=())
    run = dry.run_of(config, trainer.policy.shape)
    said = collections.Counter(call.program.name for calls in run.learn(1, run.pack()) for call in calls)
    assert train(trainer)
    real = collections.Counter(name for name, _ in seen)
    assert {name: real[name] for name in said} == said
