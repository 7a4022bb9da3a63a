"""What README and the guide show of methods works: commands, and names and YAML."""

import guide_pages
import pytest
from guide_pages import LINES, PAGES, YAML, of

EXTENSION = "methods"
importable = guide_pages.importable


@pytest.mark.parametrize(("page", "text"), of(YAML, EXTENSION))
def test_yaml_is_a_part_of_a_recipe(page, text, tmp_path):
    guide_pages.check_yaml(text, tmp_path)


@pytest.mark.parametrize(("page", "line"), of(LINES, EXTENSION))
def test_commands_are_taken(page, line):
    guide_pages.check_command(line)


def test_every_named_module_and_file_exists():
    for page in PAGES:
        guide_pages.check_names(page, EXTENSION)
