"""What a run keeps, in a bucket of a real storage server on loopback: the same as on a disk."""

import contextlib
import json

import bucket
import numpy as np
import pytest
import tiny_hf

from grpojax.data import Problem
from grpojax.evaluation import Attempt, Sample
from grpojax.host import files
from grpojax.host.errors import UserError
from grpojax.models import hf
from grpojax.models.hf import writing
from grpojax.records import board, evaluations, metrics, samples
from grpojax.records.checkpoint import Checkpoints
from grpojax.records.directory import RunDirectory

proxy, place = bucket.proxy, bucket.place


@pytest.mark.slow
def test_metrics_of_a_run_that_goes_on_are_those_on_a_disk(place, tmp_path, proxy):
    proxy.every(5, 503, "torn", 429)
    read = []
    for folder in (tmp_path / "run", place):
        files.make_folder(folder)
        bucket.record(folder, 0, range(1, 6))  # and is killed: nothing is closed
        bucket.record(folder, 4, [], [(4, {"eval/late": 0.5})]).close()  # an evaluation that was due
        bucket.record(folder, 4, range(5, 9)).close()
        read.append(metrics.read_metrics(folder))
        assert samples.sample_steps(folder) == list(range(1, 9))
        assert samples.read_samples(folder, 5)[1][0]["completion"] == "5\u2028"
    assert read[0] == read[1] and [x["step"] for x in read[1]] == [1, 2, 2, 3, 4, 4, 4, 5, 6, 6, 7, 8, 8]
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == b"".join(
        (json.dumps(line) + "\n").encode() for line in read[1]
    )
    assert [x for x in bucket.objects(str(place)) if x.startswith("metrics")] == [
        "metrics.jsonl", *(f"metrics/{n:06d}.jsonl" for n in range(5, 9))
    ]  # fmt: skip


def test_a_start_that_is_killed_while_it_drops_lines_loses_none_and_doubles_none(place, monkeypatch):
    bucket.record(place, 0, range(1, 4)).close()
    before = metrics.read_metrics(place)
    monkeypatch.setattr(files, "remove_all", lambda found: None)
    metrics.Metrics(place, 3)
    assert metrics.read_metrics(place) == before


def test_a_step_costs_two_requests_and_waits_for_none(place, proxy):
    written = bucket.record(place, 0, [1])
    proxy.latency, asked = 0.2, proxy.asked
    row = {"prompt": "p", "completion": "c", "reward": 1.0, "length": 1}
    written.write_samples(3, [row])
    written.write(3, {"reward": 1.0})
    assert proxy.asked == asked
    written.flush()
    assert proxy.asked == asked + 2
    proxy.latency = 0.0
    written.close()


def test_events_are_an_object_for_every_few_minutes(place, monkeypatch):
    monkeypatch.setattr(board, "EVERY_S", 0.0)
    bucket.record(place, 0, [1, 2]).close()
    events = [files.read(file) for file in files.listing(place / "tensorboard")]
    assert len(events) == 3 and all(b"reward" in content for content in events)


@pytest.mark.slow
def test_a_directory_is_one_runs(place):
    first = RunDirectory(place, {"a": 1}, lambda name: False)
    with contextlib.ExitStack() as held:
        first.check()
        first.claim(held)
        first.check_data({"train": "x"})
        first.write()
        second = RunDirectory(place, {"a": 1}, lambda name: False)
        with pytest.raises(UserError, match="is in use by"):
            second.check()
        second.check(take_over=True)
        with pytest.raises(UserError, match="is in use by"):
            second.claim(contextlib.ExitStack())
    files.write(place / "reference.npz", b"r")
    files.write(place / "eval/step_0/problems.jsonl", b"e")
    other = RunDirectory(place, {"a": 2}, lambda name: False)
    other.check()  # a run without a step gives way
    with contextlib.ExitStack() as held:
        other.claim(held)
        other.write()
        other.check_data({"train": "x"})
    assert bucket.objects(str(place)) == [
        "config.json", "data.json", "replaced/1/config.json", "replaced/1/data.json",
        "replaced/1/eval/step_0/problems.jsonl", "replaced/1/reference.npz",
    ]  # fmt: skip
    bucket.record(place, 0, [1]).close()
    with pytest.raises(UserError, match="another config: a: 2 -> 1"):
        first.check()
    with pytest.raises(UserError, match="have changed"):
        other.check_data({"train": "y"})
    with pytest.raises(UserError, match="gs://other/run.*no such bucket"):
        RunDirectory("gs://other/run", {}, lambda name: False).check()
    with pytest.raises(UserError, match="gs://bucket' is a whole bucket; give a folder in it: gs://bucket/RUN"):
        RunDirectory(bucket.URL, {}, lambda name: False).check()
    files.write(place / "mine/file", b"")
    with pytest.raises(UserError, match="is not a run"):
        RunDirectory(place / "mine", {}, lambda name: False).check()


# ---------------------------------------------------------------------------------------------- evaluations


def attempts(n):
    one = Sample(completion="7", answer="7", vote="7", correct=True, tokens=5, stopped=True, reward=1.0, rewards={})
    return [Attempt(uid=i, prompt=f"q{i}", gold="7", samples=(one,)) for i in range(n)]


@pytest.mark.slow
def test_an_evaluation_goes_on_where_it_was_stopped(place, tmp_path):
    problems, done = [Problem(i, (1,), f"q{i}", "7", {}) for i in range(7)], attempts(7)
    for folder in (place, tmp_path / "out"):
        with evaluations.Record(folder, {"k": 1}, problems) as record:
            record.append(done[:3])
            record.append(done[3:5])
        assert evaluations.read(folder) == done[:5]
        with evaluations.Record(folder, {"k": 1}, problems) as record:
            assert record.done == done[:5]
            record.append(done[5:])
            record.finish({"m": 1})
        assert evaluations.read(folder) == done
        with pytest.raises(UserError, match="other settings"):
            evaluations.Record(folder, {"k": 2}, problems)
    assert bucket.objects(str(place)) == sorted(p.name for p in (tmp_path / "out").iterdir())
    for name in ("problems.jsonl", "settings.json", "summary.json"):
        assert files.read(place / name) == (tmp_path / "out" / name).read_bytes()
    assert "7 problems in both" in evaluations.compare(place, tmp_path / "out")
    with pytest.raises(UserError, match="give the file or the folder"):
        evaluations.read(place / "nowhere")


def test_two_that_write_batches_of_different_sizes_leave_whole_lines(place):
    done = attempts(8)
    evaluations.write(place / "problems/000000.jsonl", done[:2])
    evaluations.write(place / "problems/000002.jsonl", done[2:4])
    evaluations.write(place / "problems/000003.jsonl", done[3:6])
    evaluations.write(place / "problems/000007.jsonl", done[7:])
    files.write_json(place / "settings.json", {})
    assert evaluations.read(place) == done[:4]


# ---------------------------------------------------------------------------------------------- weights


@pytest.mark.slow
def test_checkpoints(place, proxy):
    met = proxy.met
    state = {"policy": {"w": np.arange(5, dtype=np.float32), "b": np.ones((3, 2), np.float32)}}
    proxy.only, proxy.faults = "upload", iter([*[None] * 5, 503])
    checkpoints = Checkpoints(place / "checkpoints", keep=3)
    for step in (1, 2):
        checkpoints.save(step, {"policy": {k: x + step for k, x in state["policy"].items()}}, {"step": step})
        checkpoints.wait()
    checkpoints.close()
    assert proxy.met > met
    files.write(place / "checkpoints/3/policy_params/half", b"")  # of a save that was killed
    whole = bucket.objects(f"{place}/checkpoints/2")
    (place / "checkpoints/2" / next(x for x in whole if x.endswith("policy_params/manifest.ocdbt"))).unlink()
    checkpoints = Checkpoints(place / "checkpoints", keep=3)
    assert checkpoints.steps() == [1, 2]
    got, meta, broken = checkpoints.restore_newest(state)
    assert meta["step"] == 1 and broken == [2] and checkpoints.steps() == [1]
    np.testing.assert_array_equal(got["policy"]["w"], state["policy"]["w"] + 1)
    assert len(bucket.objects(f"{place}/broken/2")) == len(whole) - 1
    for step in (2, 3):  # both can be saved again
        checkpoints.save(step, state, {"step": step})
        checkpoints.wait()
    assert checkpoints.steps() == [1, 2, 3]
    checkpoints.close()


@pytest.mark.slow
def test_export(place, tmp_path, monkeypatch):
    tiny_hf.save(tmp_path / "in")
    model = hf.load(tmp_path / "in")
    hf.save(tmp_path / "out", model, source=tmp_path / "in", max_shard_bytes=20_000)
    files.write(place / ".partial", b"")
    files.write(place / "model.safetensors", b"of an export that was killed")
    hf.save(place, model, source=tmp_path / "in", max_shard_bytes=20_000)
    assert bucket.objects(str(place)) == sorted(p.name for p in (tmp_path / "out").iterdir())
    for file in (tmp_path / "out").iterdir():
        assert files.read(place / file.name) == file.read_bytes(), file.name
    with pytest.raises(UserError, match="already exists"):
        hf.save(place, model)

    def failing(*args):
        assert not (place / "second/config.json").exists()
        raise OSError("gone")

    monkeypatch.setattr(writing, "_fetch", failing)
    with pytest.raises(OSError, match="gone"):
        hf.save(place / "second", model)
    assert not (place / "second").exists()
