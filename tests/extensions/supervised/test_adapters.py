"""Supervised runs with adapters."""

import json

import answered_runs
import jax
import pytest
from adapter_runs import RANK
from runs import numbers

from grpojax.cli import main as cli
from grpojax.extensions.supervised import finetune
from grpojax.extensions.supervised.finetune_recipe import load_dpo, load_sft
from grpojax.host.errors import UserError
from grpojax.train import train


@pytest.mark.in_ci("dpo")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_supervised_runs_learn_factors_and_go_on(recipe, tmp_path, kind):
    recipes = answered_runs.make(tmp_path, recipe.parent)

    def run_of(name, *more):
        load = {"sft": load_sft, "dpo": load_dpo}[kind]
        made = load(recipes[kind], [*RANK, f"run.dir={tmp_path / name}", *more])
        return finetune.open_finetune(made, jax.devices()[:1])

    with pytest.raises(UserError, match="model.adapter.merged=false: .*leave it out"):
        run_of("refused", "model.adapter.merged=false")
    assert train(run_of("whole")) and train(run_of("parts", "train.steps=4")) and train(run_of("parts"))
    lines = [line for line in numbers(tmp_path / "whole") if "eval/loss" in line]
    assert lines[-1]["eval/loss"] < lines[0]["eval/loss"] - 0.015
    last = [[x for x in numbers(tmp_path / n) if x["step"] == 7 and "test/loss" not in x] for n in ("whole", "parts")]
    assert last[0] == last[1] and len(last[0]) == 2
    assert not (tmp_path / "whole" / "checkpoints" / "7" / "base_params").exists()
    assert cli.main(["export", str(tmp_path / "whole"), "--to", str(tmp_path / "peft")]) == 0
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["r"] == 4
