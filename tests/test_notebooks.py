"""Notebooks run, and are committed without what they printed."""

from pathlib import Path

import nbclient
import nbformat
import pytest
import quick_xla

from grpojax import variants

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_has_no_outputs(name):
    cells = nbformat.read(FOLDER / name, as_version=4).cells
    assert not [c for c in cells if c.cell_type == "code" and (c.outputs or c.execution_count is not None)]


def printed_by(name):
    """What a notebook prints when it is run from its own folder."""
    notebook = nbformat.read(FOLDER / name, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()
    return "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", []))


@pytest.mark.exhaustive("test_readme.py::test_commands_run_one_after_the_other")
def test_quickstart(monkeypatch):
    monkeypatch.setenv("GRPOJAX_NOTEBOOK_STEPS", "2")
    monkeypatch.setenv("XLA_FLAGS", quick_xla.flags())
    printed = printed_by("quickstart.ipynb")
    assert "step 2/2" in printed and "held-out reward" in printed and ">>>" in printed


@pytest.mark.slow
def test_pure_functions():
    printed = printed_by("pure_functions.ipynb")
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.strip()}
    assert set(variants.names()) <= rows.keys()
    assert (
        rows["rloo"] == "0.67 0.67 -0.67 -0.67 0.00 0.00 0.00 0.00 0.00 0.00 0.00 0.00 1.00 -0.33 -0.33 -0.33".split()
    )
    assert rows["ngrpo"][4] == "-0.45"


def test_experiments():
    """Read from saved results: six claims, each with what was measured."""
    printed = printed_by("experiments.ipynb")
    assert printed.count("claimed: ") == printed.count("measured: ") == 6
    assert printed.count("agrees") + printed.count("not seen here") == 6
    assert "SmolLM2" not in printed and "smollm2_sums" in printed
