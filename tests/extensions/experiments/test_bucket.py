"""Runs in a bucket of a real storage server on loopback."""

import json

import bucket
import pytest
import report_runs

from grpojax.cli import main as cli
from grpojax.extensions.experiments.runs import read_runs
from grpojax.host import files

proxy, place = bucket.proxy, bucket.place


@pytest.mark.slow
def test_runs_are_found_in_a_folder(place):
    for name in ("a", "b"):
        files.write_json(place / name / "config.json", {"rollout": {}, "train": {"steps": 2}})
        bucket.record(place / name, 0, [1, 2]).close()
    runs, notes = read_runs([str(place)])
    assert [str(run.path) for run in runs] == [f"{place}/a", f"{place}/b"] and not notes
    assert runs[0].done == 2


@pytest.mark.slow
def test_a_report_is_written_beside_its_run(place, proxy):
    bucket.record(f"{place}/a", 0, range(1, 3))
    files.write(f"{place}/a/config.json", json.dumps(report_runs.CONFIG | {"variant": {"name": "grpo"}}).encode())
    assert cli.main(["report", f"{place}/a", "--to", f"{place}/report.html"]) == 0
    assert files.path(f"{place}/report.html").exists()
