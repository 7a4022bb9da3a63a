"""What a run's metrics and samples say, of numbers that are made up."""

import gzip
import json

import numpy as np
import pytest
import report_runs

from grpojax.extensions.experiments import measures, report
from grpojax.extensions.experiments.runs import read_runs
from grpojax.records.samples import samples_path

RIGHT, WRONG, INVALID = 1.0, 0.0, None


def sample(uid, right, length=4, follows=1.0, text="", advantage=0.0):
    rewards = {"answer": right, "follows": follows}
    return {"uid": uid, "completion": text, "length": length, "rewards": rewards, "advantage": advantage}


def write_samples(run, steps, rewards=("answer",)):
    """Samples of each step, and a recipe whose rewards have these names."""
    for step, samples in steps:
        path = samples_path(run, step)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress("".join(json.dumps(s) + "\n" for s in samples).encode()))
    file = run / "config.json"
    config = json.loads(file.read_text()) | {"rewards": {"terms": [{"name": name, "weight": 1.0} for name in rewards]}}
    file.write_text(json.dumps(config))


def test_prompts_that_start_all_fail():
    """A prompt is judged by its first group; an invalid sample is no failure, and none of it no group."""
    steps = [
        (1, [sample(0, WRONG), sample(0, WRONG), sample(1, WRONG), sample(1, RIGHT), sample(2, INVALID)]),
        (2, [sample(2, WRONG), sample(3, WRONG), sample(3, INVALID), sample(4, 0.5)]),
        (3, [sample(0, WRONG), sample(1, WRONG), sample(2, WRONG), sample(2, RIGHT), sample(4, 0.9)]),
        (4, [sample(0, RIGHT), sample(0, WRONG), sample(1, RIGHT)]),
    ]
    found = measures.of_samples(steps, "answer")["starts_all_fail"]
    assert found == {"prompts": 4, "again": 3, "solved": 2}  # 0, 2, 3, 4; all but 3 again; 0 and 2


def test_parts_are_tenths_of_the_steps():
    steps = [(n, [sample(n, RIGHT, length=2 * n, follows=0.0), sample(n, WRONG, length=n)]) for n in range(1, 24)]
    parts = measures.of_samples(steps, "answer")["parts"]
    ends = [part["step"] for part in parts]
    assert ends == [2, 5, 7, 9, 12, 14, 16, 18, 21, 23]
    for start, part in zip([0, *ends], parts, strict=False):
        mean = np.mean(range(start + 1, part["step"] + 1))
        assert part["length"] == {"right": pytest.approx(2 * mean), "wrong": pytest.approx(mean)}
        assert part["follows"] == {"right": 0.0, "wrong": 1.0}


def test_groups_that_fail_as_a_whole():
    """Only groups without a right sample count, each as much as any other, whatever its size."""
    failed = [
        sample(0, WRONG, 4, 0.0, "a", 1.0), sample(0, WRONG, 6, 1.0, "a", 2.0), sample(0, WRONG, 8, 0.0, "b", 3.0),
        sample(0, INVALID, 99, 1.0, "c", -9.0),
    ]  # fmt: skip
    others = [sample(1, WRONG, 9, 0.0, "d", 1.0), sample(1, WRONG, 3, 1.0, "e", 2.0)]
    mixed = [sample(2, RIGHT, 1, 1.0, "f", 1.0), sample(2, WRONG, 9, 0.0, "f", -1.0)]
    alike = [sample(3, WRONG, 5, 1.0, "g", -1.0), sample(3, WRONG, 7, 0.0, "g", -1.0)]
    found = measures.of_samples([(1, failed + mixed), (2, others + alike)], "answer")
    assert found["all_fail_advantage"] == {"length": pytest.approx(0.0), "follows": pytest.approx(0.5)}
    assert [part["distinct"] for part in found["parts"]] == [pytest.approx(2 / 3), 0.75]
    (part,) = measures.of_samples([(1, mixed)], "answer")["parts"]
    assert part["distinct"] is None and measures.of_samples([(1, mixed)], "answer")["all_fail_advantage"] == {}


def test_a_run_is_measured_and_the_report_has_it(tmp_path):
    data = report_runs.write_data(tmp_path / "data.jsonl")
    for seed in (0, 1):
        report_runs.write_run(tmp_path / "runs" / f"grpo_{seed}", "grpo", seed, 0.5, data=data)
    run = tmp_path / "runs" / "grpo_0"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    norms = [line["grad_norm"] for line in lines if line.get("grad_norm") is not None]
    lines[3] |= {"watch/entropy_jump": 1.0, "critic/bias_abs": 0.25}
    lines[5] |= {"watch/truncation": 1.0, "critic/bias_abs": 0.5}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_samples(run, [(1, [sample(0, WRONG)]), (2, [sample(0, RIGHT)])])
    plain = json.loads(json.dumps(report.to_json(report.build([tmp_path / "runs"])), allow_nan=False))
    assert plain["measures"]["grpo"].keys() == {"0", "1"} and plain["measures"]["grpo"]["1"]["samples"] is None
    assert plain["measures"]["grpo"]["1"]["alarm"] is plain["measures"]["grpo"]["1"]["critic_bias"] is None
    found = plain["measures"]["grpo"]["0"]
    assert found["grad_norm"] == pytest.approx({"mean": np.mean(norms), "variance": np.var(norms, ddof=1)})
    assert found["entropy"] == [1.0, pytest.approx(1 / 6)] and found["critic_bias"] == [0.25, 0.5]
    assert found["alarm"] == {"step": lines[3]["step"], "names": ["entropy_jump"]}
    assert found["samples"]["starts_all_fail"] == {"prompts": 1, "again": 1, "solved": 1}


def test_without_a_reward_that_says_what_is_right_samples_are_not_measured(tmp_path):
    run = report_runs.write_run(tmp_path / "a", "grpo", 0, 0.5, data=None)
    write_samples(run, [(1, [sample(0, RIGHT)])], rewards=("repetition",))
    assert measures.measure(read_runs([run])[0][0])["samples"] is None
