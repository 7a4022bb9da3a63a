"""From a run's right answers to a model of its own: the commands as a user gives them."""

import json
from pathlib import Path

import answered_runs
import jax
import pytest
from runs import opened

from grpojax import data
from grpojax.cli import main as cli
from grpojax.extensions.supervised.finetune_recipe import load_dpo, load_sft
from grpojax.models import hf
from grpojax.records.metrics import Metrics
from grpojax.records.samples import read_samples, samples_path
from grpojax.run import recipe as config
from grpojax.train import train

CONFIGS = Path(__file__).parents[3] / "configs" / "supervised"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*")), ids=lambda path: path.stem)
def test_every_recipe_parses_and_says_how_to_run_it(path):
    command, load = ("dpo", load_dpo) if path.stem == "dpo" else ("sft", load_sft)
    load(path)
    head = path.read_text().split("\nmodel:")[0]
    assert f"grpojax {command} configs/supervised/{path.name}" in head


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    """A run in which samples of an even length are right, with an instruction in its prompts."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    overrides = [f"run.dir={directory}", "train.steps=2", "data.validation=null", "variant.kl_coef=0",
                 "rewards=[{name: 'tiny_run:even'}, {name: 'tiny_run:length', weight: 0.1}]",
                 "data.instruction='is {prompt}'", "data.max_prompt_tokens=16"]  # fmt: skip
    assert train(opened(config.load(recipe, overrides)))
    return directory


def exported(finished, file, capsys, *options):
    assert cli.main(["traces", str(finished), "--to", str(file), *options]) == 0
    said = capsys.readouterr().out
    return [json.loads(line) for line in file.read_text().splitlines()], said


@pytest.mark.slow
def test_traces_are_the_right_samples_with_what_was_asked(finished, tmp_path, capsys):
    rows, said = exported(finished, tmp_path / "out" / "traces.jsonl", capsys)
    samples = {(n, s["uid"], s["sample"]): s for n in (1, 2) for s in read_samples(finished, n)[1]}
    assert f"{len(rows)} samples of " in said and "from 2 steps" in said
    for row in rows:
        sample = samples[row["step"], row["uid"], row["sample"]]
        assert sample["rewards"]["tiny_run:even"] == 1.0 and sample["stop"] == "eos"
        asked, answer = row["messages"]
        assert asked == {"role": "user", "content": f"is {sample['prompt']}"}
        assert answer == {"role": "assistant", "content": sample["completion"]}
        assert (row["reward"], row["rewards"], row["run"]) == (sample["reward"], sample["rewards"], str(finished))
    right = {(s["uid"], s["completion"]) for s in samples.values()
             if s["rewards"]["tiny_run:even"] == 1 and s["stop"] == "eos" and s["completion"].strip()}  # fmt: skip
    assert {(row["uid"], row["messages"][1]["content"]) for row in rows} == right and len(rows) == len(right)
    again, _ = exported(finished, tmp_path / "again.jsonl", capsys)
    assert again == rows
    few, said = exported(finished, tmp_path / "few.jsonl", capsys, "--most", "1", "--least-reward", "1.3")
    assert 0 < len(few) < len(rows) and all(row["reward"] >= 1.3 for row in few)
    assert len({row["uid"] for row in few}) == len(few)


@pytest.mark.parametrize(("options", "message"), [
    (["--success", "7"], "no sample of 2 steps is right by 'tiny_run:even'; left out: 64 wrong"),
    (["--by", "answer"], "no reward 'answer' in step 1; it has tiny_run:even, tiny_run:length"),
    (["--most", "-1"], "most=-1: must be at least 0"),
    (["train.steps=3"], "override 'train.steps=3' has no effect on traces"),
    (["data.train=nowhere.jsonl"], "data file 'nowhere.jsonl' does not exist"),
])  # fmt: skip
@pytest.mark.slow
def test_mistakes_are_told(finished, tmp_path, capsys, options, message):
    assert cli.main(["traces", str(finished), "--to", str(tmp_path / "t.jsonl"), *options]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "t.jsonl").exists()


@pytest.mark.slow
def test_what_is_no_run_or_has_other_questions_is_told(finished, tmp_path, capsys):
    assert cli.main(["traces", str(tmp_path), "--to", str(tmp_path / "t.jsonl")]) == 2
    assert "is no run directory" in capsys.readouterr().err
    (tmp_path / "other.jsonl").write_text(json.dumps({"question": "5+5=", "answer": "10"}) + "\n")
    assert cli.main(["traces", str(finished), f"data.train={tmp_path}/other.jsonl", "--to", str(tmp_path / "t")]) == 2
    assert "is not row" in capsys.readouterr().err and not (tmp_path / "t").exists()


@pytest.mark.slow
def test_a_run_s_answers_become_a_model(recipe, finished, tmp_path, capsys, monkeypatch):
    """traces, sft, export, sample: the model comes to say what it learned."""
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *of: one)
    rows, _ = exported(finished, tmp_path / "traces.jsonl", capsys, "--most", "1")
    first = rows[0]["messages"]
    (tmp_path / "one.jsonl").write_text("".join(json.dumps({"messages": first}) + "\n" for _ in range(8)))
    recipes = answered_runs.make(tmp_path, recipe.parent)
    overrides = [f"data.train={tmp_path}/one.jsonl", "data.validation=null", "data.max_prompt_tokens=16",
                 "train.group=1", "train.eval_every=0", "train.steps=30", "optimizer.learning_rate=0.02"]  # fmt: skip
    assert cli.main(["sft", str(recipes["sft"]), *overrides]) == 0
    assert cli.main(["export", str(tmp_path / "sft"), "--to", str(tmp_path / "model")]) == 0
    capsys.readouterr()
    prompt = ["--prompt", first[0]["content"], "--temperature", "0", "--max-tokens", "9"]
    assert cli.main(["sample", str(tmp_path / "model"), *prompt]) == 0
    assert capsys.readouterr().out.rstrip("\n") == first[1]["content"]
    assert cli.main(["sft", str(recipes["sft"]), "train.stepz=3"]) == 2
    assert "train.stepz (from the command line): unknown key; did you mean 'steps'" in capsys.readouterr().err
    assert cli.main(["eval", str(tmp_path / "sft"), "--data", str(tmp_path / "one.jsonl")]) == 2
    assert "is a supervised run, which has no rewards: grpojax export" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["traces", "export"])
def test_a_damaged_config_is_named(tmp_path, capsys, command):
    (tmp_path / "config.json").write_text('{"model": ')
    samples_path(tmp_path, 1).parent.mkdir()
    samples_path(tmp_path, 1).touch()
    assert cli.main([command, str(tmp_path), "--to", str(tmp_path / "out")]) == 2
    assert f"{tmp_path}/config.json is damaged" in capsys.readouterr().err


def test_traces_of_a_model_without_a_chat_template_are_what_it_read(recipe, tmp_path, capsys):
    """With ``template: auto`` its prompts were one text, examples and all; as messages, sft would refuse them."""
    overrides = ["data.examples=[{prompt: 2+2=, completion: '4'}]", "data.max_prompt_tokens=32", "data.validation=null",
                 f"run.dir={tmp_path}/run"]  # fmt: skip
    given = config.load(recipe, overrides)
    (tmp_path / "run").mkdir()
    sample = {"uid": 0, "sample": 0, "prompt": "0+0=", "completion": "0", "reward": 1.0,
              "rewards": {"tiny_run:length": 1.0}, "advantage": 0.5, "length": 1, "stop": "eos", "gold": "0",
              "answer": "0"}  # fmt: skip
    metrics = Metrics(tmp_path / "run", 0)
    metrics.write_samples(1, [sample])
    metrics.close()
    (tmp_path / "run" / "config.json").write_text(json.dumps(given.resolved()))
    (row,), _ = exported(tmp_path / "run", tmp_path / "traces.jsonl", capsys)
    asked, answer = row["messages"]
    assert asked == {"role": "user", "content": "2+2=4\n\n0+0="} and answer["content"] == "0"
    tokenize = data.Tokenize(hf.load_tokenizer(given.model.path), given.data)
    assert tokenize.text("0+0=") == asked["content"]


def test_a_chat_is_exported_whole(tmp_path, capsys):
    """The samples have its last message only; system message, examples and instruction stand as the model read them."""
    turns = [("user", "Hi"), ("assistant", "Yes?"), ("user", "1+1=")]
    chat = [{"role": role, "content": content} for role, content in turns]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"chat": chat, "answer": "2"}) + "\n")
    overrides = [f"data.train={tmp_path}/chats.jsonl", "data.prompt=chat", "data.system=Add.", "data.validation=null",
                 "data.instruction='{prompt} ?'", "data.examples=[{prompt: 2+2=, completion: '4'}]",
                 f"run.dir={tmp_path}/run"]  # fmt: skip
    recipe = config.load(CONFIGS.parent / "quickstart.yaml", overrides)
    (tmp_path / "run").mkdir()
    metrics = Metrics(tmp_path / "run", 0)
    sample = {"uid": 0, "sample": 3, "prompt": "1+1=", "completion": "2", "reward": 1.0, "rewards": {"answer": 1.0},
              "advantage": 0.5, "length": 2, "stop": "eos", "gold": "2", "answer": "2"}  # fmt: skip
    metrics.write_samples(5, [sample])
    metrics.close()
    (tmp_path / "run" / "config.json").write_text(json.dumps(recipe.resolved()))
    (row,), _ = exported(tmp_path / "run", tmp_path / "traces.jsonl", capsys)
    assert [(m["role"], m["content"]) for m in row["messages"]] == [
        ("system", "Add."), ("user", "2+2= ?"), ("assistant", "4"), ("user", "Hi"), ("assistant", "Yes?"),
        ("user", "1+1= ?"), ("assistant", "2"),
    ]  # fmt: skip
    assert (row["step"], row["uid"], row["sample"], row["gold"], row["model"]) == (5, 0, 3, "2", "builtin:tiny")
