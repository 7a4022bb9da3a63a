"""What goes wrong in a long run, and what must hold then: nothing is lost beyond the last save, and it is said why."""

import errno
import itertools
import json
import os
import shutil
import signal
import sys
import types

import fake_device
import jax
import numpy as np
import pytest
import spies
from runs import Full, add_step, numbers, opened

from grpojax import train as train_module
from grpojax.cli import main as cli
from grpojax.host.errors import UserError
from grpojax.records import checkpoint
from grpojax.records import metrics as tracking
from grpojax.records.samples import read_samples
from grpojax.run import learn
from grpojax.run import recipe as config
from grpojax.train import train

pytestmark = pytest.mark.usefixtures("fakes")


def load(recipe, directory, *overrides):
    short = (
        "train.steps=4",
        "train.checkpoint_every=1",
        "train.eval_every=0",
        "data.validation=null",
        "rewards.0.name=answer_format",
    )
    return config.load(recipe, [f"run.dir={directory}", *short, *overrides])


EVEN_TOO = (
    "rewards=[{name: 'tiny_run:length'}, {name: format, weight: 0, options: {pattern: '.*[02468].*'}, label: even}]"
)


@pytest.fixture(scope="module")
def unbroken(recipe, tmp_path_factory):
    """The metrics of a run that nothing happened to."""
    directory = tmp_path_factory.mktemp("runs") / "unbroken"
    with fake_device.in_place():
        assert train(opened(load(recipe, directory)))
    return numbers(directory)


def poison(trainer, steps):
    """Has the updates of these steps see a NaN in the policy's gradient."""

    def train_step(state, frozen, packed):
        if trainer.state.step + 1 in steps:
            packed = packed.with_arrays({"advantages": packed.arrays["advantages"] * np.float32("nan")})
        return plain(state, frozen, packed)

    plain = spies.update_by(trainer, train_step)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(recipe, tmp_path):
    """Two that are not in a row are none too many."""
    trainer = opened(load(recipe, tmp_path / "run", "train.max_skipped=2"))
    poison(trainer, {2, 4})
    assert train(trainer)
    skipped = [line["skipped_updates"] for line in tracking.read_metrics(tmp_path / "run") if "reward" in line]
    assert skipped == [0.0, 1.0, 0.0, 1.0]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(trainer.state.networks["policy"].params))
    assert int(trainer.state.networks["policy"].step) == 2


@pytest.mark.slow
def test_many_such_gradients_in_a_row_stop_the_run_at_the_last_good_state(recipe, tmp_path):
    trainer = opened(load(recipe, tmp_path / "run", "train.max_skipped=2", "train.checkpoint_every=0"))
    poison(trainer, {2, 3, 4})
    with pytest.raises(UserError, match="2 updates in a row had a gradient that is not finite.*\nlower optimizer"):
        train(trainer)
    assert trainer.store.checkpoints.steps() and int(trainer.state.networks["policy"].step) == 1
    assert trainer.state.rollouts == 3  # the fourth was under way, and is drawn again


@pytest.mark.slow
def test_a_full_disk_costs_one_checkpoint(recipe, tmp_path, unbroken, caplog):
    trainer = opened(load(recipe, tmp_path / "run"))
    trainer.store.checkpoints._manager = Full(trainer.store.checkpoints._manager, {2})
    assert train(trainer)
    assert "No space left on device" in caplog.text
    assert trainer.store.checkpoints.steps()[-1] == 4
    assert numbers(tmp_path / "run") == unbroken


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Full", "Late"])
def test_a_last_save_that_fails_is_made_again(recipe, tmp_path, unbroken, caplog, kind):
    trainer = opened(load(recipe, tmp_path / "run"))
    trainer.store.checkpoints._manager = globals()[kind](trainer.store.checkpoints._manager, {4})
    assert train(trainer)
    assert caplog.text.count("a save failed") == 1
    assert trainer.store.checkpoints.steps()[-1] == 4
    assert numbers(tmp_path / "run") == unbroken


@pytest.mark.slow
def test_a_disk_full_to_the_end_is_said_and_the_run_goes_on_from_the_last_save(recipe, tmp_path, unbroken, monkeypatch):
    trainer = opened(load(recipe, tmp_path / "run"))
    trainer.store.checkpoints._manager = Full(trainer.store.checkpoints._manager, {4})
    plain = checkpoint._manager_of  # a manager whose save failed is replaced by another
    with monkeypatch.context() as full:
        full.setattr(checkpoint, "_manager_of", lambda *given: Full(plain(*given), {1}))
        with pytest.raises(UserError, match="the last save failed.*No space left.*\n.*goes on from step 3") as raised:
            train(trainer)
    assert raised.value.status == 1  # no mistake of the command's: who watches it starts it again
    assert not (tmp_path / "run" / "done").exists()
    again = opened(load(recipe, tmp_path / "run"))
    assert again.state.step == 3 and train(again)
    assert (tmp_path / "run" / "done").exists()
    assert numbers(tmp_path / "run") == unbroken


@pytest.mark.slow
def test_a_w_and_b_that_cannot_start_is_said_before_anything_is_compiled(recipe, tmp_path, monkeypatch):
    """One that starts is ended with the run."""

    def refuse(**given):
        raise RuntimeError("No API key configured. Use `wandb login` to log in.")

    wandb = types.SimpleNamespace(init=refuse)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with monkeypatch.context() as inside:
        inside.setattr("grpojax.run.opening._started", lambda *args: pytest.fail("it goes on"))
        with pytest.raises(UserError, match="tracking.wandb='mine': .* No API key configured.*\n`wandb login` or"):
            opened(load(recipe, tmp_path / "run", "tracking.wandb=mine"))
    ended = []
    wandb.init = lambda **given: types.SimpleNamespace(log=lambda *args, **steps: None, finish=lambda: ended.append(1))
    trainer = opened(load(recipe, tmp_path / "run", "tracking.wandb=mine", "train.steps=1"))
    assert not ended and train(trainer) and ended == [1]


class Late(Full):
    """A file system on which some saves fail after they were begun, which the next wait or save finds out."""

    def _fail(self):
        if self._count in self._saves:
            raise OSError(errno.EIO, "Input/output error")

    def save(self, *args, **kwargs):
        self._fail()
        self._count += 1
        return self._manager.save(*args, **kwargs)

    def wait_until_finished(self):
        self._fail()
        return self._manager.wait_until_finished()


@pytest.mark.slow
def test_a_save_that_failed_late_does_not_cost_the_next_one(recipe, tmp_path, unbroken, caplog):
    trainer = opened(load(recipe, tmp_path / "run"))
    trainer.store.checkpoints._manager = Late(trainer.store.checkpoints._manager, {3})
    assert train(trainer)
    assert caplog.text.count("a save failed") == 1 and "Input/output error" in caplog.text
    assert trainer.store.checkpoints.steps()[-1] == 4
    assert numbers(tmp_path / "run") == unbroken


@pytest.mark.slow
def test_a_stop_with_an_error_behind_it_is_saved(recipe, tmp_path, monkeypatch):
    """What the metrics of the last step say is found out after the loop."""
    trainer = opened(load(recipe, tmp_path / "run", "train.checkpoint_every=0"))
    plain, told = train_module._rescue, []

    def rescue(run):
        if not told:
            told.append(1)
            raise UserError("too many updates in a row")
        return plain(run)

    monkeypatch.setattr(train_module, "_rescue", rescue)
    with pytest.raises(UserError, match="too many updates"):
        train(trainer, lambda *_: trainer.state.step == 2 and trainer.control.ask("SIGTERM"))
    assert trainer.store.checkpoints.steps() == [2]


@pytest.mark.slow
def test_a_checkpoint_directory_made_read_only(recipe, tmp_path, unbroken, caplog, monkeypatch):
    """Nothing can be made in it while steps 2 and 3 are saved (a file system's permissions do not bind root)."""
    trainer = opened(load(recipe, tmp_path / "run"))
    mkdir = os.mkdir

    def refuse(path, *args, **kwargs):
        if trainer.state.step in (2, 3) and f"{trainer.store.checkpoints.directory}/" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return mkdir(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", refuse)
    assert train(trainer)
    assert caplog.text.count("Permission denied") >= 2
    assert set(trainer.store.checkpoints.steps()) <= {1, 4} and 4 in trainer.store.checkpoints.steps()
    assert numbers(tmp_path / "run") == unbroken


PHASES = {
    "rollout": lambda trainer: (trainer.policy, "sample"),
    "reward": lambda trainer: (trainer.source.rewards, "combine"),
    "update": lambda trainer: (learn, "update"),
    "save": lambda trainer: (trainer.store.checkpoints, "save"),
}


def at(monkeypatch, trainer, phase, do, call=2):
    """Has ``do()`` happen within a phase, as a rule of step 2."""
    owner, name = PHASES[phase](trainer)
    plain, calls = getattr(owner, name), itertools.count(1)

    def hooked(*args, **kwargs):
        if next(calls) == call:
            do()
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, hooked)


def send(*signals):
    for s in signals:
        os.kill(os.getpid(), s)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.slow
def test_sigterm_in_any_phase_saves_and_loses_nothing(recipe, tmp_path, unbroken, monkeypatch, phase):
    trainer = opened(load(recipe, tmp_path / "run", "train.checkpoint_every=2"))
    at(monkeypatch, trainer, phase, lambda: send(signal.SIGTERM), call=1 if phase == "save" else 2)
    assert not train(trainer)
    again = opened(load(recipe, tmp_path / "run", "train.checkpoint_every=2"))
    assert again.state.step == (1 if phase == "rollout" else 2)  # a rollout in flight is dropped
    assert train(again)
    assert numbers(tmp_path / "run") == unbroken


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.slow
def test_a_second_sigint_stops_at_once_and_loses_one_save_interval_at_most(
    recipe, tmp_path, unbroken, monkeypatch, phase
):
    trainer = opened(load(recipe, tmp_path / "run"))
    at(monkeypatch, trainer, phase, lambda: send(signal.SIGINT, signal.SIGINT), call=3)
    with pytest.raises(KeyboardInterrupt):
        train(trainer)
    again = opened(load(recipe, tmp_path / "run"))
    assert again.state.step in (1, 2) and train(again)
    assert numbers(tmp_path / "run") == unbroken


@pytest.mark.exhaustive("run/test_faults.py::test_sigterm_in_any_phase_saves_and_loses_nothing")
def test_sigterm_in_dynamic_sampling_drops_all_of_the_step(recipe, tmp_path):
    sampling = (
        EVEN_TOO,
        "filter={metric: even, max_rollouts: 3}",
        "train.steps=3",
    )
    assert train(opened(load(recipe, tmp_path / "unbroken", *sampling)))
    trainer = opened(load(recipe, tmp_path / "run", *sampling))
    at(trainer, "rollout", lambda: send(signal.SIGTERM), call=4)  # of step 2, which has drawn once before
    assert not train(trainer)
    assert trainer.source.rollouts == 4 > trainer.state.rollouts
    again = opened(load(recipe, tmp_path / "run", *sampling))
    assert again.state.step == 1 and train(again)
    assert numbers(tmp_path / "run") == numbers(tmp_path / "unbroken")


@pytest.mark.slow
def test_a_reward_worker_killed_under_the_run_changes_nothing(recipe, tmp_path):
    rewards = {
        "unbroken": "{name: 'tiny_run:length', label: length}",
        "run": f"{{name: 'tiny_run:dies_once', label: length, options: {{marker: {tmp_path / 'died'}}}}}",
    }
    for name, reward in rewards.items():
        assert train(opened(load(recipe, tmp_path / name, f"rewards=[{reward}]", "train.steps=2")))
    assert (tmp_path / "died").exists()
    assert numbers(tmp_path / "run") == numbers(tmp_path / "unbroken")


def test_a_trainer_that_cannot_start_lets_go_of_the_directory(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "Metrics", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        opened(load(recipe, tmp_path / "run"))
    monkeypatch.undo()
    opened(load(recipe, tmp_path / "run")).close()


@pytest.mark.parametrize("every", [1, 0])
@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.slow
def test_a_directory_that_is_moved_away_during_the_run_ends_it_with_its_state_saved(
    recipe, tmp_path, at, every, unbroken
):
    """A checkpoint that went with it is saved again, and the same command goes on."""
    run, moved = tmp_path / "run", tmp_path / "moved"
    trainer = opened(load(recipe, run, f"train.checkpoint_every={every}"))
    done = []

    def move(updates):
        done.append(updates.number)
        if len(done) == at:
            trainer.store.checkpoints.wait()
            run.rename(moved)

    with pytest.raises(UserError, match="was removed or moved away during the run.*\nthe state of step") as raised:
        train(trainer, move)
    assert raised.value.status == 1 and not (run / "done").exists() and len(done) == at
    again = opened(load(recipe, run, f"train.checkpoint_every={every}"))
    assert again.state.step == at and train(again) and (run / "done").exists()
    assert numbers(moved)[:at] + numbers(run) == unbroken


@pytest.mark.slow
def test_a_checkpoint_directory_removed_under_the_run(recipe, tmp_path, unbroken):
    trainer = opened(load(recipe, tmp_path / "run"))

    def remove(updates):
        if updates.number == 3:
            trainer.store.checkpoints.wait()
            shutil.rmtree(tmp_path / "run" / "checkpoints")

    try:
        assert train(trainer, remove)
    except UserError as e:
        assert "save failed" in str(e)
    again = opened(load(recipe, tmp_path / "run"))
    if again.state.step < 4:
        assert train(again)
    else:
        again.close()
    assert numbers(tmp_path / "run") == unbroken


@pytest.mark.slow
def test_a_broken_newest_checkpoint_falls_back_to_the_one_before(recipe, tmp_path, unbroken, caplog):
    assert train(opened(load(recipe, tmp_path / "run")))
    for file in (tmp_path / "run" / "checkpoints" / "4" / "policy_params").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    again = opened(load(recipe, tmp_path / "run"))
    assert again.state.step == 3 and "step 4 cannot be read" in caplog.text
    assert (tmp_path / "run" / "broken" / "4").is_dir()
    assert train(again)
    assert numbers(tmp_path / "run") == unbroken


def test_data_that_changed_is_refused(recipe, tmp_path):
    rows = (recipe.parent / "sums.jsonl").read_text().splitlines()
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(rows))
    trainer = opened(load(recipe, tmp_path / "run", f"data.train={data}"))
    trainer.close()
    add_step(tmp_path / "run")
    data.write_text("\n".join(rows[:-1] + [json.dumps({"question": "9+9=", "answer": "18"})]))
    with pytest.raises(UserError, match="the rows of data.train have changed"):
        opened(load(recipe, tmp_path / "run", f"data.train={data}"))


def test_a_directory_in_use_is_refused(recipe, tmp_path):
    first = opened(load(recipe, tmp_path / "run"))
    with pytest.raises(UserError, match="in use by another process"):
        opened(load(recipe, tmp_path / "run"))
    first.close()


def test_out_of_memory_names_the_knobs(recipe, tmp_path):
    trainer = opened(load(recipe, tmp_path / "run"))

    def train_step(state, frozen, packed):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes")

    spies.update_by(trainer, train_step)
    with pytest.raises(
        UserError, match="train.microbatches.*model.remat.*rollout.decode_slots.*in a new run.*rollout.max_tokens"
    ):
        train(trainer)


def test_out_of_memory_before_the_first_step_names_them_too(recipe, tmp_path, monkeypatch):
    def load_weights(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes")

    monkeypatch.setattr("grpojax.models.hf.load", load_weights)
    with pytest.raises(UserError, match="before the first step.*spread over more devices"):
        opened(load(recipe, tmp_path / "run"))


@pytest.mark.slow
def test_the_clock_may_jump(recipe, tmp_path, unbroken, monkeypatch):
    """Times are of the monotonic clock; the wall clock only stamps lines."""
    import time

    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert train(opened(load(recipe, tmp_path / "run")))
    assert numbers(tmp_path / "run") == unbroken


@pytest.mark.slow
def test_dynamic_sampling_refills_from_a_named_reward(recipe, tmp_path):
    """A length reward varies everywhere; the named one decides which groups train."""
    overrides = (
        EVEN_TOO,
        "filter={metric: even, max_rollouts: 3}", "train.steps=2",
    )  # fmt: skip
    trainer = opened(config.load(recipe, [f"run.dir={tmp_path / 'run'}", "data.validation=null", *overrides]))
    assert train(trainer)
    lines = [line for line in tracking.read_metrics(tmp_path / "run") if "reward" in line]
    assert all(line["frac_reward_zero_std"] < 1 for line in lines)
    assert trainer.state.rollouts > 2
    for line in lines:
        _, samples = read_samples(tmp_path / "run", line["step"])
        groups = {}
        for s in samples:
            groups.setdefault(s["uid"], []).append(s["rewards"]["even"])
        varied = np.mean([len(set(g)) > 1 for g in groups.values()])
        assert varied >= 1 - line["groups/missing"] - 1e-6 > line["groups/kept"] - 1


@pytest.mark.slow
def test_show_prints_best_and_worst(recipe, tmp_path, capsys):
    trainer = opened(load(recipe, tmp_path / "run", "rewards.0.name=tiny_run:length", "train.steps=1"))
    assert train(trainer)
    capsys.readouterr()
    assert cli.main(["show", str(tmp_path / "run"), "-n", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step 1: 32 samples of 8 prompts") and out.count("--- best") == out.count("--- worst") == 2
    rewards = [float(line.split("reward ")[1].split()[0]) for line in out.splitlines() if line.startswith("---")]
    assert rewards[0] >= rewards[1] >= rewards[3] >= rewards[2]
    assert cli.main(["show", str(tmp_path / "run"), "--step", "7"]) == 2
    assert "no samples of step 7" in capsys.readouterr().err


def test_sigterm_in_an_evaluation_saves_the_step_before_it(recipe, tmp_path, monkeypatch):
    overrides = [f"run.dir={tmp_path / 'run'}", "train.checkpoint_every=0", "train.eval_every=2"]
    trainer = opened(config.load(recipe, [*overrides, "rewards.0.name=answer_format"]))
    plain = train_module._evaluate
    monkeypatch.setattr(
        train_module, "_evaluate", lambda run: send(*[signal.SIGTERM] * (run.state.step == 2)) or plain(run)
    )
    assert not train(trainer)
    assert trainer.store.checkpoints.steps() == [2]
