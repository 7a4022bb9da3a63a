"""``grpojax eval``: resumption, refusals, and runs evaluated by their own rewards as they were in training."""

import errno
import fcntl
import json
import logging
import re
import shutil

import fake_device
import numpy as np
import pytest
from refusals import RECIPE, check_said

from grpojax import data, rewards
from grpojax.cli import main as cli
from grpojax.cli.targets import read_target
from grpojax.host.errors import UserError
from grpojax.records import metrics as tracking
from grpojax.records.evaluations import read
from grpojax.run import control, held_out
from grpojax.run import recipe as config
from grpojax.run.closing_report import report
from grpojax.train import open_run, train

DATA = "builtin:arithmetic/test.jsonl"
ROWS_8_TO_15 = [(a, b) for a in range(6) for b in range(5)][8:16]


def run(*arguments):
    return cli.main(["eval", *map(str, arguments)])


TINY = (
    "builtin:tiny",
    "--data",
    DATA,
    "--limit",
    10,
    "--samples",
    4,
    "--k",
    "1,2",
    "--max-tokens",
    24,
    "--batch",
    16,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("eval") / "whole"
    assert run(*TINY, "--out", out) == 0
    return out


@pytest.mark.slow
def test_the_command_writes_lines_and_a_summary(whole, capsys):
    done = read(whole)
    assert [a.uid for a in done] == list(range(10)) and all(len(a.samples) == 4 for a in done)
    assert all(s.correct == rewards.check_answer(s.completion, a.gold) for a in done for s in a.samples)
    summary = json.loads((whole / "summary.json").read_text())
    accuracy = np.mean([s.correct for a in done for s in a.samples])
    assert summary["problems"] == 10 and summary["metrics"]["accuracy"]["value"] == pytest.approx(accuracy)
    assert 0 < accuracy < 1 and set(summary["metrics"]) > {"pass@1", "pass@2", "maj@2"}
    assert summary["metrics"]["reward"] == summary["metrics"]["rewards/math_answer"] == summary["metrics"]["accuracy"]
    assert len({s.completion for s in done[0].samples}) > 1
    assert run(*TINY, "--out", whole) == 0  # all there already
    out = capsys.readouterr().out
    assert "judged by math_answer; a sample is right if math_answer gives 1" in out
    assert "going on after 10 of 10" in out and "avg@4" in out and "maj@2" in out and "compiled" not in out


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.55])
@pytest.mark.slow
def test_half_way_the_same_command_goes_on_to_the_same_file(whole, tmp_path, keep, capsys):
    """Cut inside a line, in the middle of a batch of four problems or in the first one."""
    want = (whole / "problems.jsonl").read_bytes()
    (tmp_path / "settings.json").write_bytes((whole / "settings.json").read_bytes())
    (tmp_path / "problems.jsonl").write_bytes(want[: int(keep * len(want))])
    lines = want[: int(keep * len(want))].count(b"\n")
    batch = 16 if keep < 0.5 else 17  # four problems at a time all the same
    assert run(*TINY, "--out", tmp_path, "--batch", batch) == 0
    assert (tmp_path / "problems.jsonl").read_bytes() == want
    assert (tmp_path / "summary.json").read_bytes() == (whole / "summary.json").read_bytes()
    assert (f"going on after {lines} of 10" in capsys.readouterr().out) == (lines > 0)


@pytest.mark.parametrize(("options", "message"), [
    (["--seed", 5], "eval.seed: 0 -> 5"),
    (["--limit", 9], "data.problems: 10 -> 9"),
    (["--temperature", 0.5], "eval.sampler.temperature: 1.0 -> 0.5"),
    (["data.instruction='Now: {prompt}'"], "data.instruction:"),
    (["rewards=[{name: answer}]"], "rewards.terms.0.name: 'math_answer' -> 'answer'"),
    (["rewards=[{name: answer_format}]"], "judge: 'math_answer' -> None"),
    (["rewards={terms: [{name: math_answer}], timeout_s: 5}"], "rewards.timeout_s: 10.0 -> 5.0"),
    (["evaluate.judge=mine"], "evaluate.judge='mine' is not a reward of the run, which has math_answer"),
    (["evaluate.juge=mine"], "evaluate.juge (from the command line): unknown key; did you mean 'judge'"),
    (["--samples", "0"], "--samples 0: must be at least 1"),
    (["--samples", "2000"], "samples=2000: must be at most 1000"),
    (["--k", "8"], "k=8: must be between 1 and samples=4"),
    (["--k", "two"], "--k 'two': give whole numbers"),
    (["--k", ""], "--k '': give whole numbers"),
    (["--temperature", "0"], "samples=4 at temperature 0 would all be the same"),
    (["--top-p", "0"], "top_p=0.0: must be over 0"),
    (["--batch", "0"], "batch=0: must be at least 1"),
    (["--limit", "-1"], "limit=-1: must be at least 0"),
    (["--max-tokens", "0"], "max_tokens=0: must be at least 1"),
    (["--max-tokens", "1020"], "max_position_embeddings=1024: lower it, or data.max_prompt_tokens"),
    (["--step", "3"], "--step and --best are for a run directory"),
    (["--best"], "--step and --best are for a run directory"),
    (["--data", "nowhere.jsonl"], "data file 'nowhere.jsonl' does not exist"),
    (["train.steps=3"], "override 'train.steps=3' has no effect on an evaluation"),
    (["model.path=x"], "override 'model.path=x' has no effect"),
    (["model={path: x}"], "override 'model={path: x}' has no effect"),
    (["data.promt=x"], "data.promt (from the command line): unknown key; did you mean 'prompt'"),
    (["data.answer=null"], "reward 'math_answer' needs gold answers: give data.answer their column"),
])  # fmt: skip
@pytest.mark.slow
def test_refusals(whole, options, message, capsys):
    before = (whole / "problems.jsonl").read_bytes()
    assert run(*TINY, "--out", whole, *options) == 2
    check_said(message, capsys)
    assert (whole / "problems.jsonl").read_bytes() == before


@pytest.mark.parametrize(("override", "message"), [
    ("train.eval_samples=0", "eval_samples=0: must be at least 1"),
    ("train.eval_samples=1001", "eval_samples=1001: must be at least 1 and at most 1000"),
    ("train.eval_samples=4", "eval_samples=4 would all be the same at eval_temperature=0"),
    ("train.eval_samples=few", "train.eval_samples='few'"),
    ("train.eval_temperature=-1", "eval_temperature=-1.0: must be at least 0"),
    ("train.eval_temprature=1",
     "train.eval_temprature (from the command line): unknown key; did you mean 'eval_temperature'"),
    ("evaluate.judge=math_answer", "evaluate.judge='math_answer' is not a reward of the run, which has answer"),
    ("evaluate={judge: 3}", "evaluate.judge=3"),
])  # fmt: skip
def test_config_values(override, message):
    with pytest.raises(UserError, match=re.escape(message)):
        config.load(RECIPE, [override])


def test_places_that_are_not_an_evaluations(whole, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    for arguments, message in [
        ([*TINY, "--out", tmp_path], "exists and is not an evaluation"),
        ([*TINY, "--out", tmp_path / "thesis.txt"], "exists and is not an evaluation"),
        ([tmp_path / "nothing", "--data", DATA], "is no run directory and no Hugging Face folder"),
        (["builtin:tiny"], "builtin:tiny has no problems for evaluation; give --data FILE"),
    ]:
        assert run(*arguments) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") <= 2
    with open(whole / "problems.jsonl", "ab") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        assert run(*TINY, "--out", whole) == 2
    assert "another evaluation is writing there" in capsys.readouterr().err


def test_without_locks_an_evaluation_warns_and_goes_on(whole, monkeypatch, capsys):
    def flock(file, kind):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert run(*TINY, "--out", whole) == 0
    assert f"{whole} cannot be locked (Function not implemented)" in capsys.readouterr().out


@pytest.mark.slow
def test_several_sets_have_a_row_each_and_a_folder(whole, tmp_path, capsys):
    """One was evaluated before, the other is new; the same command again draws nothing."""
    shutil.copytree(whole, tmp_path / "test")
    other = tmp_path / "more.test.jsonl"
    other.write_bytes(b"".join(data.locate(DATA).read_bytes().splitlines(keepends=True)[20:30]))
    given = [*TINY, "--data", other, "--out", tmp_path]
    for _ in range(2):
        assert run(*given) == 0
        out = capsys.readouterr().out
        found = json.loads((tmp_path / "summary.json").read_text())["sets"]
        assert list(found) == ["test", "more"] and [s["problems"] for s in found.values()] == [10, 10]
        for name in found:
            one = json.loads((tmp_path / name / "summary.json").read_text())
            assert one["metrics"] == found[name]["metrics"]
            accuracy, best = one["metrics"]["accuracy"], one["metrics"]["pass@2"]
            right = [np.mean([s.correct for s in a.samples]) for a in read(tmp_path / name)]
            assert accuracy["value"] == pytest.approx(np.mean(right)) and accuracy["low"] < accuracy["high"]
            shown = [
                f"{100 * m['value']:.1f} % ({100 * m['low']:.1f} to {100 * m['high']:.1f})" for m in (accuracy, best)
            ]
            assert re.search(rf"^{name} +10  {re.escape(shown[0])} .*  {re.escape(shown[1])}", out, re.M), out
        assert re.search(r"^set +problems +avg@4 +pass@1 +pass@2 +maj@2$", out, re.M)
    assert (tmp_path / "test" / "problems.jsonl").read_bytes() == (whole / "problems.jsonl").read_bytes()


@pytest.mark.parametrize(("sets", "message"), [
    (["test"], "--data test: builtin:tiny has no data.test; give a file"),
    ([DATA, DATA], f"--data {DATA} occurs twice"),
    ([""], "the name of a source is empty"),
])  # fmt: skip
def test_sets_that_are_refused(sets, message):
    with pytest.raises(UserError, match=re.escape(message)):
        read_target("builtin:tiny", sets=sets)


@pytest.mark.slow
def test_the_sets_of_a_run_and_where_their_evaluations_go(trained):
    def read_sets(*sets):
        target = read_target(str(trained), sets=sets)
        return list(target.sets), str(target.out.relative_to(trained))

    assert read_sets() == read_sets("validation") == (["validation"], "eval/step_4")
    assert read_sets("test") == (["test"], "test/step_4")
    both = ["a", "test", "a_2"]
    assert read_sets("x/a.jsonl", "test", "y/a.jsonl.gz") == (both, "eval/step_4_a_test_a_2")


# -------------------------------------------------------------------------------------------- runs, comparison


def overrides_of(recipe):
    return ["train.steps=4", "train.eval_every=2", "train.checkpoint_every=2", "train.eval_samples=2",
            "train.eval_temperature=1.0", "mesh.data=8",
            f"data.test={{path: {recipe.parent}/sums.jsonl, rows: [8, 16]}}"]  # fmt: skip


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory):
    """A run of four steps that evaluates two samples a problem; its reward is a function and nothing judges."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    with fake_device.in_place():
        trainer = open_run(config.load(recipe, [f"run.dir={directory}", *overrides_of(recipe)]))
        assert train(trainer)
        report(trainer)
    return directory


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_a_run_reports_its_own_rewards_mean_on_held_out_problems(trained, capsys):
    """And no accuracy: nothing was named that says what is right."""
    metrics = [x for x in tracking.read_metrics(trained) if "eval/reward" in x]
    assert [x["step"] for x in metrics] == [0, 2, 4]
    for x in metrics:
        done = read(trained / "eval" / f"step_{x['step']}.jsonl")
        assert len(done) == 8 and len(done[0].samples) == 2
        samples = [s for a in done for s in a.samples]
        assert all(s.reward == s.rewards["tiny_run:length"] == s.tokens and s.correct is None for s in samples)
        want = np.mean([s.tokens for s in samples])
        assert x["eval/reward"] == x["eval/rewards/tiny_run:length"] == x["eval/mean_length"] == want
        assert {name for name in x if name.startswith("eval/")} == {
            "eval/reward", "eval/rewards/tiny_run:length", "eval/mean_length", "eval/clipped_ratio",
        }  # fmt: skip
    assert run(trained, "--samples", 2, "--limit", 8) == 0
    out = capsys.readouterr().out
    assert "judged by tiny_run:length; no accuracy" in out and "avg@" not in out and "pass@" not in out
    assert {"reward", "rewards/tiny_run:length", "mean_length", "clipped_ratio"} == set(
        json.loads((trained / "eval" / "step_4" / "summary.json").read_text())["metrics"]
    )


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_the_test_set_is_read_once_at_the_end_also_where_that_was_interrupted(
    recipe, trained, tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    lines = tracking.read_metrics(trained)
    (test,) = [x for x in lines if any(name.startswith("test/") for name in x)]
    assert test is lines[-1] and test["step"] == 4 and test["test/problems"] == 8
    done = read(trained / "test" / "step_4.jsonl")
    assert [a.uid for a in done] == list(range(8)) and [a.prompt for a in done] == [
        f"{a}+{b}=" for a, b in ROWS_8_TO_15
    ]
    assert test["test/reward"] == np.mean([s.reward for a in done for s in a.samples])

    def resumed(*more):
        trainer = open_run(config.load(recipe, [f"run.dir={again}", *overrides_of(recipe), *more]))
        finished = train(trainer)
        report(trainer)
        return finished

    shutil.copytree(trained, again := tmp_path / "again")
    with monkeypatch.context() as patch:  # a finished run does not read it again
        patch.setattr(held_out.HeldOut, "read_test", None)
        assert resumed() and tracking.read_metrics(again) == lines
    assert "of 8 problems, read once with the final weights" in caplog.text
    text = (again / "metrics.jsonl").read_text().splitlines(keepends=True)
    (again / "metrics.jsonl").write_text("".join(text[:-1]))  # as if it had been stopped while it was read
    (again / "done").unlink()

    def stop(*_):
        raise control.Stopped

    with monkeypatch.context() as patch:
        patch.setattr(held_out.HeldOut, "read_test", stop)
        assert not resumed() and not (again / "done").exists()
    assert resumed("train.eval_limit=4") and (again / "done").exists()
    assert tracking.read_metrics(again) == lines  # whole, whatever the limit of validation is
    assert resumed("train.steps=6")  # then its final weights are others
    assert [x["step"] for x in tracking.read_metrics(again) if "test/problems" in x] == [4, 6]


@pytest.mark.slow
def test_a_judge_that_teaches_nothing_gives_accuracy(recipe, tmp_path, capsys):
    """A reward of weight 0, or a 0/1 function that is named."""
    overrides = ["train.steps=1", "train.eval_samples=2", "train.eval_temperature=1.0", "train.eval_limit=8",
                 'rewards=[{name: "tiny_run:length"}, {name: "tiny_run:even", weight: 0, label: even},'
                 " {name: answer, weight: 0}]"]  # fmt: skip
    for judge, name in (("even", "tiny_run:even"), ("null", "answer")):
        directory = tmp_path / judge
        trainer = open_run(config.load(recipe, [f"run.dir={directory}", f"evaluate.judge={judge}", *overrides]))
        assert train(trainer)
        (_, line) = [x for x in tracking.read_metrics(directory) if "eval/reward" in x]
        samples = [s for a in read(directory / "eval" / "step_1.jsonl") for s in a.samples]
        assert line["eval/accuracy"] == line[f"eval/rewards/{judge if judge == 'even' else name}"]
        assert line["eval/accuracy"] == np.mean([s.correct for s in samples])
        assert line["eval/reward"] == np.mean([s.tokens for s in samples])
        assert "eval/pass@2" in line and ("eval/maj@2" in line) == (judge == "null")
        if judge == "even":
            assert all(s.correct == (s.tokens % 2 == 0) for s in samples) and 0 < line["eval/accuracy"] < 1


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_a_reward_that_hangs_costs_its_sample_in_an_evaluation(recipe, trained, tmp_path, capsys):
    """Under the run's own time limit: with another one's ten seconds this would take a minute."""
    rows = [{"question": f"{i}+1=", "answer": str(i + 1), "k": i} for i in range(5)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = "rewards={terms: [{name: 'reward_functions:hangs', label: mine}], timeout_s: 1.0}"
    options = [
        "--data",
        tmp_path / "data.jsonl",
        "--out",
        tmp_path / "out",
        judged,
        "evaluate.judge=mine",
        "mesh.data=1",
    ]
    assert run(trained, *options) == 0
    assert "mine took too long" in (out := capsys.readouterr().out) and "rewards.timeout_s=1" in out
    done = read(tmp_path / "out")
    assert [a.samples[0].reward for a in done] == [1.0, 1.0, 1.0, None, 1.0]
    metrics = json.loads((tmp_path / "out" / "summary.json").read_text())["metrics"]
    assert metrics["reward"]["value"] == 1.0 and metrics["accuracy"]["value"] == 0.8
    assert metrics["invalid"] == metrics["unjudged"] == {"value": 1}


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_a_run_is_evaluated_at_any_checkpoint_as_it_was_in_training(trained, capsys):
    same = ["--samples", 2, "--limit", 8]
    assert run(trained, *same) == 0
    newest = trained / "eval" / "step_4" / "problems.jsonl"
    assert newest.read_bytes() == (trained / "eval" / "step_4.jsonl").read_bytes()
    assert run(trained, "--step", 2, *same) == 0
    assert read(trained / "eval" / "step_2") == read(trained / "eval" / "step_2.jsonl")
    capsys.readouterr()
    assert run(trained, "--step", 3, *same) == 2
    assert "has no checkpoint of step 3; it has 2, 4" in capsys.readouterr().err


@pytest.mark.parametrize(("values", "step"), [((0.5, 0.25), 2), ((0.25, 0.5), 4), ((0.5, 0.5), 4), ((0.5, None), 2)])
def test_the_best_checkpoint_is_that_of_the_highest_reward(trained, monkeypatch, values, step):
    """Whatever its accuracy."""
    lines = [{"step": 0, "eval/reward": 0.9}, {"step": 1, "reward": 1.0}]
    lines += [{"step": s, "eval/reward": x, "eval/accuracy": -s} for s, x in zip((2, 4), values, strict=True)]
    monkeypatch.setattr(tracking, "read_metrics", lambda _: lines)
    assert read_target(str(trained), best=True).step == step
    monkeypatch.setattr(tracking, "read_metrics", lambda _: [{"step": 2, "eval/accuracy": 1.0}])
    with pytest.raises(UserError, match="none of .* checkpoints has an eval/reward; give --step"):
        read_target(str(trained), best=True)
