"""What README and the guide show of supervised runs works: commands, and names."""

import guide_pages
import pytest
from guide_pages import LINES, PAGES, of

from grpojax.extensions.supervised import finetune_recipe
from grpojax.run import recipe as config

EXTENSION = "supervised"
importable = guide_pages.importable
LOADERS = {"sft": finetune_recipe.load_sft, "dpo": finetune_recipe.load_dpo}


@pytest.mark.parametrize(("page", "line"), of(LINES, EXTENSION))
def test_commands_are_taken(page, line):
    guide_pages.check_command(line, LOADERS[line.split()[1]])


def test_every_named_module_and_file_exists():
    for page in PAGES:
        guide_pages.check_names(page, EXTENSION)


def test_every_named_setting_exists():  # in a recipe of any kind
    kinds = [config.Config, finetune_recipe.SFTConfig, finetune_recipe.DPOConfig]
    assert not guide_pages.unknown_settings(kinds)


@pytest.mark.parametrize("recipe", [finetune_recipe.SFTConfig, finetune_recipe.DPOConfig])
def test_every_key_of_a_recipe_is_documented(recipe):
    guide_pages.check_documented(recipe)
