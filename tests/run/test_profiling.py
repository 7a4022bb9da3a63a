"""A trace holds its steps whole, and the run's numbers are those of one without."""

import logging
from pathlib import Path

import bucket
import jax
import pytest

from grpojax.host import files
from grpojax.host.errors import UserError
from grpojax.records.metrics import read_metrics
from grpojax.run import profiling
from grpojax.run import recipe as recipe_module
from grpojax.run.profiling import Profile, ProfileConfig
from grpojax.train import open_run, train


def trained(recipe, folder, *changes):
    config = recipe_module.load(recipe, [f"run.dir={folder}", "train.steps=4", "train.eval_every=0", *changes])
    assert train(open_run(config, jax.devices()[:1]))
    return [{k: v for k, v in x.items() if "time" not in k and "per_s" not in k} for x in read_metrics(folder)]


def steps_of(folder):
    """The numbers of the steps in the traces below a folder, and the names of the programs that ran in them."""
    files_ = [f for f in files.path(folder).glob("plugins/profile/*/*.xplane.pb")]
    events = [
        event
        for file in files_
        for plane in jax.profiler.ProfileData.from_serialized_xspace(file.read_bytes()).planes
        for line in plane.lines
        for event in line.events
    ]
    return sorted(dict(e.stats)["step_num"] for e in events if e.name == "step"), {e.name for e in events}


@pytest.mark.exhaustive("run/test_profiling.py::test_the_loop_waits_at_the_edges_alone")
def test_chosen_steps_are_traced_and_no_number_changes(recipe, tmp_path, caplog):
    plain = trained(recipe, tmp_path / "plain")
    with caplog.at_level(logging.INFO):
        assert trained(recipe, tmp_path / "run", "profile.steps=[2, 3]") == plain
    steps, names = steps_of(tmp_path / "run/profile")
    assert steps == [2, 3] and any("update" in name for name in names) and any("rollout" in name for name in names)
    assert f"tensorboard --logdir {tmp_path}/run/profile" in caplog.text
    assert not (tmp_path / "plain/profile").exists()


@pytest.fixture
def calls(monkeypatch):
    """What the profiler is asked, with nothing traced."""
    made = []

    def start(folder, **options):
        made.append("start")
        (Path(folder) / "plugins").mkdir(parents=True)
        (Path(folder) / "plugins/a.xplane.pb").write_bytes(b"trace")

    monkeypatch.setattr(jax.profiler, "start_trace", start)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: made.append("stop"))
    monkeypatch.setattr(profiling.jax, "block_until_ready", lambda x: made.append(x))
    return made


def walk(profile, numbers, calls):
    for number in numbers:
        profile.begin(number, f"before {number}")
        calls.append(number)
        profile.end(number, f"after {number}")


def test_the_loop_waits_at_the_edges_alone(tmp_path, calls):
    walk(Profile(ProfileConfig(steps=(2, 4)), tmp_path), range(1, 6), calls)
    assert calls == [1, "before 2", "start", 2, 3, 4, "after 4", "stop", 5]


def test_a_run_that_goes_on_or_ends_in_between(tmp_path, calls, caplog):
    profile = Profile(ProfileConfig(steps=(2, 4)), tmp_path / "a")
    walk(profile, [3], calls)
    profile.close()
    profile.close()
    assert calls == ["before 3", "start", 3, "stop"]
    calls.clear()
    walk(Profile(ProfileConfig(steps=(2, 4)), tmp_path / "b"), [5, 6], calls)
    assert calls == [5, 6] and caplog.text.count("are over, since the run is at step 5: nothing is traced") == 1
    walk(Profile(ProfileConfig(), tmp_path / "b"), [7], calls)
    assert calls == [5, 6, 7]


def test_a_trace_that_fails_costs_nothing_else(tmp_path, calls, caplog, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("Only one profile may be run at a time.")

    monkeypatch.setattr(jax.profiler, "start_trace", fail)
    walk(Profile(ProfileConfig(steps=(1, 2)), tmp_path), [1, 2], calls)
    assert calls == ["before 1", 1, 2] and "nothing is traced: Only one profile may be run" in caplog.text


def test_several_processes_and_a_bucket(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    walk(Profile(ProfileConfig(steps=(1, 1)), tmp_path), [1], calls)
    assert (tmp_path / "profile/process_3/plugins/a.xplane.pb").read_bytes() == b"trace"
    with bucket.clients(tmp_path / "server"):
        walk(Profile(ProfileConfig(steps=(1, 1)), f"{bucket.URL}/run"), [1], calls)
        assert files.read(f"{bucket.URL}/run/profile/process_3/plugins/a.xplane.pb") == b"trace"


@pytest.mark.parametrize("steps", ["[0, 3]", "[5, 4]", "[3, 13]"])
def test_steps_that_no_run_has_are_refused(recipe, steps):
    with pytest.raises(UserError, match=f"steps={steps}: ".replace("[", r"\[")):
        recipe_module.load(recipe, [f"profile.steps={steps}"])
    with pytest.raises(UserError, match=r"profile.steps"):
        recipe_module.load(recipe, ["profile.steps=[1]"])
