"""The notebook of the quickstart runs."""

import pytest
import quick_xla
from notebook_files import printed_by


@pytest.mark.exhaustive("extensions/problems/test_guide.py::test_commands_run_one_after_the_other")
def test_quickstart(monkeypatch):
    monkeypatch.setenv("GRPOJAX_NOTEBOOK_STEPS", "2")
    monkeypatch.setenv("XLA_FLAGS", quick_xla.flags())
    printed = printed_by("quickstart.ipynb")
    assert "step 2/2" in printed and "held-out reward" in printed and ">>>" in printed
