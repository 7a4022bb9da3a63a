"""What rows must have, what is left out, and what a mistake in the section says."""

import json
import os

import pytest
from chat_tokenizer import Fake, chatml
from data_files import ROWS, jsonl, letters, load, refusal
from refusals import RECIPE, check_said

from grpojax import data
from grpojax.cli import main as cli
from grpojax.data import DataConfig, SourceConfig, Tokenize
from grpojax.host import settings
from grpojax.host.errors import UserError
from grpojax.rewards import RewardConfig, Rewards
from grpojax.run import recipe as config

GSM8K = os.environ.get("GRPOJAX_GSM8K")


def test_bad_rows_can_be_skipped(write):
    lines = [
        '{"question": "a", "answer": 1}',
        "{",
        '{"question": "", "answer": 1}',
        '{"question": "b", "answer": 2}',
    ]
    path = write("d.jsonl", "\n".join(lines).encode() + b"\n\xff\n")
    got = load(path, on_bad_row="skip")
    assert [(p.prompt, p.uid) for p in got] == [("a", 0), ("b", 3)]
    assert [line.removeprefix(path) for line in got.skipped] == [
        ":2: invalid JSON: Expecting property name enclosed in double quotes", ":3: has an empty prompt",
        ":5: not UTF-8 at byte 0 of the line; convert its encoding, as by iconv -f WINDOWS-1252 -t UTF-8",
    ]  # fmt: skip
    notes = got.notes("train", DataConfig(train=path))
    assert notes[0] == "train data: left out 3 bad rows" and notes[1].endswith(got.skipped[0]) and len(notes) == 4
    assert "no row can be used; the first left out is" in refusal(write("e.jsonl", "{\n"), on_bad_row="skip")


def test_long_prompts_are_dropped_or_refused(write):
    path = write("d.jsonl", jsonl([{"question": "a" * n, "answer": n} for n in (3, 9, 5)]))
    got = load(path, max_prompt_tokens=5)
    assert [p.uid for p in got] == [0, 2] and got.dropped == 1
    assert got.notes("train", DataConfig(train="", max_prompt_tokens=5)) == [
        "train data: left out 1 prompts over data.max_prompt_tokens=5"
    ]
    message = refusal(path, max_prompt_tokens=5, too_long="refuse")
    assert message.endswith(":2: the prompt has 9 tokens, over data.max_prompt_tokens=5")
    message = refusal(path, max_prompt_tokens=2)
    assert "every prompt is longer than data.max_prompt_tokens=2" in message and message.endswith("has 3 tokens")


def test_an_unusable_gold_answer_names_its_row(write):
    path = write("d.jsonl", jsonl([{"question": "a", "answer": "7"}, {"question": "a", "answer": r"\frac{"}]))
    with Rewards([RewardConfig(name="math_answer")]) as rewards:
        with pytest.raises(UserError, match=r"d\.jsonl:2: gold answer '.*' cannot be read"):
            load(path, rewards.check_gold)
        assert len(load(path, rewards.check_gold, on_bad_row="skip")) == 1
        with pytest.raises(UserError, match="reward 'math_answer' needs gold answers: give data.answer"):
            load(path, rewards.check_gold, answer=None)


def test_columns_are_mapped(write):
    rows = [{"problem": "a", "solution": "7", "tokens": 3, "level": "hard"}]
    path = write("d.jsonl", jsonl(rows))
    got = load(path, prompt="problem", answer="solution", columns={"difficulty": "level", "n": "tokens"})
    assert (got[0].prompt, got[0].gold, got[0].columns) == ("a", "7", {"difficulty": "hard", "n": 3})
    source = SourceConfig(path=path, prompt="problem", answer="solution")
    assert load(source, columns={})[0].columns == {}
    assert ":1: has no column 'lvl'" in refusal(source, columns={"difficulty": "lvl"})


def test_the_fingerprint_is_of_the_rows(write):
    def print_of(rows):
        return load(write("d.jsonl", jsonl(rows))).fingerprint

    changed = [*ROWS[:2], {"question": "1+1=", "answer": "3"}]
    prints = {print_of(ROWS), print_of(ROWS[1:] + ROWS[:1]), print_of(ROWS[:2]), print_of(changed)}
    assert len(prints) == 4 and all(len(p) == 32 for p in prints)


def test_a_prompt_may_be_the_messages_of_a_chat(tmp_path):
    chat = [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?", "tool_calls": None}, {"role": "user", "content": "1+1"},
    ]  # fmt: skip
    (tmp_path / "d.jsonl").write_text(json.dumps({"question": chat, "answer": "2"}))
    one = data.Example(prompt="0+0", completion="0")
    settings = DataConfig(train="", examples=(one,), instruction="{prompt}=?")
    tokenizer = Fake(chatml)
    problems = data.load_problems(str(tmp_path / "d.jsonl"), Tokenize(tokenizer, settings), settings)
    assert "".join(map(chr, problems[0].ids)) == "<s>be brief<u>0+0=?<a>0<u>hi<a>yes?<u>1+1=?<a>"
    assert problems[0].prompt == "1+1"


@pytest.mark.parametrize(("chat", "said"), [
    ([], "does not end with the user's"),
    ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "1"}], "does not end with the user's"),
    ([{"role": "user", "content": "hi", "name": "Eve"}], "more than role and text"),
    ([{"role": "user", "content": [{"type": "image"}]}], "a part of type 'image'; only text is read"),
    ([{"role": "user", "content": 3}], "has a message without a text: its content is 3"),
    ([{"content": "hi"}], "no message with a role"),
    (["hi"], "no message with a role"),
    ([{"role": "user", "content": " "}], "empty prompt"),
    ([{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}], "data.system gives another"),
])  # fmt: skip
def test_chats_that_are_refused(tmp_path, chat, said):
    (tmp_path / "d.jsonl").write_text("\n" + json.dumps({"question": chat, "answer": "2"}))
    settings = DataConfig(train="", system="mine")
    with pytest.raises(UserError, match=said) as e:
        data.load_problems(str(tmp_path / "d.jsonl"), Tokenize(Fake(chatml), settings), settings)
    assert "line 2" in str(e.value) or ":2" in str(e.value)


@pytest.mark.parametrize(("override", "message"), [
    ("data.train=3", "data.train=3 (from the command line): expected a string"),
    ("data.train=[]", "data: train: the list of sources is empty"),
    ("data.train=''", "data file '': the name is empty"),
    ("data.train={pth: x}", "data.train.pth (from the command line): unknown key; did you mean 'path'?"),
    ("data.train={path: 3}", "data.train.path=3"),
    ("data.train={path: x, weight: 0}", "data.train: weight=0.0: must be over 0"),
    ("data.train={path: x, weight: much}", "data.train.weight='much' (from the command line): expected a number"),
    ("data.train={path: x, format: jsn}", "did you mean 'json'?"),
    ("data.train={path: x, split: train}", "split='train' is for hub:owner/name"),
    ("data.train={path: x, subset: main}", "subset='main' is for hub:owner/name"),
    ("data.train={path: 'hub:a/b'}", "split: which part of 'hub:a/b'?"),
    ("data.train=hub:a/b", "split: which part of 'hub:a/b'?"),
    ("data.train={path: 'hub:a/b', split: train, format: csv}", "format='csv' is for files"),
    ("data.train={path: x, prompt: 3}", "data.train.prompt=3"),
    ("data.train=[x, {path: y, weigth: 2}]",
     "data.train.1.weigth (from the command line): unknown key; did you mean 'weight'?"),
    ("data.validation=[{path: x, weight: 2}]",
     "data: validation: every problem is evaluated once; weights are for train"),
    ("data.columns=[a]", "data.columns=['a'] (from the command line): expected"),
    ("data.columns={tokens: a}", "columns.tokens: reward functions have an argument of that name"),
    ("data.columns={a: 3}", "data.columns.a=3 (from the command line): expected a string"),
    ("data.examples=[{prompt: a}]", "data.examples.0.completion is required"),
    ("data.examples=[{prompt: a, completion: 3}]", "data.examples.0.completion=3"),
    ("data.instruction=Answer this.", "instruction='Answer this.': must have {prompt} in it once"),
    ("data.instruction=3", "data.instruction=3 (from the command line): expected a string"),
    ("data.today=Monday", "data.today='Monday' (from the command line): expected a date such as 2026-01-31"),
    ("data.too_long=drp", "did you mean 'drop'?"),
    ("data.on_bad_row=skp", "did you mean 'skip'?"),
    ("data.on_bad_row=true", "data.on_bad_row=True (from the command line): expected 'error' or 'skip'"),
    ("data.max_prompt_tokens=0", "max_prompt_tokens=0: must be at least 1"),
    ("data.max_prompt_tokens=few", "data.max_prompt_tokens='few'"),
    ("data.exampels=[]", "data.exampels (from the command line): unknown key; did you mean 'examples'?"),
    ("data.prompt=qestion", "test.jsonl:129: has no column 'qestion' for data.prompt"),
    ("data.system=3", "data.system=3"),
    ("data.template=chta", "did you mean 'chat'?"),
])  # fmt: skip
def test_a_mistake_is_two_lines_and_status_two(override, message, tmp_path, capsys):
    assert cli.main(["train", RECIPE, f"run.dir={tmp_path / 'run'}", override]) == 2
    check_said(message, capsys)


def test_every_option_survives_the_record_of_a_run():
    options = {
        "train": ["a.jsonl", {"path": "hub:a/b", "split": "train", "subset": "main", "weight": 2, "prompt": "p"}],
        "validation": {"path": "b.csv", "format": "csv"}, "test": {"path": "b.csv", "rows": [-5, None]},
        "columns": {"a": "b"}, "system": "s", "too_long": "refuse",
        "examples": [{"prompt": "p", "completion": "c"}], "instruction": "{prompt}!", "on_bad_row": "skip",
    }  # fmt: skip
    got = settings.build(DataConfig, options)
    assert settings.build(DataConfig, json.loads(json.dumps(settings.to_dict(got)))) == got
    assert got.train[1].weight == 2.0 and got.validation.format == "csv" and got.test.rows == (-5, None)


@pytest.mark.skipif(not GSM8K, reason="GRPOJAX_GSM8K names no folder with train.jsonl and test.jsonl")
@pytest.mark.slow
def test_gsm8k_is_three_lines(tmp_path):
    recipe = tmp_path / "gsm8k.yaml"
    recipe.write_text(f"""\
model: {{path: "builtin:tiny"}}
data:
  train: {GSM8K}/train.jsonl
  validation: {GSM8K}/test.jsonl
rewards: [{{name: math_answer}}]
rollout: {{prompts: 4, group: 4, max_tokens: 8}}
train: {{steps: 1}}
run: {{dir: {tmp_path}/run}}
""")
    got = config.load(recipe)
    with Rewards(got.method.rewards) as rewards:
        train, test = (
            data.load_problems(path, letters, got.data, rewards.check_gold)
            for path in (got.data.train, got.data.validation)
        )
    assert (len(train) + train.dropped, len(test) + test.dropped) == (7473, 1319)
    assert train[0].gold == "72" and not train.skipped and all(len(p.ids) <= 512 for p in train)
