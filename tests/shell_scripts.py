"""The shells' scripts, and what bash completes by its own."""

import subprocess

import pytest

from grpojax.cli import main as cli

ASK = r"""
source "$1"
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_shtab_grpojax
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


@pytest.fixture
def completed(script, tmp_path):
    """What bash offers for the last of some words, in a folder with a recipe."""
    file, folder = script("bash"), tmp_path / "here"
    folder.mkdir()
    (folder / "my recipe.yaml").touch()

    def offered(*words):
        command = ["bash", "-c", ASK, "ask", file, "grpojax", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.split("\n")[:-1]

    return offered
