"""Runs of controls: with its mechanism off a method learns bit for bit what GRPO of the same objective learns."""

import pytest
from runs import numbers, opened

from grpojax import variants
from grpojax.run import recipe as config
from grpojax.train import train

GRPO = {"name": "grpo", "aggregate": "sequence_sum", "kl_coef": 0.0}


def metrics(recipe, directory, variant):
    overrides = [
        f"run.dir={directory}", f"variant={variant}", "data.validation=null", "rewards.0.name=tiny_run:parity",
        "train.steps=2", "rollout.max_tokens=4", "optimizer.learning_rate=1e-2",
    ]  # fmt: skip
    assert train(opened(config.load(recipe, overrides), eos_ids=()))
    return numbers(directory)


@pytest.mark.parametrize("names", [["negative_advantage"], ["rare_token", "culling", "gt_likelihood"]])
@pytest.mark.slow
def test_a_control_and_grpo_have_the_same_metrics(recipe, tmp_path, names):
    want = metrics(recipe, tmp_path / "grpo", GRPO)
    for name in names:
        control, options = variants.control(name)
        assert metrics(recipe, tmp_path / name, {"name": control, **options}) == want


@pytest.mark.slow
def test_a_method_with_its_mechanism_on_has_others(recipe, tmp_path):
    """Some group of the first step has failed."""
    one, other = (metrics(recipe, tmp_path / str(c), {"name": "negative_advantage", "c": c}) for c in (0.0, 1.0))
    assert one[0]["reward"] == other[0]["reward"] and one[0]["grad_norm"] != other[0]["grad_norm"]
