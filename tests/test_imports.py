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

# A module imports from its own branch and from the layers above it here. A package stands for all that is in
# it; the name of a module that does not exist yet does no harm.
BASE = {"types", "errors", "masked"}
PURE = {"advantages", "credit", "losses", "surrogates", "allocation", "variants", "diagnostics"}
LAYERS = [
    [BASE],
    [PURE, {"models", "sharding", "hosts"}],
    [{"packing", "critic", "sampler", "step"}],
    [{"rewards", "data", "readers", "tracking", "checkpoint", "settings", "host"}],
    [{"config"}],
    [{"trainer", "evaluate", "plan", "bench", "assets"}],
    [{"cli", "__main__"}],
]
PLACE = {name: (n, branch) for n, layer in enumerate(LAYERS) for branch in layer for name in branch}
ROOT_MAY_IMPORT = BASE | PURE  # as `import grpojax.advantages` runs grpojax/__init__.py first


def modules():
    """Dotted name inside grpojax -> file, of every module there is; the package itself is ''."""
    files = {p.relative_to(ROOT).with_suffix("").parts: p for p in ROOT.rglob("*.py")}
    return {
        ".".join(parts).removesuffix("__init__").rstrip("."): path for parts, path in sorted(files.items())
    }


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
            if own in BASE | PURE and top not in {"jax", "numpy", *sys.stdlib_module_names}:
                bad.add(name)
            continue
        other = rest[0] if rest else ""
        if own == "":
            allowed = other in ROOT_MAY_IMPORT
        elif other in PLACE:
            (n, branch), (m, _) = PLACE[own], PLACE[other]
            allowed = m < n or other in branch
        else:
            allowed = False  # a name of grpojax/__init__.py, which is over everything
        if not allowed:
            bad.add(name)
    return bad


def test_modules_are_found():
    assert {"", "types", "losses", "packing", "models.decoder", "config"} <= set(MODULES)


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
        ("losses", "import jax\nfrom grpojax import masked\nfrom grpojax.errors import UserError", set()),
        ("losses", "import optax", {"optax"}),
        ("losses", "def f():\n  from flax import nnx", {"flax.nnx"}),
        ("losses", "from grpojax.models import decoder", {"grpojax.models.decoder"}),
        ("masked", "from grpojax import losses", {"grpojax.losses"}),
        ("models.decoder", "from grpojax import config, sharding", {"grpojax.config"}),
        ("models.decoder", "from grpojax.models.config import DecoderConfig", set()),
        ("models.decoder", "from ..config import build", {"grpojax.config.build"}),
        ("models.decoder", "from .config import from_hf", set()),
        ("models.decoder", "from grpojax import losses", {"grpojax.losses"}),
        ("step", "import grpojax.trainer", {"grpojax.trainer"}),
        ("step", "from grpojax.cli import main", {"grpojax.cli.main"}),
        ("step", "from grpojax import grpo", {"grpojax.grpo"}),
        ("step", "from grpojax import losses, models, packing", set()),
        ("rewards.math", "from grpojax.config import load", {"grpojax.config.load"}),
        ("config", "from grpojax import rewards, step", set()),
        ("trainer", "from grpojax import config, cli", {"grpojax.cli"}),
        ("cli", "from grpojax import config, trainer, errors", set()),
        ("", "from grpojax import losses", set()),
        ("", "from grpojax.models import Decoder", {"grpojax.models.Decoder"}),
    ],
)
def test_the_rule(module, source, bad):
    assert wrong(module, imports(source, module, module == "")) == bad


def loaded(names):
    imported = ", ".join(f"grpojax.{name}" for name in names)
    code = f"import sys, {imported}; print(*{{name.split('.')[0] for name in sys.modules}})"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


def test_pure_modules_load_jax_alone():
    heavy = {"flax", "optax", "transformers", "datasets", "grain", "torch", "orbax", "pydantic", "matplotlib"}
    names = sorted((BASE | PURE) & set(MODULES))
    got = loaded(names)
    assert "jax" in got and not heavy & got, heavy & got


def test_importing_the_pure_modules_takes_little_longer_than_jax():
    """The best of three each, in processes of their own."""
    names = ", ".join(f"grpojax.{name}" for name in sorted(PURE))
    code = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"

    def seconds(what):
        runs = [subprocess.run([sys.executable, "-c", code.format(what)], cwd=ROOT.parent, capture_output=True,
                               text=True, check=True) for _ in range(3)]  # fmt: skip
        return min(float(run.stdout) for run in runs)

    assert seconds(names) < 1.5 * seconds("jax, jax.numpy")


@pytest.mark.parametrize("module", sorted((BASE | PURE) & set(MODULES)))
def test_doctests(module):
    result = doctest.testmod(importlib.import_module(f"grpojax.{module}"))
    assert result.failed == 0
    if module in PURE:
        assert result.attempted


@pytest.mark.parametrize(
    "module",
    ["advantages", "credit", "losses", "surrogates", "surrogates", "masked", "allocation", "diagnostics"],
)
def test_every_public_name_has_an_example(module):
    """Those defined there; `test_doctests` runs the examples."""
    functions = importlib.import_module(f"grpojax.{module}")
    own = {
        name: thing
        for name, thing in vars(functions).items()
        if not name.startswith("_") and getattr(thing, "__module__", "") == functions.__name__
    }
    assert len(own) > 5
    without = [name for name, thing in own.items() if ">>>" not in (thing.__doc__ or "")]
    assert not without, f"no example: {without}"


def test_every_module_is_a_file_of_the_package():
    """A folder without __init__.py would be left out of the wheel."""
    packages = {m.name for m in pkgutil.iter_modules([str(ROOT)])}
    assert {module.split(".")[0] for module in MODULES if module} <= packages
