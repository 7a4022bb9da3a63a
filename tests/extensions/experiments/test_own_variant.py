"""A sweep of a variant of one's own."""

import own_variants
from refusals import RECIPE

from grpojax import variants
from grpojax.extensions.experiments import sweep

module = own_variants.module


def test_a_sweep_of_it(module, tmp_path):
    long = {"name": f"{module}:plain", "untyped": "a/../b " * 40}
    made = sweep.Sweep(config=RECIPE, variants=(f"{module}:mine", "grpo", long), seeds=(0,), folder=tmp_path).jobs()
    made = list(made.values())
    names = [job.name for job in made]
    assert names[:2] == [f"{module}-mine_0", "grpo_0"]
    assert all(
        len(name) < 140 and job.directory.parent == tmp_path / "runs" for name, job in zip(names, made, strict=True)
    )
    assert made[0].config["variant"]["source"] == variants.source(f"{module}:mine")
    assert sweep.read_variants(f"{module}:mine,grpo") == (f"{module}:mine", "grpo")
