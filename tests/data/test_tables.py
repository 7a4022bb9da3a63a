"""Tables as programs save them: read where the meaning is certain, else refused with the cause."""

import codecs
import csv
import io
import json
import random

import pyarrow
import pytest
from data_files import as_csv, jsonl, load, read_rows, refusal
from pyarrow import parquet

ROW = {"question": "What is 4 + 4?", "answer": "8"}
TWICE = io.BytesIO()
parquet.write_table(pyarrow.table([["a"], ["1"], ["2"]], names=["question", "answer", "answer"]), TWICE)


@pytest.mark.parametrize(("name", "content"), [
    ("d.csv", "question;answer\nWhat is 4 + 4?;8\n"), ("d.csv", "sep=,\r\nquestion,answer\r\nWhat is 4 + 4?,8\r\n"),
    ("d.csv", '"sep=;"\nquestion;answer\nWhat is 4 + 4?;8\n'), ("d.csv", "question|answer\nWhat is 4 + 4?|8"),
    ("d.csv", "question\tanswer\nWhat is 4 + 4?\t8\n"), ("d.tsv", "question,answer\nWhat is 4 + 4?,8\n"),
    ("d.csv", ",question,answer\n0,What is 4 + 4?,8\n"), ("d.csv", "question,answer,,\nWhat is 4 + 4?,8,,\n"),
    ("d.csv", "question, answer \nWhat is 4 + 4?,8"), ("d.csv", '"question";"answer"\n"What is 4 + 4?";"8"'),
    ("d.csv", "question\tanswer\r\nWhat is 4 + 4?\t8\r\n".encode("utf-16")),
    ("d.csv", codecs.BOM_UTF16_BE + "question,answer\nWhat is 4 + 4?,8\n".encode("utf-16-be")),
    ("d.csv", "question,answer\nWhat is 4 + 4?,8\n".encode("utf-16-le")), ("d.jsonl", jsonl([ROW]).encode("utf-16")),
    ("d.json", f"[{jsonl([ROW])}]".encode("utf-32")),
])  # fmt: skip
def test_what_is_certain_is_read(write, name, content):
    assert read_rows(write(name, content)) == [ROW]


@pytest.mark.parametrize(("name", "content", "cause"), [
    ("d.csv", "question,answer\na,1\nWhat is 4\0 + 4?,8\n", ":3: a NUL byte in 'What is 4"),
    ("d.csv", "quest\0ion,answer\nWhat is 4 + 4?,8\n", ":1: the header has a NUL byte"),
    ("d.csv", "question,answer\nWas heißt 4 + 4?,8\n".encode("latin-1"),
     ":2: not UTF-8; convert its encoding, as by iconv"),
    ("d.csv", "Größe,question,answer\n".encode("cp1252"), ":1: the header is not UTF-8; convert its encoding"),
    ("d.csv", "question,answer\na,1\n\n,2\n", ":4: has an empty prompt"),
    ("d.csv", "question,answer\na,\n", ":2: column 'answer' has an empty answer"),
    ("d.csv", "question;answer\nWhat; is?;8\n", ":2: 3 cells, but the header has 2; semicolons in a cell need quotes"),
    ("d.csv", "sep=;\nquestion,answer\na,8\n", 
     ":3: has no column 'question' for data.prompt; it has ['question,answer']"),
    ("d.csv", "question,answer,\na,b,8\n", ":2: the cell '8' is in a column without a name"),
    ("d.csv", ",question,answer\n0,a,nan\n", ":2: column 'answer' has 'nan', which is no answer"),
    ("d.csv", "question,answer\na,8\n".encode("utf-16")[:-1], ": not whole UTF-16-LE, which its first bytes say it is"),
    ("d.csv", b"PK\3\4 a sheet", ": it is no text but a zip archive, as Excel's .xlsx is; save the sheet as CSV"),
    ("d.jsonl", b"\x1f\x8b\x08", ": it is no text but compressed; let the name end in .gz"),
    ("d.jsonl", '{"question": "a\0b"}', ":1: a NUL byte at character 16 of the line; take it out"),
    ("d.jsonl", '{"question": "a", "answer": 1, "answer": 2}', ":1: invalid JSON: the key 'answer' is there twice"),
    ("d.json", '[{"question": "a", "answer": 1},\n{"b": {"x": 1, "x": 1}}]', ":2: invalid JSON: the key 'x' is there"),
    ("d.json", '[{"x": {"a": 1, "a": 1}, "b"}]', ":1: invalid JSON: Expecting ':' delimiter"),
    ("d.jsonl", json.dumps([ROW], indent=1), ": it is a JSON list, and no rows on lines; say format: json"),
    ("d.jsonl", json.dumps([ROW]), ": it is a JSON list, and no rows on lines; say format: json"),
    ("d.jsonl", json.dumps(ROW, indent=1) + json.dumps(ROW, indent=1), ": its JSON objects are over several lines;"),
    ("d.jsonl", json.dumps({"version": "1", "data": [ROW]}, indent=1),
     ": it is one object with rows in 'data'; take them out: jq -c '.data[]'"),
    ("d.jsonl", json.dumps({"tags": ["x"], "my-rows": [ROW]}, indent=1),
     ": it is one object with rows in 'my-rows'; take them out: jq -c '.\"my-rows\"[]'"),
    ("d.jsonl", json.dumps({"messages": [{"role": "user", "content": "a"}], "answer": "1"}, indent=1),
     ": its JSON objects are over several lines;"),
    ("d.json", '{"question": ["a"], "answer": ["1"]}', ": it is one object of columns ('question', 'answer'), and no"),
    ("d.json", json.dumps({"answer": {"0": "1", "1": "2"}}, indent=1), ": it is one object of columns ('answer'), and"),
    ("d.parquet", TWICE.getvalue(), ": it has two columns 'answer'; rename one, or take it out"),
])  # fmt: skip
def test_the_cause_is_named(write, name, content, cause):
    assert f"{name}{cause}" in refusal(write(name, content))


def test_a_row_with_a_key_twice_can_be_skipped_and_a_chat_is_no_table(write):
    twice = '{"question": "b", "answer": 1, "answer": 2}'
    got = load(write("d.json", f"[{json.dumps(ROW)}, {twice}, {json.dumps(ROW)}]"), on_bad_row="skip")
    assert [p.prompt for p in got] == [ROW["question"]] * 2
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "add"}]}
    assert read_rows(write("d.jsonl", json.dumps(chat))) == [chat]


def test_a_number_of_a_table_is_an_answer(write):
    got = load(write("d.csv", ",question,answer\n0,a,8.0\n1,b,\n2,c,1e3\n"), on_bad_row="skip")
    assert [(p.prompt, p.gold, p.columns) for p in got] == [
        ("a", "8.0", {"question": "a", "answer": "8.0"}), ("c", "1e3", {"question": "c", "answer": "1e3"})
    ]  # fmt: skip
    assert got.skipped[0].endswith("d.csv:3: column 'answer' has an empty answer; set data.on_bad_row=skip")


def test_any_table_in_any_encoding_with_any_delimiter(write):
    draw = random.Random(0)
    for n in range(60):
        letters = "abz é中,;\t|\"'\n=0.5"
        cells = ["".join(draw.choices(letters, k=9)).strip() + "x" for _ in range(6)]
        rows = [{"question": cells[i], "answer": cells[i + 1]} for i in range(0, 6, 2)]
        delimiter = draw.choice(",;\t|")
        text = as_csv(rows, delimiter)
        if draw.random() < 0.3:
            text = f"sep={delimiter}\r\n{text}"
        if draw.random() < 0.3:
            out = io.StringIO()
            csv.writer(out, delimiter=delimiter).writerows(
                [["", "question", "answer"], *([i, *r.values()] for i, r in enumerate(rows))]
            )
            text = out.getvalue()
        content = text.encode(draw.choice(["utf-8", "utf-8-sig", "utf-16", "utf-32"]))
        assert read_rows(write(f"d{n}.{draw.choice(['csv', 'tsv'])}", content)) == rows
