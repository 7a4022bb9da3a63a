"""A run that ends by the tokens it has drawn, as a report reads it."""

import pytest
from runs import numbers, opened

from grpojax.extensions.experiments.runs import read_runs
from grpojax.run import recipe as config
from grpojax.train import train

BUDGET = ("train.steps=null", "train.tokens=700", "train.checkpoint_every=2", "train.eval_every=0",
          "optimizer.schedule=linear", "train.minibatches=2", "variant=grpo")  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("fakes")
def test_a_budget_is_part_of_its_state(recipe, tmp_path):
    given = (*BUDGET, f"run.dir={tmp_path}")
    trainer = opened(config.load(recipe, given))
    assert not train(trainer, lambda updates: updates.number == 3 and trainer.control.ask("SIGTERM"))
    assert not read_runs([tmp_path])[0][0].finished
    assert train(opened(config.load(recipe, given)))
    lines = [line for line in numbers(tmp_path) if "reward" in line]
    (one,), _ = read_runs([tmp_path])
    assert one.finished
    assert one.state() == f"{len(lines)} steps, {lines[-1]['sampled_tokens']:.0f} of 700 tokens"
