"""What the guide shows of guidance works: YAML and names."""

import guide_pages
import pytest
from guide_pages import PAGES, YAML, of

EXTENSION = "guidance"
importable = guide_pages.importable


@pytest.mark.parametrize(("page", "text"), of(YAML, EXTENSION))
def test_yaml_is_a_part_of_a_recipe(page, text, tmp_path):
    guide_pages.check_yaml(text, tmp_path)


def test_every_named_module_and_file_exists():
    for page in PAGES:
        guide_pages.check_names(page, EXTENSION)
