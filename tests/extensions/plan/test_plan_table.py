"""What fits what: every cell is what the search finds for the recipe that the cell stands for."""

import json
from pathlib import Path

import pytest

from grpojax.cli import main as cli
from grpojax.extensions.plan import plan_chips, plan_search, plan_table
from grpojax.extensions.plan.cli import plan
from grpojax.extensions.plan.plan_run import RunBound
from grpojax.extensions.plan.plan_shapes import SHAPES, shape_of
from grpojax.run import recipe as recipes

CONFIGS = Path(__file__).parents[3] / "configs"
GSM8K = str(CONFIGS / "gsm8k_qwen2.5_0.5b.yaml")


def load(*overrides, recipe="gsm8k_qwen2.5_0.5b.yaml"):
    return recipes.load(CONFIGS / recipe, overrides)


@pytest.mark.slow
def test_every_model_is_planned_in_every_way_on_every_device():
    models, devices = ["Qwen2.5-7B-Instruct", "SmolLM2-135M"], ["v5e-8", "h100"]
    found = plan_table.cells(load(), models, devices)
    assert [(c.model, c.learns, c.device) for c in found] == [
        (model, learns, device) for model in models for learns in plan_table.LEARNS for device in devices
    ]
    by_name = {(c.model, c.learns, c.device): c for c in found}
    ways = {"full": [], "LoRA": ["model.adapter.rank=32"]}
    ways["LoRA, int8 base"] = ["model.adapter.rank=32", "model.adapter.base=int8"]
    for learns, more in ways.items():
        fit = plan_search.best(load(f"model.path={models[0]}", *more), plan_chips.parse("v5e-8"))
        cell = by_name[models[0], learns, "v5e-8"]
        assert (cell.fits, cell.needs, cell.missing) == (fit.fits, fit.needs, fit.missing)
        mesh = fit.split
        assert (cell.fsdp, cell.tensor, cell.microbatches) == (mesh.fsdp, mesh.tensor, mesh.microbatches)
        assert cell.step_s == fit.estimate.run.step and cell.bound_by in ("compute", "HBM", "ICI")
    assert not by_name[models[0], "full", "v5e-8"].fits and by_name[models[0], "LoRA", "v5e-8"].fits


@pytest.mark.slow
def test_an_adapter_of_the_recipe_is_kept():
    wide, narrow = (plan_table.cells(load(f"model.adapter.rank={rank}"), ["Qwen3-8B"], ["h100:8"]) for rank in (512, 8))
    assert wide[0] == narrow[0] and wide[1].needs > narrow[1].needs and wide[2].needs > narrow[2].needs


def test_a_step_is_bound_by_what_binds_most_of_its_seconds():
    phases = {"rollout": (2.0, "HBM"), "scores": (1.5, "compute"), "update": (1.0, "compute")}
    assert plan_table._bound_by(RunBound(phases=phases, steps=1, chips=1)) == "compute"


@pytest.mark.slow
def test_what_has_no_plan_says_why():
    cells = plan_table.cells(load("variant=ppo"), ["Qwen3-8B"], ["h100"])
    assert len(cells) == 3 and all("runs critic" in cell.refused and not cell.fits for cell in cells)
    rows = plan_table.format_cells(cells).splitlines()[-3:]
    assert all("no plan: variant 'ppo' runs critic" in row for row in rows)
    (row, *_) = json.loads(plan_table.as_json(cells))
    assert row["device"] == "h100" and row["fits"] is False and row["needs"] is row["step_s"] is None


@pytest.mark.slow
def test_the_command_prints_a_line_for_each(capsys):
    command = ["plan", GSM8K, "--models", "Qwen2.5-7B,Qwen3-0.6B", "--devices", "v5e-8,rtx4090"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 3 + 2 * 3 * 2
    assert out[3].split()[:4] == ["Qwen2.5-7B", "full", "v5e-8", "20.8"] and "lacks 5.0 GiB (update)" in out[3]
    assert out[5].endswith("fsdp=2 tensor=4 microbatches=8") and " s  " in out[5]
    assert cli.main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["fits"] for row in rows[:4]] == [False, False, True, False]
    assert rows[0]["missing"] == pytest.approx(5.0, abs=0.05) and rows[2]["tensor"] == 4


@pytest.mark.slow
def test_a_table_in_markdown_has_models_down_and_devices_across():
    made = plan_table.markdown(plan_table.cells(load(), ["Qwen2.5-7B", "Qwen3-0.6B"], ["v5e-8", "rtx4090"]))
    first, *rows = made.split("\n\n")[1].splitlines()
    assert made.startswith("## full\n\n") and first == "| model | v5e-8, 15.8 GiB | rtx4090, 22.0 GiB |"
    assert rows[1].startswith("| Qwen2.5-7B | lacks 5 GiB | lacks 136 GiB |") and rows[2].startswith("| Qwen3-0.6B |")
    refused = plan_table.markdown(plan_table.cells(load("variant=ppo"), ["Qwen3-8B"], ["h100", "l4"]))
    assert refused.count("| no plan | no plan |") == refused.count("\n\nNo plan for Qwen3-8B: variant 'ppo' runs") == 3


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--models", "Qwen3-8B"], "add --devices v5e-8,h100"),
        (["--devices", "h100"], "or --models all"),
        (["--json"], "needs both"),
        (["--models", "Qwen3-8B", "--devices", "h100", "--layers", "2"], "leave these out"),
        (["--models", "Qwen3-8B", "--devices", "h100", "--topology", "h100:1"], "leave these out"),
        (["--models", "Qwen3-9B", "--devices", "h100"], "qwen3-8b, qwen3-14b"),
        (["--models", "Qwen3-8B", "--devices", "h100,p4"], "no topology 'p4': known are v4"),
    ],
)
def test_a_table_that_cannot_be_made_is_refused(capsys, more, said):
    assert cli.main(["plan", GSM8K, *more]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_all_is_every_published_model(capsys):
    assert cli.main(["plan", GSM8K, "--models", "all", "--devices", "v5p-8", "--json"]) == 0
    assert {row["model"] for row in json.loads(capsys.readouterr().out)} == SHAPES.keys()


def test_a_recipe_without_an_estimate_says_so_of_its_longest_completion(capsys):
    plan._tell_longest(load("variant=ppo"), plan_chips.parse("v5e-8"), shape_of("Qwen2.5-0.5B"))
    assert "not estimated: variant 'ppo' runs critic" in capsys.readouterr().out
