"""Rows out of files of every common kind, local or remote, and out of hub datasets; a bad row is told apart."""

import bz2
import codecs
import csv
import dataclasses
import glob
import gzip
import io
import json
import logging
import lzma
import math
import re
import sys
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from grpojax.host.errors import UserError

BUILTIN, HUB = "builtin:", "hub:"

Row = dict[str, Any] | str  # a row, or what is wrong with it


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of problems; where there is nothing else to say, its path alone will do.

    Attributes:
      path: a file, a glob such as ``train/*.jsonl.gz``, ``gs://bucket/file``, ``hub:owner/name`` for a dataset of
        the Hugging Face hub, or ``builtin:name`` for a file in the package.
      format: of files: "jsonl", "json" (a list of objects), "csv", "tsv", "parquet", "text" (a prompt a line, in the
        column ``text``); "auto" goes by the name, less a ``.gz``, ``.bz2``, ``.xz`` or ``.zst`` at its end.
      weight: share of the prompts that come from here, relative to the other sources.
      subset, split: of a hub dataset.
      prompt, answer: columns, where they differ from those of the whole section.
    """

    path: str
    format: Literal["auto", "jsonl", "json", "csv", "tsv", "parquet", "text"] = "auto"
    weight: float = 1.0
    subset: str | None = None
    split: str | None = None
    prompt: str | None = None
    answer: str | None = None

    def __post_init__(self):
        if not 0 < self.weight < math.inf:
            raise UserError(f"weight={self.weight}: must be over 0")
        hub = self.path.startswith(HUB)
        if hub and not self.split:
            raise UserError(f"split: which part of {self.path!r}? Such as split: train")
        if hub and self.format != "auto":
            raise UserError(f"format={self.format!r} is for files, not for {self.path!r}")
        for name in ("subset", "split"):
            if getattr(self, name) is not None and not hub:
                raise UserError(f"{name}={getattr(self, name)!r} is for hub:owner/name, not for {self.path!r}")


def locate(path: str) -> Path:
    """A path as a user writes it; ``builtin:x`` is the package's own ``assets/x``."""
    if path.startswith(BUILTIN):
        return Path(str(resources.files("grpojax") / "assets" / path.removeprefix(BUILTIN)))
    return Path(path).expanduser()


def open_source(source: SourceConfig) -> Iterator[tuple[str, Row]]:
    """Yields (where, row) for each row of a source: ``where`` is file and line, or file and row number.

    A row that cannot be read is a text that says why. Raises `UserError` where nothing after it could be read.
    """
    if source.path.startswith(HUB):
        yield from _hub_rows(source)
        return
    for name, content in _files(source.path):
        kind, data = _decompress(name, content)
        if source.format != "auto":
            kind = source.format
        elif kind not in READERS:
            raise UserError(f"{name}: unknown kind of file; say data format: one of {', '.join(READERS)}")
        try:
            for line, row in READERS[kind](data):
                yield f"{name}:{line}", row
        except UserError as e:
            raise UserError(f"{name}{e}") from None


# ------------------------------------------------------------------------------------------------------ bytes


def _files(path: str) -> Iterator[tuple[str, bytes]]:
    if "://" in path:
        yield from _remote(path)
        return
    if not path.strip():
        raise UserError(f"data file {path!r}: the name is empty")
    try:
        file = locate(path)
        exists, folder = file.exists(), file.is_dir()
        files = [path]
        if glob.has_magic(path) and not exists:
            files = sorted(f for f in glob.glob(str(file), recursive=True) if Path(f).is_file())
    except (OSError, ValueError, RuntimeError, re.error) as e:  # a zero byte; no such user as in ~user
        raise UserError(f"data file {path!r}: {e}") from None
    if folder:
        raise UserError(f"data file {path!r} is a folder; give its files, such as {path.rstrip('/')}/*.jsonl")
    if not files:
        raise UserError(f"no data file matches {path!r}")
    for name in files:
        try:
            yield name, locate(name).read_bytes()
        except FileNotFoundError:
            hub = f"; for a dataset of the hub write hub:{path}" if re.fullmatch(r"[\w.-]+/[\w-]+", path) else ""
            raise UserError(f"data file {name!r} does not exist{hub}") from None
        except (OSError, ValueError) as e:
            raise UserError(f"data file {name!r} cannot be read: {getattr(e, 'strerror', e)}") from None


def _remote(path: str) -> Iterator[tuple[str, bytes]]:
    scheme = path.partition("://")[0]
    try:
        import fsspec

        system, inside = fsspec.core.url_to_fs(path)
        names = sorted(map(str, system.glob(inside))) if glob.has_magic(inside) else [inside]
        if not names:
            raise UserError(f"no data file matches {path!r}")
        for name in names:
            yield f"{scheme}://{name.lstrip('/')}", system.cat_file(name)
    except UserError:
        raise
    except ImportError as e:
        extra = "pip install 'grpojax[gcs]'" if scheme in ("gs", "gcs") else str(e)
        raise UserError(f"{path}: reading {scheme}:// needs more: {extra}") from None
    except FileNotFoundError:
        raise UserError(f"data file {path!r} does not exist") from None
    except Exception as e:  # each store has its own errors: credentials, network, permissions
        raise UserError(f"{path}: cannot be read: {type(e).__name__}: {' '.join(str(e).split())[:200]}") from None


def _zstd(content: bytes) -> bytes:
    import pyarrow

    return pyarrow.input_stream(io.BytesIO(content), compression="zstd").read()


_COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress, ".bz2": bz2.decompress, ".xz": lzma.decompress, ".zst": _zstd
}  # fmt: skip
_KINDS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
    ".txt": "text",
}  # fmt: skip


def _decompress(name: str, content: bytes) -> tuple[str, bytes]:
    """The kind of file that a name tells, and its bytes."""
    stem = name.lower()
    for suffix, decompress in _COMPRESSED.items():
        if stem.endswith(suffix):
            stem = stem.removesuffix(suffix)
            try:
                content = decompress(content)
            except Exception as e:  # EOFError, OSError, zlib.error, LZMAError, ArrowInvalid, ...
                raise UserError(f"{name}: not a whole {suffix} file: {' '.join(str(e).split())[:120]}") from None
    return _KINDS.get(Path(stem).suffix, Path(stem).suffix), content


# ------------------------------------------------------------------------------------------------------- rows


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
    "jsonl": _jsonl, "json": _json, "csv": _table(","), "tsv": _table("\t"), "parquet": _parquet, "text": _text
}  # fmt: skip


def _hub_rows(source: SourceConfig) -> Iterator[tuple[str, Row]]:
    name = source.path.removeprefix(HUB)
    try:
        import datasets

        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # a line for each try
        loaded: Any = datasets.load_dataset(name, source.subset, split=source.split)
    except Exception as e:  # network, names, formats: datasets and the hub client have dozens
        raise UserError(f"{source.path}: cannot be loaded: {' '.join(str(e).split())[:300]}") from None
    for number, row in enumerate(loaded, 1):
        yield f"{source.path} row {number}", dict(row)
