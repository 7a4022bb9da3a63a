"""The notebook with a plan runs."""

import pytest
from notebook_files import printed_by


@pytest.mark.slow
def test_what_needs_eight_chips_is_left_out_without_them(monkeypatch):
    """The rest runs: the recipe and its plan."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    printed = printed_by("tpu_v5e8.ipynb")
    assert "(cpu), jax" in printed and "Not eight TPU chips" in printed
    assert "update" in printed and printed.endswith("fits\n") and "does not fit" not in printed
