"""Whether a run goes on is one decision of all of its processes."""

import subprocess
import sys
import threading
import time

import pytest
import runs

from grpojax.run import control

THREE = """
import random, sys, time
import jax
from grpojax.host import processes
from grpojax.run.control import RunControl, Stopped
processes.start()
me = jax.process_index()
rng = random.Random(me)
with processes.watched():
    for asker in range(3):
        run, saves = RunControl(minutes=0.3 / 60), []
        for turn in range(1, 200):
            if me == asker and turn == 20 + asker:
                run.ask("SIGTERM")
            try:
                run.sync()
            except Stopped:
                break
            if run.due:
                saves.append(turn)
                run.save_started()
            time.sleep(rng.uniform(0, 0.06))
        print(turn, saves, run.reason if me == 0 else "", flush=True)
"""


@pytest.mark.slow
def test_three_processes_stop_and_save_at_the_same_turn():
    """Whoever asks, and however far one is ahead: without collectives nothing else holds them together."""
    group = [
        subprocess.Popen([sys.executable, "-c", THREE], env=runs.environment() | env, stdout=subprocess.PIPE, text=True)
        for env in runs.together(3)
    ]
    said = [process.communicate(timeout=240)[0].splitlines() for process in group]
    assert all(process.returncode == 0 for process in group), said
    first, *others = [[line for line in lines if "[" in line and "Gloo" not in line] for lines in said]
    assert [line.partition("]")[2] for line in first] == [" SIGTERM", " SIGTERM of process 1", " SIGTERM of process 2"]
    for lines in others:
        assert [x.split("]")[0] for x in lines] == [x.split("]")[0] for x in first] and len(lines) == 3
    for asker, line in enumerate(first):
        stopped, saves = line.partition("]")[0].split(" [")
        assert int(stopped) >= 20 + asker or asker > 0  # the first can be behind the one that asks
        assert int(stopped) < 199 and saves


class Awaited:
    """Arrays of a device that never finishes."""

    def is_ready(self):
        return False


def test_a_rollout_in_flight_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(control, "_ready", lambda awaited: awaited.is_ready())
    one = control.RunControl()
    threading.Timer(0.2, one.ask, ["preempted TRUE"]).start()
    started = time.monotonic()
    with pytest.raises(control.Stopped):
        one.sync(Awaited())
    assert time.monotonic() - started < 2 and one.reason == "preempted TRUE" and one.since >= started
    one.ask("SIGTERM")
    assert one.reason == "preempted TRUE"  # the first notice is the one that is timed


def test_the_clock_asks_for_a_save_until_one_is_begun():
    one = control.RunControl(minutes=0.1 / 60)
    one.sync()
    assert not one.due
    time.sleep(0.15)
    one.sync()
    one.sync()
    assert one.due
    one.save_started()
    one.sync()
    assert not one.due
    none = control.RunControl(minutes=0)
    time.sleep(0.15)
    none.sync()
    assert not none.due
