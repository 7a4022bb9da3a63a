"""Evaluation and export with several processes, of a run that was trained on one device."""

import json

import fake_device
import numpy as np
import pytest
import runs
from safetensors.numpy import load_file
from several import together

from grpojax.cli import export, targets
from grpojax.cli import main as cli
from grpojax.host import agreement, processes
from grpojax.host.errors import UserError
from grpojax.run import recipe as config
from grpojax.run import store
from grpojax.train import train


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "one"
    overrides = [f"run.dir={directory}", "train.steps=2", "train.checkpoint_every=1", "train.eval_every=0",
                 "train.eval_limit=1"]  # fmt: skip
    with fake_device.in_place():
        assert train(runs.opened(config.load(recipe, overrides)))
    return directory


@pytest.mark.slow
def test_evaluation_and_export_of_any_run_by_any_processes(trained, tmp_path, capsys):
    """Half of an evaluation by one process, the rest by two: as all of it by one, on a mesh that the run never had."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = ["--limit", "9", "--batch", "4", "mesh.data=1"]
    assert cli.main(["eval", str(trained), *options, "--out", str(whole), "mesh.fsdp=4", "mesh.tensor=2"]) == 0
    lines = (whole / "problems.jsonl").read_text().splitlines(keepends=True)
    parts.mkdir()
    (parts / "settings.json").write_text((whole / "settings.json").read_text())
    (parts / "problems.jsonl").write_text("".join(lines[:3]))
    assert cli.main(["export", str(trained), "--to", str(tmp_path / "one"), "mesh.fsdp=8"]) == 0
    (evaluation, exported), others = together(
        ["eval", trained, *options, "--out", parts, "mesh.fsdp=2", "mesh.tensor=2"],
        ["export", trained, "--to", tmp_path / "two", "mesh.fsdp=2", "mesh.tensor=2"],
    )
    assert [[x for x in lines if x] for lines in others] == [["status 0"], ["status 0"]]
    assert any("going on after 3 of 9 problems" in line for line in evaluation)
    assert evaluation[-2:] == [f"wrote {parts}", "status 0"]
    got, want = ([json.loads(x) for x in (d / "problems.jsonl").open()] for d in (parts, whole))
    assert got == want
    assert json.loads((parts / "summary.json").read_text()) == json.loads((whole / "summary.json").read_text())

    assert exported == [f"wrote {tmp_path / 'two'}", "status 0"]
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)
    names = [sorted(p.name for p in (tmp_path / name).iterdir()) for name in ("one", "two")]
    assert names[0] == names[1]


@pytest.mark.exhaustive("extensions/pods/test_peers.py::test_a_users_mistake_keeps_its_status")
def test_who_is_refused_tells_the_others(trained, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("")
    first, second = together(
        ["export", trained, "--to", tmp_path / "full", "mesh.fsdp=4"],
        ["eval", trained, "--out", tmp_path / "full", "mesh.fsdp=4"],
    )
    for lines, others, says in zip(first, second, ("is not an empty folder", "is not an evaluation"), strict=True):
        assert (lines[-1], others[-1]) == ("status 2", "status 1") and says in lines[-2]
        assert "process 0 could not go on" in others[-2] and says in others[-2]


@pytest.mark.exhaustive("extensions/pods/test_several.py::test_evaluation_and_export_of_any_run_by_any_processes")
def test_sample_and_bench_by_two_processes(recipe, tmp_path):
    (sampled, timed), others = together(
        ["sample", recipe.parent, "--prompt", "1+1=", "-n", 3, "--max-tokens", 5],
        ["bench", recipe, f"run.dir={tmp_path}", "--steps", 1, "--json", tmp_path / "f", "mesh.fsdp=4"],
    )
    assert len(sampled) == 4 and [[x for x in lines if x] for lines in others] == [["status 0"], ["status 0"]]
    assert any("matmul rate" in line for line in timed) and json.loads((tmp_path / "f").read_text())["devices"] == 4


@pytest.mark.slow
def test_all_take_what_is_the_newest_to_the_first(trained, tmp_path, monkeypatch):
    """Here by a process that sees step 2, of a run that has saved step 1 when the first one looks."""
    taken = []

    def load(policy, run_dir, step):
        taken.append(step)
        raise UserError("seen enough")

    monkeypatch.setattr(store, "load_policy_params", load)
    monkeypatch.setattr(processes, "meet", lambda word="": ["1" if word == "2" else word, word])
    for options in ([], ["--step", "2"]):
        assert cli.main(["export", str(trained), "--to", str(tmp_path / "policy"), *options]) == 2
    assert taken == [1, 2]
    assert targets.read_target(str(trained)).step == 1


def test_an_evaluation_is_agreed_on_with_how_it_runs(trained, tmp_path, monkeypatch):
    told = {}

    def agree(**facts):
        told.update(facts)
        raise UserError("seen enough")

    monkeypatch.setattr(agreement, "agree", agree)
    options = ["mesh.data=4", "mesh.fsdp=2", "model.remat=none"]
    assert cli.main(["eval", str(trained), "--out", str(tmp_path / "out"), "--batch", "8", *options]) == 2
    assert told["config"]["mesh"]["data"] == 4 and told["config"]["model"]["remat"] == "none" and told["batch"] == 8
    assert all(len(digest) == 32 for what in ("weights", "tokenizer") for digest in told[what].values())
    assert told["evaluation"]


@pytest.mark.parametrize("text", ["train.steps=3", "model.dtype=bfloat16", "data.train=x"])
def test_export_refuses_what_says_nothing_to_it(trained, text):
    with pytest.raises(UserError, match=f"'{text}' has no effect on an export"):
        export._read(str(trained), [text])
