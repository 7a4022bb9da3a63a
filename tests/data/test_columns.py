"""Columns by name, nested ones, and those that nobody needs to name."""

import json
import random

import pytest
from data_files import jsonl, load, refusal

from grpojax import data
from grpojax.data.columns import find

CHAT = [{"role": "user", "content": "4+4="}]
MATH = {
    "problem": "4+4=",
    "solution": r"It is \boxed{9}, no, \boxed{\frac{16}{2}}.",
    "level": "Level 2",
    "type": "Sums",
}


def found(write, row, **options):
    got = load(write("d.jsonl", jsonl([row])), **options)
    return got[0].prompt, got[0].gold, [line.split(": ", 1)[1].split(";")[0] for line in got.found]


def test_every_setting_of_a_column_takes_a_path(write):
    row = {
        "ask": {"text": CHAT},
        "judge": {"style": "rule", "truth": "8"},
        "info": {"hard": {"level": 3}, "tags": ["a", "b"]},
    }
    row |= {"info.x": 1, "as_text": '{"truth": "9"}'}
    path = write("d.jsonl", jsonl([row]))
    columns = {"kind": "judge.style", "tag": "info.tags.1", "x": "info.x"}
    got = load(path, prompt="ask.text", answer="judge.truth", level="info.hard.level", columns=columns)[0]
    assert (got.prompt, got.gold, got.level, got.columns) == ("4+4=", "8", "3", {"kind": "rule", "tag": "b", "x": 1})
    assert load(data.SourceConfig(path=path, prompt="ask.text", answer="as_text.truth"))[0].gold == "9"
    message = refusal(path, prompt="ask.text", answer="judge.gold")
    assert (
        "has no column 'judge.gold' for data.answer; it has [" in message
        and "'judge' has ['style', 'truth']" in message
    )
    assert "has no column 'info.y' for data.columns" in refusal(
        path, prompt="ask.text", answer="judge.truth", columns={"y": "info.y"}
    )


def test_any_path_leads_to_its_value():
    draw = random.Random(0)
    for _ in range(200):
        keys = [draw.choice(["a", "b", "c.d", "e.f.g"]) for _ in range(draw.randrange(1, 5))]
        row = value = draw.random()
        for key in reversed(keys):
            row = {key: row, "z": {key: 0}}
        assert find(row, ".".join(keys)) == value and find(row, ".".join([*keys, "no"]), "nothing") == "nothing"
        assert find(row | {".".join(keys): "literal"}, ".".join(keys)) == "literal"
        assert len(keys) == 1 or find({keys[0]: json.dumps(row[keys[0]])}, ".".join(keys)) == value


@pytest.mark.parametrize(("row", "want"), [
    (MATH, ("4+4=", r"\frac{16}{2}", 
     r"questions are the column 'problem', answers the last \boxed{} of the column 'solution'")),
    (MATH | {"answer": "8"}, ("4+4=", "8", "questions are the column 'problem', answers the column 'answer'")),
    ({"prompt": CHAT, "answer": "8"}, ("4+4=", "8", "questions are the column 'prompt', answers the column 'answer'")),
    ({"messages": CHAT, "answer": "8"}, ("4+4=", "8",
     "questions are the column 'messages', answers the column 'answer'")),
    ({"prompt": CHAT, "reward_model": {"ground_truth": "8"}, "data_source": "sums"},
     ("4+4=", "8", "questions are the column 'prompt', answers the column 'reward_model.ground_truth'")),
    ({"problem": "4+4=", "answer": "8", "messages": [*CHAT, {"role": "assistant", "content": "8"}]},
     ("4+4=", "8", "questions are the column 'problem', answers the column 'answer'")),
    ({"question": "4+4=", "answer": "So #### 8", "prompt": "other"}, ("4+4=", "8")),
])  # fmt: skip
def test_what_is_obviously_meant_is_found_and_said(write, row, want):
    assert found(write, row) == (*want[:2], list(want[2:]))


def test_what_is_named_stays(write):
    row = MATH | {"question": "1+1=", "answer": "2", "n": "3"}
    assert found(write, row) == ("1+1=", "2", [])
    assert found(write, row, prompt="problem")[:2] == ("4+4=", "2")
    assert found(write, row, prompt="problem", answer="n") == ("4+4=", "3", [])
    assert found(write, MATH | {"n": "3"}, answer="n")[:2] == ("4+4=", "3")
    assert found(write, MATH, answer=None)[:2] == ("4+4=", None)
    source = data.SourceConfig(path=write("d.jsonl", jsonl([row])), prompt="problem", answer="n")
    assert load(source)[0].gold == "3"
    assert "has no column 'question' for data.prompt" in refusal(write("d.jsonl", jsonl([MATH])), prompt="question")


@pytest.mark.parametrize("row", [
    {"prompt": CHAT, "messages": CHAT, "answer": "8"}, {"problem": "a", "prompt": "b", "answer": "8"},
    {"messages": [*CHAT, {"role": "assistant", "content": "8"}], "answer": "8"}, {"messages": "4+4=", "answer": "8"},
    {"prompt": 8, "answer": "8"},
])  # fmt: skip
def test_what_is_not_certain_is_the_error_with_the_columns(write, row):
    assert f"has no column 'question' for data.prompt; it has {sorted(row)}" in refusal(write("d.jsonl", jsonl([row])))
    row = {"question": "4+4=", "ground_truth": "8", "final_answer": "9"}
    assert "has no column 'answer' for data.answer; it has [" in refusal(write("d.jsonl", jsonl([row])))


def test_each_source_has_columns_of_its_own_and_they_are_noted(write):
    one, other = (
        write("a.jsonl", jsonl([MATH, MATH | {"solution": "8"}])),
        write("b.jsonl", jsonl([{"question": "a", "answer": "1"}])),
    )
    got = load((other, one), on_bad_row="skip")
    assert [(p.uid, p.gold) for p in got] == [
        (0, "1"),
        (1, r"\frac{16}{2}"),
    ] and "no \\boxed{} that closes" in got.skipped[0]
    config = data.DataConfig(train=(other, one))
    assert got.notes("train", config)[0].startswith(
        f"train data: {one}: questions are the column 'problem', answers the last"
    )
    assert data.read_questions(config) == {0: "a", 1: "4+4=", 2: "4+4="}
