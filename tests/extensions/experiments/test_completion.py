"""What bash completes of the commands of this extension."""

import shutil

import pytest
import shell_scripts

script, completed = shell_scripts.script, shell_scripts.completed


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes(completed):
    assert "traces" in completed("tr")
    assert completed("--debug", "sweep", "quick") == ["quickstart"]
    assert completed("sweep", "quickstart", "--pilot", "m") == ["my recipe.yaml"]
