"""Recipes of supervised runs on the tiny random model of `tiny_run`, and answers to its sums."""

import json
from pathlib import Path

RECIPE = """\
model:     {{path: {model}}}
data:
  train: {folder}/{kind}.jsonl
  validation: {folder}/{kind}.jsonl
  test: {{path: {folder}/{kind}.jsonl, rows: [0, 9]}}
  max_prompt_tokens: 8
  max_tokens: 8
optimizer: {{learning_rate: 5.0e-3}}
mesh:      {{data: 1, fsdp: -1, tensor: 1}}
train:     {{batch_size: 8, steps: 7, checkpoint_every: 2, eval_every: 3}}
run:       {{dir: {folder}/{kind}}}
"""


def make(folder: Path, model: Path) -> dict[str, Path]:
    """Writes data and recipes into ``folder``; the recipes' paths by command."""
    sums = [(f"{a}+{b}=", str(a + b)) for a in range(6) for b in range(3)]
    answers = [{"prompt": q, "completion": text} for q, a in sums for text in (a, f"0{a}", f"is {a}")[: 1 + len(a)]]
    pairs = [{"prompt": q, "chosen": a, "rejected": f"not {a}"} for q, a in sums]
    recipes = {}
    for kind, rows in {"sft": answers, "dpo": pairs}.items():
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipes[kind] = folder / f"{kind}.yaml"
        recipes[kind].write_text(RECIPE.format(model=model, folder=folder, kind=kind))
    return recipes
