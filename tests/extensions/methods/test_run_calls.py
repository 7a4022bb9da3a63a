"""What is said of a run's programs without running any is what methods that need more call them with."""

import pytest
import run_calls

CRITIC = [
    "variant={name: ppo, kl_coef: 0.1}",
    "critic={layers: 1, warmup_steps: 1}",
    "train.reference_every=1",
    "train.minibatches=2",
    "rollout.weights=int8",
    "rollout.uncorrected=true",
]
CASES = {
    "kl, critic": CRITIC,
    "nthr": ["variant={name: nthr, kl_coef: 0.1}", "train.ppo_epochs=2"],
    "gt_likelihood": [
        "variant={name: gt_likelihood, train_on: spliced, groups: all, answer_term: 1.0, relative_to: no_reasoning}",
        "train.steps=null",
        "train.tokens=400",
    ],
    "critic, by tokens": ["variant=ppo", "critic.warmup_steps=1", "train.steps=null", "train.tokens=400"],
    "distill": ["variant={name: distill, teacher: FOLDER}"],
    "remax": ["variant=remax"],
    "lp_reg": ["variant=lp_reg", "train.minibatches=2"],
    "xrpo": ["variant=xrpo", "rollout.sample_allocation={probe: 2, phases: 2, most: 4}"],
    "overlap": ["variant={name: grpo, importance: truncate}", "rollout.overlap=0.5"],
}


@pytest.mark.slow
@pytest.mark.in_ci("kl, critic", "nthr")
@pytest.mark.parametrize("name", CASES)
def test_a_runs_programs_are_called_with_what_is_said_of_them(recipe, tmp_path, monkeypatch, name):
    run_calls.check(run_calls.record(monkeypatch), recipe, tmp_path, CASES[name], devices=1 if name == "nthr" else 2)
