"""What README and the guide show of sweeps and reports works: commands, and names."""

import shlex
from pathlib import Path

import guide_pages
import pytest
from guide_pages import LINES, PAGES, ROOT, of

from grpojax import variants
from grpojax.cli import main as cli
from grpojax.extensions.experiments import sweep
from grpojax.run import recipe as recipes

EXTENSION = "experiments"
importable = guide_pages.importable


@pytest.mark.parametrize(("page", "line"), of(LINES, EXTENSION))
def test_commands_are_taken(page, line, monkeypatch):
    """A sweep has a recipe for each of its methods, and the recipe alone may not be valid."""
    monkeypatch.syspath_prepend(str(ROOT))  # a method may be code of the checkout
    monkeypatch.setattr(variants.registry, "_ALL", dict(variants.registry._ALL))  # which it joins
    args, _ = cli.parser().parse_known_args(shlex.split(line)[1:])

    def methods(recipe, overrides):
        given = {"variants": sweep.read_variants(args.variants), "seeds": sweep.read_seeds(args.seeds)}
        return sweep.Sweep(config=recipe, overrides=tuple(overrides), folder=Path("unused"), **given).methods

    guide_pages.check_command(line, methods if args.command == "sweep" else recipes.load)


def test_every_named_module_and_file_exists():
    for page in PAGES:
        guide_pages.check_names(page, EXTENSION)
