"""Rows out of the bytes of a file of every common kind; a bad row is reported."""

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

import numpy as np

from grpojax.data.chats import is_message
from grpojax.host.errors import UserError

Row = dict[str, Any] | str  # a row, or what is wrong with it

# Said of bytes that are not UTF-8: which of the encodings with a byte for each letter it is, nobody can know.
ENCODING = "convert its encoding, as by iconv -f WINDOWS-1252 -t UTF-8"


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
    """The kind of file by its name ("jsonl"), and its bytes; raises `UserError` if they are not complete."""
    stem = name.lower()
    for suffix, unpack in _COMPRESSED.items():
        if stem.endswith(suffix):
            stem = stem.removesuffix(suffix)
            try:
                content = unpack(content)
            except Exception as e:  # EOFError, OSError, zlib.error, LZMAError, ArrowInvalid, ...
                raise UserError(f"{name}: not a whole {suffix} file: {' '.join(str(e).split())[:120]}") from None
    return _KINDS.get(Path(stem).suffix, Path(stem).suffix), content


_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16, whose mark its own begins with
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_OTHERS = {
    b"PK\3\4": "a zip archive, as Excel's .xlsx is; save the sheet as CSV",
    b"\x1f\x8b": "compressed; let the name end in .gz",
    b"PAR1": "Parquet; say format: parquet",
    b"%PDF": "a PDF",
}


def _utf8(content: bytes) -> bytes:
    """A file of text as UTF-8 without a byte order mark, where it says or shows which encoding it has.

    A file without a mark whose every other byte of the first line is zero is UTF-16. What is not UTF-8 stays as it is:
    which of the many encodings of a byte each it is cannot be known.
    """
    if (other := next((what for magic, what in _OTHERS.items() if content.startswith(magic)), None)) is not None:
        raise UserError(f": it is no text but {other}")
    mark, encoding = next(((m, e) for m, e in _MARKS if content.startswith(m)), (b"", "utf-8"))
    start = content[:200]
    if not mark and len(start) > 3:
        pairs = start[: len(start) // 2 * 2]
        zeros = pairs[::2].count(0), pairs[1::2].count(0)
        if zeros in ((0, len(pairs) // 2), (len(pairs) // 2, 0)):
            encoding = "utf-16-be" if zeros[0] else "utf-16-le"
    if encoding == "utf-8":
        return content.removeprefix(mark)
    try:
        return content[len(mark) :].decode(encoding).encode()
    except UnicodeError as e:
        raise UserError(f": not whole {encoding.upper()}, which its first bytes say it is: {e}"[:200]) from None


def _lines(content: bytes) -> Iterator[tuple[int, str | UserError]]:
    """Numbered lines that are not blank; for one that is no text an error that says why."""
    for number, line in enumerate(_utf8(content).split(b"\n"), 1):
        try:
            text = line.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError as e:
            yield number, UserError(f"not UTF-8 at byte {e.start} of the line; {ENCODING}")
            continue
        if "\0" in text:
            yield number, UserError(f"a NUL byte at character {text.index(chr(0)) + 1} of the line; take it out")
        elif text.strip():
            yield number, text


class _Twice(ValueError):
    """A key that an object has twice: only the last of its values would be read."""


def _keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise _Twice(f"the key {twice[:60]!r} is there twice; take one out")
    return found


def _object(text: str) -> Row:
    """A JSON object, or what is wrong with it."""
    try:
        row = json.loads(text, object_pairs_hook=_keys_once)
    except json.JSONDecodeError as e:
        return f"invalid JSON: {e.msg}"
    except (ValueError, RecursionError) as e:  # a number of thousands of digits; brackets a thousand deep
        return f"invalid JSON: {e}"
    return _as_row(row)


def _as_row(value: Any) -> Row:
    return value if isinstance(value, dict) else f"a row must be a JSON object, got {type(value).__name__}"


def _jsonl(content: bytes) -> Iterator[tuple[int, Row]]:
    first = True
    for number, line in _lines(content):
        row = _object(line) if isinstance(line, str) else str(line)
        if first and (isinstance(row, str) or _has_columns(row)):
            _check_layout(content)
        first = False
        yield number, row


def _check_layout(content: bytes) -> None:
    """Raises `UserError` for JSON of another layout than a row on each line."""
    text = _utf8(content).decode("utf-8", errors="replace").lstrip()
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):  # the line's own error says more
        return
    alone = not text[end:].strip()
    if alone and isinstance(value, list) and value:
        raise UserError(": it is a JSON list, and no rows on lines; say format: json, or let the name end in .json")
    if alone and isinstance(value, dict) and _has_columns(value):
        columns = ", ".join(map(repr, list(value)[:3]))
        raise UserError(
            f": it is one object of columns ({columns}), and no rows; convert with pandas: "
            'read_json(FILE).to_json(NEW_FILE, orient="records", lines=True)'
        )
    inside = [key for key, x in value.items() if _are_rows(x)] if isinstance(value, dict) else []
    if alone and "\n" in text.rstrip() and inside:
        key = inside[0] if re.fullmatch(r"[A-Za-z_]\w*", inside[0], re.ASCII) else json.dumps(inside[0])
        raise UserError(f": it is one object with rows in {inside[0]!r}; take them out: jq -c '.{key}[]' FILE > NEW")
    if isinstance(value, dict) and "\n" in text[:end].rstrip():
        raise UserError(": its JSON objects are over several lines; write each on one line: jq -c . FILE > NEW.jsonl")


def _are_rows(value: Any) -> bool:
    """Whether a value is a list of objects, and no chat."""
    return isinstance(value, list) and value != [] and all(isinstance(x, dict) and not is_message(x) for x in value)


def _has_columns(value: dict[str, Any]) -> bool:
    """Whether an object has a list for each column, or as pandas writes it, an object of numbered values."""
    columns = list(value.values())
    if columns and all(isinstance(c, dict) and c and all(key.isdigit() for key in c) for c in columns):
        return True
    listed = all(isinstance(c, list) and c and not any(isinstance(x, dict) for x in c) for c in columns)
    return listed and len(columns) > 1 and len({len(c) for c in columns}) == 1


def _text(content: bytes) -> Iterator[tuple[int, Row]]:
    for number, line in _lines(content):
        yield number, {"text": line} if isinstance(line, str) else str(line)


def _json(content: bytes) -> Iterator[tuple[int, Row]]:
    """A list of objects; a file that starts otherwise is taken for JSON lines."""
    content = _utf8(content)
    if not content.lstrip().startswith(b"["):
        yield from _jsonl(content)
        return
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as e:
        line = content.count(b"\n", 0, e.start) + 1
        raise UserError(f":{line}: not UTF-8; {ENCODING}") from None
    decoder, plain = json.JSONDecoder(object_pairs_hook=_keys_once), json.JSONDecoder()

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
        wrong = ""
        try:
            try:
                row, at = decoder.raw_decode(text, at)
            except _Twice as e:
                wrong = f"invalid JSON: {e}"
                row, at = plain.raw_decode(text, at)
        except json.JSONDecodeError as e:
            raise invalid(e.pos, e.msg) from None
        except (ValueError, RecursionError) as e:  # as in `_object`
            raise invalid(at, str(e)) from None
        yield line, wrong or _as_row(row)
        at = token(at)
        if text[at : at + 1] not in (",", "]"):
            raise invalid(at, "expected , or ] after a row")
        more = text[at] == ","
        at = token(at + 1) if more else at
    if text[at + 1 :].strip():
        raise invalid(token(at + 1), "text after the list")


csv.field_size_limit(sys.maxsize)  # a long text in a cell is no mistake


_DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}


def _delimiter(text: str, given: str) -> tuple[str, int]:
    """What separates the cells of a table, and how many characters stand before its header.

    A first line ``sep=;``, which Excel writes, says it. Else it is that of the kind of file, unless the header has none
    of those and one of another.
    """
    first = text.split("\n", 1)[0]
    if found := re.fullmatch(r'"?sep=(.)"?\r?', first):
        return found[1], len(first) + 1
    header = re.search(r"[^\r\n]*\S[^\r\n]*", text)
    if header is not None and given not in header[0]:
        for other in _DELIMITERS:
            cells = next(csv.reader([header[0]], delimiter=other))
            if len(cells) > 1 and all(re.fullmatch(r"[\w .-]*", cell) for cell in cells):
                return other, 0
    return given, 0


def _table(given: str) -> Callable[[bytes], Iterator[tuple[int, Row]]]:
    def read(content: bytes) -> Iterator[tuple[int, Row]]:
        # Bytes that are not UTF-8 become lone surrogates, which are found in their row.
        text = _utf8(content).decode("utf-8", errors="surrogateescape")
        delimiter, skipped = _delimiter(text, given)
        rows = csv.reader(io.StringIO(text[skipped:], newline=""), delimiter=delimiter, strict=True)
        names: list[str] | None = None
        while True:
            line = rows.line_num + 1 + bool(skipped)
            try:
                cells = next(rows)
            except StopIteration:
                return
            except csv.Error as e:
                yield line, f"invalid CSV: {e}"
                continue
            if not cells:
                continue
            not_utf8 = any(re.search("[\ud800-\udfff]", c) for c in cells)
            if names is None:
                names = _header(cells, line, not_utf8)
            elif not_utf8:
                yield line, f"not UTF-8; {ENCODING}"
            elif any("\0" in c for c in cells):
                yield line, f"a NUL byte in {next(c for c in cells if chr(0) in c)[:60]!r}; take it out"
            elif len(cells) != len(names):
                hint = f"{_DELIMITERS.get(delimiter, repr(delimiter))} in a cell need quotes around it"
                yield line, f"{len(cells)} cells, but the header has {len(names)}; {hint}"
            else:
                yield line, _named(names, cells)

    return read


def _header(cells: list[str], line: int, not_utf8: bool) -> list[str]:
    names = [c.strip() for c in cells]
    if not_utf8:
        raise UserError(f":{line}: the header is not UTF-8; {ENCODING}")
    if any("\0" in name for name in names):
        raise UserError(f":{line}: the header has a NUL byte; is the file UTF-16 without its mark, or no table?")
    if twice := sorted({name for name in names if name and names.count(name) > 1}):
        raise UserError(f":{line}: the header names a column twice: {twice[0]!r}")
    return names


def _named(names: list[str], cells: list[str]) -> Row:
    """A row less the columns without a name: an index at the beginning, and empty cells."""
    for place, (name, value) in enumerate(zip(names, cells, strict=True)):
        if not name and place and value.strip():
            return f"the cell {value[:60]!r} is in a column without a name; name it in the header"
    return {name: value for name, value in zip(names, cells, strict=True) if name}


def _parquet(content: bytes) -> Iterator[tuple[int, Row]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(io.BytesIO(content)) as file:
            names = file.schema_arrow.names
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise UserError(f": it has two columns {twice!r}; rename one, or take it out")
            number = 0
            for batch in file.iter_batches():
                for row in arrow_rows(batch):
                    number += 1
                    yield number, row
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as e:
        raise UserError(f": not a Parquet file that can be read: {' '.join(str(e).split())[:120]}") from None


def arrow_rows(batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of a batch or a table of Arrow."""
    for row in batch.to_pylist():
        yield {name: _shortest(x, batch.schema.field(name).type) for name, x in row.items()}


def _shortest(value: Any, kind: Any) -> Any:
    """A value of Arrow whose floats of 16 or 32 bits are what was written: 0.1, and not 0.10000000149011612."""
    from pyarrow import types

    if value is None or not kind.num_fields and not types.is_floating(kind):
        return value
    if types.is_float32(kind) or types.is_float16(kind):
        return float(str(np.dtype(kind.to_pandas_dtype()).type(value)))
    if types.is_struct(kind):
        return {name: _shortest(x, kind.field(name).type) for name, x in value.items()}
    if types.is_map(kind):
        return [(_shortest(k, kind.key_type), _shortest(x, kind.item_type)) for k, x in value]
    if hasattr(kind, "value_type") and isinstance(value, list):
        return [_shortest(x, kind.value_type) for x in value]
    return value


READERS: dict[str, Callable[[bytes], Iterator[tuple[int, Row]]]] = {
    "jsonl": _jsonl,
    "json": _json,
    "csv": _table(","),
    "tsv": _table("\t"),
    "parquet": _parquet,
    "text": _text,
}
