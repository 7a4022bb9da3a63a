"""A supervised run by two processes: the metrics of one."""

import json

import jax
import pytest
import several_runs

from grpojax.extensions.supervised import finetune, finetune_recipe
from grpojax.train import train

SFT = """\
model:     {{path: {folder}}}
data:      {{train: {folder}/sft.jsonl, max_prompt_tokens: 8, max_tokens: 8}}
train:     {{steps: 3, batch_size: 8}}
run:       {{dir: {folder}/sft}}
"""


@pytest.mark.exhaustive("run/test_train.py::test_several_processes_train_as_one_stop_as_one_and_go_on")
def test_recipes_by_two_processes(recipe, tmp_path):
    sft = tmp_path / "sft.yaml"
    sft.write_text(SFT.format(folder=recipe.parent))
    rows = [{"prompt": f"{n}+{m}=", "completion": str(n + m)} for n in range(5) for m in range(5)]
    (recipe.parent / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def by_one(given):
        return train(finetune.open_finetune(finetune_recipe.load_sft(sft, given), jax.devices()[:4]))

    several_runs.check("sft", sft, tmp_path, {"sft": several_runs.EVERY}, by_one)
