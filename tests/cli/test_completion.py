"""The shells' scripts: bash is asked; zsh and fish read theirs where they are installed."""

import shutil
import subprocess

import pytest
import shell_scripts

from grpojax.cli import main as cli
from grpojax.host import shipped

script, completed = shell_scripts.script, shell_scripts.completed


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes(completed):
    assert completed("trai") == ["train"]
    assert completed("train", "my") == ["my recipe.yaml"] and completed("eval", "my") == ["my recipe.yaml"]
    assert completed("train", "variants/dap") == ["variants/dapo"]
    assert completed("--debug", "train", "quick") == ["quickstart"]
    assert completed("train", "quickstart", "--t") == ["--take-over"]
    assert completed("completion", "z") == ["zsh"]
    assert completed("recipes", "") == [*shipped.names(), "my recipe.yaml"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_have_every_command_and_a_shell_can_read_them(shell, script):
    file = script(shell)
    text = file.read_text()
    (commands,) = (a.choices for a in cli.parser()._actions if a.dest == "command")
    assert {"train", "eval", "completion"} <= commands.keys() and all(name in text for name in commands)
    assert "variants/dapo" in text and "take-over" in text and "bfloat16" in text
    if program := shutil.which(shell):
        subprocess.run([program, "-n", file], check=True)
