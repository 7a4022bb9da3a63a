"""What reward functions may do to the processes that they run in, and what holds then."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from grpojax.host.errors import UserError
from grpojax.rewards import RewardConfig, Rewards, RewardsConfig, pool, scoring


def judge(name, n=2, batches=1, options=None, **config):
    """The last batch's scores."""
    term = RewardConfig(name=f"misbehaving:{name}", options=options or {})
    with Rewards(RewardsConfig(terms=(term,), workers=1, **config)) as rewards:
        for _ in range(batches):
            scores = rewards([""] * n, [""] * n, [[0]] * n, {})
    return scores


@pytest.mark.slow
def test_a_worker_that_is_full_is_replaced():
    """40 MiB more with each call: with the same worker all samples from the sixth on would be invalid."""
    for batches in (5, 12):
        assert judge("hoards", batches=batches, memory_mb=256).invalid == {}


def test_a_client_is_kept_from_job_to_job():
    """A client belongs to the event loop that it was made in."""
    config = RewardsConfig(terms=(RewardConfig(name="reward_functions:with_client"),), workers=1)
    with Rewards(config) as rewards:
        for _ in range(2):
            assert rewards([""] * 3, [""] * 3, [[0]] * 3, {}).invalid == {}


def test_a_sample_that_takes_all_memory_is_invalid():
    scores = judge("takes_all", memory_mb=256)
    assert scores.invalid == {"misbehaving:takes_all/memory": 2} and np.isnan(scores.total).all()


@pytest.mark.slow
def test_a_sample_that_hangs_is_waited_for_twice_at_most(tmp_path):
    """Once beside a second of its kind, which may be too much where one is not, and once alone."""
    scores = judge("hangs_and_counts", n=1, options={"file": str(tmp_path / "calls")}, timeout_s=0.5)
    assert scores.invalid == {"misbehaving:hangs_and_counts/timeout": 1}
    assert (tmp_path / "calls").read_text() == "called\n" * 2


def running(program):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [path] if program in path.read_bytes() else []
        except OSError:  # gone meanwhile
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
@pytest.mark.slow
def test_what_a_stopped_worker_had_started_is_stopped_too():
    assert judge("leaves_a_program", n=1, timeout_s=0.5).invalid == {"misbehaving:leaves_a_program/timeout": 1}
    deadline = time.monotonic() + 10
    while running(b"321.123") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running(b"321.123")


@pytest.mark.parametrize(("name", "reason"), [("mapping", "type"), ("members", "type"), ("over_float32", "nan")])
def test_what_is_no_list_of_numbers_is_invalid(name, reason):
    assert judge(name).invalid == {f"misbehaving:{name}/{reason}": 2}


@pytest.mark.parametrize("n", [1, 3])
def test_an_error_for_the_user_is_not_a_sample_s(n):
    with pytest.raises(UserError, match="^limit=3: too low\nset limit: 4$"):
        judge("refuses", n=n)


@pytest.mark.parametrize(("name", "options", "said"), [
    ("no_columns", {}, r"must take \(prompts, completions, tokens, \*\*columns\)"),
    ("no_tokens", {}, "add `tokens` as the third parameter"),
    ("scaled", {"scael": 2}, "takes no option 'scael'"),
    ("scaled", {"prompts": 2}, "takes no option 'prompts'"),
    ("Class", {}, "is no function"),
    ("HOARD", {}, "is no function"),
    ("nothing", {}, "cannot be imported: AttributeError"),
])  # fmt: skip
def test_a_function_that_cannot_work_is_refused_at_once(name, options, said):
    with pytest.raises(UserError, match=said):
        judge(name, options=options)
    assert judge("scaled", options={"scale": 3.0}).total.tolist() == [3.0, 3.0]


def test_a_file_in_place_of_a_module_is_said():
    with pytest.raises(UserError, match="cannot be imported: write my.rewards:f"):
        Rewards([RewardConfig(name="./my/rewards.py:f")])
    for elsewhere in ("/x/rewards.py:f", "../rewards.py:f"):
        with pytest.raises(UserError, match="give MODULE:FUNCTION, with the module's folder in PYTHONPATH"):
            Rewards([RewardConfig(name=elsewhere)])


@pytest.mark.slow
def test_an_import_that_hangs_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "hanging.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(scoring, "IMPORT_TIMEOUT_S", 2.0)
    monkeypatch.setattr(pool, "START_S", 1.0)
    with pytest.raises(UserError, match="reward 'hanging:f' is not imported after 2 s"):
        Rewards([RewardConfig(name="hanging:f")])


def test_functions_are_named_before_their_code_runs(tmp_path, monkeypatch, caplog):
    """The module's own import fails; its name was said before that."""
    (tmp_path / "failing.py").write_text("raise SystemExit('ran')\n")
    monkeypatch.syspath_prepend(tmp_path)
    started = pool.WorkerPool
    seen = []
    monkeypatch.setattr(pool, "WorkerPool", lambda **kw: seen.append(caplog.text) or started(**kw))
    with (
        caplog.at_level("INFO", "grpojax"),
        pytest.raises(UserError, match="cannot be imported: SystemExit: ran"),
    ):
        Rewards([RewardConfig(name="failing:f")])
    assert "rewards run the function failing:f" in seen[0]


@pytest.mark.exhaustive("host/test_startup.py::test_reward_functions_in_this_folder_can_be_imported")
def test_the_folder_one_is_in_is_searched(tmp_path, recipe):
    """By the installed command, whose own folder is that of the programs."""
    (tmp_path / "mine.py").write_text("raise RuntimeError('found it')\n")
    command = Path(sys.executable).with_name("grpojax")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"XLA_FLAGS": ""}
    done = subprocess.run(
        [command, "train", recipe, f"run.dir={tmp_path / 'run'}", 'rewards=[{name: "mine:short"}]'],
        cwd=tmp_path, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "RuntimeError: found it" in done.stderr and done.stderr.count("\n") <= 2
