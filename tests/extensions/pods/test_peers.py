"""The failure of one process is the end of all, within a minute and with its own words."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import pytest
import runs

from grpojax.extensions.pods import peers
from grpojax.host import coordination, internals

TOGETHER = """
import argparse, os, sys, threading, time
import jax, numpy as np
from jax.experimental import multihost_utils
from grpojax.extensions.pods import peers
from grpojax.host import coordination, preemption, processes
from grpojax.host.errors import UserError
from grpojax.cli import main as cli
me, (how, who) = int(os.environ["JAX_PROCESS_ID"]), sys.argv[1:]

def unfit():
    raise ValueError("no such chip")

if how == "unfit" and me == int(who):
    processes.start = unfit

def work():
    for n in range(10):
        multihost_utils.process_allgather(np.ones(3))
    if me == int(who):
        if how == "raises":
            threading.Thread(target=time.sleep, args=(70,)).start()  # as a save that waits for the others
            raise ValueError("all is lost")
        if how == "cleans":
            try:
                with peers.telling():
                    raise ValueError("all is lost")
            finally:
                time.sleep(peers.GRACE_S + 2 * peers.LOOK_S)
                print("clean", flush=True)
        if how == "refuses":
            raise UserError("no such thing")
        if how == "dies":
            os.kill(os.getpid(), 9)
        if how == "told":
            os.kill(os.getpid(), 15)
        if how == "lingers":
            time.sleep(8)
            return
    if how == "lingers":
        return
    if me == (int(who) + 1) % 3:  # as in a collective that does not break off
        coordination.heard("never", 300)
    multihost_utils.process_allgather(np.ones(3))

try:
    with cli._company(argparse.Namespace(joins=True)):
        work()
except UserError as e:
    print(f"refused: {e}", file=sys.stderr)
    sys.exit(2)
print("end")
"""


def play(how, who, count=3):
    """What each of some processes said, its status, and the seconds from the first end to the last."""
    group = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER, how, str(who)],
            env=runs.environment() | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for env in runs.together(count)
    ]  # fmt: skip
    said, ended = {}, {}

    def read(index):
        said[index] = group[index].communicate()[0]
        ended[index] = time.monotonic()

    threads = [threading.Thread(target=read, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    for process in group:
        process.kill()  # only where it hangs
    return said, [process.returncode for process in group], max(ended.values()) - min(ended.values())


@pytest.mark.slow
def test_an_exception_ends_all_with_its_words():
    said, status, seconds = play("raises", 0)  # the first is the one that carries the service
    assert status == [1, 1, 1] and seconds < 60
    assert said[0].rstrip().endswith("ValueError: all is lost")
    for i in (1, 2):
        assert f"grpojax: process 0 ({os.uname().nodename}) failed: ValueError: all is lost" in said[i], said[i]
        assert "Traceback" not in said[i] and "end" not in said[i].splitlines()


@pytest.mark.in_ci("0")
@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_host_without_its_devices_is_named_to_those_that_wait_for_them(who):
    said, status, seconds = play("unfit", who)
    assert status == [1, 1, 1] and seconds < 60
    for i in set(range(3)) - {who}:
        assert f"process {who} ({os.uname().nodename}) failed: ValueError: no such chip" in said[i], said[i]


@pytest.mark.in_ci("1")
@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_an_error_is_told_before_what_is_held_is_let_go_of(who):
    """And nobody leaves before that: jax ends a process whose service another one has left."""
    said, status, seconds = play("cleans", who)
    assert status == [1, 1, 1] and seconds < 60
    assert "\nclean\n" in said[who] and said[who].rstrip().endswith("ValueError: all is lost")
    words = f"grpojax: process {who} ({os.uname().nodename}) failed: ValueError: all is lost\n"
    for i in set(range(3)) - {who}:
        assert said[i].count(words) == 2 and "lets go of what it holds, and all end\n" in said[i], said[i]


@pytest.mark.in_ci("2")
@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 2])
def test_a_users_mistake_keeps_its_status(who):
    said, status, seconds = play("refuses", who)
    assert status == [2 if i == who else 1 for i in range(3)] and seconds < 60
    for i in set(range(3)) - {who}:
        assert "failed: no such thing" in said[i]


@pytest.mark.in_ci("1")
@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_when_one_is_told_to_stop_all_end_with_75(who):
    said, status, seconds = play("told", who)
    assert status == [os.EX_TEMPFAIL] * 3 and seconds < 60
    for i in set(range(3)) - {who}:
        assert said[i].rstrip().endswith(f"grpojax: process {who} ({os.uname().nodename}) was stopped"), said[i]


@pytest.mark.in_ci("1")
@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_killed_process_is_the_end_of_all(who):
    """By jax, which has heard nothing of it; one process waits for a text, the others for their devices."""
    said, status, seconds = play("dies", who, 4)
    assert status == [-signal.SIGKILL if i == who else -signal.SIGABRT for i in range(4)] and seconds < 60
    for i in set(range(4)) - {who}:
        assert "another task died" in said[i] and "end" not in said[i].splitlines(), said[i]
    if who:  # the first carries the service, and can only be missed
        assert re.search(rf"unhealthy \(stopped sending heartbeats\):\s+{who}\s", said[0]), said[0]


@pytest.mark.slow
def test_an_end_is_no_death(monkeypatch):
    said, status, seconds = play("lingers", 1)
    assert status == [0, 0, 0] and all(text.rstrip().endswith("end") for text in said.values())


def test_the_thread_is_gone_before_the_end(monkeypatch):
    """One that is in a call to the service while the process ends has crashed it."""
    posted = coordination.posted

    def slow(folder):
        time.sleep(0.3 * folder.endswith("failed"))
        return posted(folder)

    monkeypatch.setattr(coordination, "posted", slow)
    one = peers._Peers()
    one.start()
    one.finish()
    assert not one.is_alive()


def test_alone_there_is_no_thread():
    before = threading.active_count()
    with peers.watched():
        assert threading.active_count() == before


def test_what_a_process_will_end_by_is_said_once(monkeypatch, capsys):
    monkeypatch.setattr(internals, "joined", lambda: (0, 2))
    one = peers._Peers()
    monkeypatch.setattr(peers, "_here", [one])
    coordination.post(f"{one._place}/failing/1", "other failed: no disk")
    for _ in range(2):
        one._hear()
    assert capsys.readouterr().err.splitlines()[0] == "grpojax: process 1 (other) failed: no disk"
    one._hear()
    assert not capsys.readouterr().err
    for error in (jax.errors.JaxRuntimeError("UNAVAILABLE: connection reset"), SystemExit(1)):
        with pytest.raises(type(error)), peers.telling():
            raise error
    assert set(coordination.posted(f"{one._place}/failing")) == {"1"}  # the other's doing, and an end
    with pytest.raises(ValueError), peers.telling():
        raise ValueError("all\nis lost")
    assert coordination.posted(f"{one._place}/failing")["0"] == f"{os.uname().nodename} failed: ValueError: all is lost"
    coordination.post(f"{one._place}/failing/2", "other failed: no disk")
    one._hear()  # one that fails itself has its own to say
    assert not capsys.readouterr().err


def test_a_word_that_is_lost_is_not_the_end(monkeypatch):
    """One call to the service that fails: jax ends the process where all do."""
    monkeypatch.setattr(peers, "LOOK_S", 0.01)
    monkeypatch.setattr(peers, "GRACE_S", 0.0)
    one, calls, left = peers._Peers(), [], []

    def look():
        calls.append(1)
        if len(calls) < 3:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")
        return "process 1 (other) failed: no disk"

    monkeypatch.setattr(one, "_look", look)
    monkeypatch.setattr(one, "_leave", left.append)
    one.run()
    assert left == ["process 1 (other) failed: no disk"] and len(calls) == 3
