"""The environments that come with the package: what they compute, and what they refuse."""

import fcntl
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from grpojax.data.readers import SourceConfig, open_source
from grpojax.extensions.problems import frozen_lake
from grpojax.extensions.problems.calculator import compute
from grpojax.extensions.problems.python_tool import Python
from grpojax.host import isolation
from grpojax.host.errors import UserError

EXTRA = "an extra is absent: pip install 'grpojax[test-all]'"


# ------------------------------------------------------------------------------------------------ calculator


@pytest.mark.parametrize(("expression", "value"), [
    ("12 * (3.5 + 4) ** 2 =", "675"), ("0.1 + 0.2", "0.3"), ("1/3", "0.333333333333"), ("2^10 - 7 ÷ 2", "1020.5"),
    ("2 × 3 − 4", "2"), ("-7 % 3", "2"), ("7 // 2", "3"), ("2**-2", "0.25"), ("sqrt(9/4)", "1.5"), ("9 ** 0.5", "3"),
    ("round(2.567, 2)", "2.57"), ("round(2.5)", "2"), ("max(1, 2, gcd(12, 18))", "6"), ("floor(-0.5)", "-1"),
    ("cos(pi)", "-1"), ("123456789 * 987654321", "121932631112635269"),
])  # fmt: skip
def test_the_calculator_is_exact(expression, value):
    assert compute(expression) == value


@pytest.mark.parametrize(("expression", "problem"), [
    ("", "no arithmetic expression"), ("1 +", "no arithmetic expression"), ("(" * 400, "no arithmetic expression"),
    ("1" * 501, "501 characters"), ("1/0", "division by zero"), ("0 ** -1", "division by zero"),
    ("2 ** 2000", "at most 1000"), ("(2 ** 1000) ** 1000", "too large"), ("9 ** 999 * 9 ** 999", "too large"),
    ("exp(1000)", "too large"), ("1e400", "no number"), ("(-8) ** 0.5", "domain"), ("gcd(1.5, 2)", "no whole number"),
    ("x + 1", "'x' is no number"), ("__import__('os')", "is no number"), ("().__class__", "is no number"),
    ("[1 for x in y]", "is no number"), ("True + 1", "is no number"), ("'a' * 3", "is no number"),
    ("round(1/3, 9999999999)", "at most 100"), ("round(1/3, -101)", "at most 100"),
    ("sqrt(1, 2)", "does not take 2"), ("min()", "does not take 0"), ("abs(x=1)", "is no number"),
])  # fmt: skip
def test_the_calculator_computes_nothing_else(expression, problem):
    with pytest.raises(ValueError, match=problem):
        compute(expression)


def test_no_expression_raises_anything_but_an_error_of_its_value():
    rng = random.Random(0)
    pieces = [*"0123456789.+-*/%^(),= ", "**", "//", "sqrt", "round(", "log(", "e", "1e9", "factorial", "x", "\n", "é"]
    for _ in range(3000):
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(0, 15)))
        try:
            assert isinstance(compute(text), str)
        except ValueError:
            continue


# ------------------------------------------------------------------------------------------------ programs


needs_namespaces = pytest.mark.skipif(not isolation.programs_can_be_closed_off(), reason="the system has no namespaces")


@needs_namespaces
@pytest.mark.parametrize(("code", "shown"), [
    ("x = 2\nx + 1", "3"),
    ("for i in range(2): print(i)", "0\n1"),
    ("s = 'é'\ns; s * 2  # twice", "'éé'"),
    ("x = 3", "[no output]"),
    ("import os; os._exit(4)", "[ended with exit status 4]"),
    ("import os; os.kill(os.getpid(), 9)", "[ended with exit status 137]"),
])  # fmt: skip
def test_a_program_shows_what_it_prints(code, shown):
    assert Python(seconds=30.0).python(code) == shown


# Makes files writable again, also in namespaces of its own.
REMOUNT = """
import ctypes
libc = ctypes.CDLL(None)
remount = lambda: libc.mount(b"none", b"/", None, 0x1020, None)
print(remount(), libc.unshare(0x10020000) > 0, remount())
1 / 0
"""


@needs_namespaces
@pytest.mark.parametrize(("code", "error"), [
    ("1 /", "SyntaxError"),
    ("def f():\n    return 1 / 0\nf()", "line 2, in f\n    return 1 / 0\n"),
    ("bytearray(2 ** 40)", "MemoryError"),
    ("open('/tmp/grpojax-test', 'w')", "Read-only file system"),
    (REMOUNT, "-1 False -1"),
    ("import os; print(os.listdir('/run')); 1 / 0", "[]"),
    ("import resource; print(resource.getrlimit(resource.RLIMIT_NPROC)); 1 / 0", "(64, 64)"),
    ("open('big', 'wb').write(bytes(2 ** 27))", "File too large"),
    ("import socket; socket.create_connection(('127.0.0.1', 9), 1)", "Network is unreachable"),
    ("import os; print(os.listdir('.'), os.environ.get('GRPOJAX_SECRET')); 1 / 0", "[] None"),
])  # fmt: skip
def test_what_a_program_may_not_do(code, error, monkeypatch):
    monkeypatch.setenv("GRPOJAX_SECRET", "x")
    assert error in Python(seconds=30.0).python(code)


@needs_namespaces
def test_a_program_shares_no_memory_with_us():
    shown = Python(seconds=30.0).python("import os; os.readlink('/proc/self/ns/ipc')")
    assert shown.startswith("'ipc:") and shown != repr(os.readlink("/proc/self/ns/ipc"))


def test_where_programs_cannot_be_closed_off_they_must_be_allowed(monkeypatch):
    monkeypatch.setattr(isolation, "programs_can_be_closed_off", lambda: False)
    with pytest.raises(UserError, match="namespaces.*\nset network: true"):
        Python()
    assert Python(seconds=30.0, network=True).python("3") == "3"


@needs_namespaces
@pytest.mark.slow
def test_a_program_that_hangs_is_ended_with_what_it_started():
    code = "import os, time\nprint('before', flush=True)\nif os.fork() == 0: os.setsid()\ntime.sleep(60)"
    assert Python(seconds=4.0).python(code) == "before\n\n[ended after 4 s]"


def locked(path):
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@needs_namespaces
@pytest.mark.parametrize(("sent", "seconds"), [(signal.SIGKILL, 300), (signal.SIGSTOP, 6)])
@pytest.mark.slow
def test_a_program_does_not_outlive_its_worker_or_its_time(tmp_path, sent, seconds):
    (tmp_path / "file").touch()
    program = f"import fcntl, time\nfile = open({str(tmp_path / 'file')!r})\nfcntl.flock(file, 2)\ntime.sleep(300)"
    code = f"from grpojax.extensions.problems.python_tool import Python; Python(seconds={seconds}).python({program!r})"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for(lambda: locked(tmp_path / "file"))
        process.send_signal(sent)
        wait_for(lambda: not locked(tmp_path / "file"))
    finally:
        process.kill()
        process.wait()


# ------------------------------------------------------------------------------------------------ the lake


def test_a_walk_over_the_lake():
    lake = frozen_lake.FrozenLake()
    assert lake.reset(board="SFF/FHF/FFG") is None
    assert lake.move("left") == "PFF\nFHF\nFFG" and lake.move("right") == "SPF\nFHF\nFFG"
    assert lake.move("down") == "You fell into a hole." and lake.done and lake.get_reward() == 0
    with pytest.raises(ValueError, match="over"):
        lake.move("up")
    lake.reset(board="SFF/FHF/FFG")
    for move in ("down", "down", "right"):
        lake.move(move)
    assert lake.move("right") == "You are at the goal." and lake.done and lake.get_reward() == 1


def test_a_walk_ends_after_its_last_move():
    lake = frozen_lake.FrozenLake(most_moves=2)
    lake.reset(board="SF/FG")
    assert lake.move("up") == "PF\nFG" and not lake.done
    assert lake.move("up") == "Your time is over." and lake.done and lake.get_reward() == 0


def walk(lake, board, n=30):
    lake.reset(board=board)
    return [lake.move("right") for _ in range(n) if not lake.done]


def test_slips_are_the_same_each_time():
    board = "/".join(["S" + "F" * 7] + ["F" * 8] * 6 + ["F" * 7 + "G"])
    lake = frozen_lake.FrozenLake(slippery=0.5)
    assert walk(lake, board) == walk(lake, board) == walk(frozen_lake.FrozenLake(slippery=0.5), board)
    assert walk(lake, board) != walk(frozen_lake.FrozenLake(slippery=0.5, seed=1), board)
    assert walk(lake, board) != walk(frozen_lake.FrozenLake(), board)


def test_lakes_can_be_crossed_and_are_in_one_part_only():
    boards = {}
    for part in ("train", "validation", "test"):
        source = SourceConfig(path="grid:frozen_lake", options={"size": 60, "part": part, "side": 4})
        rows = [row for _, row in open_source(source)]
        boards[part] = {row["board"] for row in rows}
        assert len(boards[part]) == 60
        assert all(frozen_lake.shortest(row["board"]) == row["level"] >= 6 for row in rows)
        assert all(row["question"].endswith(row["board"].replace("/", "\n")) for row in rows)
    assert not boards["train"] & boards["test"] and not boards["validation"] & boards["test"]


@pytest.mark.parametrize(("name", "options", "match"), [
    ("frozen_sea", {}, "no such grid"),
    ("frozen_lake", {"side": 1}, "side=1"),
    ("frozen_lake", {"sides": 4}, "sides"),
    ("frozen_lake", {"side": 2, "size": 500}, "only . lakes of side=2"),
])  # fmt: skip
def test_lakes_that_there_are_not(name, options, match):
    with pytest.raises(UserError, match=match):
        frozen_lake.rows(name, options)


# ------------------------------------------------------------------------------------------------ with extras


GUESSES = ["[10]", "[15]", "no number", "[7]", "[3]"]


def guess(game, moves):
    return [game.play(move=move) for move in moves if not game.done]


def test_games_are_the_same_each_time_whatever_runs_besides():
    pytest.importorskip("textarena", reason=EXTRA)
    from grpojax.extensions.problems.games import TextArena

    one, two = TextArena("2048-v0"), TextArena("2048-v0")
    opening = one.reset(seed=1)
    moves = ["[left]", "[up]", "[right]", "[down]"] * 3
    expected = guess(one, moves)
    assert one.reset(seed=1) == opening and two.reset(seed=1) == opening
    mixed = []
    for move in moves:
        random.seed(7)
        outside = random.getstate()
        two.play(move=move)
        assert random.getstate() == outside
        mixed += guess(one, [move])
    assert mixed == expected


@pytest.mark.slow
def test_a_problem_with_several_attempts():
    pytest.importorskip("reasoning_gym", reason=EXTRA)
    from grpojax.extensions.problems.reasoning_gym import Attempts, rows

    row = rows("chain_sum", {"size": 1})[0]
    problem = Attempts(attempts=2, discount=0.5)
    problem.reset(row["task"])
    assert problem.submit("no idea") == "Wrong, try again." and problem.get_reward() == 0 and not problem.done
    assert problem.submit(f" {row['answer']}\n") == "Right." and problem.done and problem.get_reward() == 0.5
    problem.reset(row["task"])
    assert [problem.submit(""), problem.submit("x")] == ["Wrong, try again.", "Wrong."]
    assert problem.done and problem.get_reward() == 0
    with pytest.raises(ValueError, match="no attempt left"):
        problem.submit(row["answer"])
    with pytest.raises(UserError, match="another source"):
        problem.reset("12 + 9")
