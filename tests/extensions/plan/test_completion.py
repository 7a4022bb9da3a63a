"""What bash completes of the commands of this extension."""

import shutil

import pytest
import shell_scripts

script, completed = shell_scripts.script, shell_scripts.completed


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes(completed):
    assert completed("plan", "quickstart", "--recipe", "") == ["train", "sft", "dpo"]
