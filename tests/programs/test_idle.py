"""The seconds in which devices have nothing to do."""

import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest
import runs

from grpojax.programs.idle import Clocked, Idle, arrival


class Clock:
    """Stands until it is moved."""

    now = 5.0

    def __call__(self):
        return self.now


def test_only_the_time_in_which_nothing_is_owed_counts():
    clock = Clock()
    idle = Idle(clock)
    for at, act in (
        (7.0, idle.call),  # idle since 5
        (8.0, idle.call),
        (11.0, idle.settle),  # one is still owed
        (13.0, idle.settle),
        (17.0, idle.call),  # idle since 13
        (19.0, idle.settle),
    ):
        clock.now = at
        act()
    clock.now = 20.0
    assert idle.take() == 2.0 + 4.0 + 1.0
    clock.now = 23.0
    assert idle.take() == 3.0


class Output:
    """A result that is there when it is said to be."""

    def __init__(self):
        self.there = threading.Event()

    def block_until_ready(self):
        assert self.there.wait(10)
        return self


def quick(output):
    return output


def test_a_program_is_owed_from_its_call_until_its_last_result_is_there():
    programs, clock, outputs = Clocked(), Clock(), [Output(), Output()]
    programs.idle = Idle(clock)
    programs._seen = {("quick", None, frozenset(), ())}  # its first call would wait
    clock.now = 6.0
    for output in outputs:
        programs("quick", quick, output)
    clock.now = 9.0
    outputs[0].there.set()
    clock.now = 10.0
    outputs[1].there.set()
    until = time.monotonic() + 10
    while programs.idle._owed and time.monotonic() < until:
        time.sleep(0.001)
    clock.now = 14.0
    assert programs.idle.take() == 1.0 + 4.0


def test_a_program_that_raises_owes_nothing():
    programs, clock = Clocked(), Clock()
    programs.idle = Idle(clock)
    with pytest.raises(ZeroDivisionError):
        programs("bad", lambda x: 1 // x, 0)
    clock.now = 8.0
    assert programs.idle.take() == 3.0


def test_an_arrival_is_when_the_device_was_through_not_when_somebody_asks():
    begun = time.perf_counter()
    arrived = arrival(jax.jit(lambda x: x @ x)(jnp.ones((64, 64))))
    time.sleep(0.3)  # a host that is busy with something else
    asked = time.perf_counter()
    assert begun < arrived() < asked
    assert arrived() == arrived()


def test_a_process_ends_well_while_a_program_runs():
    """As at a stop, with the next rollout under way."""
    code = """
import jax, jax.numpy as jnp
from grpojax.programs.idle import Clocked
x = jnp.ones((700, 700))
long = lambda x: jax.lax.fori_loop(0, 100, lambda _, x: x @ x / 700, x)
programs = Clocked()
for _ in range(2):  # the first call waits for its end
    programs("long", long, x)
"""
    ended = subprocess.run([sys.executable, "-c", code], env=runs.environment(), capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
