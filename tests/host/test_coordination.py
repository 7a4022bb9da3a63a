import subprocess
import sys
import time

import jax
import pytest
import runs

from grpojax.host import coordination, internals

THREE = """
import sys, jax
from grpojax.host import coordination, processes
processes.start()
me = jax.process_index()
print(coordination.exchange("words", f"word {me}"))
coordination.post(f"folder/{me}", "x" * me)
coordination.exchange("posted", "")
print(sorted(coordination.posted("folder").items()), coordination.posted("other"))
if me == 0:
    try:
        coordination.exchange("alone", "", seconds=1)
    except TimeoutError as e:
        print(e)
coordination.exchange("end", "")
"""


def test_alone():
    coordination.post("a/x", "1")
    coordination.post("a/x", "2")
    coordination.post("ab", "3")
    assert coordination.posted("a") == {"x": "2"}
    coordination.forget("a")
    assert coordination.posted("a") == {} and coordination.exchange("meeting", "word") == ["word"]


@pytest.mark.slow
def test_three_processes():
    group = [
        subprocess.Popen([sys.executable, "-c", THREE], env=runs.environment() | env, stdout=subprocess.PIPE, text=True)
        for env in runs.together(3)
    ]
    said = [process.communicate(timeout=120)[0].splitlines() for process in group]
    assert all(process.returncode == 0 for process in group), said
    for lines in said:
        assert lines[:2] == ["['word 0', 'word 1', 'word 2']", "[('0', ''), ('1', 'x'), ('2', 'xx')] {}"]
    assert said[0][2] == "alone: process 1 did not arrive within 1 s"


def test_a_signal_comes_between_the_parts_of_a_wait(monkeypatch):
    """jax's call cannot be interrupted: Ctrl-C would wait for as long as it does."""
    waits = []

    class Client:
        def blocking_key_value_get(self, key, milliseconds):
            waits.append(milliseconds)
            time.sleep(milliseconds / 1e5)
            if len(waits) == 4:
                return "there"
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: in vain")

    monkeypatch.setattr(internals, "client", Client)
    assert coordination.heard("key", 3600) == "there" and waits == [1000] * 4
    assert coordination.heard("key", 0.25) is None and waits[4:] == [249] or waits[4:] == [250]
