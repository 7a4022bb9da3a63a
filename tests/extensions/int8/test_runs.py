"""Learning from samples that eight-bit weights, or eight-bit keys and values, have drawn."""

import json
from types import SimpleNamespace

import pytest

from grpojax.host.errors import UserError
from grpojax.models import Compute
from grpojax.run import checks
from grpojax.run import recipe as config
from grpojax.run.held_out import config_of
from grpojax.train import open_run, train

EIGHT = "rollout.weights=int8"
CACHE = "rollout.cache_dtype=int8"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            [EIGHT],
            "rollout.weights=int8 with variant 'grpo'.*importance=truncate or variant.ratio_denominator=sampler, or",
        ),
        ([EIGHT, "variant=rloo"], "variant 'rloo'.*set variant.importance=truncate, or rollout.uncorrected=true"),
        (
            [CACHE],
            "rollout.cache_dtype=int8 with variant 'grpo'.*importance=truncate or variant.ratio_denominator=sampler",
        ),
        ([EIGHT, CACHE], "rollout.weights=int8 and rollout.cache_dtype=int8 with variant 'grpo'"),
        (
            ["rollout.uncorrected=true", "rollout.cache_dtype=bfloat16"],
            "uncorrected=true: there is nothing to correct with weights=compute and cache_dtype=bfloat16; it goes",
        ),
        (["rollout.uncorrected=true"], "uncorrected=true: there is nothing to correct with weights=compute"),
        (["rollout.weights=int4"], "int4"),
    ],
)
def test_uncorrected_samples_are_refused(recipe, overrides, said):
    with pytest.raises(UserError, match=said):
        config.load(recipe, overrides)


@pytest.mark.parametrize(
    "correction", ["variant.importance=mask", "variant.ratio_denominator=sampler", "rollout.uncorrected=true"]
)
def test_what_corrects_or_is_asked_for_by_name_is_taken(recipe, correction):
    assert config.load(recipe, [EIGHT, correction]).rollout.weights == "int8"
    assert config.load(recipe, [CACHE, correction]).rollout.cache_dtype == "int8"


def test_held_out_completions_read_the_policys_own_keys_and_values(recipe):
    eight = config.load(recipe, [CACHE, "variant.importance=truncate"])
    assert config_of(eight).sampler.cache_dtype == "compute"
    half = config.load(recipe, ["rollout.cache_dtype=bfloat16"])
    assert config_of(half).sampler.cache_dtype == "bfloat16"


def test_a_gpu_is_refused_before_anything_is_drawn(recipe):
    eight = config.load(recipe, [CACHE, "variant.importance=truncate"])
    on = SimpleNamespace(sampling=SimpleNamespace(compute=Compute(platform="gpu")))
    with pytest.raises(UserError, match="cache_dtype=int8: .* GPU.*set rollout.cache_dtype=compute"):
        checks.cache(eight, on)
    on.sampling.compute = Compute(platform="tpu")
    checks.cache(eight, on)


@pytest.mark.in_ci("rollout.weights=int8-1.001")
@pytest.mark.slow
@pytest.mark.parametrize(("eight", "high"), [(EIGHT, 1.001), (CACHE, 1.00001)])
def test_a_run_tells_how_far_sampler_and_policy_are_apart(recipe, tmp_path, eight, high):
    more = [
        eight,
        "variant.importance=truncate",
        f"variant.importance_high={high}",
        "train.steps=2",
        "train.eval_every=0",
    ]
    assert train(open_run(config.load(recipe, [*more, f"run.dir={tmp_path}"])))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    step = next(line for line in lines if "sampling/kl" in line)
    assert 1e-5 < step["sampling/logp_difference_max"] < 0.3 and 0 < step["sampling/kl"] < 0.01
    assert 0 < step["importance_clipped_mean"] < 1 and step["importance_mean"] < 1.001
