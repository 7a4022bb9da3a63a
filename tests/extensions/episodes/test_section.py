"""The section of a recipe."""

import pytest
from tiny_run import make_run

from grpojax import extension
from grpojax.extensions.episodes.environment_config import EnvironmentConfig
from grpojax.host import settings
from grpojax.run import recipe


def test_a_recipe_with_the_section_is_read_and_stored(tmp_path):
    given = ["environment={name: search, options: {corpus: x.jsonl}, max_turns: 3}"]
    config = recipe.load(make_run(tmp_path), given)
    assert config.environment == EnvironmentConfig(name="search", options={"corpus": "x.jsonl"}, max_turns=3)
    assert settings.build(recipe.Config, config.resolved()).environment == config.environment
    choices = recipe.load(make_run(tmp_path), ["environment={choices: {a: {name: python}, b: {tools: ['m:f']}}}"])
    assert list(choices.environment.all_choices) == ["a", "b"]
    assert recipe.load(make_run(tmp_path)).environment is None


@pytest.mark.parametrize("name", ["workers", "seconds", "memory"])
def test_how_it_is_executed_may_differ_after_a_resume(tmp_path, name):
    config = recipe.load(make_run(tmp_path))
    assert config.may_differ(f"environment.{name}") and not config.may_differ("environment.max_turns")


def test_the_section_names_all_that_is_built_in():
    text = " ".join(EnvironmentConfig.__doc__.split())
    assert all(f'"{name}"' in text for name in extension.words("environments"))
