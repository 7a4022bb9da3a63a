"""Workers survive what they run, end with their run, and nothing invalid becomes a number."""

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from reward_functions import STAYS

from grpojax.host import isolation
from grpojax.host.errors import UserError
from grpojax.rewards import RewardConfig, Rewards, RewardsConfig, sandbox

HERE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def console():
    """What the package logs."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("grpojax")
    logging.getLogger().addHandler(handler)  # each test clears those of the package
    before = logger.level
    logger.setLevel(logging.INFO)
    yield lines
    logger.setLevel(before)
    logging.getLogger().removeHandler(handler)


BAD = {
    "raises": "error", "leaves": "error", "hangs": "timeout", "sleeps_in_c": "timeout", "dies": "crash",
    "eats": "memory", "some_nan": "nan", "some_none": "none", "some_text": "type",
}  # fmt: skip
ALL_BAD = {"too_many": "count", "no_list": "type"}
GOOD = ["tokens", "later", "loaded", "runs_a_program"]


@pytest.fixture(scope="module")
def judged(console):
    """A batch of eight samples, the third bad, through every function at once."""
    names = [*BAD, *ALL_BAD, *GOOD]
    terms = tuple(RewardConfig(name=f"reward_functions:{n}", label=n) for n in names)
    terms += (RewardConfig(name="format", options={"pattern": "(a+)+b"}),)
    config = RewardsConfig(terms=terms, timeout_s=1.0, memory_mb=512, workers=2)
    completions = ["aab"] * 3 + ["a" * 60 + "c"] + ["aab"] * 4
    with Rewards(config) as scorer:
        batch = ([""] * 8, completions, [[0] * i for i in range(8)], {"k": list(range(8))})
        yield scorer(*batch), scorer, batch


@pytest.mark.parametrize("name", [*BAD, "format"])
@pytest.mark.slow
def test_a_bad_sample_is_invalid_and_the_others_are_not(judged, name):
    scores = judged[0]
    valid = np.isfinite(scores.by_name[name])
    assert valid.tolist() == [i != 3 for i in range(8)] and set(scores.by_name[name][valid]) == {1.0}
    assert scores.invalid.get(f"{name}/{BAD.get(name, 'timeout')}") == 1, scores.invalid


@pytest.mark.parametrize("name", ALL_BAD)
@pytest.mark.slow
def test_a_wrong_count_makes_all_invalid(judged, name):
    assert np.isnan(judged[0].by_name[name]).all() and judged[0].invalid[f"{name}/{ALL_BAD[name]}"] == 8


@pytest.mark.slow
def test_good_functions_go_on_beside_bad_ones(judged):
    scores = judged[0]
    assert scores.by_name["tokens"].tolist() == scores.by_name["later"].tolist() == list(range(8))
    assert not scores.by_name["loaded"].any()
    assert set(scores.by_name["runs_a_program"]) == {2.0}
    assert len(scores.invalid) == len(BAD) + len(ALL_BAD) + 1
    assert np.isnan(scores.total).all()


@pytest.mark.slow
def test_each_kind_of_failure_is_shown_once_with_its_traceback(judged, console):
    _, scorer, batch = judged
    start = len(console)
    assert [
        line for line in console[:start] if "reward raises raised;" in line and "ZeroDivisionError: the third" in line
    ]
    shown = next(line for line in console if "reward raises raised;" in line)
    assert "reward_functions.py" in shown and "worker.py" not in shown
    assert any("hangs took too long;" in line and "rewards.timeout_s=1" in line for line in console)
    once = "some_none returned None; such samples are left out, and later ones not shown"
    assert sum(once in line for line in console) == 1
    assert scorer(*batch[:3], {"k": [9] * 8}).invalid["too_many/count"] == 8
    assert not [line for line in console[start:] if "not shown" in line]


def test_killed_workers_are_replaced(judged, monkeypatch):
    from grpojax.rewards import pool

    _, scorer, batch = judged
    monkeypatch.setattr(pool, "GRACE", 2.0)  # a job may be lost with its worker
    good = ([""] * 8, ["aab"] * 8, batch[2], {"k": [9] * 8})
    for _ in range(2):
        for pid in list(scorer.workers._pool._pool_manager.worker_manager.workers):
            with contextlib.suppress(ProcessLookupError):  # dead, and not yet noticed
                os.kill(pid, signal.SIGKILL)
        assert set(scorer(*good).invalid) == {"too_many/count", "no_list/type"}


def test_workers_that_are_lost_are_given_up(judged, monkeypatch):
    """Nothing comes back, and nobody says why."""
    from concurrent.futures import Future

    from grpojax.rewards import pool

    scorer = judged[1]
    monkeypatch.setattr(pool, "GRACE", 0.0)
    monkeypatch.setattr(scorer.workers, "timeout_s", 0.2)
    future = Future()
    assert scorer.workers.next_done([future]) is future
    assert pool.failure(future) == "broken"


def test_a_slow_function_gets_smaller_jobs():
    config = RewardsConfig(terms=(RewardConfig(name="reward_functions:slow"),), timeout_s=2.0, workers=2)
    with Rewards(config) as scorer:
        batch = ([""] * 8, [""] * 8, [[]] * 8, {})
        assert scorer.job_size(0) == 8 and scorer(*batch).invalid == {}
        assert scorer.job_size(0) in (1, 2)


def test_rewards_are_computed_while_the_caller_goes_on():
    with Rewards([RewardConfig(name="reward_functions:slow")]) as scorer:
        start = time.perf_counter()
        pending = scorer.submit([""] * 4, [""] * 4, [[]] * 4, {})
        assert time.perf_counter() - start < 0.3
        time.sleep(0.8)
        waited = time.perf_counter()
        assert pending.result().total.tolist() == [1.0] * 4
        assert time.perf_counter() - waited < 0.3


def test_closing_leaves_nothing_behind():
    scorer = Rewards([RewardConfig(name="reward_functions:pid")])
    pid = int(scorer([""], [""], [[]], {}).total[0])
    os.kill(pid, 0)
    scorer.close()
    scorer.close()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


# No guard: a worker that ran this again would start workers of its own. And jax has started.
SCRIPT = """
import sys, jax
jax.numpy.zeros(1).block_until_ready()
from grpojax.rewards import RewardConfig, Rewards
names = ["pid", "loaded", "sleeps_in_c"]
scorer = Rewards([RewardConfig(name=f"reward_functions:{n}") for n in names])
scores = scorer([""], [""], [[]], {"k": [0]})
print(int(scores.by_name["reward_functions:pid"][0]), scores.by_name["reward_functions:loaded"].any(), flush=True)
if sys.argv[1:]:
    pids = list(scorer.workers._pool._pool_manager.worker_manager.workers)
    for _ in pids:
        scorer.submit([""], [""], [[]], {"k": [3]})
    import time; time.sleep(1)
    print(*pids, flush=True)
    time.sleep(60)
"""


def gone(pid):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def environment():
    return dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE.parent), str(HERE)]))


@pytest.mark.slow
def test_a_script_without_a_guard_that_never_closes(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(file)], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    pid, bad = done.stdout.split()
    assert bad == "False" and gone(pid)


def programs_left():
    def line(place):
        with contextlib.suppress(OSError):
            return (place / "cmdline").read_bytes()

    return [place.name for place in Path("/proc").iterdir() if line(place) == f"sleep\0{STAYS}\0".encode()]


@pytest.mark.parametrize("contained", [True, False])
@pytest.mark.slow
def test_hanging_workers_of_a_killed_run_end(tmp_path, contained):
    if contained and not isolation.processes_can_be_contained():
        pytest.skip("the system cannot contain processes")
    file = tmp_path / "script.py"
    allow = f"from grpojax.host import isolation\nisolation.processes_can_be_contained = lambda: {contained}\n"
    file.write_text(allow + SCRIPT.replace("sleeps_in_c", "clings"))
    process = subprocess.Popen(
        [sys.executable, str(file), "wait"], env=environment(), stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    pids = process.stdout.readline().split()
    assert pids and all(Path(f"/proc/{pid}").exists() for pid in pids)
    process.kill()  # they hang in a function
    process.wait()
    process.stdout.close()
    ended, left = [gone(pid) for pid in pids], programs_left()
    if contained:
        ended += [gone(pid) for pid in left]  # the kernel ends them after the workers
    for pid in programs_left():
        os.kill(int(pid), signal.SIGKILL)
    assert all(ended) and (contained or left)


@pytest.mark.parametrize(("what", "call"), [("launch_process", 2), ("launch_thread", 2)])
@pytest.mark.slow
def test_what_is_stopped_while_it_starts_starts_nothing_more(monkeypatch, what, call):
    """As by SIGTERM, which raises anywhere."""
    from pebble.pool import process

    from grpojax.rewards import pool

    made, real = [], getattr(process, what)

    def stopped(*args):
        made.append(real(*args))
        if len(made) == call:
            raise SystemExit
        return made[-1]

    before = set(multiprocessing.active_children())
    monkeypatch.setattr(process, what, stopped)
    with pytest.raises(SystemExit):
        pool.WorkerPool(count=2)
    gc.collect()
    assert len(made) == call
    for child in set(multiprocessing.active_children()) - before:
        child.join(10)
        assert child.exitcode is not None


ASKS = r"""
from grpojax.rewards import check_answer
def ask(_=None):
    return check_answer(r"\boxed{\int_0^1 x dx}", r"\frac{1}{2}")
"""


@pytest.mark.slow
def test_an_answer_is_checked_in_a_daemonic_process(tmp_path):
    """As those of `multiprocessing.Pool` are."""
    file = tmp_path / "script.py"
    file.write_text(f"""{ASKS}
if __name__ == "__main__":
    import multiprocessing
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(ask, [0]))
        pool.close(), pool.join()  # a process that is terminated leaves semaphores behind, and Python warns of that
""")
    done = subprocess.run([sys.executable, str(file)], env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[True]\n", "")


def test_a_process_that_was_forked_says_why_it_cannot_check(monkeypatch):
    from grpojax.rewards import check_answer, pool

    monkeypatch.setattr(pool, "_shared", lambda: (os.getppid(), None))
    with pytest.raises(UserError, match="before this process was forked.*\n.*spawn"):
        check_answer(r"\boxed{\int_0^1 x dx}", r"\frac{1}{2}")


@pytest.mark.slow
def test_an_interrupt_while_workers_start_prints_no_traceback(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(f"""{ASKS}
import contextlib
print("go", flush=True)
with contextlib.suppress(KeyboardInterrupt):
    ask()
""")
    process = subprocess.Popen(
        [sys.executable, str(file)],
        env=environment(), start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.readline()
    time.sleep(0.4)  # the fork server imports what the workers need
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")


def test_outside_of_a_worker_the_event_loop_of_the_thread_stays():
    own = asyncio.new_event_loop()  # as a notebook has one
    asyncio.set_event_loop(own)
    try:
        sandbox.call(len, "")
        assert asyncio.get_event_loop_policy().get_event_loop() is own
    finally:
        asyncio.set_event_loop(None)
        own.close()


def test_an_error_of_a_class_of_the_users_own_ends_the_run_with_its_message():
    with Rewards([RewardConfig(name="reward_functions:refuses")]) as scorer:
        with pytest.raises(UserError, match="^7: no such key$"):
            scorer(["p"], ["c"], [[1]], {})


def test_what_cannot_be_imported_is_a_user_error(console):
    with pytest.raises(UserError, match="'reward_functions:nowhere' cannot be imported: AttributeError"):
        Rewards([RewardConfig(name="reward_functions:nowhere")])
    assert "rewards run the function reward_functions:nowhere" in console
