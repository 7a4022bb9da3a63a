"""The split that fits, and the longest completion that does: both are what the recipe's own plan then says."""

import dataclasses
import math
import re
from pathlib import Path

import pytest

from grpojax.extensions.plan import plan_chips, plan_estimate, plan_search
from grpojax.host.errors import UserError
from grpojax.run import recipe as recipes

CONFIGS = Path(__file__).parents[3] / "configs"


def load(*overrides, recipe="gsm8k_lora.yaml"):
    return recipes.load(CONFIGS / recipe, overrides)


@pytest.mark.slow
def test_a_run_that_does_not_fit_gets_a_mesh_with_which_it_does():
    model, target = "model.path=Qwen2.5-7B-Instruct", plan_chips.parse("v5e-8")
    assert not plan_estimate.of_recipe(load(model), target).fits
    found = plan_search.best(load(model), target)
    assert found.fits and not found.missing and found.split.tensor > 1
    again = plan_estimate.of_recipe(load(model, *found.settings.split()), target)
    assert again.fits and again.run.step == found.estimate.run.step
    assert found.needs == max(p.total + p.resident for p in again.programs) <= found.largest.room


@pytest.mark.slow
def test_a_split_may_have_to_need_less_than_another():
    """Where the compiler says that the recipe's own needs more than by shapes."""
    config, target = load("model.path=Qwen2.5-0.5B"), plan_chips.parse("v5e-8")
    fastest = plan_search.best(config, target)
    found = plan_search.best(config, target, under=fastest.needs)
    assert found.fits and found.needs < fastest.needs and found.estimate.run.step >= fastest.estimate.run.step
    own = plan_search.own(load("model.path=Qwen2.5-0.5B", *found.settings.split()), target)
    assert own.split == found.split and own.needs == found.needs
    assert plan_search.best(config, target, under=1.0) == fastest  # none needs so little


@pytest.mark.parametrize("device", ["rtx4090", "v5e-8"])
def test_micro_batches_keep_a_chip_busy(device):
    found = plan_search.best(load("model.path=Qwen2.5-0.5B"), plan_chips.parse(device))
    assert 32 * (512 + 8 * 512) / found.split.fsdp / found.split.microbatches >= plan_search.LEAST


@pytest.mark.slow
def test_micro_batches_are_smaller_only_where_they_have_to_be():
    eight = ["model.adapter.base=int8", "rollout.weights=int8", "rollout.uncorrected=true"]
    config = load("model.path=Qwen2.5-7B-Instruct", *eight, "rollout.prompts=8", "model.remat=none")
    target = plan_chips.parse("rtx4090")
    found = plan_search.best(config, target)
    tokens = 8 * (512 + 8 * 512) / found.split.microbatches
    assert found.fits and tokens < plan_search.LEAST
    fewer = dataclasses.replace(found.split, microbatches=found.split.microbatches // 2)
    assert not plan_estimate.of_recipe(config, target, split=fewer).fits


@pytest.mark.slow
def test_what_fits_nowhere_lacks_as_little_as_it_can():
    config, target = load("model.path=Qwen2.5-72B-Instruct"), plan_chips.parse("v5e-8")
    found = plan_search.best(config, target)
    assert not found.fits and found.missing == found.needs - found.largest.room > 0
    for fsdp in (1, 2, 4, 8):
        other = load("model.path=Qwen2.5-72B-Instruct", f"mesh.fsdp={fsdp}", f"mesh.tensor={8 // fsdp}")
        programs = plan_estimate.of_recipe(other, target).programs
        assert max(p.total + p.resident for p in programs) >= found.needs


@pytest.mark.parametrize(
    ("device", "overrides", "names"),
    [
        ("rtx4080", ("model.path=Qwen2.5-7B-Instruct",), ["merged base prompts"]),
        ("rtx5090", ("model.path=Qwen2.5-1.5B", "model.adapter=null"), ["rank", "prompts"]),
        (
            "rtx4070",
            ("model.path=Qwen2.5-1.5B", "rollout.max_tokens=4096"),
            ["merged base prompts", "decode_slots", "prompts"],
        ),
        ("t4", ("model.path=Qwen2.5-72B",), []),
    ],
)
@pytest.mark.slow
def test_what_fits_with_no_split_gets_settings_with_which_it_does(device, overrides, names):
    target = plan_chips.parse(device)
    assert not plan_search.best(load(*overrides), target).fits
    found = list(plan_search.changes(load(*overrides), target))
    assert [" ".join(re.findall(r"(\w+)=", said)) for said, _ in found] == names
    for said, fit in found:
        again = plan_estimate.of_recipe(load(*overrides, *said.split(), *fit.settings.split()), target)
        assert again.fits and fit.needs == max(p.total + p.resident for p in again.programs)


def test_sizes_that_divide_over_no_mesh_are_refused():
    with pytest.raises(UserError, match="does not divide|do not divide"):
        plan_search.best(load(), plan_chips.parse("h100:7"))


@pytest.mark.parametrize("device", ["l4", "v5e-8"])
@pytest.mark.slow
def test_the_longest_completion_fits_and_a_longer_one_does_not(device):
    target = plan_chips.parse(device)
    found = plan_search.longest(load(recipe="gsm8k_qwen2.5_0.5b.yaml"), target)
    assert found.tokens > 512 and found.tokens % plan_search.STEP == 0
    plans = {
        tokens: plan_estimate.of_recipe(load(f"rollout.max_tokens={tokens}", recipe="gsm8k_qwen2.5_0.5b.yaml"), target)
        for tokens in (found.tokens, found.tokens + plan_search.STEP)
    }
    assert [plan.fits for plan in plans.values()] == [True, False]
    (program,) = (p.name for p in plans[found.tokens + plan_search.STEP].programs if not p.fits)
    assert found.why == f"memory of {program}"


def test_no_completion_is_longer_than_the_models_positions():
    found = plan_search.longest(load(recipe="gsm8k_qwen2.5_0.5b.yaml"), plan_chips.parse("v5p-128"))
    assert found.tokens == 32768 - 512 and "32768 positions" in found.why
    none = plan_search.longest(load("model.path=Qwen2.5-72B-Instruct"), plan_chips.parse("l4"))
    assert none.tokens == 0 and "rollout" in none.why and math.isfinite(none.tokens)
