"""A fake device runs the programs of methods that need more than the core."""

import fake_checks
import pytest

from grpojax.run import recipe as recipes

CRITIC = ("variant={name: ppo, kl_coef: 0.1}", "critic={layers: 1, warmup_steps: 1}", "train.reference_every=1")
ANSWERS = "groups: all, relative_to: no_reasoning, train_on: spliced, answer_term: 1.0, kl_coef: 0.1"
CASES = {
    "critic": CRITIC,
    "nthr": ("variant=nthr",),
    "answers": (f"variant={{name: gt_likelihood, {ANSWERS}}}",),
    "lp_reg": ("variant={name: lp_reg, kl_coef: 0.1}",),
}
policy = fake_checks.policy


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_it_takes_and_gives_for_every_program_what_a_real_one_does(recipe, policy, tmp_path, case):
    config = recipes.load(recipe, [f"run.dir={tmp_path}", "rewards.0.name=tiny_run:parity", *CASES[case]])
    fake_checks.check_every(config, policy)
