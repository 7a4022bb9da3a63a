"""A reward for code: the share of tests that a completion's program passes, in a process without a network."""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from grpojax.host import isolation

_BLOCK = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

# Runs a solution, then each test after it, and writes the number of each test that passes after a mark which the
# solution cannot guess. What they print goes nowhere.
_HARNESS = """\
import os
def run(solution, tests, mark):
    out, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1), os.dup2(nowhere, 2)
    names = {"__name__": "solution"}
    exec(compile(solution, "solution.py", "exec"), names)
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
      seconds: time of a run. Programs are one run, and each ``input`` is one; set ``rewards.timeout_s`` over all.
      memory_mb: MiB of address space of a run.
      partial: give the share of the tests that pass.
      network: whether the code may use the network; needed where the system allows no user namespaces.
    """
    limits = {"seconds": seconds, "memory_mb": memory_mb, "network": network}
    return [
        None if not of_row else _score(code_of(text), of_row, partial, limits)
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


def _score(code: str, tests: Any, partial: bool, limits: Mapping[str, Any]) -> float:
    tests = [tests] if isinstance(tests, str) else list(tests)
    of_text = [test for test in tests if isinstance(test, str)]
    passed = _passed(code, of_text, limits) if of_text else 0
    for test in tests:
        if not isinstance(test, str):
            wanted = str(test["output"])
            most = 4 * len(wanted) + 4096  # bytes, for spaces too
            ran = isolation.run_python(code, given=str(test["input"]), output_bytes=most, **limits)
            passed += ran.status == 0 and _lines(ran.output) == _lines(wanted)
    return passed / len(tests) if partial else float(passed == len(tests))


def _passed(code: str, tests: Sequence[str], limits: Mapping[str, Any]) -> int:
    mark = secrets.token_hex(16)
    program = f"{_HARNESS}\nrun({code!r}, {list(tests)!r}, {mark!r})\n"
    ran = isolation.run_python(program, output_bytes=64 * (len(tests) + 1), **limits)
    return len({line for line in ran.output.splitlines() if line.startswith(mark)})


def _lines(text: str) -> list[str]:
    """Without spaces at the ends of lines, and lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
