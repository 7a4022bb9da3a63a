"""Supervised runs: they learn, they go on bit for bit, and they refuse what does not go together."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import types

import answered_runs
import fake_device
import jax
import numpy as np
import pytest
from runs import environment, numbers

from grpojax.extensions.supervised import answer_scoring, finetune, teaching
from grpojax.extensions.supervised.answered import Answered
from grpojax.extensions.supervised.finetune_recipe import load_dpo, load_sft
from grpojax.host import files
from grpojax.host.errors import UserError
from grpojax.records.checkpoint import Checkpoints
from grpojax.run import control
from grpojax.train import train

LOAD = {"sft": load_sft, "dpo": load_dpo}
KINDS = pytest.mark.parametrize("kind", ["sft", "dpo"])


@pytest.fixture(scope="module")
def recipes(recipe, tmp_path_factory):
    return answered_runs.make(tmp_path_factory.mktemp("answers"), recipe.parent)


def run_of(recipes, kind, directory, *overrides, devices=1):
    config = LOAD[kind](recipes[kind], [f"run.dir={directory}", *overrides])
    return finetune.open_finetune(config, jax.devices()[:devices])


@pytest.fixture(scope="module")
def unbroken(recipes, tmp_path_factory):
    """A whole run of each kind."""
    folder = tmp_path_factory.mktemp("runs")
    for kind in LOAD:
        assert train(run_of(recipes, kind, folder / kind))
    return folder


@pytest.fixture(scope="module")
def unbroken_fake(recipes, tmp_path_factory):
    """The same with results that are made up (`fake_device`)."""
    folder = tmp_path_factory.mktemp("fakes")
    with fake_device.in_place():
        for kind in LOAD:
            assert train(run_of(recipes, kind, folder / kind))
    return folder


@KINDS
@pytest.mark.slow
def test_a_run_learns_and_says_so(unbroken, kind):
    lines = numbers(unbroken / kind)
    updates = [line for line in lines if "loss" in line]
    held_out = [line for line in lines if "eval/loss" in line]
    assert [line["step"] for line in updates] == list(range(1, 8))
    assert [line["step"] for line in held_out] == [0, 3, 6, 7]
    assert held_out[-1]["eval/loss"] < held_out[0]["eval/loss"] - 0.1
    assert all(line["grad_norm"] > 0 and line["skipped_updates"] == 0 for line in updates)
    assert updates[-1]["num_tokens"] > updates[0]["num_tokens"] > 0
    (test,) = [line for line in lines if "test/loss" in line]
    assert test is lines[-1] and test["step"] == 7 and test["test/problems"] == {"sft": 5, "dpo": 9}[kind]
    assert {name.replace("test/", "eval/") for name in test} == {*held_out[-1], "eval/problems"}
    saved = Checkpoints(unbroken / kind / "checkpoints", read_only=True)
    assert saved.latest() == 7
    saved.close()


@pytest.mark.slow
def test_a_policy_that_is_the_reference_has_no_margin(unbroken):
    """Log 2 before the first update, in the update and on held-out pairs: reference and policy are scored alike."""
    lines = numbers(unbroken / "dpo")
    assert lines[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[1]["loss"] == pytest.approx(math.log(2), abs=1e-6) and abs(lines[1]["rewards/margins"]) < 1e-5
    assert lines[1]["logps/rejected"] < lines[1]["logps/chosen"] < 0
    assert lines[-2]["eval/rewards/margins"] > 0.1 and lines[-2]["eval/rewards/accuracies"] > 0.9
    assert lines[-1]["test/rewards/margins"] > 0.1


@KINDS
@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_a_run_that_died_goes_on_bit_for_bit(recipes, unbroken_fake, tmp_path, monkeypatch, kind):
    """It dies in step 6, after the save of step 4, with an update in flight; then it is started again."""
    plain, calls = teaching.to_batch, []

    def dies(entries, *given):
        if len(entries) == 8 and len(calls) == at:
            raise KeyboardInterrupt
        calls.append(entries)
        return plain(entries, *given)

    first = dataclasses.replace(run_of(recipes, kind, tmp_path / "run"), steps_in_flight=1)  # as on an accelerator
    reads_eval = -(-len(first.held_out.entries["validation"]) // 8)
    at = 5 + 2 * reads_eval  # batches of five updates, and of the evaluations before and in step 3
    monkeypatch.setattr(finetune.teaching, "to_batch", dies)
    with pytest.raises(KeyboardInterrupt):
        train(first)
    monkeypatch.undo()
    if kind == "dpo":
        before = (tmp_path / "run" / "reference.npz").read_bytes()
    second = dataclasses.replace(run_of(recipes, kind, tmp_path / "run"), steps_in_flight=1)
    assert second.state.step == 4
    assert train(second)
    assert numbers(tmp_path / "run") == numbers(unbroken_fake / kind)
    if kind == "dpo":
        assert (tmp_path / "run" / "reference.npz").read_bytes() == before


def test_a_reference_is_of_its_weights_and_answers(tmp_path):
    """It is read where both are the same, and scored again where one is another, or the file was not written whole."""
    scorer, calls = answer_scoring.Scorer(types.SimpleNamespace(params=None, adapter=None), None, None, 1), []

    def sums(entries, params):
        calls.append(len(entries))
        return np.full((len(entries), 2), len(calls), np.float32), None

    scorer.sums, file = sums, files.path(tmp_path) / "reference.npz"
    one, other = (Answered(0, ids, ((7, 1), (8, 1)), 0) for ids in ((5, 6), (5, 7)))
    given = {"train": (one, other), "validation": (one,)}, {"model": "digest"}
    first = scorer.reference(given[0], file, given[1])
    assert calls == [2, 1] and first["validation"].tolist() == [[2, 2]]
    jax.tree.map(np.testing.assert_array_equal, scorer.reference(given[0], file, given[1]), first)
    assert len(calls) == 2
    for kept, weights in (
        ({**given[0], "train": (other, one)}, given[1]),
        (given[0], {"model": "of other weights"}),
        (given[0], given[1]),
    ):
        before = len(calls)
        assert scorer.reference(kept, file, weights)["train"][0, 0] == before + 1 == len(calls) - 1
        scorer.reference(kept, file, weights)
        assert len(calls) == before + 2
    file.write_bytes(file.read_bytes()[:99])
    assert scorer.reference(given[0], file, given[1])["train"][0, 0] == len(calls) - 1 == 9


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_a_stop_in_an_evaluation_or_the_test_drops_it_and_it_is_made_up_for(recipes, unbroken_fake, tmp_path):
    def stop():
        raise control.Stopped

    first = run_of(recipes, "sft", tmp_path / "run")
    plain = first.held_out.scorer.sums

    def sums(entries, params, turn):
        if first.state.step == 3:
            first.control.ask("SIGTERM")
        return plain(entries, params, turn)

    first.held_out.scorer.sums = sums
    assert not train(first) and first.state.step == 3
    assert "eval/loss" not in numbers(tmp_path / "run")[-1]
    second = run_of(recipes, "sft", tmp_path / "run")
    whole = second.held_out.scorer.sums
    second.held_out.scorer.sums = lambda entries, *more: (
        stop() if entries is second.held_out.entries["test"] else whole(entries, *more)
    )
    assert second.state.step == 3 and not train(second)
    assert numbers(tmp_path / "run") == numbers(unbroken_fake / "sft")[:-1]
    third = run_of(recipes, "sft", tmp_path / "run")
    assert third.state.step == 7 and train(third)
    assert numbers(tmp_path / "run") == numbers(unbroken_fake / "sft")
    third = run_of(recipes, "sft", tmp_path / "run")
    third.held_out.read_test = None  # a finished run does not read it again
    assert train(third)


def command(recipes, kind, directory, *overrides):
    arguments = [kind, str(recipes[kind]), f"run.dir={directory}", *overrides]
    return subprocess.Popen(
        [sys.executable, "-m", "grpojax.cli.main", *arguments],
        env=environment(1), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.exhaustive("extensions/supervised/test_finetune.py::test_a_run_that_died_goes_on_bit_for_bit")
def test_kills_and_signals_change_nothing(recipes, tmp_path):
    """Killed once and stopped once, with a save in flight after every step."""
    kind = "dpo"  # which has a reference too
    whole = command(recipes, kind, tmp_path / "unbroken")
    assert whole.communicate(timeout=300)[0] and whole.returncode == 0
    for number, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, os.EX_TEMPFAIL)):
        process = command(recipes, kind, tmp_path / "stopped", "train.checkpoint_every=1")
        for line in process.stdout:
            if f"step {2 if number == signal.SIGKILL else 4}/7" in line:
                process.send_signal(number)
        assert process.wait() == status
        process.stdout.close()
    assert 4 <= numbers(tmp_path / "stopped")[-1]["step"] < 7
    last = command(recipes, kind, tmp_path / "stopped")
    assert last.communicate(timeout=300)[0] and last.returncode == 0
    assert numbers(tmp_path / "stopped") == numbers(tmp_path / "unbroken")


@pytest.mark.in_ci("overrides0-sft")
@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("overrides", [["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"], ["train.microbatches=4"]])
def test_devices_and_microbatches_change_nothing(recipes, unbroken, tmp_path, kind, overrides):
    devices = 8 if "mesh.data=2" in overrides else 1
    assert train(run_of(recipes, kind, tmp_path / "run", *overrides, devices=devices))
    for got, want in zip(numbers(tmp_path / "run"), numbers(unbroken / kind), strict=True):
        assert got.keys() == want.keys()
        for name in want.keys() - {"useful_token_fraction"}:
            assert got[name] == pytest.approx(want[name], rel=2e-3, abs=1e-3), (got["step"], name)


def test_epochs_are_passes_over_the_data(recipes, tmp_path):
    run = run_of(recipes, "sft", tmp_path / "run", "train.steps=null", "train.epochs=2", "train.group=1")
    count, steps = len(run.held_out.entries["train"]), run.learn_from.args[0].updates
    assert steps == math.ceil(2 * count / 8)
    seen = [e.uid for step in range(steps) for e in run.source.batches[step]]
    assert sorted(seen[:count]) == sorted(seen[count : 2 * count]) == list(range(count))
    run.close()


@pytest.mark.slow
def test_the_held_out_loss_is_that_of_its_answers_one_by_one(recipes, unbroken, tmp_path):
    """Evaluation fills its last batch up; what fills it counts in nothing."""
    by_tokens = run_of(recipes, "sft", tmp_path / "a", "data.train=" + str(recipes["sft"].parent / "sft.jsonl"))
    held_out = by_tokens.held_out
    logps, lengths = held_out.scorer.sums(held_out.entries["validation"], by_tokens.state.networks["policy"].params)
    by_tokens.close()
    assert len(logps) == 18 and len(logps) % 8  # prompts
    before = numbers(unbroken / "sft")[0]
    assert before["eval/loss"] == pytest.approx(-logps.sum() / lengths.sum(), rel=1e-6)
    kind = teaching.CompletionLoss(group=3, aggregate="sequence_mean")
    each = [-logps[i] / lengths[i] for i in np.ndindex(logps.shape) if lengths[i]]
    values = kind.held_out(logps, lengths, np.zeros_like(logps))
    assert values["eval/loss"] == pytest.approx(np.mean(each)) != values["eval/nll"]


def test_answers_of_tools_are_read_and_not_learned(recipes, tmp_path):
    run = run_of(recipes, "sft", tmp_path / "run")
    kept = run.held_out.entries["train"]
    prompt, ids = kept[0].ids, max((c for entry in kept for c in entry.completions), key=len)
    n = len(ids)
    assert n >= 3
    whole, head, call, played = (
        Answered(uid, prompt, (ids[:end],), (turns,))
        for uid, (end, turns) in enumerate([(n, (n,)), (n - 1, (n - 1,)), (1, (1,)), (n, (1, n - 2, 1))])
    )
    entries = [whole, head, call, played]
    sums, counts = run.held_out.scorer.sums(entries, run.state.networks["policy"].params)
    assert counts[:, 0].tolist() == [n, n - 1, 1, 2]
    # What the call and the last token cost; the last token is the whole answer's without its head.
    np.testing.assert_allclose(sums[3, 0], sums[2, 0] + sums[0, 0] - sums[1, 0], atol=1e-4)
    shapes = run.source.shapes
    part, layout = run.held_out.kind.part(teaching.to_batch([played] * 8, shapes), shapes)
    weights = layout.unpack(np.asarray(part.arrays["weights"]))[0, 0]
    assert np.flatnonzero(weights).tolist() == [0, n - 1]
    run.close()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.slow
def test_gradients_that_are_not_finite_stop_the_run_and_cost_nothing(recipes, tmp_path, ahead):
    """With an update ahead, the one after the last that is allowed is on the device by then: it is recorded too."""
    overrides = ("optimizer.learning_rate=1e30", "train.max_skipped=2", "train.eval_every=0")
    run = dataclasses.replace(run_of(recipes, "sft", tmp_path / "run", *overrides), steps_in_flight=ahead)
    with pytest.raises(UserError, match="step 3: 2 updates in a row had a gradient that is not finite"):
        train(run)
    lines = [line for line in numbers(tmp_path / "run") if "loss" in line]
    assert [line["skipped_updates"] for line in lines] == [0, 1, 1, 1][: 3 + ahead]
    saved = Checkpoints(tmp_path / "run" / "checkpoints", read_only=True)
    assert saved.latest() == lines[-1]["step"]
    saved.close()


@pytest.mark.parametrize(("kind", "overrides", "message"), [
    ("sft", ["train.steps=null"], "train: steps=None, epochs=None: give one of them"),
    ("sft", ["train.epochs=2"], "train: steps=7, epochs=2: give one of them"),
    ("sft", ["train.beta=0.1"], "train.beta (from the command line): unknown key"),
    ("dpo", ["train.beta=0"], "beta=0.0: must be over 0"),
    ("dpo", ["train.group=2"], "train.group (from the command line): unknown key"),
    ("dpo", ["train.aggregate=token_mean"], "train.aggregate (from the command line): unknown key"),
    ("sft", ["rollout.group=2"], "unknown key"),
    ("sft", ["data.answer=x"], "data.answer (from the command line): unknown key"),
    ("sft", ["tracking.samples=false"], "tracking.samples=False: nothing is sampled here"),
    ("dpo", ["tracking.texts_every=0"], "tracking.texts_every=0: nothing is sampled here"),
    ("sft", ["data.validation=null"], "train.eval_every=3: there is no data.validation to evaluate on"),
    ("sft", ["train.batch_size=19"], "train.batch_size=19 is more than the 18 entries of the data"),
    ("sft", ["train.microbatches=3"], "train.batch_size=8 does not divide over 1 batch shards with"),
    ("dpo", ["train.microbatches=16"], "make it a multiple of 16"),
    ("sft", ["data.system=Be brief"], "data.system needs a chat template"),
    ("dpo", ["data.train=nowhere.jsonl"], "data file 'nowhere.jsonl' does not exist"),
    ("dpo", ["data.max_tokens=1"], "no row can be used"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(recipes, tmp_path, kind, overrides, message):
    with pytest.raises(UserError) as e:
        run_of(recipes, kind, tmp_path / "run", *overrides)
    assert message in str(e.value) and str(e.value).count("\n") <= 1


def test_a_directory_of_another_run_is_refused(recipes, unbroken, tmp_path):
    with pytest.raises(UserError, match="train.seed: 0 -> 5"):
        run_of(recipes, "sft", unbroken / "sft", "train.seed=5")
    with pytest.raises(UserError, match="holds a run of another config"):
        run_of(recipes, "dpo", unbroken / "sft")
    with pytest.raises(UserError, match="6 steps: the run in .* is at step 7 already"):
        run_of(recipes, "sft", unbroken / "sft", "train.steps=6")
    rows = [json.dumps({"prompt": "1+1=", "completion": str(i)}) for i in range(8)]
    (tmp_path / "other.jsonl").write_text("\n".join(rows))
    longer = ["train.steps=9", f"data.train={tmp_path}/other.jsonl"]
    with pytest.raises(UserError, match="data.train: "):
        run_of(recipes, "sft", unbroken / "sft", *longer)
