"""Recipes of variants that need more than the core, and the settings of the critic."""

import pytest
import recipe_files
from recipe_files import OTHER_VARIANTS, VARIANTS
from refusals import RECIPE

from grpojax.host.errors import UserError
from grpojax.run import recipe as config

LEAVES = recipe_files.settings_of(config.Config, "critic")


@pytest.mark.parametrize("name", OTHER_VARIANTS)
def test_a_variants_recipe_changes_only_what_it_says(name):
    recipe_files.check_variant(name)


def test_no_two_recipes_are_the_same():
    recipe_files.check_apart(VARIANTS)


@pytest.mark.parametrize("name", OTHER_VARIANTS)
def test_a_recipe_is_not_another_method_under_its_name(name):
    recipe_files.check_own(name)


@pytest.mark.parametrize("path", LEAVES)
def test_a_wrong_type_and_a_typo_are_told_with_their_path(path):
    recipe_files.check_mistakes(path)


@pytest.mark.parametrize("path", recipe_files.numbers_of(LEAVES))
def test_a_number_far_out_of_range_is_refused(path):
    recipe_files.check_range(path)


@pytest.mark.parametrize("name", ["{name: distill, teacher: t}", "gt_likelihood"])
def test_groups_that_fail_as_a_whole_are_not_filtered_from_who_learns_from_them(name):
    with pytest.raises(UserError, match="filter: variant '.*' learns from groups whose rewards are all the same"):
        config.load(RECIPE, [f"variant={name}", "filter={}"])
