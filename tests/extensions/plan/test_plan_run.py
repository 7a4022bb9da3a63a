"""A step and a run on paper: how often each program runs, and what they take."""

import math

import pytest

from grpojax.extensions.plan import plan_run
from grpojax.extensions.plan.plan_calls import PlannedCall, a_step
from grpojax.extensions.plan.plan_report import ProgramReport
from grpojax.run import recipe as recipes


def load(recipe, tmp_path, *more):
    keep = [f"run.dir={tmp_path}", "data.validation=null", "rewards.0.name=tiny_run:parity", "train.steps=1"]
    return recipes.load(recipe, [*keep, *more])


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["variant={name: grpo, kl_coef: 0}"], {"update": 1}),
        (["variant={name: grpo, kl_coef: 0.1}"], {"score": 1, "update": 1}),
        (
            ["variant={name: grpo, kl_coef: 0.1}", "train.minibatches=2", "train.ppo_epochs=3"],
            {"score": 2, "reference score": 2, "update": 6},
        ),
        (["variant=gtpo"], {"score with entropy": 1, "update": 1}),
        (["variant=nthr"], {"score": 1, "influence": 4, "update": 1}),
        # by the policy as it was before the first update, and for its mask as it is before each
        (["variant=clip_cov", "train.ppo_epochs=2"], {"score": 3, "covariance mask": 2, "update": 2}),
        # the reward has the KL
        (["variant={name: rloo, kl_coef: 0.1}"], {"score": 1, "reference score": 1, "update": 1}),
        (["variant={name: distill, teacher: t}"], {"score": 1, "teacher": 1, "update": 1}),
        (["variant=ppo"], {"critic": 1, "update": 1}),
        (["variant=remax"], {"greedy": 1, "update": 1}),
        (
            ["variant=xrpo", "rollout.sample_allocation={probe: 1, phases: 3}"],
            {"score": 1, "rollout phase": 3, "update": 1},
        ),
    ],
)
@pytest.mark.slow
def test_what_a_step_runs_is_what_its_variant_needs(recipe, tmp_path, more, expected):
    counts = {name: call.times for name, call in a_step(load(recipe, tmp_path, "model.dtype=bfloat16", *more)).items()}
    assert counts == expected | {"reshard": 1, "rollout": 1}


def of_a_step(**programs):
    """What `grpojax.extensions.plan.plan_calls.a_step` says of programs: ``name=(phase, times)``."""
    return {
        name.replace("_", " "): PlannedCall(program=None, args=(), phase=phase, times=times)
        for name, (phase, times) in programs.items()
    }


STEP = of_a_step(reshard=("rollout", 1), rollout=("rollout", 1), score=("scores", 1), update=("update", 1))


def report(name, **seconds):
    return ProgramReport(name=name, compile_s=1.0, seconds=seconds)


def test_chips_set_apart_take_the_longer_of_rollout_and_the_rest(recipe, tmp_path):
    reports = [
        report("rollout", HBM=5.0),
        report("reshard", ICI=2.0),
        report("score", HBM=1.0),
        report("update", HBM=4),
    ]
    known, more = {}, []
    for ahead in (0, 1):
        for rollout in (0, 2):
            more = [f"rollout.ahead={ahead}", f"mesh.rollout={rollout}", "variant={name: grpo, kl_coef: 0.1}"]
            run = plan_run.bound(load(recipe, tmp_path, *more), STEP, reports, 8)
            known[ahead, rollout] = run.step
            assert ("the rollout runs at the same time" in plan_run.format_bound(run)) == (ahead == 1 and rollout == 2)
    assert known == {(0, 0): 12.0, (0, 2): 12.0, (1, 0): 12.0, (1, 2): 7.0}
    refused = [report("rollout"), *reports[1:]]
    assert math.isnan(plan_run.bound(load(recipe, tmp_path, *more), STEP, refused, 8).step)


def test_a_run_is_the_sum_of_its_phases(recipe, tmp_path):
    config = load(recipe, tmp_path, "variant={name: grpo, kl_coef: 0.1}", "train.minibatches=2", "train.steps=1800")
    reports = [
        report("update", compute=2.0, HBM=1.0, ICI=3.0),
        report("score", compute=0.5, HBM=0.25),
        report("rollout", compute=0.1, HBM=4.0),
        report("reshard", HBM=0.1, ICI=0.5),
    ]
    more = {"score": ("scores", 4), "update": ("update", 2)}
    run = plan_run.bound(config, STEP | of_a_step(**more), reports, chips=8)
    assert run.phases == {"rollout": (4.5, "HBM"), "scores": (2.0, "compute"), "update": (6.0, "ICI")}
    assert run.step == 12.5 and run.hours == pytest.approx(1800 * 12.5 / 3600)
    assert plan_run.format_bound(run).splitlines() == [
        "a step takes at least 12.5 s: rollout 4.5 s (HBM), scores 2 s (compute), update 6 s (ICI)",
        "1800 steps take at least 6.25 h on 8 chips, without evaluations, compiling, judging, saving",
    ]


def test_a_run_by_tokens_has_as_many_steps_as_they_are_at_the_longest(recipe, tmp_path):
    config = load(recipe, tmp_path, "train.steps=null", "train.tokens=1001")
    each = config.rollout.prompts * config.rollout.group * config.rollout.max_tokens
    assert plan_run.bound(config, STEP, [], chips=1).steps == math.ceil(1001 / each)


@pytest.mark.slow
def test_steps_in_which_a_critic_learns_by_itself_are_left_out(recipe, tmp_path):
    """They take less than the others, and what a run takes at least must not be more than it takes."""
    critic = ["variant=ppo", "critic.warmup_steps=3", "train.steps=10", "train.minibatches=2"]
    reports = [report("update", compute=5.0), report("critic update", compute=1.0), report("critic", compute=0.5)]
    config = load(recipe, tmp_path, *critic)
    run = plan_run.bound(config, a_step(config), reports, chips=1)
    assert run.step == 2 * 5.5 and run.steps == 7
