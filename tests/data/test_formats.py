"""Every kind of file gives the same rows, and a bad row has a name."""

import gzip

import numpy as np
import pytest
from chat_tokenizer import Fake
from data_files import KINDS, ROWS, as_parquet, jsonl, load, read_rows, refusal

from grpojax import data
from grpojax.data import DataConfig, SourceConfig, Tokenize
from grpojax.data.formats import READERS


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_has_the_same_rows(name, write):
    got = load(write(name, KINDS[name]))
    assert [(p.prompt, p.gold, p.columns) for p in got] == [
        (r["question"], r["answer"].split("####")[-1].strip(), r) for r in ROWS
    ]
    assert [p.uid for p in got] == [0, 1, 2]  # the third repeats the first, and is another problem
    assert got.fingerprint == load(write("again.jsonl", jsonl(ROWS))).fingerprint
    assert read_rows(write(name, KINDS[name])) == ROWS


def test_kinds_are_all_read():
    assert set(READERS) == set(SourceConfig.__annotations__["format"].__args__) - {"auto"}


def test_a_format_can_be_said(write):
    assert len(load(SourceConfig(path=write("data.dump", jsonl(ROWS)), format="jsonl"))) == 3
    assert "d.dump: unknown file type" in refusal(write("d.dump", jsonl(ROWS)))
    got = load(write("d.txt", "one\n\ntwo\r\n"), prompt="text", answer=None)
    assert [(p.prompt, p.gold) for p in got] == [("one", None), ("two", None)]


@pytest.mark.parametrize(("name", "content", "message"), [
    ("d.jsonl", '{"question": "a", "answer": 1}\n{"question"', ":2: invalid JSON: Expecting ':' delimiter"),
    ("d.jsonl", '{"question": "a", "answer": 1}\n\n[1]', ":3: a row must be a JSON object, got list"),
    ("d.jsonl", b'{"question": "\xff"}', ":1: not UTF-8 at byte 14 of the line"),
    ("d.jsonl", '{"answer": 1}', ":1: has no column 'question' for data.prompt; it has ['answer']"),
    ("d.jsonl", '{"question": "a"}', ":1: has no column 'answer' for data.answer; it has ['question']"),
    ("d.jsonl", '{"question": 5, "answer": 1}', ":1: column 'question' is no text but 5"),
    ("d.jsonl", '{"question": null, "answer": 1}', ":1: has no text in column 'question', but None"),
    ("d.jsonl", '{"question": "a", "answer": [1]}', ":1: has no text in column 'answer', but [1]"),
    ("d.jsonl", '{"question": "a", "answer": true}', ":1: has no text in column 'answer', but True"),
    ("d.jsonl", '{"question": "a", "answer": NaN}', ":1: has no text in column 'answer', but nan"),
    ("d.jsonl", '{"question": "a", "answer": " #### "}', ":1: column 'answer' has an empty answer"),
    ("d.jsonl", '{"question": " ", "answer": 1}', ":1: has an empty prompt"),
    ("d.jsonl", '{"question": "\\ud800", "answer": 1}', ":1: column 'question' is not valid Unicode"),
    ("d.jsonl", '{"question": "a", "answer": 1, "tokens": 2}', ":1: column 'tokens' has the name of a reward"),
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
    ("d.csv", "question,question\n", ":1: the header names a column twice: 'question'"),
    ("d.csv", 'question,answer\n"a"b,1\n', ":2: invalid CSV"),
    ("d.parquet", b"PAR1 not", "d.parquet: not a Parquet file that can be read"),
    ("d.parquet", as_parquet([{"question": q, "answer": "1"} for q in ("a", None)]), ":2: has no text in column"),
    ("d.jsonl.gz", b"plain", "d.jsonl.gz: not a whole .gz file"),
    ("d.jsonl.gz", gzip.compress(b"{}" * 99, mtime=0)[:-9], "d.jsonl.gz: not a whole .gz file"),
    ("d.jsonl.bz2", b"plain", "not a whole .bz2 file"), ("d.jsonl.xz", b"plain", "not a whole .xz file"),
    ("d.jsonl.zst", b"plain", "not a whole .zst file"),
    ("d.txt", "a", ":1: has no column 'question' for data.prompt; it has ['text']"),
])  # fmt: skip
def test_bad_rows_are_named(name, content, message, write):
    assert message in refusal(write(name, content))


def test_a_bad_row_of_a_table_is_skipped_and_long_cells_are_read(tmp_path):
    long = "q" * 200_000
    (tmp_path / "d.csv").write_text(f'question,answer\na,1\n"b"c,2\n{long},3\n')
    settings = DataConfig(train="", on_bad_row="skip", max_prompt_tokens=10**6)
    problems = data.load_problems(str(tmp_path / "d.csv"), Tokenize(Fake(), settings), settings)
    assert [p.prompt[:3] for p in problems] == ["a", "qqq"] and "d.csv:3: invalid CSV" in problems.skipped[0]


def test_floats_of_parquet_are_what_was_written():
    """0.1 in 32 bits is 0.10000000149011612 in 64; also in lists and structs, and with 16 bits."""
    import io

    import pyarrow as pa
    from pyarrow import parquet

    single, half = pa.float32(), pa.float16()
    inside = pa.struct([("a", single), ("b", pa.list_(single))])
    kinds = {"one": single, "half": half, "many": pa.list_(single), "inside": inside, "double": pa.float64()}
    rows = [
        {"one": 0.1, "half": np.float16(0.1), "many": [0.7, None], "inside": {"a": 1 / 3, "b": [2.5]}, "double": 0.1},
        dict.fromkeys(kinds),
    ]
    out = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows, schema=pa.schema(kinds)), out)
    (_, first), (_, second) = READERS["parquet"](out.getvalue())
    assert first == {
        "one": 0.1, "half": 0.1, "many": [0.7, None], "inside": {"a": 0.33333334, "b": [2.5]}, "double": 0.1
    }  # fmt: skip
    assert second == dict.fromkeys(kinds)
