"""Whose a run directory is: nothing is written before a run begins, and one without a step may be replaced."""

import contextlib
import errno
import fcntl
import json
import os
import random

import pytest

from grpojax.host import claims, files
from grpojax.host.errors import UserError
from grpojax.records.directory import RunDirectory

DATA = {"train": "x", "validation": None}


def run_of(place, seed=0, **more):
    return RunDirectory(place, {"seed": seed, "keep": 1} | more, lambda name: name == "keep")


def start(run, data=DATA):
    """As `grpojax.run.store.Store` does, until the run lets go of its directory."""
    run.check()
    with contextlib.ExitStack() as held:
        run.claim(held)
        if not run.started:
            run.write()
        run.check_data(data)
        with pytest.raises(UserError, match="is in use by another process"):
            claims.check(run.path)


def contents(place):
    """Every file of a folder, but for the lock."""
    return {str(x.relative_to(place)): x.read_bytes() for x in place.rglob("*") if x.is_file() and x.name != "lock"}


def test_a_check_writes_nothing(tmp_path):
    run_of(tmp_path / "a/b").check()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("made", ["file", "link"])
def test_a_place_where_no_folder_can_be_is_refused_at_once(tmp_path, made):
    if made == "file":
        (tmp_path / "a").write_text("")
    else:
        (tmp_path / "a").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"run.dir='.*a/b/c' cannot be made: .*/a is no folder"):
        run_of(tmp_path / "a/b/c").check()


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda place, mode: str(place) != str(tmp_path))
    with pytest.raises(UserError, match="cannot be made: Permission denied"):
        run_of(tmp_path / "a").check()


def nothing(place):
    pass


def empty_folders(place):
    for name in ("checkpoints", "samples"):
        (place / name).mkdir()


@pytest.mark.parametrize("left", [nothing, empty_folders])
def test_a_run_without_a_step_gives_way_and_leaves_nothing(tmp_path, left, caplog):
    caplog.set_level("INFO", "grpojax")
    start(run_of(tmp_path))
    left(tmp_path)
    start(run_of(tmp_path, seed=1))
    said = f"{tmp_path} held a run without a step; it begins anew with this recipe (changed: seed: 0 -> 1)"
    assert set(caplog.messages) == {said}
    assert set(contents(tmp_path)) == {"config.json", "data.json"}
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 1
    start(run_of(tmp_path, seed=1, keep=2))  # which may differ
    assert set(caplog.messages) == {said}


def test_what_it_had_is_moved_and_never_lost(tmp_path, caplog):
    """An evaluation before the first step, and log-probs of a reference that another recipe would read as its own."""
    caplog.set_level("INFO", "grpojax")
    place, seen = files.path(tmp_path), {}
    for seed in range(3):
        start(run_of(tmp_path, seed))
        now = contents(tmp_path)
        assert {n: x for n, x in now.items() if not n.startswith("replaced/")}.keys() == {"config.json", "data.json"}
        assert {n: x for n, x in now.items() if n.startswith("replaced/")} == seen
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "eval/reward": 0.5 + seed}) + "\n")
        (tmp_path / "samples").mkdir()
        (tmp_path / "samples" / "1").write_text("drawn, and not learned from")
        files.write(place / "reference.npz", b"%d" % seed)
        now = {n: x for n, x in contents(tmp_path).items() if not n.startswith("replaced/")}
        seen |= {f"replaced/{seed + 1}/{name}": content for name, content in now.items()}
    assert f"and what else was there is in {tmp_path}/replaced/2" in caplog.text


def test_changed_rows_replace_a_run_without_a_step(tmp_path):
    start(run_of(tmp_path))
    files.write(files.path(tmp_path) / "reference.npz", b"of the rows before")
    start(run_of(tmp_path), {"train": "y", "validation": None})
    assert json.loads((tmp_path / "data.json").read_text())["train"] == "y"
    assert (tmp_path / "config.json").exists() and not (tmp_path / "reference.npz").exists()


def a_step(place):
    (place / "metrics.jsonl").write_text('{"step": 0, "eval/reward": 1}\n{"step": 1, "reward": 1}\n')


def a_checkpoint(place):
    (place / "checkpoints/3").mkdir(parents=True)


def a_broken_checkpoint(place):
    (place / "broken/3").mkdir(parents=True)


@pytest.mark.parametrize("left", [a_step, a_checkpoint, a_broken_checkpoint])
def test_a_run_with_a_step_is_never_replaced(tmp_path, left):
    start(run_of(tmp_path))
    left(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(UserError, match="holds a run of another config: seed: 0 -> 1"):
        run_of(tmp_path, seed=1).check()
    with contextlib.ExitStack() as held, pytest.raises(UserError, match="holds a run of another config"):
        run_of(tmp_path, seed=1).claim(held)
    with pytest.raises(UserError, match="the rows of data.train have changed"):
        start(run_of(tmp_path), {"train": "y", "validation": None})
    assert contents(tmp_path) == before
    start(run_of(tmp_path))


def test_one_that_another_process_holds_is_not_replaced(tmp_path):
    start(run_of(tmp_path))
    before = contents(tmp_path)
    with claims.hold(tmp_path):
        for call in (run_of(tmp_path, seed=1).check, lambda: run_of(tmp_path, 1).claim(contextlib.ExitStack())):
            with pytest.raises(UserError, match="is in use by another process"):
                call()
    assert contents(tmp_path) == before


def test_without_locks_a_run_begins_with_one_warning(tmp_path, monkeypatch, caplog):
    def flock(file, kind):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with claims.hold(tmp_path):
        claims.check(tmp_path)
    assert caplog.messages == [
        f"{tmp_path} cannot be locked (Function not implemented): a second run there would not be noticed"
    ]


@pytest.mark.parametrize("killed_at", range(5))
def test_a_replacement_that_is_killed_is_made_by_the_next_start(tmp_path, monkeypatch, killed_at):
    start(run_of(tmp_path))
    for name in ("reference.npz", "metrics.jsonl", "stopped"):
        (tmp_path / name).write_text("")
    calls, plain = [], files.move

    def move(*given):
        calls.append(given)
        if len(calls) > killed_at:
            raise KeyboardInterrupt
        plain(*given)

    monkeypatch.setattr(files, "move", move)
    with pytest.raises(KeyboardInterrupt):
        start(run_of(tmp_path, seed=1))
    monkeypatch.undo()
    start(run_of(tmp_path, seed=1))
    found = contents(tmp_path)
    assert {x.rpartition("/")[2] for x in found if "/" in x} >= {"reference.npz", "metrics.jsonl", "stopped"}
    assert {x for x in found if "/" not in x} == {"config.json", "data.json"}


@pytest.mark.parametrize("seed", range(3))
def test_whoever_starts_whatever_was_written_is_there_and_a_step_settles_whose_it_is(tmp_path, seed):
    rng, written, owner = random.Random(seed), [], None
    for n in range(12):
        run = run_of(tmp_path, who := rng.randrange(3))
        if owner not in (None, who):
            with pytest.raises(UserError, match="holds a run of another config"):
                start(run)
            continue
        start(run)
        assert json.loads((tmp_path / "config.json").read_text())["seed"] == who
        for name in rng.sample(["reference.npz", "samples/1", "eval/step_0/a", "notes.txt"], 2):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            if not (tmp_path / name).exists():
                (tmp_path / name).write_text(f"{n} {name}")
                written.append(f"{n} {name}".encode())
        if n > 6 and rng.random() < 0.5:
            owner = who
            a_step(tmp_path)
    found = list(contents(tmp_path).values())
    assert all(found.count(content) == 1 for content in written)


def test_a_folder_of_somebody_elses_stays_as_it_is(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="exists and is not a run"):
        run_of(tmp_path).check()
    assert os.listdir(tmp_path) == ["thesis.txt"]


METHOD = {
    "variant": "grpo",
    "options": {"eps": 1e-4, "ddof": 1},
    "advantage": "center(by=group) | scale(ddof=1, eps=0.0001)",
    "objective": {"aggregate": "sequence_mean"},
}
CHANGED = METHOD | {"options": {"eps": 1e-6, "ddof": 1}, "advantage": "center(by=group) | scale(ddof=1, eps=1e-06)"}


def test_another_length_is_refused_with_the_schedule_that_depends_on_it(tmp_path):
    start(run_of(tmp_path, train={"steps": 2}))
    a_step(tmp_path)
    with pytest.raises(UserError, match=r"train.steps: 2 -> 4\n.*run.dir.*optimizer.schedule.*depends on train.steps"):
        run_of(tmp_path, train={"steps": 4}).check()
    with pytest.raises(UserError) as e:
        run_of(tmp_path, train={"steps": 2}, seed=7).check()
    assert "optimizer.schedule" not in str(e.value)


def test_a_default_that_has_changed_since_is_refused_by_name(tmp_path):
    start(run_of(tmp_path, method=METHOD))
    a_step(tmp_path)
    start(run_of(tmp_path, method=METHOD))
    with pytest.raises(UserError) as e:
        run_of(tmp_path, method=CHANGED).check()
    first, second = str(e.value).splitlines()
    assert first.endswith("though the recipe is the same: options.eps: 0.0001 -> 1e-06")
    assert second == "give this run another run.dir, or go on with the code that began it"


def test_the_remedy_is_no_other_config(tmp_path):
    """An option that is given as it was by default, or left out where the default is the same, is no change."""
    start(run_of(tmp_path, method=METHOD, variant={"name": "grpo", "ddof": 1}))
    a_step(tmp_path)
    start(run_of(tmp_path, method=METHOD, variant={"name": "grpo", "eps": 1e-4}))
    with pytest.raises(UserError, match=r"another config: variant.eps: \(absent\) -> 1e-06"):
        start(run_of(tmp_path, method=CHANGED, variant={"name": "grpo", "eps": 1e-6}))


def test_a_run_without_a_step_gives_way_to_another_method(tmp_path, caplog):
    caplog.set_level("INFO", "grpojax")
    start(run_of(tmp_path, method=METHOD))
    start(run_of(tmp_path, method=CHANGED))
    assert (
        "begins anew with this recipe (changed: advantage.scale.eps: 0.0001 -> 1e-06; options.eps: 0.0001 -> 1e-06)"
        in caplog.text
    )
    assert json.loads((tmp_path / "config.json").read_text())["method"] == CHANGED
