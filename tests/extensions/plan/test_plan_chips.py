"""What ``--topology`` names, and what ``grpojax plan`` refuses."""

import re
from pathlib import Path

import pytest

from grpojax.cli import main as cli
from grpojax.extensions.plan import plan_chips, plan_estimate, planner
from grpojax.extensions.plan.plan_report import ProgramReport
from grpojax.host.errors import UserError
from grpojax.run import recipe as recipes

CONFIGS = Path(__file__).parents[3] / "configs"
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
        ("rtx5090", "NVIDIA GeForce RTX 5090", 1),
        ("t4:2", "Tesla T4", 2),
        ("v5e-8", "TPU v5 lite", 8),
        ("v5p-64", "TPU v5p", 32),
        ("a100-40gb", "NVIDIA A100-SXM4-40GB", 1),
    ],
)
def test_a_topology_names_chips(topology, kind, chips):
    target = plan_chips.parse(topology)
    assert (target.kind, target.chips) == (kind, chips) and target.by_sheet == (not kind.startswith("TPU"))
    assert (target.chip.flops > 1e14) == (kind != "Tesla T4")  # it multiplies no bfloat16
    assert target.chip.memory > 15e9


@pytest.mark.parametrize(
    ("topology", "slices", "said"),
    [
        ("v9:2x2", 1, "known are v4, v5e"),
        ("v5e", 1, "v5e-8, .* or v5e:4x4"),
        ("v5p-24", 1, "no slice 'v5p-24': write one of v5p-8, v5p-16"),
        ("h100:2x2", 1, "write h100:8"),
        ("h100:8", 2, "--slices 2: is for TPUs"),
    ],
)
def test_a_topology_that_is_none_is_told(topology, slices, said):
    with pytest.raises(UserError, match=said):
        plan_chips.parse(topology, slices)


@pytest.mark.slow
def test_a_gpu_is_planned_by_its_sheet(capsys):
    command = ["plan", str(GSM8K), "--topology", "l4:1", "train.microbatches=32"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "estimated from shapes" in out and "a step takes at least" in out
    assert re.search(r"longest completion that would fit, by shapes: \d{4} tokens \(memory of rollout\)", out)
    assert cli.main([*command, "--layers", "3"]) == 0
    assert "all numbers are for a model with 3 layers" in capsys.readouterr().out


@pytest.mark.slow
def test_what_does_not_fit_exits_with_1_and_names_the_largest(capsys):
    assert cli.main(["plan", str(GSM8K), "model.path=Qwen2.5-3B-Instruct", "--topology", "rtx4090:1"]) == 1
    out = capsys.readouterr().out
    assert "update: does not fit" in out and "a step takes" not in out
    assert "none of 128 tokens or more (memory of" in out
    assert "by shapes it would fit with model.adapter.rank=16 mesh.data=1" in out
    assert "optimiser 22.99" in out  # two float32 moments of 3.09 billion weights


@pytest.mark.slow
def test_what_does_not_fit_names_a_mesh_that_does(capsys):
    eight = ["model.path=Qwen3-8B", "model.adapter.rank=32", "--topology", "l4:4"]
    assert cli.main(["plan", str(GSM8K), *eight]) == 1
    out = capsys.readouterr().out
    settings = re.search(r"by shapes it fits with (mesh.data=1 mesh.fsdp=1 mesh.tensor=4 train.microbatches=\d+) ", out)
    assert cli.main(["plan", str(GSM8K), *eight, *settings[1].split()]) == 0


@pytest.mark.slow
def test_what_a_compiler_refuses_gets_a_split_that_needs_less_by_shapes(monkeypatch, capsys):
    """By shapes the recipe's own mesh would fit."""
    asked = []

    def refuse(config, *, topology, **how):
        asked.append(topology)
        report = ProgramReport(name="update", compile_s=1.0, error="used 22.69G of 15.75G")
        return planner.Planned({}, [report])

    monkeypatch.setattr(planner, "plan", refuse)
    seven = ["model.path=Qwen2.5-7B-Instruct", "model.adapter.rank=32", "mesh.tensor=2", "train.microbatches=8"]
    assert cli.main(["plan", str(GSM8K), *seven, "--topology", "v5e-8"]) == 1
    out = capsys.readouterr().out
    assert asked == ["v5e:2x4"] and "by shapes it fits with mesh.data=1 mesh.fsdp=2 mesh.tensor=4" in out
    assert "a step takes" not in out and "longest completion that would fit, by shapes" in out


def test_a_shape_that_nobody_published_is_told(capsys):
    assert cli.main(["plan", str(GSM8K), "model.path=/nowhere/Mine-9B", "--topology", "h100:1"]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert cli.main(["plan", str(GSM8K), "--slices", "0"]) == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["variant=ppo"], "variant 'ppo' runs critic, which a plan by data sheet does not cover"),
        (["variant=remax"], "variant 'remax' runs greedy"),
        (["mesh.fsdp=16"], "mesh data=1 x fsdp=16 x tensor=1 does not make 8 chips"),
        (["mesh.tensor=8"], "with num_heads=14 does not divide over mesh.fsdp=1 and mesh.tensor=8"),
        (["train.microbatches=3"], "train.microbatches=3 splits neither 4 prompts"),
        (["rollout.prompts=20"], "20 prompts of a batch"),
    ],
)
@pytest.mark.slow
def test_what_no_data_sheet_knows_or_does_not_divide_is_told(capsys, more, said):
    assert cli.main(["plan", str(GSM8K), "--topology", "h100:8", *more]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_variant_with_entropies_scores_with_them():
    config = load("variant=gtpo", "rollout.prompts=32")
    plain = load("variant={name: grpo, kl_coef: 0.1}", "rollout.prompts=32")
    found = [plan_estimate.of_recipe(x, plan_chips.parse("h100:8")).programs for x in (config, plain)]
    entropy, score = ({p.name: p for p in programs if "score" in p.name} for programs in found)
    assert entropy.keys() == {"score with entropy"} and score.keys() == {"score"}
    assert entropy["score with entropy"].seconds == score["score"].seconds


def test_a_supervised_recipe_is_compiled_for_tpus(capsys):
    sft = str(CONFIGS / "supervised" / "sft.yaml")
    assert cli.main(["plan", sft, "--recipe", "sft", "--topology", "h100:1"]) == 2
    assert "--recipe sft is compiled for TPUs" in capsys.readouterr().err
