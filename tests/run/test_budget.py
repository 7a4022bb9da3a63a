"""A run that ends by the tokens it has drawn: where it stops, what its schedules follow, and how it goes on."""

import fake_device
import numpy as np
import pytest
import spies
from runs import numbers, opened

from grpojax.host.errors import UserError
from grpojax.run import recipe as config
from grpojax.train import train

pytestmark = pytest.mark.usefixtures("fakes")

BUDGET = ("train.steps=null", "train.tokens=700", "train.checkpoint_every=2", "train.eval_every=0",
          "optimizer.schedule=linear", "train.minibatches=2", "variant=grpo")  # fmt: skip


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory):
    directory = tmp_path_factory.mktemp("budget") / "whole"
    with fake_device.in_place():
        assert train(opened(config.load(recipe, (*BUDGET, f"run.dir={directory}"))))
    return directory


@pytest.mark.slow
def test_it_ends_with_the_step_that_reaches_the_budget(run):
    lines = [line for line in numbers(run) if "reward" in line]
    drawn = np.array([line["sampled_tokens"] for line in lines])
    assert drawn[-1] >= 700 > drawn[-2] and len(lines) > 3
    np.testing.assert_allclose(np.diff(drawn, prepend=0), [32 * line["completions/mean_length"] for line in lines])
    assert (run / "done").exists()


@pytest.mark.slow
def test_it_goes_on_as_if_it_had_not_stopped(recipe, run, tmp_path):
    trainer = opened(config.load(recipe, (*BUDGET, f"run.dir={tmp_path}")))
    assert not train(trainer, lambda updates: updates.number == 3 and trainer.control.ask("SIGTERM"))
    assert trainer.state.step == 3
    assert not (tmp_path / "done").exists()
    assert train(opened(config.load(recipe, (*BUDGET, f"run.dir={tmp_path}"))))
    assert [x for x in numbers(tmp_path) if "reward" in x] == [x for x in numbers(run) if "reward" in x]


@pytest.mark.slow
def test_schedules_follow_the_share_that_is_used(recipe, tmp_path, monkeypatch):
    trainer = opened(config.load(recipe, (*BUDGET, f"run.dir={tmp_path}")))
    seen = []
    update = spies.update_by(
        trainer, lambda state, frozen, packed: seen.append(frozen["progress"]) or update(state, frozen, packed)
    )
    assert train(trainer)
    drawn = [0, *(line["sampled_tokens"] for line in numbers(tmp_path) if "reward" in line)]
    ends = np.minimum(np.array(drawn) / 700, 1)
    want = [x for a, b in zip(ends, ends[1:], strict=False) for x in (a, (a + b) / 2)]
    np.testing.assert_allclose(seen, want, rtol=1e-6)


def test_steps_or_tokens(recipe):
    for given in (("train.tokens=5", "train.steps=3"), ("train.steps=null",)):
        with pytest.raises(UserError, match="give one of them, and null for the other"):
            config.load(recipe, given)
    budget = config.load(recipe, ("train.tokens=5",)).train
    assert (budget.steps, budget.tokens) == (None, 5)  # an override takes the other's place
    assert config.load(recipe, ("train={tokens: 5}",)).train == budget
    with pytest.raises(UserError, match="tokens=0: must be at least 1"):
        config.load(recipe, ("train.steps=null", "train.tokens=0"))


@pytest.mark.slow
def test_a_budget_that_is_spent_already_is_refused(recipe, tmp_path):
    given = (*BUDGET, "optimizer.schedule=constant", "train.tokens=300", f"run.dir={tmp_path}")
    assert train(opened(config.load(recipe, given)))
    assert train(opened(config.load(recipe, given)))  # of its own budget it was over
    with pytest.raises(UserError, match=r"train.tokens=100: the run in .* has drawn \d+ already"):
        opened(config.load(recipe, (*given, "train.tokens=100")))
