"""Runs by two processes have the metrics of one process with as many devices.

Sums over devices are added in another order across processes, so equality is to rounding: 1e-6 of each number. The
optimiser's eps is large, since Adam makes of a gradient of nothing but rounding a full step.
"""

import json

import jax
import pytest
import runs
from runs import Trainer, numbers, start
from several import together

from grpojax.run import finetune, finetune_recipe
from grpojax.run import recipe as config

SFT = """\
model:     {{path: {folder}}}
data:      {{train: {folder}/sft.jsonl, max_prompt_tokens: 8, max_tokens: 8}}
train:     {{steps: 3, batch_size: 8}}
run:       {{dir: {folder}/sft}}
"""
EVERY = ["optimizer={learning_rate: 1.0e-3, eps: 1.0e-3}", "train.checkpoint_every=0", "mesh.data=2", "mesh.fsdp=2"]
REINFORCED = ["rewards=[{name: 'tiny_run:parity'}]", "data.validation=null", "train.eval_every=0", "train.steps=3"]
RECIPES = {
    "grpo": ["variant={name: grpo, kl_coef: 0.01}", "train.minibatches=2"],
    "dapo": ["variant=dapo", "rollout.group=2"],
    "token_critic": ["variant=token_critic", "critic={optimizer: {learning_rate: 1.0e-3, eps: 1.0e-3}}"],
    "xrpo": ["variant=xrpo"],
    "sft": [],
}


def overrides(name):
    return [*EVERY, *(REINFORCED if name != "sft" else []), *RECIPES[name]]


def same(several, one, name):
    assert len(several) == len(one) >= 3
    for got, want in zip(several, one, strict=True):
        assert got.keys() == want.keys()
        for metric, value in want.items():
            assert got[metric] == value or got[metric] == pytest.approx(value, rel=1e-6, abs=1e-6), (
                name, want["step"], metric,
            )  # fmt: skip


@pytest.mark.exhaustive("run/test_trainer.py::test_several_processes_train_as_one_stop_as_one_and_go_on")
def test_recipes_by_two_processes(recipe, tmp_path):
    sft = tmp_path / "sft.yaml"
    sft.write_text(SFT.format(folder=recipe.parent))
    rows = [{"prompt": f"{n}+{m}=", "completion": str(n + m)} for n in range(5) for m in range(5)]
    (recipe.parent / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = {name: ("sft", sft) if name == "sft" else ("train", recipe) for name in RECIPES}
    commands = [[*first[name], f"run.dir={tmp_path / 'several' / name}", *overrides(name)] for name in RECIPES]
    said = together(*commands, processes=2)
    assert all(lines[-1] == "status 0" for of_one in said for lines in of_one), said
    assert all([x for x in lines if x] == ["status 0"] for of_one in said[1:] for lines in of_one), said[1:]
    for name in RECIPES:
        given = [f"run.dir={tmp_path / 'one' / name}", *overrides(name)]
        if name == "sft":
            assert finetune.FineTune(finetune_recipe.load_sft(sft, given), jax.devices()[:4]).run()
        else:
            assert Trainer(config.load(recipe, given), devices=4).run()
        same(numbers(tmp_path / "several" / name), numbers(tmp_path / "one" / name), name)


@pytest.mark.exhaustive("host/test_agreement.py::test_two_processes")
def test_processes_that_disagree_start_nothing(recipe, tmp_path):
    pair = [
        start(recipe, tmp_path / "run", f"train.seed={i}", "mesh.fsdp=2", env=env)
        for i, env in enumerate(runs.together(2))
    ]
    for process in pair:
        said = process.communicate(timeout=300)[0]
        assert process.returncode == 2 and "process 1" in said and "train.seed: 0 -> 1" in said, said
    assert not (tmp_path / "run" / "config.json").exists()
