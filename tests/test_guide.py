"""What README and the guide show works: Python runs, YAML is part of a recipe, commands run, and names exist."""

import dataclasses
import importlib.util
import json
import pkgutil
import re
import shlex
import sys
import typing
from pathlib import Path

import gguf_files
import pytest
import tiny_hf
import yaml
from tiny_run import make_run

from grpojax import rewards, variants
from grpojax.host import other_trainers
from grpojax.host.settings import build
from grpojax.rewards.config import NAMED_FUNCTIONS
from grpojax.run import alarms, finetune_recipe, step_metrics
from grpojax.run import recipe as config
from grpojax.tools import cli, plan_shapes
from grpojax.variants import registry

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
}
README = PAGES["README.md"]
BLOCKS = [
    (page, kind, text)
    for page, whole in PAGES.items()
    for kind, text in re.findall(r"^```(\w*)\n(.*?)^```", whole, re.M | re.S)
]
COMMANDS = [
    (page, command.strip())
    for page, kind, text in BLOCKS
    if not kind
    for line in text.splitlines()
    for command in line.split("&&")
]
# The pages whose commands are run, in this order: a later one may read what an earlier one wrote.
RUN = ("README.md", *(f"docs/{page}.md" for page in ("start/quickstart", "start/variant", "start/model", "scale/gpu",
                                                     "scale/adapters", "scale/planning")))  # fmt: skip

# What makes a command of hours one of seconds.
SHORT = {
    "train configs/quickstart.yaml": "train.steps=1 train.eval_limit=8",
    "train configs/lora.yaml": "train.steps=1 train.eval_limit=8",
    "train configs/smollm2": "train.steps=1 rollout.prompts=4 rollout.group=2 rollout.max_tokens=4 train.eval_limit=8",
    "train configs/gsm8k": "train.steps=10 train.eval_limit=8 rollout.prompts=8 rollout.group=4 rollout.max_tokens=8 "
    "data.max_prompt_tokens=192",
    "sweep": "train.steps=1 train.eval_limit=8 rollout.prompts=4 rollout.group=2",
    "sft": "train.epochs=null train.steps=2 train.batch_size=8",
    "dpo": "train.epochs=null train.steps=1 train.batch_size=8 train.microbatches=1",
    "eval": "--limit 8 --max-tokens 8",
    "sample": "--max-tokens 8",
    "bench": "--steps 1 rollout.prompts=8 rollout.group=2 rollout.max_tokens=8",
    "plan configs/gsm8k_qwen2.5_0.5b.yaml --models": "--json",
    "plan": "rollout.prompts=16 rollout.group=4 rollout.max_tokens=128 data.max_prompt_tokens=128 --topology v5e:2x2",
}
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"
LOADERS = {"sft": finetune_recipe.load_sft, "dpo": finetune_recipe.load_dpo}


def generated():
    """The module that makes pages from the code; mkdocs, which it is for, is not needed."""
    spec = importlib.util.spec_from_file_location("guide_generate", ROOT / "docs/generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def files_of_the_guide(tmp_path_factory, monkeypatch):
    """Python that says in its first line which file it is can be imported."""
    folder = tmp_path_factory.mktemp("guide")
    for _, kind, text in BLOCKS:
        named = re.match(r"# (\w+)\.py\n", text)
        if kind == "python" and named:
            (folder / f"{named[1]}.py").write_text(text)
            monkeypatch.delitem(sys.modules, named[1], raising=False)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(registry, "_ALL", dict(registry._ALL))


# ------------------------------------------------------------------------------------------------ code and commands


@pytest.mark.parametrize(("page", "code"), [(page, text) for page, kind, text in BLOCKS if kind == "python"])
@pytest.mark.slow
def test_python_runs(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    exec(compile(code, page, "exec"), {})


@pytest.mark.parametrize(("page", "text"), [(page, text) for page, kind, text in BLOCKS if kind == "yaml"])
def test_yaml_is_a_part_of_a_recipe(page, text, tmp_path):
    quickstart = (ROOT / "configs/quickstart.yaml").read_text()
    if "base:" in text:
        (tmp_path / "quickstart.yaml").write_text(quickstart)
        (tmp_path / "mine.yaml").write_text(text)
        config.load(tmp_path / "mine.yaml")
    else:
        build(config.Config, yaml.safe_load(quickstart) | yaml.safe_load(text))


@pytest.mark.parametrize(("page", "line"), [(page, line) for page, line in COMMANDS if line.startswith("grpojax ")])
def test_commands_are_taken(page, line):
    """By the parser, and their recipe with the settings given; the shell's variables stand for anything."""
    args, rest = cli.parser().parse_known_args(shlex.split(line)[1:])
    assert not [word for word in rest if word.startswith("-") or not hasattr(args, "overrides")], rest
    if getattr(args, "config", None) and "$" not in line:
        LOADERS.get(args.command, config.load)(ROOT / args.config, [*args.overrides, *rest])


@pytest.mark.slow
def test_commands_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    """In a folder with the recipes, sums in place of GSM8K, and tiny models in place of those in models/."""
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
    assert len(said) == 22 and json.loads((tmp_path / "models/my-policy/config.json").read_text())
    logged = {name for file in tmp_path.rglob("metrics.jsonl") for row in file.open() for name in json.loads(row)}
    assert len(logged) > 60 and not [name for name in sorted(logged - {"step"}) if not documented(name)]


# ------------------------------------------------------------------------------------------------ names


def documented(metric):
    """Whether the page of metrics has it; NAME, KIND, LEVEL, k and a closing ``...`` there stand for anything."""
    names = re.findall(r"`([\w/@.]+)`", PAGES["docs/reference/metrics.md"])
    forms = (re.sub(r"NAME|KIND|LEVEL|\b(?<=@)k\b|\\\.\\\.\\\.$", ".+", re.escape(name)) for name in names)
    return any(re.fullmatch(form, metric) for form in forms)


def test_every_metric_of_an_update_is_documented():
    named = [*step_metrics.MEANS.values(), *step_metrics.FIRST.values(), *(f"watch/{name}" for name in alarms.SAID)]
    assert not [name for name in named if not documented(name)]
    assert documented("eval/pass@8") and not documented("pass@8") and not documented("rewards/mean")


@pytest.mark.parametrize("page", PAGES)
def test_every_named_module_and_file_exists(page):
    text = PAGES[page].partition("## Not run yet")[0]  # behind it are files to be made
    for name in set(re.findall(r"`(grpojax(?:\.\w+)+)", text)):
        pkgutil.resolve_name(name)
    for path in set(re.findall(r"\b(?:tests|configs|notebooks|grpojax|docs)/[\w./-]*\w(?![\w$*{])", text)):
        assert (ROOT / path).exists(), path


def keys_of(kind, made):
    """Every dotted key below a section, by the dataclasses that read it."""
    for name, hint in typing.get_type_hints(kind).items():
        yield name
        for inner in made.parts_of(hint):
            yield from (f"{name}.{key}" for key in keys_of(inner, made))


def test_every_named_setting_exists():
    made = generated()
    known = {key for kind in (config.Config, finetune_recipe.SFTConfig, finetune_recipe.DPOConfig)
             for key in keys_of(kind, made)}  # fmt: skip
    known |= {f"variant.{option}" for name in variants.names() for option in variants.parameters(name)}
    sections = "|".join({key.partition(".")[0] for key in known})
    for page, text in PAGES.items():
        if page.endswith("coming_from.md"):  # the first column has our keys, the others those of other trainers
            text = "\n".join("|".join(line.split("|")[:2]) for line in text.splitlines())
        for key in set(re.findall(rf"`((?:{sections})(?:\.[a-z_]+)+)(?=[`=:])", text)):
            assert key in known or key.startswith("data.train.options.") or key.endswith(".json"), (page, key)


def dataclasses_of(kind, made):
    """The dataclass and those of all sections below it."""
    return {kind}.union(*(dataclasses_of(inner, made) for hint in typing.get_type_hints(kind).values()
                          for inner in made.parts_of(hint)))  # fmt: skip


@pytest.mark.parametrize("recipe", [config.Config, finetune_recipe.SFTConfig, finetune_recipe.DPOConfig])
def test_every_key_of_a_recipe_is_documented(recipe):
    """In its dataclass's docstring, which documents nothing else."""
    made = generated()
    for kind in dataclasses_of(recipe, made):
        assert sorted(made.meanings(kind)) == sorted(field.name for field in dataclasses.fields(kind)), kind.__name__


def test_the_built_in_rewards_are_listed():
    table = re.search(r"## Built-in rewards\n(.*?)\n\n[^|\n]", PAGES["docs/start/reward.md"], re.S)
    assert table and set(re.findall(r"^\| `(\w+)`", table[1], re.M)) == {*rewards.REWARDS, *NAMED_FUNCTIONS}


# ------------------------------------------------------------------------------------------------ pages


def test_the_alarms_are_listed():
    table = generated().alarms_table()
    assert table in PAGES["docs/start/trouble.md"], f"docs/start/trouble.md must have\n{table}"


def test_the_keys_of_other_trainers_are_those_that_errors_know():
    for title in other_trainers.TABLES:
        table = other_trainers.markdown(title)
        assert f"## {title}\n\n{table}\n" in PAGES["docs/start/coming_from.md"], f"coming_from.md must have\n{table}"


def without_blocks(page):
    return re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)


def text_of(page):
    """A page without code."""
    return re.sub(r"`[^`\n]+`", "", without_blocks(PAGES[page]))


def anchors(file):
    """Those that GitHub gives to a page's headings; mkdocs checks its own when it builds the site."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(file.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere_on_github(page):
    """To files of the repository: pages that are made with the site are not there."""
    for path, anchor in set(re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text_of(page))):
        target = (ROOT / page).parent.joinpath(path).resolve() if path else ROOT / page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), (path, anchor)


@pytest.mark.parametrize("page", PAGES)
def test_pages_can_be_read_on_github(page):
    """It shows the forms that only mkdocs knows as they stand, unless they are in a comment."""
    shown = re.sub(r"^<!--.*?-->", "", text_of(page), flags=re.M | re.S)
    assert not re.search(r"^(:::|!!!|\?\?\?|===) |\{\{|\{:", shown, re.M)


def test_tables_of_functions_are_those_of_the_code():
    made = generated()
    for page in made.WITH_TABLES:
        assert made.with_tables(PAGES[f"docs/{page}"]) == PAGES[f"docs/{page}"], "run python docs/generate.py"


def test_the_readme_is_one_page():
    assert len(README.splitlines()) <= 150 and len(README.split()) <= 1200


def test_generated_pages_are_whole():
    """Each variant has a text and a page, each key of a recipe a meaning, each command its help."""
    made = generated()
    assert made.check(made.texts()) == []
    pages = made.pages()
    assert all(f"`{option}`" in pages[f"variants/{name}.md"] for name in variants.names()
               for option in variants.parameters(name))  # fmt: skip
    assert not [
        name for name, page in pages.items() if name.startswith("variants/") and re.search(r"\|\s+\|$", page, re.M)
    ]
    assert "| `rollout.decode_slots` | whole number | `0` |" in pages["reference/recipe.md"]
    assert all(pages["scale/what_fits.md"].count(f"| {name} |") == 3 for name in plan_shapes.SHAPES)
    assert all(f"usage: grpojax {name} " in pages["reference/commands.md"] for name in made.commands())
