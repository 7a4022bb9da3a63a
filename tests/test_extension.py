"""The ring's rule: the core names no extension, and an extension another only for a reason. And how words find one."""

import ast
import dataclasses
import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

import grpojax
from grpojax import extension, variants
from grpojax.host import settings
from grpojax.host.errors import UserError
from grpojax.run import parts, recipe
from grpojax.run.parts.part import Part

ROOT = Path(grpojax.__file__).parent
FILES = {str(p.relative_to(ROOT)): p for p in sorted(ROOT.rglob("*.py"))}
CORE = [name for name in FILES if not name.startswith(("extensions/", "configs/"))]  # a wheel has the recipes there
RING = [name for name in FILES if name.count("/") > 1 and name.startswith("extensions/")]
# An extension and another that it imports; the module that does so says why in its docstring.
NEIGHBOURS = {("plan", "episodes"), ("serve", "episodes")}


def named(source, extensions="grpojax.extensions"):
    """Modules below ``extensions`` that a source names, in an import or in any text such as a docstring."""
    found = set(re.findall(rf"{re.escape(extensions)}((?:\.\w+)*)", source))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in ("grpojax", extensions):
            names = {alias.name for alias in node.names}
            found |= {f".{name}" for name in names} if node.module == extensions else names & {"extensions"}
        if isinstance(node, ast.ImportFrom) and node.level:
            found |= {"." * node.level}  # where it leads depends on the file
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from grpojax.extensions.plan import planner", {".plan"}),
        ("from grpojax.extensions import plan", {"", ".plan"}),
        ("from grpojax import extensions", {"extensions"}),
        ("import grpojax.extensions.plan.planner", {".plan.planner"}),
        ("def f():\n  return load('grpojax.extensions.plan.planner:plan')", {".plan.planner"}),
        ("from ..extensions import plan", {".."}),
        ("from grpojax import extension, data", set()),
    ],
)
def test_what_a_source_names(source, found):
    assert named(source) == found


@pytest.mark.parametrize("name", [n for n in CORE if n != "extension.py"])
def test_the_core_names_no_extension(name):
    assert not named(FILES[name].read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RING)
def test_an_extension_names_another_only_for_a_reason(name):
    own, source = name.split("/")[1], FILES[name].read_text(encoding="utf-8")
    others = {x.split(".")[1] for x in named(source) if x.count(".")} - {own}
    assert {(own, other) for other in others} <= NEIGHBOURS
    tree = ast.parse(source)
    texts = [ast.get_docstring(x) for x in (tree, *ast.walk(tree)) if isinstance(x, ast.Module | ast.FunctionDef)]
    assert all(any("extension" in (text or "") for text in texts) for _ in others), "it does not say why"


def test_every_word_leads_somewhere():
    """Each import path of the extensions that come along is that of a module or of an object in it."""
    fields = {*extension.Names.__dataclass_fields__} - {
        "environments",
        "exclusions",
        "processes",
        "axes",
    }  # some need extras; have no paths
    for kind in sorted(fields):
        for word in extension.words(kind):
            if word != "reasoning_gym":  # an extra
                assert extension.load(kind, word, word) is not None


class Entry:
    name, value = "luck", "my_package:NAMES"

    def __init__(self, names):
        self._names = names

    def load(self):
        if isinstance(self._names, Exception):
            raise self._names
        return self._names


@pytest.fixture
def strange(monkeypatch):
    """A function that has another package register this."""

    def register(names):
        own = metadata.entry_points
        monkeypatch.setattr(
            metadata, "entry_points", lambda group: [Entry(names)] if group == extension.GROUP else own(group=group)
        )
        extension.installed.cache_clear()

    yield register
    extension.installed.cache_clear()


def test_a_package_of_somebody_else_brings_words(strange):
    strange(extension.Names(needs={"luck": "fractions:Fraction"}))
    assert extension.load("needs", "luck", "variant 'mine' needs 'luck'").__name__ == "Fraction"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (extension.Names(commands={"more": "a"}), "no extension that is installed brings this"),
        (extension.Names(sections={"train.more": "a:b"}), "extension 'luck': no recipe would read 'train.more'"),
        (extension.Names(settings={"rollout.more": "a:b"}), "extension 'luck': no recipe would read 'rollout.more'"),
        (ImportError("no module"), "extension 'luck' cannot be imported from my_package:NAMES: no module"),
        ({"needs": {}}, "extension 'luck': my_package:NAMES is no grpojax.extension.Names"),
    ],
)
def test_what_is_not_there_is_an_error_of_two_lines(strange, names, said):
    strange(names)
    with pytest.raises(UserError) as error:
        extension.load("needs", "luck", "variant 'mine' needs 'luck'")
    assert said in str(error.value) and len(str(error.value).splitlines()) <= 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class LuckConfig:
    """How much luck
    a run has.

    Attributes:
      much: of it.
    """

    much: int = 1


class Unset(SimpleNamespace):
    """What is not given is None."""

    def __getattr__(self, name):
        return None


class Lucky(Part):
    """Needs no model."""


def test_a_package_of_somebody_else_brings_a_section_and_its_part(strange):
    """Of the recipe and of what is below a key, but not in place of a field of the class itself."""
    here = f"{__name__}:{LuckConfig.__name__}"
    names = extension.Names(
        sections={"luck": here, "rollout.luck": here, "rollout.own": here},
        settings={"rollout.luck": f"{__name__}:Lucky"},
    )
    strange(names)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    @extension.with_sections("rollout")
    class Below:
        """A part.

        Attributes:
          own: of it.
        """

        own: int = 2

    kinds = {f.name: f.type for f in dataclasses.fields(Below)}
    assert kinds["luck"] == LuckConfig | None and Below().luck is None and kinds["own"] is int and Below().own == 2
    assert (Below.__doc__ or "").splitlines()[-2] == "      luck: How much luck a run has."
    made = settings.build(Below, {"luck": {"much": 3}})
    assert made.luck == LuckConfig(much=3)

    recipe = Unset(method=SimpleNamespace(variant=variants.get("dapo")), rollout=Unset(luck=made.luck))
    assert parts.of(recipe) == {"rollout.luck": Lucky}
    recipe.rollout.luck = None
    assert parts.of(recipe) == {}


def test_a_word_of_two_extensions_is_an_error(monkeypatch):
    two = {"a": extension.Names(needs={"luck": "x:y"}), "b": extension.Names(needs={"luck": "x:z"})}
    monkeypatch.setattr(extension, "installed", lambda: two)
    with pytest.raises(UserError, match="'a' and 'b' both have 'luck' in needs"):
        extension.words("needs")


ARITHMETIC = [f"data.{part}=builtin:arithmetic/{file}.jsonl" for part, file in (("train", "train"), ("test", "test"))]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("variant=remax", "variant 'remax' needs greedy: signals.greedy_rewards"),
        ("variant=xrpo", "variant 'xrpo' needs rollout_plan: "),
        ("variant=token_critic", "variant 'token_critic' needs critic: "),
        ("variant=llds", "variant 'llds' needs 'displacement_weights': no extension"),
        ("rollout.ahead=1", "rollout.ahead: no extension"),
        ("rollout.overlap=0.25", "rollout.overlap: no extension"),
        ("rollout.curriculum={}", "rollout.curriculum: no extension"),
        ("rollout.sample_allocation={}", "rollout.sample_allocation: no extension"),
        ("critic.warmup_steps=1", "critic: no extension"),
        ("environment.name=calculator", "environment: no extension"),
        ("rewards=[{name: reasoning_gym}]", "reward 'reasoning_gym' is unknown"),
        ("data.train={path: 'reasoning:sums', options: {size: 8}}", "options={'size': 8} are for generated problems"),
    ],
)
def test_a_recipe_that_asks_for_what_is_not_there_is_refused_by_name(monkeypatch, asked, said):
    monkeypatch.setattr(extension, "installed", dict)
    recipe.load("quickstart", [*ARITHMETIC, "data.validation=null"])
    with pytest.raises(UserError) as error:
        recipe.load("quickstart", [*ARITHMETIC, "data.validation=null", asked])
    assert said in str(error.value) and len(str(error.value).splitlines()) <= 2
