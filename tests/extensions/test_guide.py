"""What README and the guide show works: Python runs, YAML is part of a recipe, commands run, and names exist."""

import re

import guide_pages
import pytest
from guide_pages import LINES, PAGES, PYTHON, README, ROOT, YAML, documented, generated, of, owner

from grpojax import rewards, variants
from grpojax.host import other_trainers
from grpojax.rewards.reward_config import named_functions
from grpojax.run import alarms, exclusions, step_metrics
from grpojax.run import recipe as config

importable = guide_pages.importable


# ------------------------------------------------------------------------------------------------ code and commands


@pytest.mark.parametrize(("page", "code"), of(PYTHON))
@pytest.mark.slow
def test_python_runs(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    guide_pages.check_python(page, code)


def test_what_needs_an_extension_is_run_beside_its_tests():
    assert {owner(needs) for *_, needs in PYTHON} <= {None, "episodes", "problems"}
    assert {owner(needs) for *_, needs in LINES} <= {*guide_pages.ORDER, None} - {"episodes", "serve"}
    assert {owner(needs) for *_, needs in YAML} <= {None, "episodes", "guidance", "methods", "problems"}


@pytest.mark.parametrize(("page", "text"), of(YAML))
def test_yaml_is_a_part_of_a_recipe(page, text, tmp_path):
    guide_pages.check_yaml(text, tmp_path)


@pytest.mark.parametrize(("page", "line"), of(LINES))
def test_commands_are_taken(page, line):
    guide_pages.check_command(line)


# ------------------------------------------------------------------------------------------------ names


def test_every_metric_of_an_update_is_documented():
    named = [*step_metrics.MEANS.values(), *step_metrics.FIRST.values(), *(f"watch/{name}" for name in alarms.SAID)]
    assert not [name for name in named if not documented(name)]
    assert documented("eval/pass@8") and not documented("pass@8") and not documented("rewards/mean")


@pytest.mark.parametrize("page", PAGES)
def test_every_named_module_and_file_exists(page):
    guide_pages.check_names(page)


def test_every_key_of_a_recipe_is_documented():
    guide_pages.check_documented(config.Config)


def test_the_built_in_rewards_are_listed():
    table = re.search(r"## Built-in rewards\n(.*?)\n\n[^|\n]", PAGES["docs/start/reward.md"], re.S)
    assert table and set(re.findall(r"^\| `(\w+)`", table[1], re.M)) == {*rewards.REWARDS, *named_functions()}


# ------------------------------------------------------------------------------------------------ pages


def test_the_alarms_are_listed():
    table = generated().alarms_table()
    assert table in PAGES["docs/start/trouble.md"], f"docs/start/trouble.md must have\n{table}"


def test_the_keys_of_other_trainers_are_those_that_errors_know():
    for title in other_trainers.tables():
        table = other_trainers.markdown(title)
        assert f"## {title}\n\n{table}\n" in PAGES["docs/start/coming_from.md"], f"coming_from.md must have\n{table}"


def without_blocks(page):
    return re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)


def text_of(page):
    """A page without code."""
    return re.sub(r"`[^`\n]+`", "", without_blocks(PAGES[page]))


def anchors(file):
    """Those that GitHub gives to a page's headings; mkdocs checks its own when it builds the site."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(file.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere_on_github(page):
    """To files of the repository: pages that are made with the site are not there."""
    for path, anchor in set(re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text_of(page))):
        target = (ROOT / page).parent.joinpath(path).resolve() if path else ROOT / page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), (path, anchor)


@pytest.mark.parametrize("page", PAGES)
def test_pages_can_be_read_on_github(page):
    """It shows the forms that only mkdocs knows as they stand, unless they are in a comment."""
    shown = re.sub(r"^<!--.*?-->", "", text_of(page), flags=re.M | re.S)
    assert not re.search(r"^(:::|!!!|\?\?\?|===) |\{\{|\{:", shown, re.M)


def test_tables_of_functions_are_those_of_the_code():
    made = generated()
    for page in made.WRITTEN:
        assert made.written(PAGES[f"docs/{page}"]) == PAGES[f"docs/{page}"], "run python docs/generate.py"


def test_the_settings_that_exclude_each_other_are_those_of_the_tables():
    assert PAGES["docs/exclusions.md"] == exclusions.page(), "python -m grpojax.run.exclusions > docs/exclusions.md"


def test_the_readme_is_one_page():
    assert len(README.splitlines()) <= 150 and len(README.split()) <= 1200


@pytest.mark.slow
def test_generated_pages_are_whole():
    """Each variant has a text and a page, each key of a recipe a meaning, each command its help."""
    made = generated()
    assert made.check(made.texts()) == []
    pages = made.pages()
    assert all(f"`{option}`" in pages[f"variants/{name}.md"] for name in variants.names()
               for option in variants.parameters(name))  # fmt: skip
    assert not [
        name for name, page in pages.items() if name.startswith("variants/") and re.search(r"\|\s+\|$", page, re.M)
    ]
    assert "| `rollout.decode_slots` | whole number | `0` |" in pages["reference/recipe.md"]
    assert all(f"usage: grpojax {name} " in pages["reference/commands.md"] for name in made.commands())
    assert all(pages["scale/what_fits.md"].count(f"| {name} |") == 3 for name in made.SHAPES)
