"""The shells' scripts: bash is asked; zsh and fish read theirs where they are installed."""

import shutil
import subprocess

import pytest

from grpojax.host import shipped
from grpojax.tools import cli

ASK = r"""
source "$1"
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_grpojax
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def script(tmp_path, capsys):
    """Writes the script of a shell."""

    def write(shell):
        assert cli.main(["completion", shell]) == 0
        (tmp_path / shell).write_text(capsys.readouterr().out)
        return tmp_path / shell

    return write


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes(script, tmp_path):
    file, folder = script("bash"), tmp_path / "here"
    folder.mkdir()
    (folder / "my recipe.yaml").touch()

    def completed(*words):
        command = ["bash", "-c", ASK, "ask", file, "grpojax", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.split("\n")[:-1]

    assert completed("tr") == ["train", "traces"]
    assert completed("train", "my") == ["my recipe.yaml"] and completed("eval", "my") == ["my recipe.yaml"]
    assert completed("train", "variants/dap") == ["variants/dapo"]
    assert completed("--debug", "sweep", "quick") == ["quickstart"]
    assert completed("train", "quickstart", "--t") == ["--take-over"]
    assert completed("plan", "quickstart", "--recipe", "") == ["train", "sft", "dpo"]
    assert completed("sweep", "quickstart", "--pilot", "m") == ["my recipe.yaml"]
    assert completed("completion", "z") == ["zsh"]
    assert completed("recipes", "") == [*shipped.names(), "-h", "--help", "my recipe.yaml"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_have_every_command_and_a_shell_can_read_them(shell, script):
    file = script(shell)
    text = file.read_text()
    for module in cli.COMMANDS:
        assert module.__name__.rpartition(".")[2] in text.replace("eval", "evaluate").replace("sft", "finetune")
    assert "variants/dapo" in text and "take-over" in text and "bfloat16" in text
    if program := shutil.which(shell):
        subprocess.run([program, "-n", file], check=True)
