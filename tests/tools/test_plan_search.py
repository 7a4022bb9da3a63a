"""A search tries settings by their estimate, compiles a few, and names those that a step is fastest with."""

import dataclasses
from pathlib import Path

import pytest

from grpojax.host.errors import UserError
from grpojax.run import recipe as recipes
from grpojax.tools import cli, plan_chips, plan_estimate, plan_search
from grpojax.tools.plan_report import ProgramReport
from grpojax.tools.plan_shapes import SHAPES

CONFIGS = Path(__file__).parents[2] / "configs"
GSM8K = CONFIGS / "gsm8k_qwen2.5_0.5b.yaml"


def load(*overrides):
    return recipes.load(GSM8K, ["model.path=Qwen2.5-1.5B-Instruct", "rollout.prompts=64", *overrides])


@pytest.mark.parametrize(
    ("topology", "kind", "chips"),
    [
        ("v4:2x2x4", "TPU v4", 16),
        ("v5e:4x4", "TPU v5 lite", 16),
        ("v5p:2x2x1", "TPU v5p", 4),
        ("v6e:2x4", "TPU v6 lite", 8),
        ("a100:4", "NVIDIA A100-SXM4-80GB", 4),
        ("rtx4090:1", "NVIDIA GeForce RTX 4090", 1),
    ],
)
def test_a_topology_names_chips(topology, kind, chips):
    target = plan_chips.parse(topology)
    assert (target.kind, target.chips) == (kind, chips) and target.by_sheet == kind.startswith("NVIDIA")
    assert target.chip.flops > 1e14 and target.chip.memory > 15e9


@pytest.mark.parametrize(
    ("topology", "slices", "said"),
    [
        ("v9:2x2", 1, "known are v4, v5e"),
        ("v5e", 1, "write v5e:4x4"),
        ("h100:2x2", 1, "write h100:8"),
        ("h100:8", 2, "--slices 2: is for TPUs"),
    ],
)
def test_a_topology_that_is_none_is_told(topology, slices, said):
    with pytest.raises(UserError, match=said):
        plan_chips.parse(topology, slices)


def test_candidates_divide_and_come_fastest_first():
    target = plan_chips.parse("v5e:4x4")
    found = plan_search.candidates(load(), SHAPES["qwen2.5-1.5b"], target)
    seconds = [c.estimate.run.step for c in found]
    assert seconds == sorted(seconds) and len(found) > 100
    meshes = {(c.execution.data, c.execution.fsdp, c.execution.tensor) for c in found}
    assert all(data * fsdp * tensor == 16 and tensor <= 4 for data, fsdp, tensor in meshes)  # twelve heads
    assert (1, 16, 1) in meshes and (16, 1, 1) in meshes and (2, 4, 2) in meshes
    assert len({c.overrides for c in found}) == len(found)
    across = plan_search.candidates(load("rollout.group=2"), SHAPES["qwen2.5-1.5b"], plan_chips.parse("v5e:2x2", 2))
    assert {c.execution.data % 2 for c in across} == {0}
    # 4 prompts of a minibatch would stand in 8 lanes twice, but the 12 of the rollout would not
    few = load("rollout.prompts=12", "train.minibatches=3", "train.microbatches=1", "rollout.group=2")
    some = plan_search.candidates(few, SHAPES["qwen2.5-1.5b"], plan_chips.parse("v5e:2x4"))
    assert {c.execution.data * c.execution.fsdp for c in some} == {2, 4}  # and tensor=4 or 2


def compiled(target, seconds, fits):
    """What a compiler might say of each candidate in turn: seconds of its update, and whether it has room."""
    seen = []

    def compile_it(config):
        n = len(seen)
        seen.append(config)
        parts = {"argument": 1.0, "temp": 1.0 if fits[n] else 99.0, "output": 0.0, "alias": 0.0, "resident": 0.0}
        return [ProgramReport(name="update", compile_s=1.0, seconds={"compute": seconds[n]}, room=15.75, **parts)]

    return compile_it, seen


def test_the_compiler_has_the_last_word():
    target, said = plan_chips.parse("v5e:4x4"), []
    compile_it, seen = compiled(target, [1.0, 3.0, 2.0], [False, True, True])
    found = plan_search.search(load(), target, compile_it=compile_it, say=said.append)
    assert len(seen) == 3 and found.candidate.execution.applied(load()) == seen[2] and found.run.step == 2.0
    assert "have room by their estimate" in said[0] and "does not fit" in said
    assert any(s.startswith("compiling 3 of at most 3: mesh.data=") for s in said)
    again = recipes.load(GSM8K, ["model.path=Qwen2.5-1.5B-Instruct", "rollout.prompts=64",
                                 *found.candidate.overrides.split()])  # fmt: skip
    assert again.resolved() == seen[2].resolved()


def test_nothing_that_fits_is_an_error():
    target = plan_chips.parse("v5e:2x2")
    compile_it, _ = compiled(target, [1.0] * 3, [False] * 3)
    with pytest.raises(UserError, match="no settings fit 4 x TPU v5 lite.*take more chips"):
        plan_search.search(load(), target, compile_it=compile_it, say=lambda _: None)
    tiny = dataclasses.replace(target, shape=(1, 1))
    with pytest.raises(UserError, match="no settings fit 1 x TPU v5 lite"):
        plan_search.search(load("model.path=Qwen2.5-7B"), tiny, compile_it=compile_it, say=lambda _: None)
    seven = dataclasses.replace(target, shape=(7, 1))
    with pytest.raises(UserError, match="no mesh of 7 chips divides rollout.prompts=64"):
        plan_search.search(load(), seven, compile_it=compile_it, say=lambda _: None)


def test_a_gpu_is_searched_and_planned_by_its_sheet(capsys):
    command = ["plan", str(GSM8K), "--topology", "l4:1"]
    assert cli.main([*command, "--search"]) == 0
    out = capsys.readouterr()
    first = next(line for line in out.out.splitlines() if line.startswith("mesh."))
    assert first.startswith("mesh.data=1 mesh.fsdp=1 mesh.tensor=1 train.microbatches=")
    assert "settings divide" in out.err
    assert cli.main([*command, *first.split(), "--price-per-hour", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("at 2 an hour of a chip: ")
    assert cli.main([*command, "--layers", "3"]) == 0
    assert "all of this is of a model with 3 layers" in capsys.readouterr().out


def test_what_does_not_fit_exits_with_1_and_names_the_largest(capsys):
    assert cli.main(["plan", str(GSM8K), "model.path=Qwen2.5-3B-Instruct", "--topology", "rtx4090:1"]) == 1
    out = capsys.readouterr().out
    assert "update: does not fit" in out and "a step takes" not in out
    assert "optimiser 22.99" in out  # two float32 moments of 3.09 billion weights
    command = ["plan", str(GSM8K), "model.path=Qwen2.5-3B-Instruct", "--topology", "rtx4090:1", "--search"]
    assert cli.main(command) == 1
    found = capsys.readouterr()
    assert "optimiser 22.99" in found.out and "no settings fit 1 x NVIDIA" in found.err


def test_a_shape_that_nobody_published_is_told(capsys):
    assert cli.main(["plan", str(GSM8K), "model.path=/nowhere/Mine-9B", "--topology", "h100:1"]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert cli.main(["plan", str(GSM8K), "--slices", "0"]) == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["variant=ppo"], "variant 'ppo' runs critic, which no plan by data sheet knows"),
        (["variant=ppo", "--search"], "variant 'ppo' runs critic, which no plan by data sheet knows"),
        (["variant=remax"], "variant 'remax' runs greedy"),
        (["mesh.fsdp=16"], "mesh data=1 x fsdp=16 x tensor=1 does not make 8 chips"),
        (["mesh.tensor=8"], "with num_heads=14 does not divide over mesh.fsdp=1 and mesh.tensor=8"),
        (["train.microbatches=3"], "train.microbatches=3 splits neither 4 prompts"),
        (["rollout.prompts=20"], "20 prompts of a batch"),
    ],
)
def test_what_no_data_sheet_knows_or_does_not_divide_is_told(capsys, more, said):
    assert cli.main(["plan", str(GSM8K), "--topology", "h100:8", *more]) == 2
    assert said in capsys.readouterr().err


def test_a_variant_with_entropies_scores_with_them():
    config = load("variant=gtpo", "rollout.prompts=32")
    by_name = {p.name: p for p in plan_estimate.of_recipe(config, plan_chips.parse("h100:8")).programs}
    assert by_name["score with entropy"].seconds == by_name["score"].seconds


def test_a_price_of_a_supervised_recipe_is_refused(capsys):
    sft = str(CONFIGS / "supervised" / "sft.yaml")
    assert cli.main(["plan", sft, "--recipe", "sft", "--price-per-hour", "2"]) == 2
    assert "--price-per-hour and GPUs go with train" in capsys.readouterr().err
