"""Consoles that are gone, full or closed, or that lack characters: the work goes on, and nothing is raised."""

import os
import subprocess
import sys

import pytest

from grpojax.host import console
from grpojax.host.console import log

START = """
from grpojax.host import console
console.prepare_streams()
console.setup_console()
"""


def run(code, redirect="", **environment):
    """What a process writes to standard error after `START`, and its status."""
    command = ["bash", "-c", f'exec "$0" -c "$1" {redirect}', sys.executable, START + code]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    return done.stderr, done.returncode


def test_a_reader_that_is_gone_is_said_once_and_lines_go_nowhere(monkeypatch, capfd):
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w", encoding="utf-8") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        console.setup_console()
        for step in range(3):
            log.info("step %d", step)
    said = "grpojax: standard output cannot be written (Broken pipe): this goes on without it\n"
    assert capfd.readouterr().err == said


@pytest.mark.parametrize(("redirect", "said"), [
    ("> /dev/full", "grpojax: standard output cannot be written (No space left on device): this goes on without it\n"),
    ("> /dev/full 2>&1", ""),
    (">&- 2>&-", ""),
])  # fmt: skip
def test_no_console_is_no_failure(redirect, said):
    code = "import os, sys\nconsole.log.info('a line')\nconsole.tell('a message')\n"
    code += "sys.exit(os.open('/dev/null', os.O_RDONLY) < 3)"  # a file must not get the number of a closed stream
    more = "grpojax: a message\n" if said else ""
    assert run(code, redirect) == (said + more, 0)


def test_a_line_that_a_signal_interrupts_does_not_fail(monkeypatch):
    class Busy:
        def write(self, text):
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    monkeypatch.setattr(sys, "stdout", Busy())
    console.setup_console()
    log.info("a line")


def test_what_a_console_cannot_show_is_escaped():
    code = "import sys\nprint('l\\u00e4ufe \\U0001f642 \\ud800', file=sys.stderr)\nconsole.log.info('l\\u00e4ufe')\n"
    assert run(code, PYTHONIOENCODING="ascii") == ("l\\xe4ufe \\U0001f642 \\ud800\n", 0)


def test_what_a_reward_function_prints_never_fails():
    code = "console.never_fail()\nprint('l\\u00e4ufe' * 10000, flush=True)"
    assert run(code, "> /dev/full", PYTHONIOENCODING="ascii") == ("", 0)
