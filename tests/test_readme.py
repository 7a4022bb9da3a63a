"""What the README shows works: its Python runs, its YAML parses, its commands are ones there are."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from grpojax import cli, config
from grpojax.settings import build

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S)
COMMANDS = [line for kind, text in BLOCKS if not kind for line in text.splitlines() if "grpojax " in line]


@pytest.mark.parametrize("code", [text for kind, text in BLOCKS if kind == "python"])
def test_python_runs(code):
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("text", [text for kind, text in BLOCKS if kind == "yaml"])
def test_yaml_is_a_part_of_a_recipe(text):
    whole = yaml.safe_load(Path(__file__).parent.parent.joinpath("configs/quickstart.yaml").read_text())
    build(config.Config, whole | yaml.safe_load(text))


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_ones_there_are(line):
    for command in line.split("&&"):
        program, *arguments = shlex.split(command)
        if program != "grpojax":
            continue
        args, rest = cli._parser().parse_known_args(arguments)
        assert all("=" in r and not r.startswith("-") for r in rest)
        if hasattr(args, "config"):
            config.load(Path(__file__).parent.parent / args.config, [*args.overrides, *rest])


def test_every_named_variant_and_reward_exists():
    from grpojax import rewards, variants

    listed = re.search(r"### Rewards\n\n(.*?), or any Python function", README, re.S)
    assert listed and set(re.findall(r"`(\w+)`", listed[1])) == set(rewards.REWARDS)
    assert "dapo" in variants.names()
