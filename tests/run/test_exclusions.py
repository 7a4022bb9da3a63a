"""The table of settings that exclude each other, and the page that is made from it."""

from pathlib import Path

import pytest

from grpojax.host.errors import UserError
from grpojax.run import exclusions

PAGE = Path(__file__).parents[2] / "docs" / "exclusions.md"


def test_the_page_is_that_of_the_table():
    assert PAGE.read_text(encoding="utf-8") == exclusions.page(), (
        "python -m grpojax.run.exclusions > docs/exclusions.md"
    )


def test_the_first_row_that_is_met_is_the_error(monkeypatch):
    def row(text, at):
        return exclusions.Exclusion(
            settings=f"`{text}`", why="so", when=lambda c: c >= at, message=lambda c: f"{text} of {c}"
        )

    monkeypatch.setattr(exclusions, "TABLE", {"train": (row("high", 2), row("low", 1))})
    exclusions.check("train", 0)
    for given, said in ((1, "low of 1"), (2, "high of 2")):
        with pytest.raises(UserError, match=said):
            exclusions.check("train", given)
    assert exclusions.page().endswith("| `high` | so |\n| `low` | so |\n")
