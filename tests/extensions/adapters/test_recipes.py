"""Recipes with adapters."""

import pytest
import recipe_files
from recipe_files import TOP, needs


@pytest.mark.parametrize("path", [path for path in TOP if "adapters" in needs(path)], ids=lambda path: path.stem)
def test_every_recipe_parses_and_says_how_to_run_it(path):
    recipe_files.check(path)
