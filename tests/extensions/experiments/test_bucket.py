"""Runs in a bucket of a real storage server on loopback."""

import json

import bucket
import report_runs

from grpojax.cli import main as cli
from grpojax.extensions.experiments.runs import read_runs
from grpojax.host import files
from grpojax.records import metrics

proxy, place = bucket.proxy, bucket.place


def record(folder, resume_at, steps, extra=()):
    """The metrics of a run of some steps; every second one is evaluated."""
    written = metrics.Metrics(folder, resume_at)
    for step in steps:
        row = {"prompt": "p", "completion": f"{step}\u2028", "reward": 1.0 / step, "length": step}
        written.write_samples(step, [row])
        written.write(step, {"reward": 1.0 / step, "none": float("nan")})
        if step % 2 == 0:
            written.write(step, {"eval/reward": step / 7})
    for step, values in extra:
        written.write(step, values)
    written.flush()
    return written


def test_runs_are_found_in_a_folder(place):
    for name in ("a", "b"):
        files.write_json(place / name / "config.json", {"rollout": {}, "train": {"steps": 2}})
        record(place / name, 0, [1, 2]).close()
    runs, notes = read_runs([str(place)])
    assert [str(run.path) for run in runs] == [f"{place}/a", f"{place}/b"] and not notes
    assert runs[0].done == 2


def test_a_report_is_written_beside_its_run(place, proxy):
    record(f"{place}/a", 0, range(1, 3))
    files.write(f"{place}/a/config.json", json.dumps(report_runs.CONFIG | {"variant": {"name": "grpo"}}).encode())
    assert cli.main(["report", f"{place}/a", "--to", f"{place}/report.html"]) == 0
    assert files.path(f"{place}/report.html").exists()
