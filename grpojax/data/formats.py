"""Rows out of the bytes of a file of every common kind; a bad row is told apart."""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grpojax.host.errors import UserError

Row = dict[str, Any] | str  # a row, or what is wrong with it


def _zstd(content: bytes) -> bytes:
    import pyarrow

    return pyarrow.input_stream(io.BytesIO(content), compression="zstd").read()


_COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".bz2": bz2.decompress,
    ".xz": lzma.decompress,
    ".zst": _zstd,
}
_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".txt": "text",
}


def decompress(name: str, content: bytes) -> tuple[str, bytes]:
    """What kind of file a name says it is ("jsonl"), and its bytes; raises `UserError` where they are not whole."""
    stem = name.lower()
    for suffix, unpack in _COMPRESSED.items():
        if stem.endswith(suffix):
            stem = stem.removesuffix(suffix)
            try:
                content = unpack(content)
            except Exception as e:  # EOFError, OSError, zlib.error, LZMAError, ArrowInvalid, ...
                raise UserError(f"{name}: not a whole {suffix} file: {' '.join(str(e).split())[:120]}") from None
    return _KINDS.get(Path(stem).suffix, Path(stem).suffix), content


def _lines(content: bytes) -> Iterator[tuple[int, str | UnicodeDecodeError]]:
    """Numbered lines that are not blank."""
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        try:
            text = line.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError as e:
            yield number, e
            continue
        if text.strip():
            yield number, text


def _object(text: str) -> Row:
    """A JSON object, or what is wrong with it."""
    try:
        row = json.loads(text)
    except json.JSONDecodeError as e:
        return f"invalid JSON: {e.msg}"
    except (ValueError, RecursionError) as e:  # a number of thousands of digits; brackets a thousand deep
        return f"invalid JSON: {e}"
    return row if isinstance(row, dict) else f"a row must be a JSON object, got {type(row).__name__}"


def _jsonl(content: bytes) -> Iterator[tuple[int, Row]]:
    for number, line in _lines(content):
        yield (
            number,
            _object(line) if isinstance(line, str) else f"not UTF-8 at byte {line.start} of the line",
        )


def _text(content: bytes) -> Iterator[tuple[int, Row]]:
    for number, line in _lines(content):
        yield (
            number,
            {"text": line} if isinstance(line, str) else f"not UTF-8 at byte {line.start} of the line",
        )


def _json(content: bytes) -> Iterator[tuple[int, Row]]:
    """A list of objects; a file that starts otherwise is taken for JSON lines."""
    content = content.removeprefix(codecs.BOM_UTF8)
    if not content.lstrip().startswith(b"["):
        yield from _jsonl(content)
        return
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as e:
        line = content.count(b"\n", 0, e.start) + 1
        raise UserError(f":{line}: not UTF-8") from None
    decoder = json.JSONDecoder()

    def token(at: int) -> int:  # where the next one starts
        while text[at : at + 1].isspace():
            at += 1
        return at

    def invalid(at: int, why: str) -> UserError:
        line = text.count("\n", 0, at) + 1
        return UserError(f":{line}: invalid JSON: {why}")

    at, line, counted = token(text.index("[") + 1), 1, 0
    more = text[at : at + 1] != "]"
    while more:
        line, counted = line + text.count("\n", counted, at), at
        try:
            row, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as e:
            raise invalid(e.pos, e.msg) from None
        except (ValueError, RecursionError) as e:  # as in `_object`
            raise invalid(at, str(e)) from None
        yield line, row if isinstance(row, dict) else f"a row must be a JSON object, got {type(row).__name__}"
        at = token(at)
        if text[at : at + 1] not in (",", "]"):
            raise invalid(at, "expected , or ] after a row")
        more = text[at] == ","
        at = token(at + 1) if more else at
    if text[at + 1 :].strip():
        raise invalid(token(at + 1), "text after the list")


csv.field_size_limit(sys.maxsize)  # a long text in a cell is no mistake


def _table(delimiter: str) -> Callable[[bytes], Iterator[tuple[int, Row]]]:
    def read(content: bytes) -> Iterator[tuple[int, Row]]:
        # Bytes that are not UTF-8 become lone surrogates, which are found in their row.
        text = io.StringIO(content.decode("utf-8-sig", errors="surrogateescape"), newline="")
        rows = csv.reader(text, delimiter=delimiter, strict=True)
        names: list[str] | None = None
        while True:
            line = rows.line_num + 1
            try:
                cells = next(rows)
            except StopIteration:
                return
            except csv.Error as e:
                yield line, f"invalid CSV: {e}"
                continue
            if not cells:
                continue
            bad = next((c for c in cells if re.search("[\ud800-\udfff]", c)), None)
            if names is None:
                if bad is not None or len(set(cells)) < len(cells):
                    raise UserError(f":{line}: the header is not UTF-8 or names a column twice")
                names = cells
            elif bad is not None:
                yield line, "not UTF-8"
            elif len(cells) != len(names):
                yield line, f"{len(cells)} cells, but the header has {len(names)}"
            else:
                yield line, dict(zip(names, cells, strict=True))

    return read


def _parquet(content: bytes) -> Iterator[tuple[int, Row]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(io.BytesIO(content)) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as e:
        raise UserError(f": not a Parquet file that can be read: {' '.join(str(e).split())[:120]}") from None


READERS: dict[str, Callable[[bytes], Iterator[tuple[int, Row]]]] = {
    "jsonl": _jsonl,
    "json": _json,
    "csv": _table(","),
    "tsv": _table("\t"),
    "parquet": _parquet,
    "text": _text,
}
