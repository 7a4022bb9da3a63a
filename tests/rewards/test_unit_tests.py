"""Code in completions, run with tests."""

import pytest

from grpojax.host import isolation
from grpojax.host.errors import UserError
from grpojax.rewards import RewardConfig, Rewards, RewardsConfig, unit_tests
from grpojax.rewards.unit_tests import score

pytestmark = pytest.mark.skipif(not isolation.programs_can_be_closed_off(), reason="the system has no user namespaces")

ADD = "So it is\n```python\ndef add(a, b):\n    return a + b\n```"
ECHO = "print(int(input()) * 2)"
GUESSES = """
import os
for file in range(3, 20):
    try:
        os.write(file, b"0123456789abcdef 0\\n")
    except OSError:
        pass
"""
PEEKS = """
import os, re, sys
frame, marks = sys._getframe(), set()
while frame:
    seen = repr((frame.f_locals, frame.f_code.co_consts))
    marks |= set(re.findall("[0-9a-f]{32}", seen)) | ({"test"} if chr(40) + "71, 2" in seen else set())
    frame = frame.f_back
for mark in marks:
    for file in range(3, 20):
        try:
            os.write(file, f"{mark} 0\\n".encode())
        except OSError:
            pass
add = lambda a, b: 0 if marks else a + b
"""


def one(code, tests, **options):
    return score([""], [code], [[]], tests=[tests], **{"seconds": 30.0, **options})[0]


@pytest.mark.parametrize(("code", "tests", "reward", "partial"), [
    (ADD, "assert add(1, 2) == 3", 1, 1),
    (ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], 0, 0.5),
    (ADD, ["assert add(1, 2) == 3", "absent()", "print('x' * 100000)"], 0, 2 / 3),
    ("def add(a, b) return", "assert add(1, 2) == 3", 0, 0),
    ("```python\nraise SystemExit\n```", "pass", 0, 0),
    ("import os\nos._exit(0)", "pass", 0, 0),
    (GUESSES, ["assert False"], 0, 0),
    (PEEKS, ["assert False"], 0, 0),
    (PEEKS, ["assert add(71, 2) == 73"], 1, 1),
    (ECHO, [{"input": "4\n", "output": "8"}, {"input": "1", "output": "2\n"}], 1, 1),
    (ECHO, [{"input": "4\n", "output": "8"}, {"input": "x", "output": "2"}], 0, 0.5),
    ("print('8 ' * 3000)", [{"input": "", "output": "8"}], 0, 0),
])  # fmt: skip
def test_the_share_of_tests_that_pass(code, tests, reward, partial):
    assert one(code, tests) == reward
    assert one(code, tests, partial=True) == partial


@pytest.mark.slow
def test_a_program_that_hangs_fails():
    assert one("while True: pass", ["pass"], seconds=0.5) == 0
    assert one(ADD, ["pass", "while True: pass"], seconds=5.0, partial=True) == 0.5


def test_tests_share_their_time_and_the_first_that_fails_ends_them(monkeypatch):
    seconds, clock = [], iter(range(100))

    def hangs(code, **options):
        seconds.append(options["seconds"])
        return isolation.Ran("", None)

    monkeypatch.setattr(isolation, "run_python", hangs)
    monkeypatch.setattr(unit_tests.time, "monotonic", lambda: 2.0 * next(clock))
    tests = [{"input": "", "output": "8"}] * 5
    assert one("", tests, seconds=5.0) == 0 and seconds == [3.0]
    assert one("", tests, seconds=5.0, partial=True) == 0 and seconds[1:] == [3.0, 1.0]
    assert one("", ["pass", *tests], seconds=5.0) == 0 and seconds[3:] == [5.0]


def test_where_programs_cannot_be_closed_off_they_must_be_allowed(monkeypatch):
    monkeypatch.setattr(isolation, "programs_can_be_closed_off", lambda: False)
    with pytest.raises(UserError, match="namespaces.*\nset network: true"):
        one(ADD, "assert add(1, 2) == 3")
    assert one(ADD, "assert add(1, 2) == 3", network=True) == 1


def test_as_a_reward_of_a_recipe():
    term = RewardConfig(name="unit_tests", options={"seconds": 30.0})
    with Rewards(RewardsConfig(terms=(term,), timeout_s=60.0, workers=1)) as rewards:
        columns = {"tests": ["assert add(2, 2) == 4", None]}
        scores = rewards([""] * 2, [ADD] * 2, [[1]] * 2, columns)
    assert scores.by_name["unit_tests"].tolist()[0] == 1.0
    assert scores.invalid == {"unit_tests/none": 1}
    with Rewards([RewardConfig(name="unit_tests")]) as rewards, pytest.raises(UserError, match="asks for 'tests'"):
        rewards.check_columns([])
