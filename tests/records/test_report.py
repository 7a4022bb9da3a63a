"""Runs read back and compared; the runs are made up, so that every number is known."""

import dataclasses
import json
import re

import numpy as np
import pytest
import report_runs

from grpojax.evaluation import bootstrap, paired_test
from grpojax.host.errors import UserError
from grpojax.records import report
from grpojax.records.comparison import smallest_shown
from grpojax.records.report_charts import chart
from grpojax.records.report_curves import draw
from grpojax.records.runs import by_method, read_runs

DAPO = {"name": "dapo", "clip_high": 0.3}
SKILLS = {
    "grpo": {0: 0.25, 1: 0.5, 2: 0.25},
    "dapo": {0: 0.5, 1: 0.75, 2: [1.0] * 6 + [0.25] * 6},
    "gspo": {0: 0.25, 2: 0.5, 5: 1.0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three methods; gspo has other seeds, and grpo a run that was cut short."""
    folder = tmp_path_factory.mktemp("sweep")
    data = report_runs.write_data(folder / "held_out.jsonl")
    for name, seeds in SKILLS.items():
        for seed, skill in seeds.items():
            variant = DAPO if name == "dapo" else name
            report_runs.write_run(folder / "runs" / f"{name}_{seed}", variant, seed, skill, data=data)
    report_runs.write_run(folder / "runs" / "grpo_7", "grpo", 7, 1.0, data=data, done=4)
    return folder


@pytest.fixture(scope="module")
def built(folder):
    return report.build([folder / "runs"])


def test_the_table(built):
    """Means over seeds, and differences over those that both have; grpo is the baseline wherever it stands."""
    assert built.metric == "eval/accuracy" and built.baseline == "grpo"
    assert [m.name for m in built.methods] == ["dapo", "grpo", "gspo"]
    results = {r.method: r for r in built.results}
    assert results["grpo"].values == {0: 0.25, 1: 0.5, 2: 0.25}  # not seed 7, which is not finished
    assert results["grpo"].difference is None
    assert results["gspo"].mean == pytest.approx(7 / 12) and results["gspo"].common == (0, 2)
    assert results["gspo"].difference == pytest.approx(0.125)
    dapo = results["dapo"]
    d = [0.25, 0.25, 0.375]
    assert (dapo.low, dapo.high) == bootstrap([0.5, 0.75, 0.625])
    assert (dapo.difference_low, dapo.difference_high) == pytest.approx(bootstrap(d))
    assert (dapo.p, dapo.p_holm) == (0.25, 0.5) and (results["gspo"].p, results["gspo"].p_holm) == (1.0, 1.0)
    assert dapo.shown is None is smallest_shown(d, 0.025)


def test_problems_seed_by_seed(built, folder):
    tests = {(t.method, t.seed): t for t in built.seed_tests}
    assert set(tests) == {("dapo", 0), ("dapo", 1), ("dapo", 2), ("gspo", 0), ("gspo", 2)}
    want = paired_test([0.25] * 12, [1.0] * 6 + [0.25] * 6)
    got = tests["dapo", 2]
    assert (got.difference, got.p, got.better, got.worse, got.problems) == (0.375, want.p, 6, 0, 12)
    assert got.p == pytest.approx(2 / 2**6) and got.p_holm == pytest.approx(
        2 * got.p
    )  # three smaller, and then one of two
    assert tests["dapo", 0].p_holm == pytest.approx(5 * 2 / 2**12)


def test_rates_by_difficulty(built):
    assert built.column == "level" and [(x.name, x.problems) for x in built.levels] == [("1", 6), ("2", 6)]
    assert built.levels[0].rates["dapo"] == pytest.approx((0.5 + 0.75 + 0.625) / 3)
    assert built.levels[0].rates["gspo"] == pytest.approx((0.25 + 0.5 + 1) / 3)


def test_samples_are_of_one_seed_and_of_the_prompts_that_differ_most(built):
    first = built.samples[0]
    assert set(first.samples) == {"grpo", "dapo", "gspo"} and len(built.samples) == 5
    assert [x.prompt for x in built.samples] == [f"what is {i} < {i + 1} & 2?" for i in range(5)]
    assert first.samples["dapo"] == ("<b>dapo_0</b> 0", "right")
    assert built.samples[0].gold == "0"


def test_the_prompts_that_differ_most_come_first(tmp_path):
    data = report_runs.write_data(tmp_path / "data.jsonl")
    report_runs.write_run(tmp_path / "grpo", "grpo", 0, 0.25, data=data)
    report_runs.write_run(tmp_path / "gspo", "gspo", 0, [0.25] * 4 + [1, 0.25, 0.75] + [0.25] * 5, data=data)
    got = report.build([tmp_path / "grpo", tmp_path / "gspo"])
    assert [x.gold for x in got.samples] == ["4", "6", "0", "1", "2"]


def test_curves_are_means_over_finished_seeds(built):
    curves = {c.metric: c for c in built.curves}
    assert list(curves) == ["eval/accuracy", "eval/reward", "eval/pass@4", "reward", "groups/all_fail", "entropy",
                            "grad_norm", "completions/mean_length"]  # fmt: skip
    line = next(x for x in curves["reward"].lines if built.methods[x.method].name == "gspo")
    assert line.steps == (1, 2, 3, 4, 5, 6) and line.seeds == (3,) * 6
    assert line.mean[0] == pytest.approx(0.1 + 0.01 * 7 / 3) and (line.low[0], line.high[0]) == pytest.approx(
        (0.1, 0.15)
    )
    assert line.tokens[1] == pytest.approx(200 + 7 / 3)
    evals = curves["eval/accuracy"].lines[1]
    assert evals.steps == (0, 6) and evals.tokens[0] == 0 and evals.mean == (0, pytest.approx(1 / 3))
    assert curves["grad_norm"].lines[0].steps == (1, 3, 4, 5, 6)  # null is no point
    assert curves["reward"].binned == 1


def test_long_curves_are_binned(tmp_path):
    report_runs.write_run(tmp_path / "a", "grpo", 0, 0.5, data=None, steps=500)
    curve = next(c for c in report.build([tmp_path / "a"]).curves if c.metric == "reward")
    line = curve.lines[0]
    assert curve.binned == 3 and line.steps[:2] == (3, 6) and line.steps[-1] == 500 and len(line.steps) == 167
    assert line.mean[0] == pytest.approx(0.2) and line.tokens[0] == 300


def test_a_bin_has_the_same_steps_of_every_seed(tmp_path):
    """Seed 0 is null at step 2 and ends at 499: its later bins are not shifted, and its last is seed 1's as well."""
    for seed in (0, 1):
        path = report_runs.write_run(tmp_path / str(seed), "grpo", seed, 0.5, data=None, steps=500)
        lines = [{"step": s, "reward": None if (seed, s) == (0, 2) else float(s)} for s in range(1, 501 - (seed == 0))]
        (path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    runs, _ = read_runs([tmp_path])
    unfinished = [
        dataclasses.replace(r, config={**r.config, "train": {**r.config["train"], "steps": 501}}) for r in runs
    ]
    (curve,) = (c for c in draw(by_method(unfinished)) if c.metric == "reward")
    line = curve.lines[0]
    assert curve.binned == 3 and line.steps == (*range(3, 500, 3), 500) and set(line.seeds) == {2}
    assert (line.low[1], line.high[1], line.mean[1]) == (5, 5, 5)
    assert (line.low[0], line.high[0]) == (2, 2) and (line.low[-1], line.high[-1]) == (499, 499.5)


def test_supervised_runs_are_left_out(tmp_path):
    for name in ("a", "sft"):
        report_runs.write_run(tmp_path / name, "grpo", 0, 0.5, data=None)
    config = json.loads((tmp_path / "sft" / "config.json").read_text())
    del config["rollout"]
    (tmp_path / "sft" / "config.json").write_text(json.dumps(config))
    runs, notes = read_runs([tmp_path])
    assert [r.path.name for r in runs] == ["a"] and notes == [f"{tmp_path / 'sft'}: left out, a supervised run"]
    with pytest.raises(UserError, match=r"no runs: give .* \(.*sft: left out, a supervised run\)"):
        read_runs([tmp_path / "sft"])


@pytest.mark.parametrize("source", [{"path": "x.jsonl", "of_another_version": 1}, {"path": "x.jsonl", "weight": -1}])
def test_a_source_that_cannot_be_made_costs_the_difficulties_alone(tmp_path, source):
    path = report_runs.write_run(tmp_path / "a", "grpo", 0, 0.5, data=report_runs.write_data(tmp_path / "data.jsonl"))
    config = json.loads((path / "config.json").read_text())
    config["data"]["validation"] = [source]
    (path / "config.json").write_text(json.dumps(config))
    assert report.build([path]).levels == []


def test_a_message_without_content_is_of_no_difficulty(tmp_path):
    data = report_runs.write_data(tmp_path / "data.jsonl")
    path = report_runs.write_run(tmp_path / "a", "grpo", 0, 0.5, data=data)
    rows = [json.loads(x) for x in data.read_text().splitlines()]
    rows = [
        {**r, "question": [{"role": "user"} | ({"content": r["question"]} if i else {})]} for i, r in enumerate(rows)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [(x.name, x.problems) for x in report.build([path]).levels] == [("1", 5), ("2", 6)]


def test_what_must_be_known_is_said(built):
    notes = "\n".join(built.notes)
    assert "gspo: with one update a rollout the ratio is 1: gspo has the gradient of GRPO's clip" in notes
    assert "grpo_7: 4 of 6 steps, not finished; it is in no result" in notes
    assert built.changes == {"dapo": [], "gspo": []}


def test_unequal_cost_is_said(tmp_path):
    report_runs.write_run(tmp_path / "a", "grpo", 0, 0.5, data=None)
    more = {"sampled_tokens": 659.0}
    report_runs.write_run(tmp_path / "b", "dapo", 0, 0.5, data=None, metrics=more)
    assert "cost" not in "\n".join(report.build([tmp_path]).notes)
    more["sampled_tokens"] = 661.0
    report_runs.write_run(tmp_path / "c", "gspo", 0, 0.5, data=None, metrics=more)
    said = "see the curves by tokens drawn; each run's in all: grpo 600, dapo 659, gspo 661"
    assert said in "\n".join(report.build([tmp_path]).notes)


def test_ticks_of_steps_are_whole(tmp_path):
    report_runs.write_run(tmp_path / "a", "grpo", 0, 0.5, data=None, steps=2)
    curve = report.build([tmp_path]).curves[0]
    assert "1.5" not in re.findall(r">([^<]*)</text>", chart(curve, ["grpo"], "steps", "x"))
    assert "150" in re.findall(r">([^<]*)</text>", chart(curve, ["grpo"], "tokens", "x"))


def test_twins_differ_after_several_updates(tmp_path):
    report_runs.write_run(tmp_path / "a", "gspo", 0, 0.5, data=None, minibatches=3)
    assert "ratio" not in "\n".join(report.build([tmp_path / "a"]).notes)


def test_crashed_and_empty_runs_and_those_without_evaluation_are_said(tmp_path, folder):
    report_runs.write_run(tmp_path / "none", "grpo", 0, 0.5, data=None)
    empty = report_runs.write_run(tmp_path / "empty", "grpo", 1, 0.5, data=None)
    (empty / "metrics.jsonl").write_text("")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text("{")
    got = report.build([tmp_path])
    notes = "\n".join(got.notes)
    assert got.metric is None and got.results == [] and "nothing is tested" in notes
    assert f"{tmp_path / 'torn'}: left out, its config.json cannot be read" in notes
    assert f"{empty}: no step recorded; it is in no result" in notes
    assert [r.state() for r in got.methods[0].runs] == ["6 of 6 steps, no held-out problems", "no step recorded"]
    mixed = report.build([tmp_path, folder / "runs" / "dapo_0"])
    assert mixed.metric == "eval/accuracy" and [r.mean for r in mixed.results] == [None, 0.5]


def test_a_file_of_problems_that_cannot_be_read_costs_its_tests_alone(tmp_path):
    data = report_runs.write_data(tmp_path / "data.jsonl")
    for name in ("grpo", "gspo"):
        report_runs.write_run(tmp_path / name, name, 0, 0.5, data=data)
    (tmp_path / "gspo" / "eval" / "step_6.jsonl").write_text("{}\n")
    got = report.build([tmp_path / "grpo", tmp_path / "gspo"])
    assert "its problems are not compared: " in "\n".join(got.notes) and not got.seed_tests
    assert got.results[1].difference == 0


def test_a_last_evaluation_without_a_value_is_none(tmp_path):
    path = report_runs.write_run(tmp_path / "a", "grpo", 0, 0.5, data=report_runs.write_data(tmp_path / "data.jsonl"))
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "eval/reward": None}) + "\n")
    got = report.build([path], metric=None)
    assert got.metric is None and got.curves[1].lines[0].steps == (0, 6)


def test_other_problems_are_not_compared_by_problem(tmp_path):
    data = report_runs.write_data(tmp_path / "data.jsonl")
    a = report_runs.write_run(tmp_path / "a", "grpo", 0, 0.5, data=data)
    b = report_runs.write_run(tmp_path / "b", "gspo", 0, 0.5, data=data, problems=11)
    got = report.build([a, b])
    assert not got.seed_tests and "its problems are not those of" in "\n".join(got.notes)
    assert got.results[1].p is None  # one seed tests nothing


def test_runs_are_told_apart_by_other_settings(tmp_path):
    for i, rate in enumerate((1e-6, 3e-6)):
        path = report_runs.write_run(tmp_path / str(i), DAPO, 0, 0.5, data=None)
        config = json.loads((path / "config.json").read_text())
        config["optimizer"]["learning_rate"] = rate
        (path / "config.json").write_text(json.dumps(config))
    runs, _ = read_runs([tmp_path])
    with pytest.raises(UserError, match="both dapo with seed 0; --by optimizer.learning_rate tells them apart"):
        by_method(runs)
    assert [m.name for m in by_method(runs, ["variant", "optimizer.learning_rate"])] == [
        "dapo learning_rate=1e-06", "dapo learning_rate=3e-06"]  # fmt: skip
    assert [m.name for m in by_method(runs, ["optimizer.learning_rate"])] == [
        "learning_rate=1e-06", "learning_rate=3e-06"]  # fmt: skip
    with pytest.raises(UserError, match="--by optimizer.rate: no run has this setting"):
        by_method(runs, ["optimizer.rate"])


def test_runs_of_a_method_that_are_not_alike_are_said(tmp_path):
    report_runs.write_run(tmp_path / "a", "grpo", 0, 0.5, data=None)
    report_runs.write_run(tmp_path / "b", "grpo", 1, 0.5, data=None, steps=7)
    notes = report.build([tmp_path]).notes
    assert "grpo: its runs differ in more than the seed: train.steps: 6 -> 7" in notes


def test_the_folder_of_a_sweep_has_its_runs(tmp_path, folder):
    """A folder of runs has what is directly in it."""
    assert [r.path for r in read_runs([folder])[0]] == [r.path for r in read_runs([folder / "runs"])[0]]
    data = report_runs.write_data(tmp_path / "held_out.jsonl")
    for name in ("own", "runs/other"):
        report_runs.write_run(tmp_path / name, "grpo", 0, 0.5, data=data)
    assert [r.path.name for r in read_runs([tmp_path])[0]] == ["own"]


def test_mistakes(tmp_path, folder):
    with pytest.raises(UserError, match="no runs: give run directories"):
        report.build([tmp_path])
    with pytest.raises(UserError, match="is no directory"):
        report.build([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="--baseline 'ppo': no such method; there are 'dapo', 'grpo', 'gspo'"):
        report.build([folder / "runs"], baseline="ppo")
    with pytest.raises(UserError, match="--metric eval/pass@9: no finished run has it"):
        report.build([folder / "runs"], metric="eval/pass@9")


def test_another_metric_and_baseline(folder):
    got = report.build([folder / "runs"], metric="eval/pass@4", baseline="dapo")
    assert got.title() == "held-out pass@4" and {r.method: r.mean for r in got.results}["grpo"] == 1.0
    assert {r.method: r.difference for r in got.results} == {"dapo": None, "grpo": 0.0, "gspo": 0.0}


def test_the_numbers_as_json(built):
    plain = json.loads(json.dumps(report.to_json(built), allow_nan=False))
    assert plain["results"][0]["values"] == {"0": 0.5, "1": 0.75, "2": 0.625}
    assert {c["metric"] for c in plain["curves"]} > {"reward", "eval/accuracy"}
    assert np.isfinite([t["p_holm"] for t in plain["seed_tests"]]).all()
