"""Recipes whose samples are episodes, and the settings of their section."""

import pytest
import recipe_files
from recipe_files import TOP, needs

from grpojax.run import recipe as config

LEAVES = recipe_files.settings_of(config.Config, "environment")


@pytest.mark.parametrize("path", [path for path in TOP if "episodes" in needs(path)], ids=lambda path: path.stem)
def test_every_recipe_parses_and_says_how_to_run_it(path):
    recipe_files.check(path)


@pytest.mark.parametrize("path", LEAVES)
def test_a_wrong_type_and_a_typo_are_told_with_their_path(path):
    recipe_files.check_mistakes(path)


@pytest.mark.parametrize("path", recipe_files.numbers_of(LEAVES))
def test_a_number_far_out_of_range_is_refused(path):
    recipe_files.check_range(path)
