"""What README and the guide show of problems that are made works: commands, and names and YAML and Python."""

import json
import shlex
from pathlib import Path

import gguf_files
import guide_pages
import pytest
import tiny_hf
from guide_pages import COMMANDS, LINES, PAGES, PYTHON, ROOT, YAML, documented, of
from tiny_run import make_run

from grpojax.cli import main as cli

EXTENSION = "problems"
importable = guide_pages.importable
# The pages whose commands are run, in this order: a later one may read what an earlier one wrote. Those of
# scale/planning.md compile for minutes what the tests of plans compile too.
RUN = ("README.md", *(f"docs/{page}.md" for page in ("start/quickstart", "start/variant", "start/model", "scale/gpu",
                                                     "scale/adapters")))  # fmt: skip

# What makes a command of hours one of seconds.
SHORT = {
    "train configs/quickstart.yaml": "train.steps=1 train.eval_limit=8",
    "train configs/lora.yaml": "train.steps=1 train.eval_limit=8",
    "train configs/smollm2": "train.steps=1 rollout.prompts=4 rollout.group=2 rollout.max_tokens=4 train.eval_limit=8",
    "train configs/gsm8k": "train.steps=10 train.eval_limit=8 rollout.prompts=8 rollout.group=4 rollout.max_tokens=8 "
    "data.max_prompt_tokens=192",
    "sweep": "train.steps=1 train.eval_limit=8 rollout.prompts=4 rollout.group=2 --seeds 1",
    "sft": "train.epochs=null train.steps=2 train.batch_size=8",
    "dpo": "train.epochs=null train.steps=1 train.batch_size=8 train.microbatches=1",
    "eval": "--limit 8 --max-tokens 8",
    "sample": "--max-tokens 8",
    "bench": "--steps 1 rollout.prompts=8 rollout.group=2 rollout.max_tokens=8",
    "plan configs/gsm8k_qwen2.5_0.5b.yaml --models": "--json",
    "plan": "rollout.prompts=16 rollout.group=4 rollout.max_tokens=128 data.max_prompt_tokens=128 --topology v5e:2x2",
}
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(("page", "code"), of(PYTHON, EXTENSION))
@pytest.mark.slow
def test_python_runs(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    guide_pages.check_python(page, code)


@pytest.mark.parametrize(("page", "text"), of(YAML, EXTENSION))
def test_yaml_is_a_part_of_a_recipe(page, text, tmp_path):
    guide_pages.check_yaml(text, tmp_path)


@pytest.mark.parametrize(("page", "line"), of(LINES, EXTENSION))
def test_commands_are_taken(page, line):
    guide_pages.check_command(line)


def test_every_named_module_and_file_exists():
    for page in PAGES:
        guide_pages.check_names(page, EXTENSION)


@pytest.mark.slow
def test_commands_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    """Those of all extensions, in a folder with the recipes, sums in place of GSM8K, and tiny models in place of those
    in models/."""
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
    pair = {"prompt": json.loads(rows.splitlines()[0])["question"], "chosen": "2", "rejected": "3"}
    (tmp_path / "pairs.jsonl").write_text((json.dumps(pair) + "\n") * 8)
    llama = tiny_hf.model(tiny_hf.config("llama-tied"))
    gguf_files.write_model(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf", llama)

    said = {}
    for line in dict.fromkeys(line for shown in RUN for page, line in COMMANDS if page == shown):
        program, *arguments = shlex.split(line)
        if program == "hf":  # there is no hub here
            program, arguments = "grpojax", ["convert", "SmolLM2-135M-Instruct.Q4_1.gguf", "--to", arguments[-1]]
        if program != "grpojax":
            assert line.startswith(("pip install", "mkdocs")) or line == "pytest", line
            continue
        if (to := arguments[-1]).endswith("my-policy") and Path(to).exists():
            arguments[-1] = f"{to}-2"
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
    assert len(said) > 20  # the pages' commands were found
    assert json.loads((tmp_path / "models/my-policy/config.json").read_text())
    logged = {name for file in tmp_path.rglob("metrics.jsonl") for row in file.open() for name in json.loads(row)}
    assert len(logged) > 60 and not [name for name in sorted(logged - {"step"}) if not documented(name)]
