"""The same three rows as files of every kind, and a short way to load one."""

import bz2
import csv
import gzip
import io
import json
import lzma

import pyarrow
import pytest
from pyarrow import parquet

from grpojax import data
from grpojax.data.readers import open_source
from grpojax.host.errors import UserError

ROWS = [
    {"question": "1+1=", "answer": "2"},
    {"question": 'a, "b"\nç', "answer": "so #### 3"},
    {"question": "1+1=", "answer": "2"},
]


def letters(question):
    return tuple(ord(c) % 250 for c in question)


def load(path, check_gold=None, **options):
    return data.load_problems(path, letters, data.DataConfig(train="", **options), check_gold)


def refusal(path, **options):
    with pytest.raises(UserError) as error:
        load(path, **options)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def read_rows(path):
    """The rows of a file as they stand there; each is valid."""
    return [row for _, row in open_source(data.SourceConfig(path=path))]


def jsonl(rows):
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)


def as_csv(rows, delimiter=","):
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def as_parquet(rows):
    out = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


def zstd(content):
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
