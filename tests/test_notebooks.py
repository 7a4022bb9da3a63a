"""Notebooks run, and are committed without what they printed."""

import importlib.util
import subprocess

import nbformat
import pytest
from notebook_files import FOLDER, printed_by

from grpojax import variants

NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_has_no_outputs(name):
    cells = nbformat.read(FOLDER / name, as_version=4).cells
    assert not [c for c in cells if c.cell_type == "code" and (c.outputs or c.execution_count is not None)]


def cells(name):
    """Sources of a notebook's code cells by their id."""
    found = nbformat.read(FOLDER / name, as_version=4).cells
    return {c.id: c.source for c in found if c.cell_type == "code"}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_first_cell_installs_where_grpojax_is_missing(name, monkeypatch):
    code = cells(name)
    assert next(iter(code)) == "install" and code["install"] == cells("quickstart.ipynb")["install"]
    ran = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: ran.append(command[1:]))
    exec(code["install"], {})
    assert not ran  # it is there
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(code["install"], {})
    exec(code["install"].replace('SOURCE = ".."', 'SOURCE = "git+https://host/grpojax"'), {})
    pip = ["-m", "pip", "install", "-q"]
    assert [c[:-1] for c in ran] == [pip, pip]
    assert ran[0][-1].startswith("..") and ran[1][-1].startswith("grpojax")
    assert ran[1][-1].endswith(" @ git+https://host/grpojax")


@pytest.mark.slow
def test_pure_functions():
    printed = printed_by("pure_functions.ipynb")
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.strip()}
    assert set(variants.names()) <= rows.keys()
    assert (
        rows["rloo"] == "0.67 0.67 -0.67 -0.67 0.00 0.00 0.00 0.00 0.00 0.00 0.00 0.00 1.00 -0.33 -0.33 -0.33".split()
    )
    assert rows["ngrpo"][4] == "-0.45"
