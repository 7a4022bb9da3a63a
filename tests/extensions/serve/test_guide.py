"""What README and the guide show of serving works: names."""

import guide_pages
from guide_pages import PAGES

EXTENSION = "serve"
importable = guide_pages.importable


def test_every_named_module_and_file_exists():
    for page in PAGES:
        guide_pages.check_names(page, EXTENSION)
