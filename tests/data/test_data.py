"""Every kind of file gives the same rows, a bad row has a name, and nothing but a `UserError` comes out."""

import bz2
import gzip
import json
import lzma
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as limits
from hypothesis import strategies as st

from grpojax.data import problems as data
from grpojax.data import readers
from grpojax.data.problems import DataConfig, Example, SourceConfig, Tokenize
from grpojax.host import settings
from grpojax.host.errors import UserError
from grpojax.models import hf
from grpojax.rewards import RewardConfig, Rewards
from grpojax.run import recipe as config
from grpojax.tools import cli

GSM8K = os.environ.get("GRPOJAX_GSM8K")
QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
ROWS = [
    {"question": "1+1=", "answer": "2"},
    {"question": 'a, "b"\nç', "answer": "so #### 3"},
    {"question": "1+1=", "answer": "2"},
]


def letters(question):
    return tuple(ord(c) % 250 for c in question)


def load(path, check_gold=None, **options):
    return data.load_problems(path, letters, DataConfig(train="", **options), check_gold)


def refusal(path, **options):
    with pytest.raises(UserError) as error:
        load(path, **options)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(file)

    return write


def jsonl(rows):
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)


def as_csv(rows, delimiter=","):
    import csv
    import io

    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def as_parquet(rows):
    import io

    import pyarrow
    from pyarrow import parquet

    out = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


def zstd(content):
    import pyarrow

    return pyarrow.compress(content, codec="zstd", asbytes=True)


KINDS = {
    "d.jsonl": jsonl(ROWS).encode(),
    "d.ndjson": b"\xef\xbb\xbf" + jsonl(ROWS).replace("\n", "\r\n").encode(),
    "d.json": json.dumps(ROWS, indent=1).encode(),
    "lines.json": jsonl(ROWS).encode(),
    "d.csv": as_csv(ROWS).encode(),
    "bom.csv": b"\xef\xbb\xbf" + as_csv(ROWS).encode(),
    "d.tsv": as_csv(ROWS, "\t").encode(),
    "d.parquet": as_parquet(ROWS),
}
COMPRESSED = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}
KINDS |= {f"d.jsonl{suffix}": f(jsonl(ROWS).encode()) for suffix, f in COMPRESSED.items()}
KINDS["d.CSV.GZ"] = gzip.compress(as_csv(ROWS).encode())


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_has_the_same_rows(name, write):
    got = load(write(name, KINDS[name]))
    assert [(p.prompt, p.gold, p.columns) for p in got] == [
        (r["question"], r["answer"].split("####")[-1].strip(), r) for r in ROWS
    ]
    assert [p.uid for p in got] == [0, 1, 2]  # the third repeats the first, and is another problem
    assert got.fingerprint == load(write("again.jsonl", jsonl(ROWS))).fingerprint
    assert data.read_rows(write(name, KINDS[name])) == ROWS


def test_a_format_can_be_said(write):
    assert len(load(SourceConfig(path=write("data.dump", jsonl(ROWS)), format="jsonl"))) == 3
    assert "d.dump: unknown kind of file" in refusal(write("d.dump", jsonl(ROWS)))
    got = load(write("d.txt", "one\n\ntwo\r\n"), prompt="text", answer=None)
    assert [(p.prompt, p.gold) for p in got] == [("one", None), ("two", None)]


def test_globs_go_by_name(write, tmp_path):
    for i in (2, 0, 1):
        write(f"part{i}.jsonl", jsonl([{"question": f"q{i}", "answer": i}]))
    got = load(str(tmp_path / "part*.jsonl"))
    assert [(p.prompt, p.gold, p.uid) for p in got] == [("q0", "0", 0), ("q1", "1", 1), ("q2", "2", 2)]
    assert "no data file matches" in refusal(str(tmp_path / "none*.jsonl"))
    assert "is a folder; give its files, such as" in refusal(str(tmp_path))
    (tmp_path / "a[1].jsonl").write_text(jsonl(ROWS))
    assert len(load(str(tmp_path / "a[1].jsonl"))) == 3


@pytest.mark.parametrize(("name", "content", "message"), [
    ("d.jsonl", '{"question": "a", "answer": 1}\n{"question"', ":2: invalid JSON: Expecting ':' delimiter"),
    ("d.jsonl", '{"question": "a", "answer": 1}\n\n[1]', ":3: a row must be a JSON object, got list"),
    ("d.jsonl", b'{"question": "\xff"}', ":1: not UTF-8 at byte 14 of the line"),
    ("d.jsonl", '{"answer": 1}', ":1: has no column 'question' for the question; it has ['answer']"),
    ("d.jsonl", '{"question": "a"}', ":1: has no column 'answer' for the answer; it has ['question']"),
    ("d.jsonl", '{"question": 5, "answer": 1}', ":1: column 'question' is no text but 5"),
    ("d.jsonl", '{"question": null, "answer": 1}', ":1: has no text in column 'question', but None"),
    ("d.jsonl", '{"question": "a", "answer": [1]}', ":1: has no text in column 'answer', but [1]"),
    ("d.jsonl", '{"question": "a", "answer": true}', ":1: has no text in column 'answer', but True"),
    ("d.jsonl", '{"question": "a", "answer": NaN}', ":1: has no text in column 'answer', but nan"),
    ("d.jsonl", '{"question": "a", "answer": " #### "}', ":1: has an empty answer"),
    ("d.jsonl", '{"question": " ", "answer": 1}', ":1: has an empty prompt"),
    ("d.jsonl", '{"question": "\\ud800", "answer": 1}', ":1: column 'question' is no valid Unicode"),
    ("d.jsonl", '{"question": "a", "answer": 1, "tokens": 2}', ":1: column 'tokens' has the name of a reward function's argument"),
    ("d.jsonl", '{"question": "a", "answer": ' + "9" * 5000 + "}", ":1: invalid JSON: Exceeds the limit"),
    ("d.jsonl", "[" * 9999, ":1: invalid JSON: maximum recursion depth"),
    ("d.jsonl", "\n \n", "d.jsonl: no rows"),
    ("d.json", '[{"question": "a",\n"answer": 1},\n 7]', ":3: a row must be a JSON object, got int"),
    ("d.json", '[{"question": "a", "answer": 1}\n{}]', ":2: invalid JSON: expected , or ] after a row"),
    ("d.json", '[{"question": "a", "answer": 1},\n]', ":2: invalid JSON: Expecting value"),
    ("d.json", '[{"question": "a", "answer": 1}]\nx', ":2: invalid JSON: text after the list"),
    ("d.json", '[{"question": "a", "answer": 1}', ":1: invalid JSON: expected , or ]"),
    ("d.json", b'[\n"\xff"]', ":2: not UTF-8"),
    ("d.json", "[]", "d.json: no rows"),
    ("d.csv", "question,answer\na,1\nb\n", ":3: 1 cells, but the header has 2"),
    ("d.csv", "question,answer\n\"a\nb\",1\n,2\n", ":4: has an empty prompt"),
    ("d.csv", b"question,answer\n\xff,1\n", ":2: not UTF-8"),
    ("d.csv", "question,question\n", ":1: the header is not UTF-8 or names a column twice"),
    ("d.csv", 'question,answer\n"a"b,1\n', ":2: invalid CSV"),
    ("d.parquet", b"PAR1 not", "d.parquet: not a Parquet file that can be read"),
    ("d.parquet", as_parquet([{"question": "a", "answer": "1"}, {"question": None, "answer": "1"}]), ":2: has no text in column"),
    ("d.jsonl.gz", b"plain", "d.jsonl.gz: not a whole .gz file"),
    ("d.jsonl.gz", gzip.compress(b"{}" * 99, mtime=0)[:-9], "d.jsonl.gz: not a whole .gz file"),
    ("d.jsonl.bz2", b"plain", "not a whole .bz2 file"), ("d.jsonl.xz", b"plain", "not a whole .xz file"),
    ("d.jsonl.zst", b"plain", "not a whole .zst file"),
    ("d.txt", "a", ":1: has no column 'question' for the question; it has ['text']"),
])  # fmt: skip
def test_bad_rows_are_named(name, content, message, write):
    assert message in refusal(write(name, content))


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
        ":5: not UTF-8 at byte 0 of the line",
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
    assert "every prompt is longer than data.max_prompt_tokens=2" in refusal(path, max_prompt_tokens=2)


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


def test_sources_are_drawn_by_weight(write):
    big = write("big.jsonl", jsonl([{"question": f"b{i}", "answer": i} for i in range(40)]))
    small = write("small.jsonl", jsonl([{"question": f"s{i}", "answer": i} for i in range(5)]))
    problems = load((SourceConfig(path=big, weight=3.0), small))
    assert problems.weights == (3.0, 1.0) and sorted(p.uid for p in problems) == list(range(45))
    batches = data.Batches(problems, 8, 3, problems.weights)
    drawn = [p for step in range(20) for p in batches[step]]
    assert Counter(p.source for p in drawn) == {0: 120, 1: 40}
    assert Counter(p.uid for p in drawn if p.source == 1) == dict.fromkeys(range(40, 45), 8)
    again = data.Batches(problems, 8, 3, problems.weights)
    assert again[17] == batches[17] and batches[17] != batches[18]
    twin = data.Batches(load((small, small)), 10, 3, (1.0, 1.0))[0]
    assert [p.uid for p in twin if p.source == 0] != [p.uid - 5 for p in twin if p.source == 1]
    alone = load(big)
    with_weights, without = data.Batches(alone, 8, 3, alone.weights), data.Batches(alone, 8, 3)
    assert all(with_weights[i] == without[i] for i in range(9))


def test_remote_files():
    import fsspec

    with fsspec.open("memory://bucket/d.jsonl.gz", "wb") as f:
        f.write(gzip.compress(jsonl(ROWS).encode()))
    assert len(load("memory://bucket/d.jsonl.gz")) == len(load("memory://bucket/*.gz")) == 3
    assert "'memory://bucket/e.jsonl' does not exist" in refusal("memory://bucket/e.jsonl")
    assert "no data file matches" in refusal("memory://bucket/*.csv")
    assert "cannot be read: ValueError: Protocol not known" in refusal("nowhere://bucket/d.jsonl")


def test_a_missing_extra_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert refusal("gs://bucket/d.jsonl").endswith("reading gs:// needs more: pip install 'grpojax[gcs]'")


def test_hub_datasets(write, tmp_path):
    write("train.jsonl", jsonl(ROWS))
    got = load(SourceConfig(path=f"hub:{tmp_path}", split="train"))
    assert [p.prompt for p in got] == [r["question"] for r in ROWS]
    message = refusal(SourceConfig(path=f"hub:{tmp_path}", split="test"))
    assert message.startswith(f"hub:{tmp_path}: cannot be loaded:") and "test" in message
    assert "write hub:openai/gsm8k" in refusal("openai/gsm8k")


def test_names_that_no_file_can_have():
    for name in ("a\0b", "~nobody-of-that-name/d.jsonl", "x" * 5000, "[", " "):
        assert "data file" in refusal(name)


# ----------------------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(("override", "message"), [
    ("data.train=3", "data.train=3 (from the command line): expected a string"),
    ("data.train=[]", "data: train: the list of sources is empty"),
    ("data.train=''", "data file '': the name is empty"),
    ("data.train={pth: x}", "data.train.pth: unknown key; did you mean 'path'?"),
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
    ("data.train=[x, {path: y, weigth: 2}]", "data.train.1.weigth: unknown key; did you mean 'weight'?"),
    ("data.eval=[{path: x, weight: 2}]", "data: eval: every problem is evaluated once; weights are for train"),
    ("data.columns=[a]", "data.columns=['a'] (from the command line): expected"),
    ("data.columns={tokens: a}", "columns.tokens: reward functions have an argument of that name"),
    ("data.columns={a: 3}", "data.columns.a=3 (from the command line): expected a string"),
    ("data.examples=[{prompt: a}]", "data.examples.0.completion is required"),
    ("data.examples=[{prompt: a, completion: 3}]", "data.examples.0.completion=3"),
    ("data.instruction=Answer this.", "instruction='Answer this.': must have {prompt} in it once"),
    ("data.instruction=3", "data.instruction=3 (from the command line): expected a string"),
    ("data.too_long=drp", "did you mean 'drop'?"),
    ("data.on_bad_row=skp", "did you mean 'skip'?"),
    ("data.on_bad_row=true", "data.on_bad_row=True (from the command line): expected 'error' or 'skip'"),
    ("data.max_prompt_tokens=0", "max_prompt_tokens=0: must be at least 1"),
    ("data.max_prompt_tokens=few", "data.max_prompt_tokens='few'"),
    ("data.exampels=[]", "data.exampels: unknown key; did you mean 'examples'?"),
    ("data.answer=null", "data.eval needs gold answers to judge by: give data.answer their column"),
    ("data.prompt=qestion", "arithmetic/train.jsonl:1: has no column 'qestion' for the question"),
    ("data.system=3", "data.system=3"),
    ("data.template=chta", "did you mean 'chat'?"),
])  # fmt: skip
def test_a_mistake_is_two_lines_and_status_two(override, message, tmp_path, capsys):
    assert cli.main(["train", QUICKSTART, f"run.dir={tmp_path / 'run'}", override]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") <= 2 and "Traceback" not in error


def test_every_option_survives_the_record_of_a_run():
    options = {
        "train": ["a.jsonl", {"path": "hub:a/b", "split": "train", "subset": "main", "weight": 2, "prompt": "p"}],
        "eval": {"path": "b.csv", "format": "csv"}, "columns": {"a": "b"}, "system": "s", "too_long": "refuse",
        "examples": [{"prompt": "p", "completion": "c"}], "instruction": "{prompt}!", "on_bad_row": "skip",
    }  # fmt: skip
    got = settings.build(DataConfig, options)
    assert settings.build(DataConfig, json.loads(json.dumps(settings.to_dict(got)))) == got
    assert got.train[1].weight == 2.0 and got.eval.format == "csv"


# --------------------------------------------------------------------------------------------------- prompts


@pytest.fixture(scope="module")
def tiny():
    return hf.load_tokenizer(data.locate("builtin:tiny"))


class Fake:
    """A tokenizer of letters with a chat template of our own; 1 is its BOS."""

    def __init__(self, template=None, bos=1, eos=2):
        self.chat_template, self.bos_token_id, self.eos_token_id = template, bos, eos

    def apply_chat_template(self, turns, *, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return self.chat_template(turns)

    def encode(self, text, *, add_special_tokens):
        first = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return first + [1 if c == "^" else ord(c) for c in text]


def dialog(turns):
    return "^" + "".join(f"<{t['role']}>{t['content']}" for t in turns) + "<assistant>"


def prompts_of(tokenizer, **options):
    tokenize = Tokenize(tokenizer, DataConfig(train="", **options))
    return tokenize.text("Q"), tokenize("Q")


def chatml(turns):
    return "".join(f"<{t['role'][0]}>{t['content']}" for t in turns) + "<a>"


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
    ([{"role": "user", "content": [{"type": "image"}]}], "no text in column 'content'"),
    ([{"role": "user", "content": 3}], "more than role and text"),
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


def test_a_chat_needs_a_template():
    with pytest.raises(UserError, match="needs a chat template"):
        Tokenize(Fake(), DataConfig(train=""))([{"role": "user", "content": "hi"}])


def test_a_chat_has_system_examples_and_instruction():
    examples = (Example(prompt="P", completion="C"),)
    text, ids = prompts_of(Fake(dialog), system="S", examples=examples, instruction=r"{prompt}, in \boxed{}")
    assert text == r"^<system>S<user>P, in \boxed{}<assistant>C<user>Q, in \boxed{}<assistant>"
    assert ids.count(1) == 1 and len(ids) == len(text)


def test_a_plain_prompt_has_examples_and_instruction():
    examples = (Example(prompt="P", completion=" C"),)
    text, ids = prompts_of(Fake(), examples=examples, instruction="Question: {prompt}\nAnswer:")
    assert text == "Question: P\nAnswer: C\n\nQuestion: Q\nAnswer:"
    assert ids[0] == 1 and ids.count(1) == 1 and len(ids) == 1 + len(text)
    assert prompts_of(Fake(dialog), template="plain") == ("Q", (1, ord("Q")))
    assert prompts_of(Fake(dialog, bos=None), template="plain") == ("Q", (ord("Q"),))


def test_two_beginnings_are_refused():
    with pytest.raises(UserError, match="two beginning-of-sequence tokens: 'Q'"):
        prompts_of(Fake(), instruction="^{prompt}")
    with pytest.raises(UserError, match="two beginning-of-sequence tokens"):
        prompts_of(Fake(lambda turns: "^" + dialog(turns)))
    with pytest.raises(UserError, match="two beginning-of-sequence tokens"):
        prompts_of(Fake(dialog), instruction="a^{prompt}")
    # GPT-2's one special token begins a text and ends a turn.
    assert prompts_of(Fake(lambda turns: dialog(turns) + "^", eos=1))[1].count(1) == 2
    with pytest.raises(UserError, match="two beginning-of-sequence tokens"):
        prompts_of(Fake(lambda turns: "^" + dialog(turns), eos=1))


def test_a_template_that_loses_something_is_refused():
    def without_system(turns):
        return dialog([t for t in turns if t["role"] != "system"])

    def no_system(turns):
        if turns[0]["role"] == "system":
            raise RuntimeError("System role not supported")
        return dialog(turns)

    with pytest.raises(UserError, match="loses the system's 'Be brief.'"):
        prompts_of(Fake(without_system), system="Be brief.")
    with pytest.raises(UserError, match="refuses: System role not supported"):
        prompts_of(Fake(no_system), system="Be brief.")
    assert prompts_of(Fake(no_system))[0] == "^<user>Q<assistant>"
    with pytest.raises(UserError, match="data.system needs a chat template"):
        prompts_of(Fake(), system="Be brief.")
    with pytest.raises(UserError, match="has no chat template; use 'plain'"):
        prompts_of(Fake(), template="chat")


def test_the_tiny_tokenizer(tiny):
    tokenize = Tokenize(tiny, DataConfig(train="", template="plain"))
    text = "Ann has 3 pens."
    assert tiny.decode(tokenize(text)) == text


def test_prompts_are_padded_on_the_right():
    got = data.to_prompts([data.Problem(i + 4, (5,) * n, "", None, {}) for i, n in enumerate((2, 3))], 3)
    np.testing.assert_array_equal(got.tokens, [[5, 5, 0], [5, 5, 5]])
    assert got.lengths.tolist() == [2, 3] and got.uids.tolist() == [4, 5]


@pytest.mark.skipif(not GSM8K, reason="GRPOJAX_GSM8K names no folder with train.jsonl and test.jsonl")
def test_gsm8k_is_three_lines(tmp_path, tiny):
    recipe = tmp_path / "gsm8k.yaml"
    recipe.write_text(f"""\
model: {{path: "builtin:tiny"}}
data:
  train: {GSM8K}/train.jsonl
  eval: {GSM8K}/test.jsonl
rewards: [{{name: math_answer}}]
rollout: {{prompts: 4, group: 4, max_tokens: 8}}
train: {{steps: 1}}
run: {{dir: {tmp_path}/run}}
""")
    got = config.load(recipe)
    with Rewards(got.make_rewards()) as rewards:
        train, test = (
            data.load_problems(path, letters, got.data, rewards.check_gold) for path in (got.data.train, got.data.eval)
        )
    assert (len(train) + train.dropped, len(test) + test.dropped) == (7473, 1319)
    assert train[0].gold == "72" and not train.skipped and all(len(p.ids) <= 512 for p in train)


# -------------------------------------------------------------------------------------------------- fuzzing

NAMES = [
    "d.jsonl",
    "d.json",
    "d.csv",
    "d.tsv",
    "d.parquet",
    "d.txt",
    "d.jsonl.gz",
    "d.csv.zst",
    "d.json.xz",
    "d.bz2",
    "d",
]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(["####", "#### 1", "\\frac{"])
)  # fmt: skip
CELLS = st.recursive(
    SCALARS, lambda t: st.one_of(st.lists(t, max_size=2), st.dictionaries(st.text(max_size=3), t, max_size=2)), max_leaves=4
)  # fmt: skip
COLUMNS = st.sampled_from(["question", "answer", "text", "tokens", "", "gold", "x"])
FUZZED = st.dictionaries(COLUMNS, CELLS, max_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def check_load(path, **options):
    """It gives problems that can be batched, or one `UserError` of a line."""
    try:
        got = load(path, max_prompt_tokens=5, **options)
    except UserError as error:
        assert str(error) and len(str(error).splitlines()) == 1
    else:
        assert all(p.prompt.strip() and 0 < len(p.ids) <= 5 for p in got)
        data.to_prompts(got, 5)


OPTIONS = st.fixed_dictionaries({}, optional={
    "on_bad_row": st.sampled_from(["error", "skip"]), "answer": st.sampled_from([None, "answer", "x"]),
    "prompt": st.sampled_from(["question", "text", "x"]), "columns": st.sampled_from([None, {}, {"a": "x"}]),
    "too_long": st.sampled_from(["drop", "refuse"]),
})  # fmt: skip
QUICK = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@limits(max_examples=200, **QUICK)
@given(st.sampled_from(NAMES), st.binary(max_size=200), OPTIONS)
def test_fuzz_bytes(folder, name, content, options):
    (folder / name).write_bytes(content)
    check_load(str(folder / name), **options)


@limits(max_examples=150, **QUICK)
@given(st.sampled_from(sorted(KINDS)), st.data(), OPTIONS)
def test_fuzz_damaged_files(folder, name, draw, options):
    """A file of each kind with some bytes changed, or cut off."""
    content = bytearray(KINDS[name])
    for _ in range(draw.draw(st.integers(0, 3))):
        content[draw.draw(st.integers(0, len(content) - 1))] = draw.draw(st.integers(0, 255))
    (folder / name).write_bytes(content[: draw.draw(st.integers(0, len(content)))])
    check_load(str(folder / name), **options)


@limits(max_examples=200, **QUICK)
@given(st.sampled_from(["d.jsonl", "d.json"]), st.lists(FUZZED, max_size=3), OPTIONS)
def test_fuzz_rows(folder, name, rows, options):
    text = jsonl(rows) if name == "d.jsonl" else json.dumps(rows)
    (folder / name).write_bytes(text.encode(errors="surrogatepass"))
    check_load(str(folder / name), **options)


@limits(max_examples=200, **QUICK)
@given(st.text(max_size=20), st.sampled_from(["", "builtin:", "~", "*", "memory://", "/"]))
def test_fuzz_paths(name, prefix):
    if "hub:" not in name and "://" not in name:
        check_load(prefix + name)


def test_kinds_are_all_read():
    assert set(readers.READERS) == set(SourceConfig.__annotations__["format"].__args__) - {"auto"}


def test_a_problem_twice_in_a_batch_goes_on_with_other_samples():
    one, other = (data.Problem(uid, (1, 2), "q", None, {}) for uid in (3, 4))
    prompts = data.to_prompts([one, other, one, one], 2, group=8)
    assert prompts.first_sample.tolist() == [0, 0, 8, 16]


def test_a_bad_row_of_a_table_is_skipped_and_long_cells_are_read(tmp_path):
    long = "q" * 200_000
    (tmp_path / "d.csv").write_text(f'question,answer\na,1\n"b"c,2\n{long},3\n')
    settings = DataConfig(train="", on_bad_row="skip", max_prompt_tokens=10**6)
    problems = data.load_problems(str(tmp_path / "d.csv"), Tokenize(Fake(), settings), settings)
    assert [p.prompt[:3] for p in problems] == ["a", "qqq"] and "d.csv:3: invalid CSV" in problems.skipped[0]
