"""Learning from samples that eight-bit weights have drawn."""

import json

import pytest

from grpojax.host.errors import UserError
from grpojax.run import recipe as config
from grpojax.run.trainer import Trainer

EIGHT = "rollout.weights=int8"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            [EIGHT],
            "rollout.weights=int8 with variant 'grpo'.*variant.importance=truncate or variant.anchor=sampler, or",
        ),
        ([EIGHT, "variant=rloo"], "variant 'rloo'.*set variant.importance=truncate, or rollout.uncorrected=true"),
        (
            [EIGHT, "variant={name: gt_likelihood, train_on: spliced}"],
            "set variant.train_on=sampled and variant.importance=truncate",
        ),
        (["rollout.uncorrected=true"], "uncorrected=true: there is nothing to correct with weights=compute"),
        (["rollout.weights=int4"], "int4"),
    ],
)
def test_uncorrected_samples_are_refused(recipe, overrides, said):
    with pytest.raises(UserError, match=said):
        config.load(recipe, overrides)


@pytest.mark.parametrize(
    "correction", ["variant.importance=mask", "variant.anchor=sampler", "rollout.uncorrected=true"]
)
def test_what_corrects_or_is_asked_for_by_name_is_taken(recipe, correction):
    assert config.load(recipe, [EIGHT, correction]).rollout.weights == "int8"


@pytest.mark.slow
def test_a_run_tells_how_far_sampler_and_policy_are_apart(recipe, tmp_path):
    more = [
        EIGHT,
        "variant.importance=truncate",
        "variant.importance_high=1.001",
        "train.steps=2",
        "train.eval_every=0",
    ]
    assert Trainer(config.load(recipe, [*more, f"run.dir={tmp_path}"])).run()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    step = next(line for line in lines if "sampling/kl" in line)
    assert 1e-5 < step["sampling/logp_difference_max"] < 0.3 and 0 < step["sampling/kl"] < 0.01
    assert 0 < step["importance_clipped_mean"] < 1 and step["importance_mean"] < 1.001
