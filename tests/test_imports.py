"""Which module may import which, read from the sources; and what importing the pure ones brings along."""

import ast
import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import grpojax

ROOT = Path(grpojax.__file__).parent

# A module imports from its own branch and from the layers above it here. A package stands for all that is in it.
LAYERS = [
    [{"types", "masked", "shapes"}, {"host", "extension"}],
    [{"advantages"}],
    [{"credit"}, {"allocation"}, {"losses"}],
    [{"variants"}, {"diagnostics"}],
    [{"sharding", "device"}],
    [{"models"}, {"data"}, {"rewards"}],
    [{"programs"}],
    [{"evaluation"}],
    [{"records"}],
    [{"run"}],
    [{"train"}],
    [{"cli"}, {"assets"}],
    [{"extensions"}],
]
PLACE = {name: (n, branch) for n, layer in enumerate(LAYERS) for branch in layer for name in branch}
PURE = {"types", "masked", "shapes"} | {name for layer in LAYERS[1:4] for branch in layer for name in branch}
PURE_MAY_IMPORT = {"jax", "numpy", *sys.stdlib_module_names}


def modules():
    """Dotted name inside grpojax -> file, of every module there is; the package itself is ''."""
    files = {p.relative_to(ROOT).with_suffix("").parts: p for p in ROOT.rglob("*.py")}
    files = {parts: path for parts, path in files.items() if parts[0] != "configs"}  # a wheel has the recipes there
    return {".".join(parts).removesuffix("__init__").rstrip("."): path for parts, path in sorted(files.items())}


MODULES = modules()


def imports(source, module, is_package=False):
    """Dotted names that a module imports anywhere, also in functions; ``from a import b`` gives a.b."""
    package = ("grpojax." + module).rstrip(".").split(".")
    if not is_package:
        package = package[:-1]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join(base + ([node.module] if node.module else []))
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def wrong(module, imported):
    """Those of the imported names that ``module`` may not import."""
    own = module.split(".")[0]
    bad = set()
    for name in imported:
        top, *rest = name.split(".")
        if top != "grpojax":
            if own in PURE and top not in PURE_MAY_IMPORT:
                bad.add(name)
            continue
        other = rest[0] if rest else ""
        if own == "":
            allowed = False  # `import grpojax.advantages` runs grpojax/__init__.py first
        elif other in PLACE:
            (n, branch), (m, _) = PLACE[own], PLACE[other]
            allowed = m < n or other in branch
            if own in PURE and other == "host":
                allowed = rest[1:2] == ["errors"]
        else:
            allowed = False  # a name of grpojax/__init__.py, which is over everything
        if not allowed:
            bad.add(name)
    return bad


def test_modules_are_found():
    assert {"", "types", "losses", "programs.packing", "models.decoder", "run.recipe"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_up(module):
    path = MODULES[module]
    own = module.split(".")[0]
    assert own in PLACE or own == "", f"{module} has no layer: give it one in LAYERS"
    bad = wrong(module, imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py"))
    assert not bad, f"{module} must not import {sorted(bad)}"


def test_no_cycles():
    graph = {}
    for module, path in MODULES.items():
        names = {n.removeprefix("grpojax.") for n in imports(path.read_text(encoding="utf-8"), module,
                 path.name == "__init__.py") if n.startswith("grpojax.")}  # fmt: skip
        names = {n if n in MODULES else n.rpartition(".")[0] for n in names}
        graph[module] = {n for n in names if n in MODULES and n not in ("", module)}
    while leaves := [m for m, needs in graph.items() if not needs & graph.keys()]:
        graph = {m: needs for m, needs in graph.items() if m not in leaves}
    assert not graph, f"these import each other: {sorted(graph)}"


# The rule itself: it must know these for what they are.
@pytest.mark.parametrize(
    ("module", "source", "bad"),
    [
        ("losses", "import jax\nfrom grpojax import masked\nfrom grpojax.host.errors import UserError", set()),
        ("losses", "from grpojax.host import settings", {"grpojax.host.settings"}),
        ("losses.ratios", "import optax", {"optax"}),
        ("losses", "def f():\n  from flax import nnx", {"flax.nnx"}),
        ("losses", "from grpojax.credit import nthr", {"grpojax.credit.nthr"}),
        ("losses", "from grpojax.models import decoder", {"grpojax.models.decoder"}),
        ("masked", "from grpojax import losses", {"grpojax.losses"}),
        ("models.decoder", "from grpojax import run, masked", {"grpojax.run"}),
        ("models.decoder", "from grpojax.models.decoder_config import DecoderConfig", set()),
        ("models.decoder", "from ..run import build", {"grpojax.run.build"}),
        ("models.decoder", "from .decoder_config import from_hf", set()),
        ("models.decoder", "from grpojax.data import readers", {"grpojax.data.readers"}),
        ("programs.update", "import grpojax.train", {"grpojax.train"}),
        ("programs.update", "from grpojax.cli.main import main", {"grpojax.cli.main.main"}),
        ("programs.update", "from grpojax import grpo", {"grpojax.grpo"}),
        ("programs.update", "from grpojax import losses, models", set()),
        ("evaluation.judge", "from grpojax.records import metrics", {"grpojax.records.metrics"}),
        ("records.evaluations", "from grpojax import evaluation", set()),
        ("train", "from grpojax.cli import main", {"grpojax.cli.main"}),
        ("train", "from grpojax import extension", set()),
        ("cli.main", "from grpojax.run import recipe, opening", set()),
        ("cli.main", "from grpojax.extensions import plan", {"grpojax.extensions.plan"}),
        ("extensions.methods.critic", "from grpojax import train", set()),
        ("", "from grpojax import losses", {"grpojax.losses"}),
    ],
)
def test_the_rule(module, source, bad):
    assert wrong(module, imports(source, module, module == "")) == bad


def loaded(names):
    imported = ", ".join(f"grpojax.{name}" for name in names)
    code = f"import sys, {imported}; print(*{{name.split('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.slow
def test_pure_modules_load_jax_alone():
    heavy = {"flax", "optax", "transformers", "datasets", "grain", "torch", "orbax", "pydantic", "matplotlib"}
    got = loaded(sorted(PURE))
    assert "jax" in got and not heavy & got, heavy & got


def test_estimates_load_no_model():
    """pass@k of counted samples is numpy; what draws them is loaded when it is asked for."""
    assert not {"jax", "flax", "optax", "orbax", "grain"} & loaded(["evaluation"])


@pytest.mark.slow
def test_a_recipe_is_read_without_what_trains():
    assert not {"flax", "optax", "orbax", "grain", "transformers", "datasets", "torch"} & loaded(["run.recipe"])


@pytest.mark.slow
def test_a_run_loads_no_way_to_draw_that_it_does_not_take():
    code = "import sys, grpojax.train; print(*(n for n in sys.modules if n.startswith('grpojax.extensions.')))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=True)
    assert not {name.split(".")[-1] for name in run.stdout.split()} & {
        "ahead",
        "partial",
        "allocated",
        "episode_source",
    }


# Import paths that users write; they stay (`variants` has more names, which follow from its table).
PUBLIC = {
    "advantages": ("Signals", "center", "chain", "scale", "to_tokens"),
    "allocation": ("keep_prompts", "solved", "xrpo_allocate"),
    "credit": ("compensate_rare_tokens",),
    "diagnostics": ("gwhes_weights",),
    "evaluation": ("pass_at_k",),
    "losses": ("Objective", "clipped", "loss_weights", "policy_loss"),
    "masked": ("mean",),
    "rewards": ("check_answer",),
    "train": ("Run", "State", "Updates", "open_run", "save", "step", "train"),
    "variants": ("control", "get", "names", "published", "table"),
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_paths_stay(module):
    found = importlib.import_module(f"grpojax.{module}")
    assert not [name for name in PUBLIC[module] if not hasattr(found, name)]


PURE_MODULES = [m for m in MODULES if m.split(".")[0] in PURE]


WITH_EXAMPLES = sorted(m for m, file in MODULES.items() if ">>> " in file.read_text())
EXTRAS = {"host.compile_cache": "google.cloud.storage", "extensions.problems.reasoning_gym": "reasoning_gym"}


@pytest.mark.slow  # hundreds of small programs; what the examples show is tested where it belongs
@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_doctests(module):
    if module in EXTRAS:
        pytest.importorskip(EXTRAS[module], reason="an extra is absent: pip install 'grpojax[test-all]'")
    assert doctest.testmod(importlib.import_module(f"grpojax.{module}")).failed == 0


@pytest.mark.parametrize("module", sorted(set(PURE_MODULES) - {"types"}))
def test_every_public_name_has_an_example(module):
    """Those defined there; `test_doctests` runs the examples."""
    if module.split(".")[0] == "variants":
        return  # one for each variant would be the same one
    functions = importlib.import_module(f"grpojax.{module}")
    own = {
        name: thing
        for name, thing in vars(functions).items()
        if not name.startswith("_") and getattr(thing, "__module__", "") == functions.__name__ and callable(thing)
    }
    without = [name for name, thing in own.items() if ">>>" not in (thing.__doc__ or "")]
    assert not without, f"no example: {without}"


def test_every_module_is_a_file_of_the_package():
    """A folder without __init__.py would be left out of the wheel."""
    packages = {m.name for m in pkgutil.iter_modules([str(ROOT)])}
    assert {module.split(".")[0] for module in MODULES if module} <= packages
