"""The tables of settings that exclude each other, of the core and of extensions, and the page made from them."""

import sys
from types import SimpleNamespace

import pytest

from grpojax import extension
from grpojax.host.errors import UserError
from grpojax.run import exclusions


def row(text, at):
    return exclusions.Exclusion(
        settings=f"`{text}`", why="so", when=lambda c: c >= at, message=lambda c: f"{text} of {c}"
    )


@pytest.fixture
def bring(monkeypatch):
    """A function that makes these tables, by name of an extension, those of the extensions that are installed; None for
    one that has no rows. Extension "luck" has the section "critic". The core's table is one row within ``train``."""

    def install(**tables):
        monkeypatch.setitem(sys.modules, "brought", SimpleNamespace(**tables))
        paths = {name: "" if table is None else f"brought:{name}" for name, table in tables.items()}
        sections = {"luck": {"critic": "brought:luck"}}
        found = {name: extension.Names(exclusions=x, sections=sections.get(name, {})) for name, x in paths.items()}
        monkeypatch.setattr(extension, "installed", lambda: found)

    monkeypatch.setattr(exclusions, "TABLE", {"train": (row("high", 3),)})
    return install


def test_the_first_row_that_is_met_is_the_error_and_those_of_extensions_come_last(bring):
    bring(luck={"critic": (row("other", 0),), "train": (row("low", 1),)}, none=None, art={"train": (row("middle", 2),)})
    exclusions.check("train", 0)
    for given, said in ((1, "low of 1"), (2, "middle of 2"), (3, "high of 3")):
        with pytest.raises(UserError, match=said):
            exclusions.check("train", given)
    _, train, critic = exclusions.page().split("|---|---|\n")
    assert train.startswith("| `high` | so |\n| `middle` | so |\n| `low` | so |\n\n")
    assert critic == "| `other` | so |\n"


def test_rows_that_nothing_would_look_at_are_refused(bring):
    bring(luck={"trains": (row("low", 1),)})
    with pytest.raises(UserError, match="extension 'luck' has exclusions of 'trains', which is none of train"):
        exclusions.check("train", 0)
