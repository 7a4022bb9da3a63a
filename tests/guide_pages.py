"""README and the guide as data: their pages, blocks and commands, what each needs, and what is asked of it."""

import dataclasses
import importlib.util
import pkgutil
import re
import shlex
import sys
import typing
from pathlib import Path

import pytest
import recipe_files
import yaml
from refusals import RECIPE

from grpojax import variants
from grpojax.cli import main as cli
from grpojax.host import settings, shipped
from grpojax.run import recipe as config
from grpojax.variants import registry

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
}
README = PAGES["README.md"]
# Code that `written` of docs/generate.py takes from the package is no example.
TAKEN = re.compile(r"^<!-- code: .*? -->\n```python\n.*?^```\n", re.M | re.S)
BLOCKS = [
    (page, kind, text)
    for page, whole in PAGES.items()
    for kind, text in re.findall(r"^```(\w*)\n(.*?)^```", TAKEN.sub("", whole), re.M | re.S)
]
COMMANDS = [
    (page, command.strip())
    for page, kind, text in BLOCKS
    if not kind
    for line in text.splitlines()
    for command in line.split("&&")
]
# Commands that are an extension's; all others are the core's.
COMMANDS_OF = {
    "experiments": ("compare", "report", "sweep", "traces"), "methods": ("displacement",), "plan": ("plan",),
    "serve": ("serve",), "supervised": ("dpo", "sft"),
}  # fmt: skip


def generated():
    """The module that makes pages from the code; mkdocs, which it is for, is not needed."""
    spec = importlib.util.spec_from_file_location("guide_generate", ROOT / "docs/generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def importable(tmp_path_factory, monkeypatch):
    """Python that says in its first line which file it is can be imported in tests of a module that has this."""
    folder = tmp_path_factory.mktemp("guide")
    for _, kind, text in BLOCKS:
        named = re.match(r"# (\w+)\.py\n", text)
        if kind == "python" and named:
            (folder / f"{named[1]}.py").write_text(text)
            monkeypatch.delitem(sys.modules, named[1], raising=False)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(registry, "_ALL", dict(registry._ALL))


# ------------------------------------------------------------------------------------------------ what needs what


def needs_of_python(code):
    """The extensions that a block imports, or has a recipe for."""
    found = set(re.findall(r"grpojax(?:\.|/)extensions(?:\.|/| import )(\w+)", code))
    return found | {"problems"} if "quickstart" in code else found


def needs_of_yaml(text):
    return recipe_files.needs_of(yaml.safe_load(text))


def needs_of_command(line):
    """The extension that has a command, and what the recipe that it names needs with the settings that it gives."""
    name, *given = shlex.split(line)[1:]
    found = {extension for extension, names in COMMANDS_OF.items() if name in names}
    for recipe in given[:1]:
        file = ROOT / recipe
        if recipe not in shipped.names() and not (recipe.endswith(".yaml") and file.exists()):
            continue
        if "supervised/" in recipe:
            return found | {"supervised"}
        if name in ("sft", "dpo"):
            return found
        tree = settings.read(recipe if recipe in shipped.names() else file)
        changes = [word for word in given[1:] if "=" in word and not word.startswith("-") and "$" not in word]
        found |= recipe_files.needs_of(settings.override(tree, changes)[0])
    return found


PYTHON = [(page, text, needs_of_python(text)) for page, kind, text in BLOCKS if kind == "python"]
YAML = [(page, text, needs_of_yaml(text)) for page, kind, text in BLOCKS if kind == "yaml"]
LINES = [(page, line, needs_of_command(line)) for page, line in COMMANDS if line.startswith("grpojax ")]


# Of what needs several the first one here has it: a command's own stands before what its recipe needs.
ORDER = ("serve", "plan", "experiments", "supervised", "episodes", "guidance", "methods", "problems")


def owner(needs):
    return next((extension for extension in ORDER if extension in needs), None)


def of(found, extension=None):
    """``(page, text)`` of those that an extension has, or that need none."""
    return [(page, text) for page, text, needs in found if owner(needs) == extension]


# ------------------------------------------------------------------------------------------------ what is asked of it


def check_python(page, code):
    exec(compile(code, page, "exec"), {})


def check_yaml(text, folder):
    """It is a part of a recipe; the quickstart that it may stand on has problems that no extension makes."""
    plain = Path(RECIPE).read_text()
    if "base:" in text:
        (folder / "quickstart.yaml").write_text(plain)
        (folder / "mine.yaml").write_text(text)
        config.load(folder / "mine.yaml")
    else:
        settings.build(config.Config, yaml.safe_load(plain) | yaml.safe_load(text))


def check_command(line, load=config.load):
    """It is taken by the parser, and its recipe with the settings given; the shell's variables stand for anything."""
    args, rest = cli.parser().parse_known_args(shlex.split(line)[1:])
    assert not [word for word in rest if word.startswith("-") or not hasattr(args, "overrides")], rest
    if getattr(args, "config", None) and "$" not in line:
        load(ROOT / args.config, [*args.overrides, *rest])


def check_names(page, extension=None):
    """Modules and files that a page names are there: those of an extension, or all others."""
    text = PAGES[page].partition("## Not run yet")[0]  # behind it are files to be made

    def asked(name):
        found = re.search(r"(?:^|\W)extensions\W(\w+)", name)
        return (found[1] if found else None) == extension

    for name in filter(asked, set(re.findall(r"`(grpojax(?:\.\w+)+)", text))):
        pkgutil.resolve_name(name)
    for path in filter(
        asked, set(re.findall(r"\b(?:tests|configs|notebooks|grpojax|docs)/[\w./-]*\w(?![\w$*{])", text))
    ):
        assert (ROOT / path).exists(), path


def documented(metric):
    """Whether the page of metrics has it; NAME, KIND, LEVEL, k and a closing ``...`` there stand for anything."""
    names = re.findall(r"`([\w/@.]+)`", PAGES["docs/reference/metrics.md"])
    forms = (re.sub(r"NAME|KIND|LEVEL|\b(?<=@)k\b|\\\.\\\.\\\.$", ".+", re.escape(name)) for name in names)
    return any(re.fullmatch(form, metric) for form in forms)


def keys_of(kind, made):
    """Every dotted key below a section, by the dataclasses that read it."""
    for name, hint in typing.get_type_hints(kind).items():
        yield name
        for inner in made.parts_of(hint):
            yield from (f"{name}.{key}" for key in keys_of(inner, made))


def unknown_settings(kinds):
    """``(page, key)`` of settings that pages name, of sections that there are, and that no config class has."""
    made = generated()
    known = {key for kind in kinds for key in keys_of(kind, made)}
    known |= {f"variant.{option}" for name in variants.names() for option in variants.parameters(name)}
    sections, unknown = "|".join({key.partition(".")[0] for key in known}), set()
    for page, text in PAGES.items():
        if page.endswith("coming_from.md"):  # the first column has our keys, the others those of other trainers
            text = "\n".join("|".join(line.split("|")[:2]) for line in text.splitlines())
        for key in set(re.findall(rf"`((?:{sections})(?:\.[a-z_]+)+)(?=[`=:])", text)):
            if not (key in known or key.startswith("data.train.options.") or key.endswith(".json")):
                unknown.add((page, key))
    return unknown


def dataclasses_of(kind, made):
    """The dataclass and those of all sections below it."""
    return {kind}.union(*(dataclasses_of(inner, made) for hint in typing.get_type_hints(kind).values()
                          for inner in made.parts_of(hint)))  # fmt: skip


def check_documented(recipe):
    """Every key of a config class is documented in its dataclass's docstring, which documents nothing else."""
    made = generated()
    for kind in dataclasses_of(recipe, made):
        assert sorted(made.meanings(kind)) == sorted(field.name for field in dataclasses.fields(kind)), kind.__name__
