"""Runs read back and compared; the runs are made up, so that every number is known."""

import dataclasses
import json
import re

import numpy as np
import pytest
import report_runs

from grpojax import variants
from grpojax.evaluation import means, paired_test
from grpojax.evaluation.summary import EpisodeRecord
from grpojax.extensions.experiments import report, sweeps
from grpojax.extensions.experiments.comparison import t_interval, verdicts
from grpojax.extensions.experiments.report_charts import chart
from grpojax.extensions.experiments.report_curves import draw
from grpojax.extensions.experiments.report_page import page
from grpojax.extensions.experiments.runs import by_method, control_of, read_runs
from grpojax.extensions.experiments.sweeps import Chosen, Compared, Failure, Rate
from grpojax.host import claims
from grpojax.host.errors import UserError
from grpojax.records import evaluations

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
    report_runs.write_run(folder / "runs" / "grpo_7", "grpo", 7, 1.0, data=data, done=4, ended="stopped")
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
    assert results["grpo"].unfinished == (7,) and not any(r.failed for r in built.results)
    assert results["gspo"].mean == pytest.approx(7 / 12)
    assert (results["dapo"].low, results["dapo"].high) == pytest.approx(t_interval([0.5, 0.75, 0.625]))
    dapo, gspo = built.comparisons
    assert [(c.method, c.other, c.roles, c.seeds) for c in (dapo, gspo)] == [
        ("dapo", "grpo", ("baseline",), (0, 1, 2)), ("gspo", "grpo", ("baseline",), (0, 2))]  # fmt: skip
    assert [dapo.result, gspo.result] == verdicts([[0.25, 0.25, 0.375], [0.0, 0.25]])
    assert gspo.result.difference == 0.125 and dapo.result.p_corrected == pytest.approx(2 * dapo.result.p)


def test_problems_seed_by_seed(built, folder):
    tests = {(t.method, t.seed): t for t in built.seed_tests}
    assert set(tests) == {("dapo", 0), ("dapo", 1), ("dapo", 2), ("gspo", 0), ("gspo", 2)}
    want = paired_test([0.25] * 12, [1.0] * 6 + [0.25] * 6)
    got = tests["dapo", 2]
    assert (got.difference, got.p, got.better, got.worse, got.problems) == (0.375, want.p, 6, 0, 12)
    assert got.other == "grpo" and got.p == pytest.approx(2 / 2**6)
    assert got.p_corrected == pytest.approx(2 * got.p)  # three smaller, and then one of two
    assert tests["dapo", 0].p_corrected == pytest.approx(5 * 2 / 2**12)


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
    assert line.at["steps"] == (1, 2, 3, 4, 5, 6) and line.seeds == (3,) * 6
    assert line.mean[0] == pytest.approx(0.1 + 0.01 * 7 / 3) and (line.low[0], line.high[0]) == pytest.approx(
        (0.1, 0.15)
    )
    assert line.at["tokens"][1] == pytest.approx(200 + 7 / 3)
    assert line.at["flops"] == tuple(1e12 * i for i in range(1, 7)) and line.at["minutes"][2] == 1.5
    evals = curves["eval/accuracy"].lines[1]
    assert evals.at["steps"] == (0, 6) and evals.at["tokens"][0] == 0 and evals.mean == (0, pytest.approx(1 / 3))
    assert evals.at["minutes"] == (0, 3)
    assert curves["grad_norm"].lines[0].at["steps"] == (1, 3, 4, 5, 6)  # null is no point
    assert curves["reward"].binned == 1


def test_rewards_of_few_samples_are_in_no_curve_and_a_note_says_so(tmp_path):
    path = report_runs.write_run(tmp_path / "a", "grpo", 0, 0.5, data=None)
    lines = [json.loads(x) for x in (path / "metrics.jsonl").read_text().splitlines()]
    lines = [x | {"rewards/invalid": 0.25 if x["step"] in (2, 5) else 0.2} for x in lines]
    few = {"eval/samples": 48, "eval/accuracy": 0.9, "eval/reward": 0.9}
    lines += [{"step": 0, **few, "eval/invalid": 11}, {"step": 6, **few, "eval/unjudged": 12}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    got = report.build([path])
    steps = {c.metric: c.lines[0].at["steps"] for c in got.curves}
    assert steps["reward"] == (1, 3, 4, 6) and steps["eval/accuracy"] == (0,) and len(steps["entropy"]) == 6
    (note,) = [x for x in got.notes if "valid reward" in x]
    assert note.endswith("no valid reward at 3 points, the last of step 6 of 6; curves leave these out")


def test_long_curves_are_binned(tmp_path):
    report_runs.write_run(tmp_path / "a", "grpo", 0, 0.5, data=None, steps=500)
    curve = next(c for c in report.build([tmp_path / "a"]).curves if c.metric == "reward")
    line = curve.lines[0]
    steps = line.at["steps"]
    assert curve.binned == 3 and steps[:2] == (3, 6) and steps[-1] == 500 and len(steps) == 167
    assert line.mean[0] == pytest.approx(0.2) and line.at["tokens"][0] == 300


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
    assert curve.binned == 3 and line.at["steps"] == (*range(3, 500, 3), 500) and set(line.seeds) == {2}
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
    assert (
        "gspo: with one update a rollout the ratio is 1 and no clip acts: gspo has the gradient of GRPO's loss" in notes
    )
    assert "grpo_7: 4 of 6 steps, unfinished: it was stopped, and can go on; it is in no result" in notes
    assert "The figures are of the validation set, by which rates and checkpoints are picked: no test set was" in notes
    assert built.changes == {"dapo": {"grpo": [report.NO_METHOD]}, "gspo": {"grpo": [report.NO_METHOD]}}


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
    for steps in (1, 2):
        path = report_runs.write_run(tmp_path / str(steps), "grpo", 0, 0.5, data=None, steps=steps)
        curve = report.build([path]).curves[0]
        by_step, by_minute = (
            re.findall(r">([^<]*)</text>", chart(curve, ["grpo"], x, "x")) for x in ("steps", "minutes")
        )
        assert by_step[: steps + 1] == [*"12"[:steps], "step"] and "." in by_minute[0]


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
    assert f"{empty}: no step recorded; it is in no result" in notes  # not started, as far as one can know
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
    assert got.comparisons[0].result.difference == 0


def test_a_last_evaluation_without_a_value_is_none(tmp_path):
    path = report_runs.write_run(tmp_path / "a", "grpo", 0, 0.5, data=report_runs.write_data(tmp_path / "data.jsonl"))
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "eval/reward": None}) + "\n")
    got = report.build([path], metric=None)
    assert got.metric is None and got.curves[1].lines[0].at["steps"] == (0, 6)


def test_other_problems_are_not_compared_by_problem(tmp_path):
    data = report_runs.write_data(tmp_path / "data.jsonl")
    a = report_runs.write_run(tmp_path / "a", "grpo", 0, 0.5, data=data)
    b = report_runs.write_run(tmp_path / "b", "gspo", 0, 0.5, data=data, problems=11)
    got = report.build([a, b])
    assert not got.seed_tests and "its problems are not those of" in "\n".join(got.notes)
    assert got.comparisons[0].result.p is None  # one seed tests nothing


def test_runs_are_told_apart_by_other_settings(tmp_path):
    for i, rate in enumerate((1e-6, 3e-6)):
        path = report_runs.write_run(tmp_path / str(i), DAPO, 0, 0.5, data=None)
        config = json.loads((path / "config.json").read_text())
        config["optimizer"]["learning_rate"] = rate
        (path / "config.json").write_text(json.dumps(config))
    runs, _ = read_runs([tmp_path])
    with pytest.raises(UserError, match="both dapo with seed 0; --by optimizer.learning_rate separates them"):
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
    assert {c.method: c.result.difference for c in got.comparisons} == {"grpo": 0.0, "gspo": 0.0}


def test_the_numbers_as_json(built):
    plain = json.loads(json.dumps(report.to_json(built), allow_nan=False))
    assert plain["results"][0]["values"] == {"0": 0.5, "1": 0.75, "2": 0.625}
    assert {c["metric"] for c in plain["curves"]} > {"reward", "eval/accuracy"}
    assert np.isfinite([t["p_corrected"] for t in plain["seed_tests"]]).all()


@pytest.mark.parametrize(("seeds", "ended", "last", "counts"), [
    ((2, 3, 4), "step 4: 3 updates in a row had a gradient that is not finite", 0.25, 0.0),
    ((2, 3, 4), None, 0.25, 0.0),  # killed: the process left no reason
    ((1, 2, 3, 4), "no held-out value is recorded", None, 0.0),
    ((1,), "the last one is not a number, and 0 would be better", [-0.25, None], -0.25),
])  # fmt: skip
def test_a_run_that_failed_counts_as_none_and_not_as_its_policy_before(tmp_path, seeds, ended, last, counts):
    """Two methods by five seeds; the failed ones are at step 4 of 6."""
    data = report_runs.write_data(tmp_path / "data.jsonl")
    for seed in range(5):
        report_runs.write_run(tmp_path / "runs" / f"grpo_{seed}", "grpo", seed, 0.5, data=data)
        lost = {"done": 4, "ended": ended} if seed in seeds else {}
        path = report_runs.write_run(
            tmp_path / "runs" / f"token_critic_{seed}", "token_critic", seed, 1.0, data=data, **lost
        )
        if lost:
            lines = [json.loads(x) for x in (path / "metrics.jsonl").read_text().splitlines()]
            lines = [x for x in lines if "eval/accuracy" not in x]
            values = [] if last is None else last if isinstance(last, list) else [last]
            lines += [{"step": 4, "eval/reward": x, "eval/accuracy": x} for x in values]
            (path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    got = report.build([tmp_path])
    result = next(r for r in got.results if r.method == "token_critic")
    values = {seed: counts if seed in seeds else 1.0 for seed in range(5)}
    reason = "its process left no reason; it was killed or crashed" if ended is None else ended
    assert result.values == values and result.failed == dict.fromkeys(seeds, reason)
    assert result.mean == pytest.approx(np.mean(list(values.values())))
    assert (result.low, result.high) == pytest.approx(t_interval(list(values.values())))
    (compared,) = got.comparisons
    assert compared.seeds == (0, 1, 2, 3, 4)
    assert compared.result == verdicts([[values[seed] - 0.5 for seed in range(5)]])[0]
    assert f"failed: {reason}; it counts as {counts:.3g}" in "\n".join(got.notes)
    line = next(x for c in got.curves if c.metric == "eval/accuracy" for x in c.lines if x.method == 1)
    assert line.at["steps"][-1] == 6 and line.seeds[-1] == 5 and line.mean[-1] == pytest.approx(result.mean)
    reward = next(x for c in got.curves if c.metric == "reward" for x in c.lines if x.method == 1)
    assert reward.seeds == (5, 5, 5, 5, 5 - len(seeds), 5 - len(seeds))


@pytest.mark.parametrize(("more", "last_line", "kind", "why"), [
    ({}, {}, "failed", "its process left no reason"),
    ({"ended": "stopped"}, {}, "unfinished", "it was stopped, and can go on"),
    ({"ended": "step 3: out"}, {}, "failed", "step 3: out"),
    ({"on_collapse": "stop"}, {"watch/entropy_collapse": 1.0}, "failed", "stopped by the alarm entropy_collapse"),
    ({}, {"watch/entropy_collapse": 1.0}, "failed", "its process left no reason"),
    ({}, {"skipped_updates": 2.0}, "failed", "the gradient was not finite"),
])  # fmt: skip
def test_how_a_run_ended(tmp_path, more, last_line, kind, why):
    path = report_runs.write_run(tmp_path / "a", "grpo", 0, 0.5, data=None, done=3, **more)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, **last_line}) + "\n")
    (run,), _ = read_runs([path])
    assert (run.ending[0], run.ending[1][: len(why)]) == (kind, why)


def test_a_run_that_goes_on_is_unfinished(tmp_path):
    path = report_runs.write_run(tmp_path / "a", "grpo", 0, 0.5, data=None, done=3)
    with claims.hold(path):
        (run,), _ = read_runs([path])
        assert run.ending == ("unfinished", "it goes on")
    (run,), _ = read_runs([path])
    assert run.ending[0] == "failed"


def test_the_test_set_is_the_result_where_every_run_has_read_it(tmp_path):
    data = report_runs.write_data(tmp_path / "data.jsonl")
    for seed in (0, 1):
        report_runs.write_run(tmp_path / "runs" / f"grpo_{seed}", "grpo", seed, 0.25, data=data, test=0.5)
    lost = report_runs.write_run(tmp_path / "runs" / "dapo_0", "dapo", 0, 0.25, data=data, done=5, ended="out")
    report_runs.write_run(tmp_path / "runs" / "dapo_1", "dapo", 1, 0.25, data=data, test=1.0)
    got = report.build([tmp_path])
    assert got.metric == "test/accuracy" and got.title() == "test accuracy" and "validation" not in "\n".join(got.notes)
    assert {r.method: r.values for r in got.results} == {"dapo": {0: 0.0, 1: 1.0}, "grpo": {0: 0.5, 1: 0.5}}
    (test,) = got.seed_tests
    assert (test.seed, test.difference) == (1, 0.5)  # on the problems of the test set
    report_runs.write_run(tmp_path / "runs" / "dapo_2", "dapo", 2, 0.25, data=data)
    mixed = report.build([tmp_path])
    assert mixed.metric == "eval/accuracy" and "only 3 of 4 runs have read a test set" in "\n".join(mixed.notes)
    assert lost.name in "\n".join(mixed.notes)


def tree(name, **options):
    """A resolved method."""
    made = variants.get(name, **options)
    objective = {"aggregate": made.objective.aggregate, "kl_coef": made.objective.kl_coef}
    plain = json.loads(json.dumps(dict(made.options), default=str))
    return {"variant": name, "options": plain, "advantage": "center(by=group)", "objective": objective, "needs": []}


def sweep_of_two(folder, margin=None, seeds=(0, 1, 2)):
    """A sweep of negative_advantage with its control, GRPO as the baseline, and a rate that is looked for."""
    data = report_runs.write_data(folder / "data.jsonl")
    methods = {
        "grpo": ("grpo", {}, 0.25), "negative_advantage": ("negative_advantage", {}, 0.5),
        "negative_advantage-c=0.0": ("negative_advantage", {"c": 0.0}, [0.5] * 11 + [0.75]),
    }  # fmt: skip
    for label, (name, options, skill) in methods.items():
        for seed in seeds:
            path = folder / "runs" / f"{label}_{seed}"
            variant = {"name": name, **options}
            report_runs.write_run(path, variant, seed, skill, data=data, method=tree(name, **options))
    compared = {label: Compared(variant={"name": n, **o}) for label, (n, o, _) in methods.items()}
    compared["negative_advantage"] = dataclasses.replace(
        compared["negative_advantage"], control="negative_advantage-c=0.0", baseline="grpo"
    )
    record = sweeps.SweepRecord(
        methods=compared, seeds=seeds, rates=(1e-4, 3e-4, 1e-3), margin=margin,
        runs={label: {seed: f"{label}_{seed}" for seed in seeds} for label in methods},
    )  # fmt: skip
    sweeps.write(folder, record)
    return record


def test_a_method_is_compared_with_its_control_and_with_the_baseline(tmp_path):
    sweep_of_two(tmp_path, margin=0.05)
    got = report.build([tmp_path])
    assert got.margin == 0.05 and got.baseline == "grpo"
    assert [m.name for m in got.methods] == ["grpo", "negative_advantage", "negative_advantage-c=0.0"]
    assert [(c.method, c.other, c.roles) for c in got.comparisons] == [
        ("negative_advantage", "negative_advantage-c=0.0", ("control",)), ("negative_advantage", "grpo", ("baseline",))
    ]  # fmt: skip
    mean = {r.method: r.mean for r in got.results}
    d = [mean["negative_advantage"] - mean[other] for other in ("negative_advantage-c=0.0", "grpo")]
    assert d == pytest.approx([-0.25 / 12, 0.25])
    assert [c.result for c in got.comparisons] == verdicts([[x] * 3 for x in d], 0.05)
    assert got.changes["negative_advantage"]["negative_advantage-c=0.0"] == ["options.c: 0.0 -> 1.0"]
    assert "objective.aggregate: sequence_mean -> sequence_sum" in got.changes["negative_advantage"]["grpo"]
    assert report.build([tmp_path], margin=0.3).margin == 0.3
    # Without sweep.json the control is found by its resolved method.
    found = report.build([tmp_path / "runs"])
    assert found.margin is None
    assert {(c.method, c.other): c.roles for c in found.comparisons} == {
        ("negative_advantage", "negative_advantage c=0"): ("control",),
        ("negative_advantage", "grpo"): ("baseline",),
        ("negative_advantage c=0", "grpo"): ("baseline",),
    }


def test_a_control_has_all_options_of_one(tmp_path):
    """Runs without sweep.json: another strength of the method's mechanism is no control, nor is a run without a
    recorded method."""
    options = {"a": {}, "b": {"c": 0.5}, "c": {"c": 0.0, "eps": 1e-6}, "d": {"c": 0.0}}
    for name, given in options.items():
        variant = {"name": "negative_advantage", **given}
        report_runs.write_run(tmp_path / name, variant, 0, 0.5, data=None, method=tree(**variant))
    report_runs.write_run(tmp_path / "e", {"name": "negative_advantage", "c": 0}, 0, 0.5, data=None)
    found = {m.runs[0].path.name: m for m in by_method(read_runs([tmp_path])[0])}
    controls = {name: control_of(m, list(found.values())) for name, m in found.items()}
    assert {name: m and m.runs[0].path.name for name, m in controls.items()} == {
        "a": "d", "b": "d", "c": None, "d": None, "e": None}  # fmt: skip


@pytest.mark.slow
def test_verdicts_are_the_same_in_page_json_and_text(tmp_path):
    sweep_of_two(tmp_path, margin=0.05, seeds=tuple(range(8)))
    got = report.build([tmp_path])
    plain = json.loads(json.dumps(report.to_json(got), allow_nan=False))
    said = [c["verdict"] for c in plain["comparisons"]]
    assert said == ["equivalent", "better"] and (plain["margin"], plain["level"]) == (0.05, 0.05)
    lines = "\n".join(report.headlines(got))
    assert "(control): -0.021: no difference of 0.05 or more (p" in lines and "(baseline): +0.250: better (p" in lines
    text = page(got)
    assert "no difference of 5 or more<" in text and "<small>better</small>" in text and "5.0 points" in text
    without = report.build([tmp_path / "runs"], by=["variant"])
    assert {c.result.verdict for c in without.comparisons} == {"better", "worse"}  # and never equivalent


@pytest.mark.slow
def test_outside_of_the_family_differences_are_described(tmp_path):
    """Those with GRPO have no verdict then, and do not weigh on the others' p-values."""
    sweep_of_two(tmp_path, margin=0.05, seeds=tuple(range(8)))
    every, some = report.build([tmp_path]), report.build([tmp_path], family="controls")
    (mine, grpo), (before, _) = ([c.result for c in built.comparisons] for built in (some, every))
    assert grpo.verdict == "described, not tested" and grpo.p is grpo.p_corrected is None and grpo.difference == 0.25
    assert mine.p == before.p and mine.p_equivalent_corrected < before.p_equivalent_corrected
    assert "(baseline): +0.250: described, not tested" in "\n".join(report.headlines(some))
    assert "corrected by Holm for 1 comparison." in page(some)


def test_two_methods_with_the_same_runs_are_not_compared(tmp_path):
    record = sweep_of_two(tmp_path)
    same = {**record.runs, "negative_advantage-c=0.0": record.runs["negative_advantage"]}
    sweeps.write(tmp_path, dataclasses.replace(record, runs=same))
    got = report.build([tmp_path])
    assert [c.other for c in got.comparisons] == ["grpo"]
    notes = "\n".join(got.notes)
    assert "have the same recipe and the same runs: not compared" in notes
    assert "c=0.0_0: left out, sweep.json does not have it" in notes


def test_what_a_sweep_knows_of_its_failures_is_in_the_report(tmp_path):
    record = sweep_of_two(tmp_path)
    (tmp_path / "runs" / "grpo_1" / "metrics.jsonl").write_text('{"step": 2, "eval/accuracy": 0.125}\n')
    (tmp_path / "runs" / "grpo_2" / "metrics.jsonl").write_text('{"step": 2, "eval/accuracy": 0.125}\n')
    failed = {
        "grpo_1": Failure(status=1, step=2, lines=("Traceback", "ValueError: no")),
        "grpo_2": Failure(status=-9, step=2, lines=("step 2",)),
    }
    sweeps.write(tmp_path, dataclasses.replace(record, failed=failed))
    result = report.build([tmp_path]).results[0]
    assert result.failed == {1: "ValueError: no", 2: "killed by signal 9"}
    assert result.values == {0: 0.25, 1: 0.0, 2: 0.0}


def test_runs_that_a_sweep_has_not_started_are_counted(tmp_path):
    record = sweep_of_two(tmp_path)
    later = {**record.runs, "grpo": {**record.runs["grpo"], 3: "grpo_3"}}
    sweeps.write(tmp_path, dataclasses.replace(record, runs=later))
    assert "grpo: 1 of its 4 runs have not been started" in report.build([tmp_path]).notes


@pytest.mark.slow
def test_every_learning_rate_that_was_tried_is_shown(tmp_path):
    sweep_of_two(tmp_path)
    lost = Failure(status=1, step=2, lines=("out",))
    curve = [
        Rate(rate=1e-4, mean=0.2, values={10: 0.1, 11: 0.3}, failed={}),
        Rate(rate=3e-4, mean=0.25, values={10: 0.5, 11: 0.0}, failed={11: lost}),
    ]
    sweeps.write_rates(tmp_path, {"grpo": Chosen(asked="x", rate=3e-4, edge="highest", curve=curve)})
    got = report.build([tmp_path])
    (line,) = got.over_rates.lines
    assert line.method == 0 and line.at == {"rate": (1e-4, 3e-4)} and line.mean == (0.2, 0.25)
    assert (line.low, line.high) == ((0.1, 0.0), (0.3, 0.5))
    text = page(got)
    assert "chosen, still the highest of the range" in text and "0.500, 0.000" in text and "0.0003" in text
    plain = json.loads(json.dumps(report.to_json(got), allow_nan=False))
    assert plain["rates"]["grpo"]["curve"][1]["values"] == {"10": 0.5, "11": 0.0}


@pytest.mark.parametrize("margin", [0.0, -1.0])
def test_a_margin_is_over_0(folder, margin):
    with pytest.raises(UserError, match="--margin .*: give a number over 0"):
        report.build([folder / "runs"], margin=margin)


def with_episodes(path, variant, seed, *, invalid=0.0):
    """A run of `report_runs` whose samples are episodes."""
    path.parent.mkdir(exist_ok=True)
    data = report_runs.write_data(path.parent / f"{path.name}.jsonl")
    figures = {"episode/turns": 2.0 + seed, "episode/calls": 1.0, "episode/calling": 0.5, "episode/failures": 0.25,
               "episode/malformed": 0.125, "episode/answer_tokens": 7.0, "episode/invalid": invalid}  # fmt: skip
    reasons = {"rewards/invalid/environment/timeout": 3.0, "rewards/invalid/answer/error": 9.0} if invalid else {}
    report_runs.write_run(path, variant, seed, 0.5, data=data, steps=4, metrics=figures | reasons)
    file = path / "eval" / "step_4.jsonl"
    played = EpisodeRecord(turns=("2<3", "<b>five</b>", "so 5"), tokens=(4, 1, 2), calls=1, failures=1, malformed=0)
    gone = dataclasses.replace(played, turns=("2<3",), tokens=(4,), invalid="crash")
    done = [
        dataclasses.replace(a, samples=tuple(dataclasses.replace(s, episode=gone if a.uid == 5 else played)
                                             for s in a.samples))
        for a in evaluations.read(file)
    ]  # fmt: skip
    evaluations.write(file, done)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines[-1] |= means(done)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
def test_episodes_are_shown_held_out_and_in_training(tmp_path):
    for name, seed, invalid in (("grpo", 0, 0.1), ("grpo", 1, 0.0), ("gspo", 0, 0.0)):
        with_episodes(tmp_path / "runs" / f"{name}_{seed}", name, seed, invalid=invalid)
    built = report.build([tmp_path / "runs"])
    held_out, training = (row for row in built.episodes if row.method == "grpo")
    assert (held_out.where, training.where) == ("validation set", "training, last step")
    assert (training.turns, training.calls, training.answer_tokens, training.own_tokens) == (2.5, 1.0, 7.0, 9.0)
    assert (training.calling, training.failures, training.malformed) == (0.5, 0.25, 0.125)
    assert training.invalid == pytest.approx(0.05) and training.reasons == {"timeout": 4 * 3}
    assert held_out.turns == pytest.approx((11 * 2 + 1) / 12) and held_out.own_tokens == 5
    assert (held_out.calls, held_out.failures, held_out.malformed) == (1.0, 1.0, 0.0)
    assert held_out.answer_tokens == pytest.approx(11 / 12) and held_out.invalid == pytest.approx(1 / 12)
    assert held_out.reasons == {"crash": 2 * 4}
    curves = {c.metric: c for c in built.curves}
    assert list(curves)[-6:] == [f"episode/{x}" for x in ("turns", "calls", "answer_tokens", "failures", "malformed",
                                                          "invalid")]  # fmt: skip
    assert [line.mean for line in curves["episode/turns"].lines] == [(2.5,) * 4, (2.0,) * 4]
    text = page(built)
    turns = re.findall(r'<pre( class="tool")?>(&[gl]t;){3} \(([^)]*)\) ([^\n]*?)</pre>', text)
    assert turns[:3] == [("", "&gt;", "4 tokens", "2&lt;3"),
                         (' class="tool"', "&lt;", "1 token, not the policy's", "&lt;b&gt;five&lt;/b&gt;"),
                         ("", "&gt;", "2 tokens", "so 5")]  # fmt: skip
    assert "12 timeout" in text and "8 crash" in text
    assert json.loads(json.dumps(report.to_json(built)))["episodes"][0]["reasons"] == {"crash": 8}


@pytest.mark.slow
def test_a_report_without_episodes_has_nothing_of_them(built):
    text = page(built)
    assert not built.episodes and "episode" not in text.lower() and 'class="tool"' not in text
    assert "episodes" not in report.to_json(built)
