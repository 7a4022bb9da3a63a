"""Notebooks run, and are committed without what they printed."""

import importlib.util
import json
import subprocess
from pathlib import Path

import nbclient
import nbformat
import pytest
import quick_xla
from scipy import stats

from grpojax import variants

FOLDER = Path(__file__).parent.parent / "notebooks"
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


def printed_by(name):
    """What a notebook prints when it is run from its own folder."""
    notebook = nbformat.read(FOLDER / name, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()
    return "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", []))


@pytest.mark.exhaustive("test_guide.py::test_commands_run_one_after_the_other")
def test_quickstart(monkeypatch):
    monkeypatch.setenv("GRPOJAX_NOTEBOOK_STEPS", "2")
    monkeypatch.setenv("XLA_FLAGS", quick_xla.flags())
    printed = printed_by("quickstart.ipynb")
    assert "step 2/2" in printed and "held-out reward" in printed and ">>>" in printed


@pytest.mark.slow
def test_what_needs_eight_chips_is_left_out_without_them(monkeypatch):
    """The rest runs: the recipe and its plan."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    printed = printed_by("tpu_v5e8.ipynb")
    assert "(cpu), jax" in printed and "Not eight TPU chips" in printed
    assert "update" in printed and printed.endswith("fits\n") and "does not fit" not in printed


@pytest.mark.slow
def test_pure_functions():
    printed = printed_by("pure_functions.ipynb")
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.strip()}
    assert set(variants.names()) <= rows.keys()
    assert (
        rows["rloo"] == "0.67 0.67 -0.67 -0.67 0.00 0.00 0.00 0.00 0.00 0.00 0.00 0.00 1.00 -0.33 -0.33 -0.33".split()
    )
    assert rows["ngrpo"][4] == "-0.45"


REPORT = json.loads((FOLDER / "results" / "controls.json").read_text())
OWN = [c for c in REPORT["comparisons"] if "control" in c["roles"]]


@pytest.mark.slow
def test_experiments():
    """Read from saved results: six claims, each with what was measured."""
    printed = printed_by("experiments.ipynb")
    assert printed.count("claimed: ") == printed.count("measured: accuracy") == printed.count("so: ") == len(OWN) == 6
    for c in OWN:
        interval = f"{c['low']:+.3f} to {c['high']:+.3f}"
        said = "no difference of 0.05 or more" if c["verdict"] == "equivalent" else c["verdict"]
        assert f"measured: accuracy {c['difference']:+.3f} ({interval}), {said}\n" in printed


def test_saved_verdicts_follow_from_the_saved_values():
    """By scipy's t tests and Holm's procedure with two hypotheses a comparison, of which one at most is true."""
    values, margin = {r["method"]: r["values"] for r in REPORT["results"]}, REPORT["margin"]
    ps = {}
    for c in OWN:
        d = [values[c["method"]][str(seed)] - values[c["other"]][str(seed)] for seed in c["seeds"]]
        test = stats.ttest_1samp(d, 0)
        assert (c["low"], c["high"]) == pytest.approx(test.confidence_interval(), abs=1e-5)
        ends = ((-margin, "greater"), (margin, "less"))
        ps[c["method"], "p_corrected"] = test.pvalue
        ps[c["method"], "p_equivalent_corrected"] = max(
            stats.ttest_1samp(d, end, alternative=side).pvalue for end, side in ends
        )
    corrected, least = {}, 0.0
    for rank, key in enumerate(sorted(ps, key=ps.__getitem__)):
        least = corrected[key] = max(least, min(1.0, ps[key] * min(len(OWN), len(ps) - rank)))
    for c in OWN:
        differs, equal = (corrected[c["method"], name] for name in ("p_corrected", "p_equivalent_corrected"))
        assert (c["p_corrected"], c["p_equivalent_corrected"]) == pytest.approx((differs, equal), rel=1e-2, abs=1e-6)
        side = "better" if c["difference"] > 0 else "worse"
        assert c["verdict"] == ("equivalent" if equal <= 0.05 else side if differs <= 0.05 else "inconclusive")
