"""A reward for code: the share of tests that a completion's program passes, in a process without a network."""

import functools
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpojax.host import isolation
from grpojax.host.errors import UserError

_BLOCK = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

# Runs a solution, then each test after it, and writes the number of each test that passes after a mark which the
# solution cannot guess. It reads the mark and the tests only then, so that the solution finds neither in any frame.
# What they print goes nowhere.
_HARNESS = """\
import json, os
def run(solution):
    out, given, nowhere = os.dup(1), os.dup(0), os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0), os.dup2(nowhere, 1), os.dup2(nowhere, 2)
    names = {"__name__": "solution"}
    exec(compile(solution, "solution.py", "exec"), names)
    with open(given) as file:
        mark, tests = json.load(file)
    for number, test in enumerate(tests):
        try:
            exec(compile(test, "test.py", "exec"), dict(names))
        except BaseException:
            continue
        os.write(out, f"{mark} {number}\\n".encode())
"""


def score(
    prompts: Sequence[str],
    completions: Sequence[str],
    tokens: Sequence[Sequence[int]],
    *,
    tests: Sequence[str | Sequence[str] | Sequence[Mapping[str, str]] | None],
    seconds: float = 5.0,
    memory_mb: int = 512,
    partial: bool = False,
    network: bool = False,
    **columns: Any,
) -> list[float | None]:
    """1 for each completion whose code passes its tests, else 0.

    The code is the last block between three backticks, or the whole completion.

    Args:
      tests: the column of that name: a program that raises where the code is wrong, such as assertions; a list of such
        programs; or a list of mappings with ``input`` and ``output``, for code that reads and prints. A sample of a row
        without tests is invalid.
      seconds: time of all tests of a completion together; those that it does not reach have failed. Programs are one
        run, and each ``input`` is one. Set ``rewards.timeout_s`` above it.
      memory_mb: MiB of address space of a run.
      partial: give the share of the tests that pass.
      network: whether the code may use the network; needed where the system allows no user namespaces.

    Raises:
      UserError: without ``network``, and the system cannot close a program off.
    """
    if not network and not isolation.programs_can_be_closed_off():
        raise UserError(
            "reward unit_tests: this system has no user, mount and process namespaces to close programs off\n"
            "set network: true in its options to run programs with your rights"
        )
    run = functools.partial(isolation.run_python, memory_mb=memory_mb, network=network)
    return [
        None if not of_row else _score(code_of(text), of_row, partial, seconds, run)
        for text, of_row in zip(completions, tests, strict=True)
    ]


def code_of(completion: str) -> str:
    r"""The code of a completion.

    Example:
      >>> code_of("So:\n```python\nx = 1\n```\nand\n```\nx = 2\n```"), code_of("x = 3")
      ('x = 2\n', 'x = 3')
    """
    blocks = _BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def _score(code: str, tests: Any, partial: bool, seconds: float, run: Callable[..., isolation.Ran]) -> float:
    tests = [tests] if isinstance(tests, str) else list(tests)
    end = time.monotonic() + seconds
    of_text = [test for test in tests if isinstance(test, str)]
    passed = _passed(code, of_text, functools.partial(run, seconds=seconds)) if of_text else 0
    failed = len(of_text) - passed
    for test in tests:
        if isinstance(test, str):
            continue
        left = end - time.monotonic()
        if left <= 0 or (failed and not partial):
            break
        wanted = str(test["output"])
        most = 4 * len(wanted) + 4096  # bytes, for spaces too
        ran = run(code, given=str(test["input"]), output_bytes=most, seconds=left)
        right = ran.status == 0 and _lines(ran.output) == _lines(wanted)
        passed, failed = passed + right, failed + (not right)
    return passed / len(tests) if partial else float(passed == len(tests))


def _passed(code: str, tests: Sequence[str], run: Callable[..., isolation.Ran]) -> int:
    mark = secrets.token_hex(16)
    program = f"{_HARNESS}\nrun({code!r})\n"
    ran = run(program, given=json.dumps([mark, list(tests)]), output_bytes=64 * (len(tests) + 1))
    return len({line for line in ran.output.splitlines() if line.startswith(mark)})


def _lines(text: str) -> list[str]:
    """Without spaces at the ends of lines, and lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
