"""What a run is thought to need from its shapes, beside what the TPU compiler said of the same programs."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from plain_decoder import FAMILIES

from grpojax.extensions.plan import plan_chips, plan_estimate, plan_links
from grpojax.extensions.plan.plan_shapes import SHAPES, shape_of
from grpojax.host.errors import UserError
from grpojax.models import Compute, flops
from grpojax.models.number_formats import format_of
from grpojax.run import recipe as recipes

PODS = Path(__file__).parents[3] / "configs" / "pods"

# GiB per chip with the run's state, and seconds of the memory, by the compiler (jax 0.10.2, libtpu 0.0.52, 2026-11-23;
# an update's less what its buffers, by the compiler, have shrunk until 2026-11-24).
COMPILED = {
    "v5e-1_qwen2.5-0.5b": ("v5e:1x1", {"update": (11.56, 1.96), "rollout": (11.03, 1.98)}),
    "v5e-8_qwen2.5-0.5b": ("v5e:2x4", {"update": (3.03, 0.261), "rollout": (2.10, 0.697)}),
    "v5e-4x4_qwen2.5-1.5b": ("v5e:4x4", {"update": (3.92, 0.573), "rollout": (4.60, 2.12)}),
    "v4-2x2x1_qwen2.5-3b": ("v4:2x2x1", {"update": (17.90, 0.982), "rollout": (17.15, 2.96)}),
    "v5p-2x2x2_qwen2.5-7b": ("v5p:2x2x2", {"update": (23.19, 0.634), "rollout": (27.66, 2.90)}),
    "v5p-2x4x4_llama-3.1-8b": ("v5p:2x4x4", {"update": (9.58, 1.1), "rollout": (22.13, 3.24)}),
}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.slow
def test_memory_is_about_the_compilers(name):
    """And the bytes that have to be moved are not many more than those that the compiled program moves."""
    topology, programs = COMPILED[name]
    found = plan_estimate.of_recipe(recipes.load(PODS / f"{name}.yaml"), plan_chips.parse(topology))
    for program in found.programs:
        if program.name in programs:
            gib, seconds = programs[program.name]
            assert program.total + program.resident == pytest.approx(gib, rel=0.15)
            assert program.seconds["HBM"] <= 1.05 * seconds
            if program.name == "rollout":
                assert program.seconds["HBM"] > seconds / 2


def test_memory_of_a_mixture_is_about_the_compilers():
    """Qwen3-30B-A3B, compiled in full (jax 0.10.2, libtpu 0.0.52, 2026-11-26)."""
    changes = ["model.path=Qwen3-30B-A3B", "mesh.tensor=4", "train.microbatches=4"]
    config = recipes.load(PODS / "v5p-2x4x4_qwen3-8b.yaml", changes)
    found = {p.name: p for p in plan_estimate.of_recipe(config, plan_chips.parse("v5p:2x4x4")).programs}
    for name, gib in {"rollout": 37.65, "reshard": 27.38, "score": 15.59, "update": 30.83}.items():
        assert found[name].total + found[name].resident == pytest.approx(gib, rel=0.2), name
    assert found["rollout"].seconds["HBM"] == pytest.approx(3.56, rel=0.2)


def test_links_are_busy_for_as_long_as_the_compilers_collectives():
    """Or for less: those that are counted are gathered weights, their gradients, and sums over ``tensor``."""
    changes = ["model.path=Qwen3-30B-A3B", "mesh.tensor=4", "train.microbatches=4"]
    config = recipes.load(PODS / "v5p-2x4x4_qwen3-8b.yaml", changes)
    found = {p.name: p.seconds["ICI"] for p in plan_estimate.of_recipe(config, plan_chips.parse("v5p-64")).programs}
    assert found["score"] == pytest.approx(0.71, rel=0.05) and found["reshard"] == pytest.approx(0.07, rel=0.1)
    assert 0.5 * 3.35 < found["update"] < 3.35
    # The update of two layers, with a copy of the weights on every 16 of 32 chips: 5.28 GB, of which the sum over the
    # copies is not counted.
    config = recipes.load(PODS / "v5e-4x4_qwen2.5-1.5b.yaml", ["rollout.prompts=128", "mesh.data=2", "mesh.fsdp=16"])
    target, shape = plan_chips.parse("v5e-32"), shape_of("Qwen2.5-1.5B", layers=2)
    update = plan_estimate.of_recipe(config, target, model=shape).programs[-1]
    rate = plan_links.rates(target, plan_estimate.split_of(config, 32))["fsdp"]
    assert update.name == "update" and 0.8 * 5.28e9 < update.seconds["ICI"] * rate < 5.28e9


def test_an_update_with_experts_on_shards_of_their_own_is_as_the_compilers():
    """The recipe's, compiled in full (jax 0.10.2, libtpu 0.0.52, 2026-11-26)."""
    config, target = recipes.load(PODS / "v5p-2x4x4_qwen3-30b-a3b.yaml"), plan_chips.parse("v5p:2x4x4")
    update = plan_estimate.of_recipe(config, target).programs[-1]
    assert config.mesh.expert == 32 and update.name == "update"
    assert update.total + update.resident == pytest.approx(23.13, rel=0.1)
    assert update.seconds["ICI"] == pytest.approx(1.68, rel=0.05)


@pytest.mark.parametrize("chips", ["v5e:1x1", "h100:4"])
@pytest.mark.slow
def test_rounds_of_episodes_draw_what_one_rollout_does_and_read_answers(chips):
    """Four turns of 128 tokens, 512 in all; the caches hold all of them in every round."""
    recipe, target = PODS / "v5e-1_qwen2.5-0.5b.yaml", plan_chips.parse(chips)
    played = ["environment.name=calculator", "environment.max_turns=8", "rollout.max_turn_tokens=128"]
    found = plan_estimate.of_recipe(recipes.load(recipe, played), target)
    first, later = (next(p for p in found.programs if p.name == name) for name in ("rollout", "rollout turns"))
    whole = plan_estimate.of_recipe(recipes.load(recipe), target)
    one = whole.programs[0]
    assert first.consumers == one.consumers and one.total < later.total < 1.5 * one.total
    assert first.seconds["compute"] + 3 * later.seconds["compute"] == pytest.approx(one.seconds["compute"])
    answers = first.seconds["HBM"] + 3 * later.seconds["HBM"] - one.seconds["HBM"]
    kept, cast = (2**30 * one.consumers[name] for name in ("keys and values", "weights cast for the rollout"))
    assert cast + kept < answers / 3 * target.chip.bandwidth < cast + 2 * kept
    assert found.run.phases["rollout"][0] == pytest.approx(whole.run.phases["rollout"][0] + answers)


def test_one_chip_receives_nothing():
    programs = plan_estimate.of_recipe(
        recipes.load(PODS / "v5e-1_qwen2.5-0.5b.yaml"), plan_chips.parse("v5e-1")
    ).programs
    assert not [p.name for p in programs if "ICI" in p.seconds]


def test_what_is_kept_is_counted_to_the_byte():
    config = recipes.load(PODS / "v5e-1_qwen2.5-0.5b.yaml")
    target = plan_chips.parse("v5e:1x1")
    rollout = plan_estimate.of_recipe(config, target).programs[0]
    c = SHAPES["qwen2.5-0.5b"]
    weights = 4 * (24 * (896 * (2 * 896 + 2 * 128) + 3 * 896 * 4864) + 151936 * 896) / 2**30
    kept = {"weights": weights, "optimiser": 2 * weights, "reference": weights / 2}
    assert {what: rollout.consumers[what] for what in kept} == pytest.approx(kept)
    assert rollout.consumers["weights cast for the rollout"] == pytest.approx(weights / 2)
    cache = 32 * (512 + 8 * 512) * 2 * 24 * 2 * 64 * 2 / 2**30
    assert rollout.consumers["keys and values"] == pytest.approx(cache) and flops.kv_numbers(c) == 2 * 24 * 2 * 64
    free = dataclasses.replace(config, variant={"name": "grpo", "kl_coef": 0.0})
    assert "reference" not in plan_estimate.of_recipe(free, target).programs[0].consumers


@pytest.mark.slow
def test_of_adapters_the_base_is_kept_once_and_only_factors_have_moments():
    config = recipes.load(PODS / "v5e-1_qwen2.5-0.5b.yaml", ["model.adapter.rank=16"])
    target, c = plan_chips.parse("v5e:1x1"), SHAPES["qwen2.5-0.5b"]
    update = next(p for p in plan_estimate.of_recipe(config, target).programs if p.name == "update")
    linear, embed = 24 * (896 * (2 * 896 + 2 * 128) + 3 * 896 * 4864), 151936 * 896
    learned = 4 * 16 * 24 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864)) / 2**30
    kept = {"base": 2 * (linear + embed) / 2**30, "weights": learned, "optimiser": 2 * learned}
    assert {what: update.consumers[what] for what in kept} == pytest.approx(kept)
    assert "reference" not in update.consumers and update.consumers["gradients"] == pytest.approx(2 * learned)
    eight = recipes.load(PODS / "v5e-1_qwen2.5-0.5b.yaml", ["model.adapter.rank=16", "model.adapter.base=int8"])
    update = plan_estimate.of_recipe(eight, target).programs[0]
    assert update.consumers["base"] == pytest.approx((linear + 2 * embed) / 2**30)
    assert c.num_layers == 24


@pytest.mark.slow
def test_what_is_not_merged_is_not_held_twice():
    """A rollout reads the base, and in eight bits that is half of what it reads in sixteen."""
    more = ["model.adapter.rank=16", "model.adapter.merged=false"]
    config, target = recipes.load(PODS / "v5e-1_qwen2.5-0.5b.yaml", more), plan_chips.parse("v5e:1x1")
    whole = recipes.load(PODS / "v5e-1_qwen2.5-0.5b.yaml", more[:1])
    eight = recipes.load(PODS / "v5e-1_qwen2.5-0.5b.yaml", [*more, "model.adapter.base=int8"])
    kept, merged, small = (plan_estimate.of_recipe(c, target).programs[0] for c in (config, whole, eight))
    assert kept.consumers["weights cast for the rollout"] == pytest.approx(kept.consumers["weights"] / 2)
    assert merged.consumers["weights cast for the rollout"] == pytest.approx(merged.consumers["base"])
    linear = 24 * (896 * (2 * 896 + 2 * 128) + 3 * 896 * 4864)
    saved = (kept.seconds["HBM"] - small.seconds["HBM"]) * target.chip.bandwidth
    assert saved == pytest.approx(511 * linear) and kept.seconds["HBM"] == merged.seconds["HBM"]
    with pytest.raises(UserError, match="merged=false with mesh.fsdp=8"):
        plan_estimate.of_recipe(config, plan_chips.parse("v5e:2x4"))


@pytest.mark.slow
def test_keys_and_values_of_eight_bits_take_a_byte_and_a_scale_a_head():
    """And a GPU, whose kernels read floats, is refused."""
    eight = ["rollout.cache_dtype=int8", "variant.importance=truncate"]
    config = recipes.load(PODS / "v5e-1_qwen2.5-0.5b.yaml", eight)
    small, large = (
        plan_estimate.of_recipe(dataclasses.replace(config, rollout=r), plan_chips.parse("v5e:1x1")).programs[0]
        for r in (config.rollout, dataclasses.replace(config.rollout, cache_dtype="compute"))
    )
    tokens, numbers = 32 * (512 + 8 * 512), 2 * 24 * 2 * 64
    assert small.consumers["keys and values"] == pytest.approx(tokens * numbers * (1 + 2 / 64) / 2**30)
    assert flops.kv_bytes(SHAPES["qwen2.5-0.5b"], format_of("int8", "").cache) == numbers + 2 * 24 * 2 * 2
    assert small.seconds["HBM"] < large.seconds["HBM"]
    with pytest.raises(UserError, match="cache_dtype=int8.*GPU"):
        plan_estimate.of_recipe(config, plan_chips.parse("h100:1"))


def test_more_chips_hold_and_do_less_each():
    config = recipes.load(PODS / "v5e-8_qwen2.5-0.5b.yaml")
    four, eight = (plan_estimate.of_recipe(config, plan_chips.parse(f"v5e:2x{n}")) for n in (2, 4))
    assert four.run.step > eight.run.step
    for more, fewer in zip(four.programs, eight.programs, strict=True):
        assert more.name == fewer.name and more.seconds["HBM"] >= fewer.seconds["HBM"]
        assert more.total + more.resident > fewer.total + fewer.resident


def test_shapes_are_those_of_the_published_models():
    """By their numbers of weights, as their makers give them (in billions, norms and biases aside)."""
    billions = {
        "qwen2.5-0.5b": 0.49, "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.61, "qwen2.5-14b": 14.7,
        "qwen2.5-32b": 32.5, "qwen2.5-72b": 72.7, "qwen3-0.6b": 0.6, "qwen3-1.7b": 1.7, "qwen3-4b": 4.0,
        "qwen3-8b": 8.19, "qwen3-14b": 14.8, "qwen3-32b": 32.8, "qwen3-30b-a3b": 30.5, "llama-3.2-1b": 1.24,
        "llama-3.2-3b": 3.21, "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.6, "llama-3.3-70b": 70.6,
        "smollm2-135m": 0.135, "smollm2-360m": 0.362, "smollm2-1.7b": 1.71, "smollm3-3b": 3.08,
        "gemma-3-270m": 0.268, "gemma-3-1b": 1.0, "qwen3.5-0.8b": 0.752, "qwen3.5-9b": 8.95,  # texts only
    }  # fmt: skip
    found = {name: flops.parameters(shape) / 1e9 for name, shape in SHAPES.items()}
    assert found == pytest.approx(billions, rel=0.0125)
    assert shape_of("gemma-3-1b-it").vocab_size == 262144
    assert shape_of("hub/Qwen3-8B").qk_norm and shape_of("Llama-3.1-8B-Instruct").rope_scaling.factor == 8.0
    assert shape_of("builtin:tiny").num_layers < 10


def test_a_token_of_a_mixture_works_with_its_own_experts_only():
    """3.3 billion weights are active, its makers say: the output projection and the layers."""
    c = SHAPES["qwen3-30b-a3b"]
    assert (flops.matmul_weights(c) + 2 * c.vocab_size * c.hidden_size) / 1e9 == pytest.approx(3.3, rel=0.02)
    shared = dataclasses.replace(c, mlp=dataclasses.replace(c.mlp, shared=100))
    assert flops.layer_weights(shared) - flops.layer_weights(c) == 3 * 2048 * 100 + 2048


def test_layers_without_experts_run_none_in_a_decode_step():
    c = FAMILIES["glm4_moe"]
    assert (c.num_layers, c.dense_layers) == (3, 1)
    of_layer = (c.mlp.count - c.mlp.chosen) * 3 * c.hidden_size * c.mlp.size
    assert flops.flops_in_vain(c, Compute(), 10, 10) == 2 * 10 * 2 * of_layer


def test_an_update_computes_again_what_it_did_not_keep():
    c = SHAPES["qwen2.5-0.5b"]
    sizes = np.array([5, 3]), np.array([[7, 2], [1, 4]])
    forward = flops.forward_flops(c, *sizes)
    assert flops.update_flops(c, *sizes, remat="layer") == 4 * forward
    logits = 2 * 14 * c.vocab_size * c.hidden_size
    assert flops.update_flops(c, *sizes, remat="none") == 3 * forward + logits
