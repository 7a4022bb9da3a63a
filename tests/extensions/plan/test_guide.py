"""What README and the guide show of plans works: commands, and names."""

import guide_pages
import pytest
from guide_pages import LINES, PAGES, of

EXTENSION = "plan"
importable = guide_pages.importable


@pytest.mark.parametrize(("page", "line"), of(LINES, EXTENSION))
def test_commands_are_taken(page, line):
    guide_pages.check_command(line)


def test_every_named_module_and_file_exists():
    for page in PAGES:
        guide_pages.check_names(page, EXTENSION)
