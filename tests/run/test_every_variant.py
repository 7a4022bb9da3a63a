"""Every variant that the trainer has what it takes for trains; the others say what they lack."""

import inspect
import subprocess
import sys

import pytest
from runs import environment

from grpojax import variants
from grpojax.run import recipe as config

EVERY_VARIANT = """
import sys
import numpy as np
from grpojax import variants
from grpojax.run import recipe as config
from grpojax.host import errors
from grpojax.records import metrics as tracking
from grpojax.run.trainer import Trainer

recipe, folder = sys.argv[1:]
for name in variants.names():
    options = {"pass_at_k": "k: 2", "gtpo": "threshold: 9.0"}.get(name)  # for a group of four, and a random model
    variant = f"{{name: {name}, {options}}}" if options else name
    overrides = [f"run.dir={folder}/{name}", f"variant={variant}", "train.steps=3", "train.minibatches=2", "data.eval=null", "rollout.max_tokens=4",
                 "rewards.0.name=tiny_run:parity", "filter=none"]
    try:
        trainer = Trainer(config.load(recipe, overrides))
    except errors.UserError as e:
        print(name, "refused", e, sep="|")
        continue
    trainer.policy.eos_ids = ()  # all of one length: an update compiles once
    assert trainer.run()
    lines = [line for line in tracking.read_metrics(f"{folder}/{name}") if "reward" in line]
    acts = {"llds": "llds_loss"}.get(name, "grad_norm")
    print(name, len(lines), all(np.isfinite(line["loss"]) for line in lines), max(line[acts] for line in lines), sep="|")
"""


@pytest.mark.slow
def test_every_variant_trains_or_says_what_it_lacks(recipe, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", EVERY_VARIANT, str(recipe), str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = {line.split("|")[0]: line.split("|")[1:] for line in done.stdout.splitlines() if "|" in line}
    assert rows.keys() == set(variants.names())
    for name, row in rows.items():
        lacks = [n for n in variants.get(name, **needed(name)).needs if n not in config.SUPPLIED]
        if lacks:
            assert row[0] == "refused" and all(variants.NEEDS[n] in row[1] for n in lacks)
        else:
            assert row[:2] == ["3", "True"] and float(row[2]) > 0, (name, row)


def needed(name):
    """Values for the options that a variant must be given."""
    return {k: 1.0 for k, v in variants.parameters(name).items() if v is inspect.Parameter.empty}
