"""A budget of tokens, of methods that draw more than samples."""

import dataclasses

import pytest
from runs import numbers, opened

from grpojax.host.errors import UserError
from grpojax.run import recipe as config
from grpojax.train import train

pytestmark = pytest.mark.usefixtures("fakes")


BUDGET = ("train.steps=null", "train.tokens=700", "train.checkpoint_every=2", "train.eval_every=0",
          "optimizer.schedule=linear", "train.minibatches=2", "variant=grpo")  # fmt: skip


@pytest.mark.slow
def test_dropped_groups_and_greedy_completions_count(recipe, tmp_path):
    given = (*BUDGET, "train.tokens=200", "train.minibatches=1", f"run.dir={tmp_path}")
    one = dataclasses.replace(config.load(recipe, given), variant="remax")
    assert train(opened(one))
    lines = [line for line in numbers(tmp_path) if "reward" in line]
    assert lines[0]["sampled_tokens"] > 32 * lines[0]["completions/mean_length"]


def test_a_budget_that_warms_the_critic_alone_is_refused(recipe):
    with pytest.raises(UserError, match="critic.warmup_steps=4 of train.tokens=100: the policy would never learn"):
        config.load(recipe, ("train.tokens=100", "variant=token_critic", "critic.warmup_steps=4"))
