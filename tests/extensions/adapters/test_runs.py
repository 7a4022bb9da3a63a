"""Runs with adapters: what they save, how they go on, and what becomes of them afterwards."""

import json
import shutil
import signal

import jax
import numpy as np
import pytest
import runs
from adapter_runs import RANK, SHORT, check_both, hf_params, trainer
from runs import numbers
from safetensors.numpy import load_file, save_file
from several import together

from grpojax.cli import main as cli
from grpojax.cli.targets import model_of, read_target
from grpojax.extensions.adapters import peft
from grpojax.host.errors import UserError
from grpojax.run import recipe as config
from grpojax.train import train


@pytest.fixture(scope="module")
def unbroken(recipe, tmp_path_factory):
    """A run whose KL has the base for its reference; with its weights, merged."""
    directory = tmp_path_factory.mktemp("adapters") / "run"
    run = trainer(recipe, directory)
    assert train(run)
    return directory, run


@pytest.mark.slow
def test_only_factors_learn_and_are_saved(unbroken):
    directory, learned = unbroken
    lines = [line for line in numbers(directory) if "reward" in line]
    assert lines[-1]["reward"] > lines[0]["reward"] + 0.5  # rewarded for length, it writes longer
    assert abs(lines[0]["kl"]) < 1e-6 < 1e-4 < lines[-1]["kl"]
    assert all(line["grad_norm"] > 0 for line in lines)
    assert max(line["sampling/logp_difference_max"] for line in lines) < 1e-4  # merged sampler, unmerged trainer
    assert set(learned.state.networks) == {"policy", "base"} and set(learned.saved_networks()) == {"policy"}
    assert {p.name for p in (directory / "checkpoints" / "4").iterdir() if p.is_dir()} >= {"policy_params"}
    assert not (directory / "checkpoints" / "4" / "base_params").exists()
    first = learned.policy.adapter.on_base(hf_params(learned.policy.folder))
    jax.tree.map(np.testing.assert_array_equal, learned.state.networks["base"], first)


@pytest.mark.slow
def test_it_goes_on_bit_for_bit(recipe, unbroken, tmp_path):
    assert train(trainer(recipe, tmp_path, "train.steps=2"))
    again = trainer(recipe, tmp_path)
    assert again.state.step == 2 and train(again)
    want = [line for line in numbers(unbroken[0]) if line["step"] > 2]
    assert [line for line in numbers(tmp_path) if line["step"] > 2] == want
    jax.tree.map(np.testing.assert_array_equal, again.state.networks, unbroken[1].state.networks)


@pytest.mark.exhaustive("extensions/adapters/test_runs.py::test_it_goes_on_bit_for_bit")
def test_it_goes_on_bit_for_bit_after_kill_nine(recipe, unbroken, tmp_path):
    process = runs.start(recipe, tmp_path, *SHORT)
    while "step 3/4" not in (line := process.stdout.readline()):
        assert line, "it ended"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert train(trainer(recipe, tmp_path))  # from the last save that was whole
    assert [x for x in numbers(tmp_path) if "reward" in x] == [x for x in numbers(unbroken[0]) if "reward" in x]


@pytest.mark.exhaustive("run/test_train.py::test_several_processes_train_as_one_stop_as_one_and_go_on")
def test_two_processes_learn_go_on_after_kill_nine_and_export_as_one(recipe, tmp_path):
    """To rounding, since sums over devices are added in another order; with a large eps, since Adam makes of a gradient
    of nothing but rounding a full step."""
    given = [*SHORT, "model.adapter.dora=true", "optimizer.eps=1e-3", "mesh.fsdp=2"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert train(runs.opened(config.load(recipe, [*given, f"run.dir={one}"]), devices=2))
    pair = runs.start_together(recipe, two, *given, processes=2, devices=1)
    while "step 3/4" not in (line := pair[0].stdout.readline()):
        assert line, "it ended"
    for process in pair:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    said = [p.communicate(timeout=600)[0] for p in runs.start_together(recipe, two, *given, processes=2, devices=1)]
    assert "step 4/4" in said[0] and "step 1/4" not in said[0], said
    got, want = ([x for x in numbers(directory) if "reward" in x] for directory in (two, one))
    assert len(got) == len(want) == 4 and want[-1]["kl"] > 1e-4
    for mine, other in zip(got, want, strict=True):
        assert mine == pytest.approx(other, rel=1e-6, abs=1e-6)

    folder, whole, start = tmp_path / "peft", tmp_path / "whole", tmp_path / "start"
    made = together(
        ["export", two, "--to", folder / "two"],
        ["export", two, "--to", whole / "two", "--merged"],
        ["train", recipe, f"run.dir={start}", *given, "train.steps=1", f"model.adapter.path={folder / 'two'}"],
        devices=1,
    )
    assert all(lines[-1] == "status 0" for of_one in made for lines in of_one), made
    assert abs(next(line["kl"] for line in numbers(start) if "reward" in line)) < 1e-6  # the start is the reference
    for place, options in ((folder, []), (whole, ["--merged"])):
        assert cli.main(["export", str(two), "--to", str(place / "one"), "mesh.data=4", *options]) == 0
        names = [sorted(p.name for p in (place / n).iterdir()) for n in ("one", "two")]
        assert names[0] == names[1]
        for name in (n for n in names[0] if n.endswith(".safetensors")):
            files = [load_file(place / n / name) for n in ("one", "two")]
            jax.tree.map(np.testing.assert_array_equal, *files)


@pytest.mark.slow
def test_another_base_is_refused(recipe, unbroken, tmp_path):
    run, model = tmp_path / "run", tmp_path / "model"
    shutil.copytree(unbroken[0], run)
    shutil.copytree(recipe.parent, model, ignore=shutil.ignore_patterns("run"))
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    args = "export", str(run), "--to", str(tmp_path / "out"), f"model.path={model}"
    assert cli.main([*args]) == 2 and not (tmp_path / "out").exists()
    settings = json.loads((run / "config.json").read_text())
    settings["model"]["path"] = str(model)
    (run / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="not learned on the weights in .*\nset model.path"):
        trainer(recipe, run, f"model.path={model}", "train.steps=6")


@pytest.mark.slow
def test_a_peft_folder_is_a_start_and_can_be_sampled_and_evaluated(recipe, unbroken, tmp_path, capsys):
    directory, learned = unbroken
    folder, whole = tmp_path / "peft", tmp_path / "whole"
    assert cli.main(["export", str(directory), "--to", str(folder)]) == 0
    assert cli.main(["export", str(directory), "--to", str(whole), "--merged"]) == 0
    again = trainer(recipe, tmp_path / "again", f"model.adapter.path={folder}", "train.steps=1")
    jax.tree.map(
        np.testing.assert_array_equal, again.state.networks["policy"].params, learned.state.networks["policy"].params
    )
    assert train(again)
    (line,) = (line for line in numbers(tmp_path / "again") if "reward" in line)
    assert abs(line["kl"]) < 1e-6 < line["grad_norm"]  # the policy at the start is the reference, not the base
    assert set(again.saved_networks()) == {"policy", "reference"}
    more = trainer(recipe, tmp_path / "again", f"model.adapter.path={folder}", "train.steps=2")
    jax.tree.map(
        np.testing.assert_array_equal, more.state.networks["reference"], learned.state.networks["policy"].params
    )
    assert more.state.step == 1
    more.close()
    capsys.readouterr()
    texts = []
    for given in ([str(directory)], [str(folder)], [str(folder), "--base", str(recipe.parent)], [str(whole)]):
        assert cli.main(["sample", *given, "--prompt", "1+2=", "-n", "3", "--max-tokens", "6"]) == 0
        texts.append(capsys.readouterr().out.splitlines()[-3:])  # a program of `again` may still say that it compiles
    assert len(texts[0]) == 3 and all(text == texts[0] for text in texts)
    model, run = model_of(str(folder))
    assert run is None and model.adapter.path == str(folder) and model.adapter.rank == 4
    assert (
        cli.main(["export", str(directory), "--to", str(tmp_path / "more"), "--step", "2", "--dtype", "bfloat16"]) == 0
    )
    half = peft.load(peft.read_config(tmp_path / "more")[0], learned.policy.config)
    assert 0 < max(np.abs(x - learned.state.networks["policy"].params[n]).max() for n, x in half.items()) < 1
    rows = ["--data", str(recipe.parent / "sums.jsonl"), "--limit", "4", "--samples", "2", "--max-tokens", "6"]
    for n, given in enumerate((str(directory), str(folder), str(whole))):
        reward = () if n == 0 else ('rewards=[{name: "tiny_run:length"}]', "data.max_prompt_tokens=8")
        assert cli.main(["eval", given, *reward, *rows, "--out", str(tmp_path / f"eval{n}")]) == 0
    made = [(tmp_path / f"eval{n}" / "problems.jsonl").read_text() for n in range(3)]
    assert made[0] == made[1] == made[2] and made[0].count("\n") == 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["train.reference_every=2"], "train.reference_every=2: with model.adapter.*set it to 0"),
        (["model.adapter.rank=0"], "rank=0"),
        (["model.adapter.merged=false", "model.adapter.dora=true"], "merged=false, dora=true: .*set merged"),
        (["model.adapter.merged=false", "mesh.rollout=1"], "mesh.rollout=1: .*set it to 0"),
        (["model.adapter.merged=false", "rollout.weights=int8", "variant.importance=truncate"], "set rollout.weights="),
        (["model.adapter.dropout=0.1"], "model.adapter.dropout.*unknown key"),
        (["model.adapter.target=[lm_head]"], "lm_head"),
    ],
)
def test_what_does_not_go_with_adapters_is_refused(recipe, given, said):
    with pytest.raises(UserError, match=said):
        config.load(recipe, [*RANK, *given])


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_an_export_of_whole_weights_cannot_be_merged(recipe, tmp_path, capsys):
    run = runs.opened(config.load(recipe, ["train.steps=1", "data.validation=null", f"run.dir={tmp_path / 'run'}"]))
    assert train(run)
    assert cli.main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "x"), "--merged"]) == 2
    assert "has no adapters" in capsys.readouterr().err


def test_adapters_without_a_folder_are_no_target(recipe):
    with pytest.raises(UserError, match="model.adapter without a path"):
        read_target(str(recipe.parent), ["model.adapter.rank=2"], sets=[str(recipe.parent / "sums.jsonl")])


# What reads the policy's weights besides updates.
VARIANTS = {
    "clip_cov": ["variant=clip_cov", "train.ppo_epochs=2"],
    "int8": [
        "model.adapter.base=int8",
        "model.adapter.dora=true",
        "rollout.weights=int8",
        "variant.importance=truncate",
    ],
    "not merged": ["model.adapter.base=int8", "model.adapter.merged=false"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_what_reads_the_policys_weights_reads_both(recipe, tmp_path, name):
    most = 0.3 if name == "int8" else 1e-4
    check_both(recipe, tmp_path, *VARIANTS[name], most=most, merged=name != "not merged")
