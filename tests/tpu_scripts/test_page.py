"""The page: every command of it runs, with ``--dry-run`` where it would cost; the scripts need no more than it says."""

import ast
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from tpu_play import ROOT, SCRIPTS, program

from grpojax.cli import main as cli
from grpojax.run import recipe

PAGE = (SCRIPTS / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "scale" / "tpu_vm.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```", PAGE + GUIDE, re.M | re.S)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
FILES = sorted(SCRIPTS.glob("*.py"))


@pytest.mark.slow
def test_every_command_of_the_page_runs(play):
    """In a folder with the scripts; those of others are stand-ins that keep what they are told."""
    (play.folder / "tpu_scripts").symlink_to(SCRIPTS)
    (play.folder / "configs").symlink_to(ROOT / "configs")
    (play.folder / "tpu.env").unlink()
    for name in ("gcloud", "hf", "pip", "curl"):
        program(play.cloud / f"bin/{name}", '#!/bin/sh\nfor word; do printf "%s " "$word"; done >>"$FAKE_CLOUD/told"\n')
    env = {"PATH": f"{play.cloud}/bin:/usr/bin:/bin", "HOME": str(play.folder), "FAKE_CLOUD": str(play.cloud)}
    said = {}
    for line in COMMANDS:
        words = shlex.split(line)
        if words[0] == "python3":
            words = [sys.executable, "-S", words[1], "--dry-run", *words[2:]]
        run = subprocess.run(words, cwd=play.folder, env=env, capture_output=True, text=True)
        assert run.returncode == 0, (line, run.stderr)
        said[line.partition("tpu.py ")[2]] = run.stdout
    assert not play.calls()  # a dry run calls nothing
    assert "storage buckets create gs://my-bucket --location=us-west4" in (play.cloud / "told").read_text()
    for command, calls in {
        "create": "gcloud compute tpus queued-resources create grpo --node-id grpo --accelerator-type v5litepod-16",
        "setup": "grpojax/bundles/BUNDLE/setup.sh BUNDLE",
        "watch": "queued-resources delete grpo --force",
        "delete": "queued-resources delete grpo --force",
    }.items():
        assert calls in said[command], command
    (train,) = {text for command, text in said.items() if "grpojax train" in command}
    for worker in range(4):
        assert f"--worker={worker} '--command=if [ -e grpojax/current ]" in train
    assert train.count("start 1 grpojax train configs/gsm8k_qwen2.5_0.5b.yaml model.path=gs://my-bucket/models/") == 4
    assert not (play.folder / ".tpu").exists()


def test_grpojax_takes_what_is_launched():
    launched = [shlex.split(line.partition("launch -- ")[2]) for line in COMMANDS if "launch -- " in line]
    assert {words[1] for words in launched} == {"train", "eval", "export"}
    for name, *words in launched:
        args = cli.parser().parse_args(words)
        assert name == "grpojax" and args.joins
        if words[0] == "train":
            assert recipe.load(ROOT / args.config, args.overrides).run.dir.startswith("gs://my-bucket/")


def test_every_command_is_on_the_page():
    listed = re.findall(r'add_parser\("(\w+)"', (SCRIPTS / "tpu.py").read_text())
    assert len(listed) == 8
    for name in listed:
        assert f"tpu.py {name}" in PAGE or f"`{name}`" in PAGE, name


def test_every_named_file_and_key_exists():
    for path in set(re.findall(r"\b(?:configs|tpu_scripts)/[\w./-]*\w", PAGE)):
        assert (ROOT / path).exists(), path
    keys = set(re.findall(r"`([A-Z_]{4,})[=`]", PAGE)) - {"FAILED", "SUSPENDED", "TAKE_OVER"}
    settings = (SCRIPTS / "settings.py").read_text()
    for key in keys:
        assert f"    {key.lower()}: " in settings, key
    for line in (SCRIPTS / "example.env").read_text().splitlines():
        assert line.startswith("#") or f"    {line.partition('=')[0].lower()}: " in settings, line


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_a_laptop_has_all_that_is_imported(file):
    tree = ast.parse(file.read_text(), feature_version=(3, 9))
    own = {f.stem for f in FILES}
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name.split(".")[0] in own | set(sys.stdlib_module_names), name


@pytest.mark.parametrize("file", sorted(SCRIPTS.glob("*.sh")), ids=lambda f: f.name)
def test_the_shell_scripts_are_clean(file):
    """By shellcheck where there is one; by the shell itself everywhere."""
    for command in (["sh", "-n"], ["shellcheck"]):
        if shutil.which(command[0]):
            run = subprocess.run([*command, str(file)], capture_output=True, text=True)
            assert run.returncode == 0, run.stdout + run.stderr
