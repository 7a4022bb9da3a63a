"""Runs that collapse are told in time, and by option stopped; healthy ones are left alone."""

import json

import pytest
import runs
from refusals import RECIPE
from runs import numbers

from grpojax.host.errors import UserError
from grpojax.run import recipe as config
from grpojax.run.alarms import Limits
from grpojax.run.watch import KEY
from grpojax.train import train

RINGS, ALARM = Limits(jump=0.0, jump_nats=-100.0), f"{KEY}entropy_jump"


def load(recipe, directory, *overrides):
    short = ("train.steps=7", "train.keep=1", "train.checkpoint_every=2", "data.validation=null", "variant.kl_coef=0",
             "rewards.0.name=tiny_run:parity", "rollout.max_tokens=4")  # fmt: skip
    return config.load(recipe, [f"run.dir={directory}", *short, *overrides])


def trainer_of(recipe, at):
    """A run whose entropy rings at a step, or later if it was over by then."""
    trainer = runs.opened(recipe, eos_ids=())
    quiet, plain = trainer.journal.watch.limits, trainer.journal.watch.note

    def note(number, values):
        trainer.journal.watch.limits = RINGS if number >= at else quiet
        return plain(number, values)

    trainer.journal.watch.note = note
    return trainer


def alarms(directory):
    return [(line["step"], name) for line in numbers(directory) for name in line if name.startswith(KEY)]


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_an_alarm_keeps_the_checkpoint_from_before_it_and_by_option_stops_the_run(recipe, tmp_path):
    whole, folder = trainer_of(load(recipe, tmp_path / "whole"), at=5), tmp_path / "run"
    assert train(whole) and alarms(tmp_path / "whole") == [(5, ALARM)]  # by default it goes on
    assert whole.store.checkpoints.steps() == [4, 7]
    trainer = trainer_of(load(recipe, folder, "train.on_collapse=stop"), at=5)
    told = f"{folder} stopped at step 5: entropy_jump: .*\n.*grpojax export {folder} --step 4 --to FOLDER; train.on_c"
    with pytest.raises(UserError, match=told):
        train(trainer)
    assert trainer.store.checkpoints.steps() == [4, 5] and trainer.state.step == 5
    failed = json.loads((folder / "failed").read_text())
    assert failed["step"] == 5 and failed["reason"].startswith("stopped at step 5: entropy_jump: ")
    with pytest.raises(UserError, match=told):  # the same command says the same
        trainer_of(load(recipe, folder, "train.on_collapse=stop"), at=5)
    again = trainer_of(load(recipe, folder), at=5)
    assert again.state.step == 5 and train(again) and not (folder / "failed").exists()
    assert numbers(folder) == numbers(tmp_path / "whole")
    assert again.store.checkpoints.steps() == [4, 7]  # held on to by the run that went on


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_without_a_checkpoint_from_before_it_there_is_none_to_go_on_from(recipe, tmp_path):
    once = ("train.on_collapse=stop", "train.checkpoint_every=0")
    with pytest.raises(UserError, match="stopped at step 3: .*\nno checkpoint is from before it.*checkpoint_every"):
        train(trainer_of(load(recipe, tmp_path / "run", *once), at=3))
    assert train(trainer_of(load(recipe, tmp_path / "last", *once, "train.steps=2"), at=2))  # nothing left to stop


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_the_best_checkpoint_is_the_one_to_go_on_from(recipe, tmp_path):
    options = (
        f"data.validation={recipe.parent / 'sums.jsonl'}",
        "train.eval_every=2",
        "train.on_collapse=stop",
        "train.steps=8",
    )
    trainer = trainer_of(load(recipe, tmp_path / "run", *options), at=7)
    found = {2: 0.5, 4: 0.6, 6: 0.55}
    trainer.held_out.evaluate = lambda state: ({"eval/reward": found.get(state.step, 0.1)},) * 2
    with pytest.raises(UserError, match="--step 4 "):
        train(trainer)
    assert trainer.store.checkpoints.steps() == [4, 7]


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_an_alarm_in_an_evaluation_finds_the_checkpoint_before_it(recipe, tmp_path):
    """The save comes before its evaluation, and may take what it keeps from the one before."""
    options = (f"data.validation={recipe.parent / 'sums.jsonl'}", "train.eval_every=4", "train.on_collapse=stop")
    trainer = runs.opened(load(recipe, tmp_path / "run", *options))
    trainer.held_out.evaluate = lambda state: ({"eval/reward": float("nan")},) * 2  # which is best is not known

    def note(number, values):
        trainer.journal.watch.rings = (
            {"held_out_falling": "it fell; stop"} if number == 4 and "eval/reward" in values else {}
        )
        return {}

    trainer.journal.watch.note = note
    with pytest.raises(UserError, match="stopped at step 4: held_out_falling: it fell.*\n.*--step 2 "):
        train(trainer)
    assert trainer.store.checkpoints.steps() == [2, 4]


# --- the built-in policy


def follow(directory, *overrides):
    """Trains the built-in policy on stories that it knows until what is right held out has halved from its best, or to
    the end; in order the alarms and that accuracy, as ``(metric, value)``."""
    stories = ("data.train=builtin:arithmetic/train.jsonl", "data.validation=builtin:arithmetic/test.jsonl")
    short = ("data.test=null", "train.checkpoint_every=0", "train.eval_limit=128", "tracking.samples=false")
    rate = "optimizer.learning_rate=3e-4"
    recipe = config.load(RECIPE, [f"run.dir={directory}", *stories, *short, rate, *overrides])
    trainer, found = runs.opened(recipe), []
    plain = trainer.held_out.evaluate

    def evaluate(state):
        values, scores = plain(state)
        found.append(values["eval/accuracy"])
        if found[-1] <= max(found) / 2:
            trainer.control.ask("it has halved")
        return values, scores

    trainer.held_out.evaluate = evaluate
    train(trainer)
    told = [(k, x) for line in numbers(directory) for k, x in line.items()]
    return [(k, x) for k, x in told if k.startswith(KEY) or k == "eval/accuracy"], found[-1] <= max(found) / 2


@pytest.mark.exhaustive("run/test_watch.py::test_each_kind_of_trouble_is_named_once_with_its_remedy")
def test_a_collapse_is_told_before_what_is_right_held_out_has_halved(tmp_path):
    """With a learning rate that is 50 times as large."""
    told, halved = follow(tmp_path / "run", "optimizer.learning_rate=1.5e-2", "train.eval_every=1", "train.steps=30")
    assert halved, told
    first = next(n for n, (name, _) in enumerate(told) if name.startswith(KEY))
    accuracies = [x for name, x in told[:first] if name == "eval/accuracy"]
    assert told[first][0] == ALARM and accuracies[-1] > max(accuracies) / 2, told


@pytest.mark.exhaustive("run/test_watch.py::test_noise_alone_rings_nothing")
def test_a_healthy_run_rings_nothing(tmp_path):
    told, _ = follow(tmp_path / "run", "train.steps=12", "train.eval_every=4")
    assert [name for name, _ in told] == ["eval/accuracy"] * 4 and told[-1][1] > 0.9, told
