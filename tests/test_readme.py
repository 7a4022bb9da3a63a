"""What the README shows works: its Python runs, its YAML parses, its commands do what they say."""

import json
import pkgutil
import re
import shlex
import sys
from pathlib import Path

import gguf_files
import pytest
import tiny_hf
import yaml
from tiny_run import make_run

from grpojax.host.settings import build
from grpojax.run import recipe as config
from grpojax.tools import cli
from grpojax.variants import registry

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S)
COMMANDS = [
    command.strip() for kind, text in BLOCKS if not kind for line in text.splitlines() for command in line.split("&&")
]
PAGES = ("README.md", "CONTRIBUTING.md")

# What makes a command of hours one of seconds.
SHORT = {
    "train configs/quickstart.yaml": "train.steps=1 train.eval_limit=8",
    "train configs/smollm2": "train.steps=1 rollout.prompts=4 rollout.group=2 rollout.max_tokens=4 train.eval_limit=8",
    "train configs/gsm8k": "train.steps=10 train.eval_limit=8 rollout.prompts=8 rollout.group=4 rollout.max_tokens=8 "
    "data.max_prompt_tokens=192",
    "sweep": "train.steps=1 train.eval_limit=8 rollout.prompts=4 rollout.group=2",
    "sft": "train.epochs=null train.steps=2 train.batch_size=8",
    "eval": "--limit 8 --max-tokens 8",
    "sample": "--max-tokens 8",
    "bench": "--steps 1 rollout.prompts=8 rollout.group=2 rollout.max_tokens=8",
    "plan": "rollout.prompts=16 rollout.group=4 rollout.max_tokens=128 data.max_prompt_tokens=128 --topology v5e:2x2",
}
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def files_of_the_readme(tmp_path_factory, monkeypatch):
    """Python that says in its first line which file it is can be imported."""
    folder = tmp_path_factory.mktemp("readme")
    for kind, text in BLOCKS:
        named = re.match(r"# (\w+)\.py\n", text)
        if kind == "python" and named:
            (folder / f"{named[1]}.py").write_text(text)
            monkeypatch.delitem(sys.modules, named[1], raising=False)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(registry, "_ALL", dict(registry._ALL))


@pytest.mark.parametrize("code", [text for kind, text in BLOCKS if kind == "python"])
def test_python_runs(code):
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("text", [text for kind, text in BLOCKS if kind == "yaml"])
def test_yaml_is_a_part_of_a_recipe(text):
    whole = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    build(config.Config, whole | yaml.safe_load(text))


@pytest.mark.slow
def test_commands_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    """In a folder with the recipes, sums in place of GSM8K, and tiny models in place of those in /models."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name in ("Qwen2.5-0.5B-Instruct", "small"):
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        make_run(folder)
        (folder / "chat_template.jinja").write_text(CHAT)
    rows = (folder / "sums.jsonl").read_text()
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train.jsonl").write_text(rows * 10)  # the last 256 are for validation
    (tmp_path / "gsm8k" / "test.jsonl").write_text(rows)
    (tmp_path / "prompts.jsonl").write_text(rows)
    llama = tiny_hf.model(tiny_hf.config("llama-tied"))
    gguf_files.write_model(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf", llama)

    said = {}
    for line in COMMANDS:
        program, *arguments = shlex.split(line.replace("/models/", f"{tmp_path}/models/"))
        if program != "grpojax":
            assert line.startswith("pip install") or line == "pytest", line
            continue
        short = next((s for start, s in SHORT.items() if " ".join(arguments).startswith(start)), "")
        with monkeypatch.context() as patch:
            if arguments[0] == "plan":
                patch.setenv("XLA_FLAGS", "")  # libtpu reads them too, and does not know all
            assert cli.main([*arguments, *short.split()]) == 0, line
        said[" ".join(arguments[:2])] = capsys.readouterr().out
    assert "held-out reward" in said["train configs/quickstart.yaml"]
    assert "--- best" in said["show runs/gsm8k_qwen2.5_0.5b"]
    assert "pass@8" in said["eval runs/gsm8k_qwen2.5_0.5b"]
    assert (tmp_path / "report.html").exists()
    assert len(said) == 16 and json.loads((tmp_path / "models/my-policy/config.json").read_text())


@pytest.mark.parametrize("page", PAGES)
def test_every_named_module_and_file_exists(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in set(re.findall(r"`(grpojax(?:\.\w+)+)", text)):
        pkgutil.resolve_name(name)
    for path in set(re.findall(r"\b(?:tests|configs|notebooks|grpojax)/[\w./-]*\w", text)):
        assert (ROOT / path).exists(), path


def test_every_named_variant_and_reward_exists():
    from grpojax import rewards, variants

    listed = re.search(r"### Rewards\n\n(.*?), or any Python function", README, re.S)
    assert listed and set(re.findall(r"`(\w+)`", listed[1])) == set(rewards.REWARDS)
    assert "dapo" in variants.names()
