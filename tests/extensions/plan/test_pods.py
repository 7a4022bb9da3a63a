"""The recipes of pods: what their heads say of the plan, and that they compile."""

import importlib.util
import re
from pathlib import Path

import pytest
import tpu_compiler

from grpojax.extensions.plan import plan_chips, plan_estimate
from grpojax.extensions.plan.plan_shapes import SHAPES
from grpojax.run import recipe as config

CONFIGS = Path(__file__).parents[3] / "configs"


PODS = {path.stem: path for path in sorted((CONFIGS / "pods").glob("*.yaml"))}


def said_of(path):
    """The head of a pod's recipe as one line, and the topology that it names."""
    head = " ".join(line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    return head, re.search(r"--topology (\S+)", head)[1]


@pytest.mark.parametrize("name", PODS)
def test_a_pods_recipe_says_what_its_plan_is(name):
    """The commands, and figures that its settings still have: of GPUs all, of TPUs within what an estimate can."""
    path = PODS[name]
    head, topology = said_of(path)
    recipe, target = config.load(path), plan_chips.parse(topology)
    model = name.split("_")[1]
    assert f"grpojax train configs/pods/{path.name}" in head and f"grpojax plan configs/pods/{path.name}" in head
    assert recipe.run.dir == f"runs/pods/{name}" and recipe.model.path.lower().startswith(model)
    estimate = plan_estimate.of_recipe(recipe, target)
    assert estimate.fits and model in SHAPES
    found = {p.name: p.total + p.resident for p in estimate.programs}
    told = {n: float(re.search(rf"{n} ([\d.]+)", head)[1]) for n in ("update", "rollout", "reshard", "score")}
    step = float(re.search(r"at least ([\d.]+) s:", head)[1])
    by_sheet = "data sheet" in head
    assert ("compiled in full" in head) != by_sheet
    assert max(told.values()) == pytest.approx(max(found.values()), rel=0.01 if by_sheet else 0.25)
    if SHAPES[model].mlp:  # programs copy tokens for their experts, which no estimate counts
        assert estimate.run.step < step < 2 * estimate.run.step
    else:
        assert step == pytest.approx(estimate.run.step, rel=0.01 if by_sheet else 0.25)


COMPILE = """
import sys
from grpojax.run import recipe
from grpojax.extensions.plan import planner
path, topology, programs = sys.argv[1:]
reports = planner.plan(recipe.load(path), topology=topology, layers=1, programs=programs.split(",")).reports
print(*(r.name for r in reports if r.fits))
"""


def compiled(path, programs):
    done = tpu_compiler.run(COMPILE, str(path), said_of(path)[1], programs)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1].split()


needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


@pytest.mark.in_ci("v5e-8_qwen2.5-0.5b")
@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("name", [name for name in PODS if not name.startswith("gpu")])
def test_a_pods_recipe_compiles(name):
    """On the smallest slice what samples, too; of the others what takes the most memory and compiles soonest."""
    programs = ["reshard", "rollout"] if name.startswith("v5e-1_") else ["reshard"]
    assert compiled(PODS[name], ",".join(programs)) == programs


RECEIVED = """
import sys
from grpojax.run import recipe
from grpojax.extensions.plan import planner
path, topology, *overrides = sys.argv[1:]
(update,) = planner.plan(recipe.load(path, overrides), topology=topology, layers=2, programs=["update"]).reports
print(update.links["ICI"].total)
"""


@pytest.mark.exhaustive("extensions/plan/test_planner.py::test_programs_compile_and_move_what_they_must")
@needs_libtpu
def test_a_chip_of_32_receives_what_the_guide_says():
    """Four prompts a chip, and every 16 of them hold a copy of the weights; the table is flat from there on."""
    table = re.findall(r"\| v5e:\S+ \| (\d+) \| ([\d.]+) GB", (CONFIGS.parent / "docs" / "measured.md").read_text())
    said = {int(chips): float(gb) for chips, gb in table}
    assert max(said[n] for n in (64, 128, 256)) == pytest.approx(said[32], rel=0.05)
    more = ["rollout.prompts=128", "mesh.data=2", "mesh.fsdp=16"]
    done = tpu_compiler.run(RECEIVED, str(PODS["v5e-4x4_qwen2.5-1.5b"]), "v5e:4x8", *more)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.split()[-1]) / 1e9 == pytest.approx(said[32], rel=0.05)
