"""What a run does when something fails that is none of its steps, and when it is told to stop."""

import json
import os
import re
import subprocess
import sys
import threading
import time

import fake_device
import pytest
from failing_runs import check_first_writes, check_told, full
from runs import environment, numbers, opened

from grpojax.cli import main as cli
from grpojax.host import preemption
from grpojax.records import evaluations
from grpojax.run import control
from grpojax.run import recipe as config
from grpojax.train import train

pytestmark = pytest.mark.usefixtures("fakes")

SHORT = ("train.steps=4", "train.checkpoint_every=1")


def load(recipe, directory, *overrides):
    return config.load(recipe, [f"run.dir={directory}", *SHORT, *overrides])


@pytest.fixture(scope="module")
def unbroken(recipe, tmp_path_factory):
    """The metrics of a run that nothing happened to."""
    directory = tmp_path_factory.mktemp("runs") / "unbroken"
    with fake_device.in_place():
        assert train(opened(load(recipe, directory, "train.eval_every=2")))
    return numbers(directory)


@pytest.mark.slow
def test_metrics_samples_and_evaluations_that_cannot_be_written_are_said(recipe, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(evaluations, "write", full)
    trainer = opened(load(recipe, tmp_path / "run", "train.eval_every=2"))
    plain, written = trainer.journal._recorder._metrics, []
    monkeypatch.setattr(plain, "write", lambda step, values: full() if step == 3 else written.append(step))
    monkeypatch.setattr(plain, "write_samples", full)
    assert train(trainer)
    assert written == [0, 1, 2, 2, 4, 4]
    for text in (
        "the metrics of step 3 are not kept: OSError: [Errno 28]",
        "metrics of 1 steps may be missing, the first of step 3",
        "samples of 4 steps may be missing, the first of step 1",
        "the evaluation of step 2 is not kept: OSError",
    ):
        assert text in caplog.text
    assert trainer.store.checkpoints.steps()[-1] == 4


@pytest.mark.slow
def test_a_report_that_fails_is_said(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("grpojax.records.curve.draw_curve", full)
    given = ["train", str(recipe), f"run.dir={tmp_path / 'run'}", "data.validation=null", "train.steps=1"]
    assert cli.main(given) == 0
    assert "the report: OSError" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "done").read_text()) == {"step": 1}


@pytest.mark.slow
def test_an_evaluation_that_fails_costs_no_step(recipe, tmp_path, monkeypatch):
    trainer = opened(load(recipe, tmp_path / "run", "train.eval_every=2", "train.checkpoint_every=2"))
    plain = trainer.held_out.evaluate
    monkeypatch.setattr(trainer.held_out, "evaluate", lambda state: full() if state.step == 2 else plain(state))
    with pytest.raises(OSError, match="No space left"):
        train(trainer)
    assert trainer.store.checkpoints.steps() == [2]


@pytest.mark.slow
def test_a_run_that_ends_is_marked_until_it_goes_on(recipe, tmp_path, monkeypatch):
    """0 is finished, 75 stopped and saved; ``done`` is there exactly when it is finished."""
    given = ["train", str(recipe), f"run.dir={tmp_path / 'run'}", *SHORT, "data.validation=null"]

    def interrupt(self, awaited=()):
        self.ask("SIGTERM")
        return plain(self, awaited)

    plain = control.RunControl.sync
    monkeypatch.setattr(control.RunControl, "sync", interrupt)
    assert cli.main(given) == os.EX_TEMPFAIL == 75
    assert not (tmp_path / "run" / "done").exists()
    stopped = json.loads((tmp_path / "run" / "stopped").read_text())
    assert stopped.pop("seconds") < 30 and stopped == {"step": 0, "notice": "SIGTERM"}
    monkeypatch.undo()
    assert cli.main(given) == 0
    assert not (tmp_path / "run" / "stopped").exists()
    assert json.loads((tmp_path / "run" / "done").read_text()) == {"step": 4}
    assert cli.main(given) == 0 and (tmp_path / "run" / "done").exists()
    more = opened(load(recipe, tmp_path / "run", "data.validation=null", "train.steps=5"))
    assert not (tmp_path / "run" / "done").exists()
    assert train(more) and json.loads((tmp_path / "run" / "done").read_text()) == {"step": 5}


@pytest.mark.parametrize("where", ["rollout", "evaluation"])
@pytest.mark.slow
def test_a_clouds_notice_saves_at_once_and_loses_nothing(recipe, tmp_path, unbroken, monkeypatch, where):
    """The rollout in flight, or the evaluation, is dropped, and done again when the run goes on."""
    told = threading.Event()
    monkeypatch.setenv("GCE_METADATA_HOST", "stand-in")
    monkeypatch.setattr(preemption, "POLL_S", 0.01)
    monkeypatch.setattr(preemption, "announced", lambda: "preempted TRUE" if told.is_set() else None)
    overrides = ("train.eval_every=2", "train.checkpoint_every=0")
    plain, at = control.RunControl.sync, {"rollout": 3, "evaluation": 2}[where]

    def turn(self, awaited=()):
        if trainer.state.step == at:
            told.set()
            while self.reason is None:
                time.sleep(0.01)
        return plain(self, awaited)

    with monkeypatch.context() as inside:
        inside.setattr(control.RunControl, "sync", turn)
        trainer = opened(load(recipe, tmp_path / "run", *overrides))
        assert not train(trainer)
    stopped = json.loads((tmp_path / "run" / "stopped").read_text())
    assert stopped["notice"] == "preempted TRUE" and stopped["step"] == trainer.store.checkpoints.steps()[-1]
    told.clear()
    again = opened(load(recipe, tmp_path / "run", *overrides))
    assert again.state.step == stopped["step"] and train(again)
    assert numbers(tmp_path / "run") == unbroken


@pytest.mark.slow
def test_saves_by_the_clock(recipe, tmp_path):
    overrides = ("train.checkpoint_every=0", "train.keep=9", "data.validation=null")
    for minutes, steps in ((1e-9, [1, 2, 3, 4]), (10, [4])):
        trainer = opened(load(recipe, tmp_path / f"{minutes}", *overrides, f"train.checkpoint_minutes={minutes}"))
        assert train(trainer) and trainer.store.checkpoints.steps() == steps


@pytest.mark.slow
def test_the_best_checkpoint_has_a_score_that_came_after_it(recipe, tmp_path, monkeypatch):
    """Of steps 0, 2 and 4 the second is the best; a run that goes on still knows it."""
    overrides = ("train.eval_every=2", "train.checkpoint_every=2", "train.keep=1")
    scores = {0: 0.0, 2: 2.0, 4: 1.0, 6: 0.5}
    for steps in (4, 6):
        trainer = opened(load(recipe, tmp_path / "run", *overrides, f"train.steps={steps}"))

        def evaluate(state, plain=trainer.held_out.evaluate):
            return (plain(state)[0] | {"eval/reward": scores[state.step]},) * 2

        monkeypatch.setattr(trainer.held_out, "evaluate", evaluate)
        assert train(trainer)
        assert trainer.store.checkpoints.steps() == [2, steps]
    assert trainer.store.checkpoints.good() == 2 and trainer.store.checkpoints.good(before=2) is None


@pytest.mark.slow
def test_the_first_writes_anew_what_all_have_read(recipe, tmp_path, monkeypatch):
    """Of a run that goes on: in a bucket the first takes objects away that another process has listed."""
    config = load(recipe, tmp_path / "run", "train.steps=1")
    check_first_writes(lambda: opened(config), monkeypatch, ["read_metrics", "changed"])


@pytest.mark.parametrize("where", ["start", "loop"])
def test_an_error_is_told_before_what_is_held_is_let_go_of(recipe, tmp_path, monkeypatch, where):
    config = load(recipe, tmp_path / "run", "train.steps=1")
    check_told(lambda: opened(config), monkeypatch, where)


HANGS = """
import sys, time
from grpojax.host import watchdog
watchdog.FLOOR_S, watchdog.SEEN = 2.0, 2
from grpojax.run import learn
plain = learn.replaced
def replaced(run, networks, sampled):
    if int(networks["policy"].step) == 4:
        time.sleep(60)
    return plain(run, networks, sampled)
learn.replaced = replaced
from grpojax.cli import main as cli
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_step_that_hangs_ends_the_run_by_option(recipe, tmp_path):
    given = ["train", str(recipe), f"run.dir={tmp_path / 'run'}", "train.steps=6", "data.validation=null",
             "train.hang_policy=stop"]  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-c", HANGS, *given], env=environment(), capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 1
    said = run.stdout + run.stderr
    assert re.search("step 5 has taken [0-9]+ s, over 10 times the median", said) and "in replace" in said, said


@pytest.mark.parametrize("setting", ["train.balance_coef=0.01", "rollout.router_replay=true"])
def test_a_policy_without_experts_has_nothing_to_balance_or_replay(recipe, tmp_path, capsys, setting):
    assert cli.main(["train", str(recipe), f"run.dir={tmp_path}", setting]) == 2
    assert setting in capsys.readouterr().err
