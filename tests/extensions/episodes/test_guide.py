"""What README and the guide show of episodes works: names and YAML and Python."""

import guide_pages
import pytest
from guide_pages import PAGES, PYTHON, YAML, of

EXTENSION = "episodes"
importable = guide_pages.importable


@pytest.mark.parametrize(("page", "code"), of(PYTHON, EXTENSION))
@pytest.mark.slow
def test_python_runs(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    guide_pages.check_python(page, code)


@pytest.mark.parametrize(("page", "text"), of(YAML, EXTENSION))
def test_yaml_is_a_part_of_a_recipe(page, text, tmp_path):
    guide_pages.check_yaml(text, tmp_path)


def test_every_named_module_and_file_exists():
    for page in PAGES:
        guide_pages.check_names(page, EXTENSION)
