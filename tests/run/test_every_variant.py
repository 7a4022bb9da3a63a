"""Every variant trains: none is refused."""

import inspect
import subprocess
import sys

import pytest
from runs import environment
from tiny_run import make_teacher

from grpojax import variants

EVERY_VARIANT = """
import sys
from pathlib import Path
import jax
import numpy as np
from grpojax import variants
from grpojax.records import metrics
from grpojax.run import recipe as config
from grpojax.run.trainer import Trainer
from test_every_variant import needed

recipe, folder = sys.argv[1:]
# For a group of four and a random model.
OPTIONS = {"pass_at_k": {"k": 2}, "gtpo": {"threshold": 9.0}, "distill": {"teacher": str(Path(folder) / "teacher")}}
REWARDS = {"grpo_process": "steps"}
for name in variants.names():
    options = {"name": name, **OPTIONS.get(name, {})}
    if not variants.get(name, **needed(name)).objective.has_ratio:
        options["ratio"] = "token"  # as a rollout here has two updates
    overrides = [
        f"run.dir={folder}/{name}", f"variant={options}", "train.steps=3", "train.minibatches=2", "data.eval=null",
        "rollout.max_tokens=4", "filter=none", f"rewards.0.name=tiny_run:{REWARDS.get(name, 'parity')}",
    ]
    # All samples are of one length: an update compiles once.
    trainer = Trainer(config.load(recipe, overrides), jax.devices()[:1], eos_ids=())
    assert trainer.run()
    lines = [line for line in metrics.read_metrics(f"{folder}/{name}") if "reward" in line]
    acts = max(line[{"llds": "llds_loss"}.get(name, "grad_norm")] for line in lines)
    print(name, len(lines), all(np.isfinite(line["loss"]) for line in lines), acts, sep="|")
"""


@pytest.mark.slow
def test_every_variant_trains(recipe, tmp_path):
    make_teacher(recipe.parent, tmp_path / "teacher")
    env = environment()
    env["PYTHONPATH"] += f":{__file__.rpartition('/')[0]}"
    run = [sys.executable, "-c", EVERY_VARIANT, str(recipe), str(tmp_path)]
    done = subprocess.run(run, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = {line.split("|")[0]: line.split("|")[1:] for line in done.stdout.splitlines() if "|" in line}
    assert rows.keys() == set(variants.names())
    for name, row in rows.items():
        assert row[:2] == ["3", "True"] and float(row[2]) > 0, (name, row)


def needed(name):
    """Values for the options that a variant must be given."""
    return {k: 1.0 for k, v in variants.parameters(name).items() if v is inspect.Parameter.empty}
