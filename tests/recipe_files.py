"""The recipes that ship, what each needs beyond the library's core, and what is asked of every recipe and setting."""

import dataclasses
import functools
import json
import re
import typing
from pathlib import Path

import pytest
import yaml
from refusals import RECIPE
from variant_examples import in_core

from grpojax import variants
from grpojax.data import PARTS
from grpojax.host import settings
from grpojax.host.errors import UserError
from grpojax.run import recipe as config

CONFIGS = Path(__file__).parents[1] / "configs"
TOP = sorted(CONFIGS.glob("*.yaml"))
VARIANTS = {path.stem: path for path in sorted((CONFIGS / "variants").glob("*.yaml"))}
# Problems that no extension makes, in place of a recipe's own.
PLAIN = ["data.train=builtin:arithmetic/train.jsonl", "data.validation=null", "data.test=null"]
MADE = ("facts:", "grid:", "reasoning:", "reasoning_gym:")  # schemes of problems that are made


def name_of(variant) -> str:
    return variant["name"] if isinstance(variant, dict) else variant


def variant_of(path: Path) -> str:
    return name_of(settings.read(path).get("variant", "grpo"))


def needs(path: Path) -> set[str]:
    """The extensions that a recipe's keys and data ask for."""
    return needs_of(settings.read(path))


def needs_of(tree: dict) -> set[str]:
    """`needs` of a recipe, or of a part of one, as plain data."""
    found = {"episodes"} if "environment" in tree else set()
    given = [tree.get("data", {}).get(part) for part in PARTS]
    sources = [s for part in given for s in (part if isinstance(part, list) else [part]) if s is not None]
    if any((s["path"] if isinstance(s, dict) else s).startswith(MADE) for s in sources):
        found.add("problems")
    if tree.get("model", {}).get("adapter"):
        found.add("adapters")
    variant, rollout = name_of(tree.get("variant", "grpo")), tree.get("rollout", {})
    if "critic" in tree or {"ahead", "overlap", "curriculum", "sample_allocation"} & rollout.keys():
        found.add("methods")
    if "guidance" in rollout:
        found.add("guidance")
    if variant in variants.names() and not in_core(variant):
        found.add("methods")
    return found


CORE_VARIANTS = {name: path for name, path in VARIANTS.items() if in_core(variant_of(path))}
OTHER_VARIANTS = {name: path for name, path in VARIANTS.items() if name not in CORE_VARIANTS}


# ------------------------------------------------------------------------------------------------- recipes


@functools.cache
def of_variant(name):
    """The recipe of a variant, on problems that no extension makes."""
    return config.load(VARIANTS[name], PLAIN)


def check(path: Path) -> None:
    """It parses, and its head says how to run it."""
    recipe = config.load(path)
    assert recipe.method.variant.name == ("dr_grpo" if path.stem in ("smollm2_sums", "smollm2_chain_sum") else "grpo")
    head = path.read_text().split("\n\n")[0]
    assert "grpojax " in head and path.name in head


def check_variant(name: str) -> None:
    """Beside its base: the variant, its directory, and no more than two sections that it names."""
    path = VARIANTS[name]
    text = path.read_text()
    said = yaml.safe_load(text)
    loaded, base = of_variant(name), of_variant("base")
    changed = {line.split(":")[0].split(".")[0] for line in settings.diff(base.resolved(), loaded.resolved())}
    assert changed - {"rewards", "method"} <= said.keys() and loaded.run.dir == f"runs/variants/{name}"
    assert settings.build(config.Config, loaded.resolved()).resolved() == loaded.resolved()  # as a run stores it
    if name != "base":
        assert said["base"] == "base.yaml" and len(said) <= 5 and len(text.splitlines()) <= 8
        assert text.startswith("# ") and re.search(r"arXiv \d{4}\.\d{5}", text)
        cited = re.findall(r"\d{4}\.\d{5}", loaded.method.variant.citation)
        assert set(cited) <= set(re.findall(r"\d{4}\.\d{5}", text))


def check_apart(names: typing.Iterable[str]) -> None:
    """No two of the variants' recipes are the same."""
    given = [settings.to_dict(of_variant(name)) | {"run": None} for name in names if name != "base"]
    assert len({json.dumps(tree, sort_keys=True) for tree in given}) == len(given) > 1


def check_own(name: str) -> None:
    """What differs from others by its ratio alone has several updates a rollout."""
    own = {"dapo", "high_entropy_tokens", "lp_reg", "magistral", "ngrpo"}  # differ in what they learn from, too
    recipe = of_variant(name)
    if recipe.train.updates_a_rollout == 1 and name not in own:
        assert variants.twin_at_one_update(recipe.method.variant) is None


# ------------------------------------------------------------------------------------------------- settings


def settings_of(cls: type, section: str | None = None) -> dict[str, typing.Any]:
    """The type of each setting of a config class, by its path: of one section, or of all in the core."""
    found = dict(_leaves(cls))
    if section is not None:
        return {path: kind for path, kind in found.items() if path.partition(".")[0] == section}
    return {path: kind for path, kind in found.items() if path.partition(".")[0] not in ("critic", "environment")}


def _leaves(cls, path=()):
    """Dotted paths of all settings of a config class."""
    for name, kind in typing.get_type_hints(cls).items():
        options = [kind, *typing.get_args(kind)] if typing.get_origin(kind) is not tuple else []
        inner = [k for k in options if dataclasses.is_dataclass(k)]
        if inner and name != "rewards" and (*path, name) not in [("data", part) for part in PARTS]:
            yield from _leaves(inner[0], (*path, name))
        else:
            yield ".".join((*path, name)), kind


def numbers_of(leaves):
    return [path for path, kind in leaves.items() if {int, float} & {kind, *typing.get_args(kind)}]


def required(path):
    """What a section must have before another of its settings means anything."""
    needed = {"model.adapter.": "model.adapter.rank=4", "environment.": "environment.name=calculator"}
    return [setting for section, setting in needed.items() if path.startswith(section)]


def check_mistakes(path):
    """A wrong type and a typo are told with the setting's path."""
    value = "[1]" if path in ("data.template_options", "environment.options") else "{oops: [1]}"  # any mapping is one
    with pytest.raises(UserError) as wrong:
        config.load(RECIPE, [*required(path), f"{path}={value}"])
    assert path.split(".")[-1] in str(wrong.value) and str(wrong.value).count("\n") <= 1
    with pytest.raises(UserError) as typo:
        config.load(RECIPE, [*required(path), f"{path}q=1"])
    assert f"{path.split('.')[-1]}q" in str(typo.value) and str(typo.value).count("\n") <= 1


def check_range(path):
    """A number far out of range is refused."""
    if path.startswith("rollout.") and path.endswith(".success"):
        return  # a reward, which may be any number
    with pytest.raises(UserError) as wrong:
        config.load(RECIPE, [*required(path), f"{path}=-1000000"])
    assert path.split(".")[-1] in str(wrong.value)
