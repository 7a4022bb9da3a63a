"""Answered questions: what a row must have, which tokens it becomes, and which prompts share an entry."""

import itertools
import json

import pytest
from chat_tokenizer import Fake, chatml

from grpojax import data
from grpojax.extensions.supervised.answered import AnsweredConfig, load_answered, read_answer, read_pair
from grpojax.host.errors import UserError
from grpojax.models import hf

END = 2


def chat(*contents, roles=("user", "assistant")):
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]}


def load(tmp_path, rows, *, template=None, bos=None, read=read_answer, group=1, **options):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = AnsweredConfig(train=str(tmp_path / "rows.jsonl"), **options)
    tokenize = data.Tokenize(Fake(template, bos=bos), config.questions())
    return load_answered(config.train, tokenize, config, read, end=END, group=group)


def texts(loaded):
    """Prompt and answers as text; the beginning of a sequence as ``^``, the end as ``$``."""

    def text(ids):
        return "".join({END: "$", 1: "^"}.get(i) or chr(i) for i in ids)

    return [(text(e.ids), [text(c) for c in e.completions]) for e in loaded.kept]


@pytest.mark.parametrize(("row", "want"), [
    (chat("Q", "A"), ("<u>Q<a>", ["A$"])),
    (chat("Be brief", "Q", " A\n", roles=("system", "user", "assistant")), ("<s>Be brief<u>Q<a>", [" A\n$"])),
    (chat("Q", "A", "R", "B", roles=("user", "assistant") * 2), ("<u>Q<a>A<u>R<a>", ["B$"])),
    ({"prompt": "Q", "completion": "A", "step": 3}, ("<u>Q<a>", ["A$"])),
    ({"prompt": chat("Q", "A")["messages"][:1], "completion": chat("Q", "A")["messages"][1:]}, ("<u>Q<a>", ["A$"])),
])  # fmt: skip
def test_rows_become_a_prompt_and_an_answer(tmp_path, row, want):
    assert texts(load(tmp_path, [row], template=chatml)) == [want]


def test_a_chat_of_one_question_needs_no_template(tmp_path):
    assert texts(load(tmp_path, [chat("Q", "A")])) == [("Q", ["A$"])]
    assert texts(load(tmp_path, [chat("Q", "A")], bos=1)) == [("^Q", ["A$"])]
    with pytest.raises(UserError, match="rows.jsonl:1: the prompt is a list of messages, which needs a chat template"):
        load(tmp_path, [chat("Q", "A", "R", "B", roles=("user", "assistant") * 2)])


def test_pairs(tmp_path):
    message = [{"role": "assistant", "content": "worse"}]
    rows = [{"prompt": "Q", "chosen": "A", "rejected": "B"}, {"prompt": "Q", "chosen": "A", "rejected": message}]
    assert texts(load(tmp_path, rows, read=read_pair)) == [("Q", ["A$", "B$"]), ("Q", ["A$", "worse$"])]
    rows = [{**chat("Be brief", "Q", roles=("system", "user")), "chosen": "A", "rejected": "B"}]
    assert texts(load(tmp_path, rows, read=read_pair, template=chatml)) == [("<s>Be brief<u>Q<a>", ["A$", "B$"])]


def test_answers_of_a_prompt_share_entries_in_the_order_they_came(tmp_path):
    rows = [{"prompt": q, "completion": a} for q, a in ["P1", "Q1", "P2", "P3", "R1", "P4", "P5", "Q2"]]
    assert texts(load(tmp_path, rows, group=2)) == [
        ("P", ["1$", "2$"]), ("Q", ["1$", "2$"]), ("P", ["3$", "4$"]), ("R", ["1$"]), ("P", ["5$"])
    ]  # fmt: skip
    loaded = load(tmp_path, rows, group=7)
    assert [len(e.completions) for e in loaded.kept] == [5, 2, 1] and [e.uid for e in loaded.kept] == [0, 1, 2]
    assert loaded.notes("train", AnsweredConfig(train="")) == ["train data: 8 answers to 3 prompts"]


def test_an_episode_has_the_tokens_of_one_that_was_played(tmp_path):
    tokenizer = hf.load_tokenizer(data.locate("builtin:caller"))
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "12 * 34"}}</tool_call>'
    row = chat("What is 12 * 34?", call, "408", " Answer: 408", roles=("user", "assistant", "tool", "assistant"))
    row["messages"][2]["name"] = "calculate"
    tool = {"type": "function", "function": {"name": "calculate", "parameters": {}}}
    asked, _, *rest = row["messages"]
    function = {"name": "calculate", "arguments": {"expression": "12 * 34"}}
    called = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    sharegpt = {"role": "function_call", "content": json.dumps(function)}
    rows = [row | {"tools": [tool]}, row | {"tools": json.dumps([tool])}, row | {"tools": None}]
    rows += [{"messages": [asked, call, *rest]} for call in (called, sharegpt)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = AnsweredConfig(train=str(tmp_path / "rows.jsonl"))
    loaded = load_answered(
        config.train, data.Tokenize(tokenizer, config.questions()), config, read_answer, end=tokenizer.eos_token_id
    )
    listed, written, bare, *structured = loaded.kept
    assert listed.ids == written.ids and listed.completions == written.completions == bare.completions
    assert [(e.ids, e.completions, e.turns) for e in structured] == [(bare.ids, bare.completions, bare.turns)] * 2
    question = "<|user|>What is 12 * 34?<|end|><|assistant|>"
    shown = [tokenizer.decode(e.ids) for e in (listed, bare)]
    assert shown == [f"<|system|>tools: calculate<|end|>{question}", question]
    tokenizer.chat_template = tokenizer.chat_template.replace("{{- '<tool_call>", "{{- '<think></think><tool_call>")
    tokenize = data.Tokenize(tokenizer, config.questions())
    without = load_answered(config.train, tokenize, config, read_answer, end=tokenizer.eos_token_id)
    assert [e.completions for e in without.kept] == [bare.completions] * 5
    some = "in messages if message.role != 'tool' -%}"
    tokenizer.chat_template = tokenizer.chat_template.replace("in messages -%}", some)
    with pytest.raises(UserError, match="rows.jsonl:1: the chat template does not write a tool's answer"):
        tokenize = data.Tokenize(tokenizer, config.questions())
        load_answered(config.train, tokenize, config, read_answer, end=tokenizer.eos_token_id)
    ids, (turns,) = listed.completions[0], listed.turns
    begins = [0, *itertools.accumulate(turns)]
    read = [tokenizer.decode(ids[a:b]) for a, b in itertools.pairwise(begins)]
    assert read == [f"{call}<|end|>", "<|tool|>408<|end|><|assistant|>", " Answer: 408<|end|>"]


@pytest.mark.parametrize(("row", "message"), [
    ({"question": "Q", "answer": "A"}, "has no column 'prompt' for the question; it has ['answer', 'question']"),
    ({"prompt": "Q"}, "column 'completion' has no text for the answer, but None; it has ['prompt']"),
    ({"prompt": "Q", "completion": 7}, "column 'completion' has no text for the answer, but 7"),
    ({"prompt": "Q", "completion": " \n"}, "the answer is empty"),
    ({"prompt": "", "completion": "A"}, "has an empty prompt"),
    (chat("Q", "A", roles=("user", "user")), "ends with the user's message; the assistant's must follow"),
    (chat("Q", "A", roles=("assistant", "assistant")), "does not end with the user's"),
    (chat("Q", "A", "6", roles=("user", "assistant", "tool")), "must alternate"),
    (chat("Q", "6", "A", roles=("user", "tool", "assistant")), "must alternate"),
    (chat("Q", "A", "B", roles=("user", "assistant", "assistant")), "must alternate"),
    (chat("Q", "A") | {"tools": "calculate"}, "column 'tools' is no list of JSON schemas, but 'calculate'"),
    (chat("Q", "A") | {"tools": [{}]}, "column 'tools': prompts show tools by a chat template, and there is none"),
    ({"messages": [{"role": "assistant", "content": "A"}]}, "is no chat of a question and an answer"),
    ({"messages": "Q"}, "is no chat of a question and an answer, but 'Q'"),
    ({"messages": [*chat("Q", "A")["messages"][:1], {"role": "assistant", "content": None, "tool_calls": []}]},
     "has a message without a text: its content is None"),
    ({"prompt": "Q", "completion": "\ud800"}, "not valid Unicode"),
])  # fmt: skip
def test_a_row_that_cannot_be_used_is_named(tmp_path, row, message):
    with pytest.raises(UserError) as e:
        load(tmp_path, [{"prompt": "fine", "completion": "A"}, row])
    assert "rows.jsonl:2: " in str(e.value) and message in str(e.value)
    loaded = load(tmp_path, [{"prompt": "fine", "completion": "A"}, row], on_bad_row="skip")
    assert texts(loaded) == [("fine", ["A$"])] and len(loaded.skipped) == 1


def test_a_pair_of_equals_teaches_nothing(tmp_path):
    with pytest.raises(UserError, match="the same text as chosen and as rejected"):
        load(tmp_path, [{"prompt": "Q", "chosen": "A", "rejected": "A"}], read=read_pair)


def test_lengths_count_the_end(tmp_path):
    rows = [{"prompt": "QQ", "completion": "123"}, {"prompt": "QQQ", "completion": "1"}]
    assert texts(load(tmp_path, rows, max_tokens=4)) == [("QQ", ["123$"]), ("QQQ", ["1$"])]
    loaded = load(tmp_path, rows, max_tokens=3)
    assert texts(loaded) == [("QQQ", ["1$"])] and loaded.dropped == 1
    assert load(tmp_path, rows, max_prompt_tokens=2).dropped == 1
    with pytest.raises(UserError, match="rows.jsonl:1: an answer has 4 tokens, over data.max_tokens=3"):
        load(tmp_path, rows, max_tokens=3, too_long="refuse")
    with pytest.raises(UserError, match="rows.jsonl:2: the prompt has 3 tokens, over data.max_prompt_tokens=2"):
        load(tmp_path, rows, max_prompt_tokens=2, too_long="refuse")
    with pytest.raises(UserError, match="no row can be used; 2 are over"):
        load(tmp_path, rows, max_tokens=1)


def test_columns_of_a_source_have_no_meaning_here():
    with pytest.raises(UserError, match="prompt and answer do not apply here"):
        AnsweredConfig(train=data.SourceConfig(path="x", prompt="question"))
    with pytest.raises(UserError, match="level=2: levels are of problems that are sampled"):
        AnsweredConfig(train=data.SourceConfig(path="x", level=2))


def test_questions_are_numbered_as_the_problems_of_a_run(tmp_path):
    """Bad rows count, sources go on from each other, and each may have its own column."""
    (tmp_path / "a.jsonl").write_text('{"question": "Q0", "answer": "1"}\n[7]\n{"question": "Q2", "answer": "1"}\n')
    turns = chat("A", "B", "C", roles=("user", "assistant", "user"))["messages"]
    (tmp_path / "b.jsonl").write_text(json.dumps({"chat": turns, "answer": "1"}) + "\n")
    both = (str(tmp_path / "a.jsonl"), data.SourceConfig(path=str(tmp_path / "b.jsonl"), prompt="chat"))
    config = data.DataConfig(train=both, on_bad_row="skip")
    questions = data.read_questions(config)
    assert questions == {0: "Q0", 2: "Q2", 3: turns}
    loaded = data.load_problems(config.train, data.Tokenize(Fake(chatml), config), config)
    assert [p.uid for p in loaded] == list(questions)
