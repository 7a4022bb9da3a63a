"""Where rows come from: files by name or glob, local or remote, the package's own, and datasets of the hub."""

import dataclasses
import glob
import itertools
import logging
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from etils import epath

from grpojax import extension
from grpojax.data.formats import READERS, Row, arrow_rows, decompress
from grpojax.host import files
from grpojax.host.errors import UserError, require

BUILTIN, HUB = "builtin:", "hub:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of problems. A path alone may stand for it.

    Attributes:
      path: a file, a glob such as ``train/*.jsonl.gz``, ``gs://bucket/file``, a folder that
        ``datasets.Dataset.save_to_disk`` wrote, ``hub:owner/name`` for a dataset of the Hugging Face hub, or
        ``builtin:name`` for a file in the package. Generated problems are of extensions: ``reasoning:sums``,
        ``reasoning:stories`` and ``reasoning:tallies``, and ``reasoning_gym:family`` for a family of that package.
        ``grid:frozen_lake`` are lakes to cross, ``facts:questions`` questions about invented facts, which are in
        ``facts:passages``.
      format: format of the files: "jsonl", "json" (a list of objects), "csv", "tsv", "parquet" or "text" (one prompt
        per line, in the column ``text``). "auto" goes by the file's ending, before ``.gz``, ``.bz2``, ``.xz`` or
        ``.zst``.
      rows: ``[start, stop]`` takes only these rows, counted like a slice in Python: ``[0, -500]`` takes all but the
        last 500, ``[-500, null]`` the last 500.
      weight: share of the prompts that come from this source, relative to the other sources.
      subset, split: subset and split of a hub dataset.
      options: options of generated problems, such as ``{size: 500, seed: 1}``.
      prompt: column with the question, if it is not that of the section.
      answer: column with the reference answer, if it is not that of the section.
      level: level of all problems of this source, in place of a column (``data.level``).
    """

    path: str
    format: Literal["auto", "jsonl", "json", "csv", "tsv", "parquet", "text"] = "auto"
    rows: tuple[int, int | None] | None = None
    weight: float = 1.0
    subset: str | None = None
    split: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    prompt: str | None = None
    answer: str | None = None
    level: int | str | None = None

    def __post_init__(self):
        require(self, weight="(0, inf)")
        if self.rows is not None and not range(1 << 62)[slice(*self.rows)]:
            raise UserError(f"rows={list(self.rows)}: takes no row; [-500, null], for example, takes the last 500")
        hub = self.path.startswith(HUB)
        if hub and not self.split:
            raise UserError(f"split: which part of {self.path!r}? Such as split: train")
        if hub and self.format != "auto":
            raise UserError(f"format={self.format!r} is for files, not for {self.path!r}")
        for name in ("subset", "split"):
            if getattr(self, name) is not None and not hub:
                raise UserError(f"{name}={getattr(self, name)!r} is for hub:owner/name, not for {self.path!r}")
        if self.options and not self.generated:
            raise UserError(f"options={self.options!r} are for generated problems ({_made()}), not for {self.path!r}")
        if self.generated and self.format != "auto":
            raise UserError(f"format={self.format!r} is for files, not for {self.path!r}")

    @property
    def generated(self) -> bool:
        """Whether its problems are made, not read."""
        return self.path.partition(":")[0] in extension.words("problems")

    def content(self, question: str) -> str | None:
        """The content of a generated problem, the same for all ways to write it; None for files."""
        if not self.generated:
            return None
        prefix, _, name = self.path.partition(":")
        return f"{prefix} {extension.load('problems', prefix, self.path).content(name, question)}"


def _made() -> str:
    """The schemes of generated problems, for a message."""
    return ", ".join(f"{scheme}:" for scheme in extension.words("problems")) or "of extensions, and none has any here"


def locate(path: str) -> epath.Path:
    """A path as a user writes it, local or in a bucket.

    ``builtin:x`` is the package's own ``assets/x``, ``hub:owner/name`` the model of that name where the Hugging Face
    hub's cache has it. Raises `UserError` where it does not, and for schemes other than ``gs://``.
    """
    if path.startswith(BUILTIN):
        return files.path(str(resources.files("grpojax") / "assets" / path.removeprefix(BUILTIN)))
    if path.startswith(HUB):
        import huggingface_hub

        name = path.removeprefix(HUB)
        try:
            return epath.Path(huggingface_hub.snapshot_download(name, local_files_only=True))
        except huggingface_hub.errors.HFValidationError:
            raise UserError(f"{path}: {name!r} is no name of a model of the hub; write hub:owner/name") from None
        except (OSError, ValueError):
            raise UserError(f"{path}: the hub's cache does not have it; hf download {name}") from None
    return files.path(path)


def open_source(source: SourceConfig) -> Iterator[tuple[str, Row]]:
    """Yields (where, row) for each row of a source: ``where`` is file and line, or file and row number.

    A row that cannot be read is a text that says why. Raises `UserError` where nothing after it could be read.
    """
    rows = _all_rows(source)
    return rows if source.rows is None else iter(list(rows)[slice(*source.rows)])


def _all_rows(source: SourceConfig) -> Iterator[tuple[str, Row]]:
    if source.path.startswith(HUB):
        yield from _hub_rows(source)
        return
    if source.generated:
        yield from _generated_rows(source)
        return
    if source.format == "auto" and _is_saved(source.path):
        yield from _saved_rows(source.path)
        return
    for name, content in _files(source.path):
        kind, data = decompress(name, content)
        if source.format != "auto":
            kind = source.format
        elif kind not in READERS:
            raise UserError(f"{name}: unknown file type; set format to one of {', '.join(READERS)}")
        try:
            for line, row in READERS[kind](data):
                yield f"{name}:{line}", row
        except UserError as e:
            raise UserError(f"{name}{e}") from None


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
    except UserError as e:
        raise UserError(f"data file {e}") from None
    except (OSError, ValueError, RuntimeError, re.error) as e:  # no such user as in ~user
        raise UserError(f"data file {path!r}: {e}") from None
    if folder and (file / "dataset_dict.json").exists():
        splits = ", ".join(sorted(str(state.parent) for state in file.glob(f"*/{_SAVED}")))
        raise UserError(f"data file {path!r} is a datasets.DatasetDict; give one of its splits: {splits}")
    if folder:
        raise UserError(f"data file {path!r} is a folder; give its files, such as {path.rstrip('/')}/*.jsonl")
    if not files:
        raise UserError(f"no data file matches {path!r}")
    for name in files:
        try:
            yield name, locate(name).read_bytes()
        except FileNotFoundError:
            hub = f"; for a dataset of the hub write hub:{path}" if re.fullmatch(r"[\w.-]+/[\w-]+", path) else ""
            scheme = f"; generated problems are {_made()}" if re.match(r"\w\w+:", path) else ""
            raise UserError(f"data file {name!r} does not exist{hub}{scheme}") from None
        except (OSError, ValueError) as e:
            raise UserError(f"data file {name!r} cannot be read: {getattr(e, 'strerror', e)}") from None


def _remote(path: str) -> Iterator[tuple[str, bytes]]:
    with files.naming(path):
        names = files.matches(path) if glob.has_magic(path) else [path]
    if not names:
        raise UserError(f"no data file matches {path!r}")
    for name in names:
        with files.naming(name):
            content = files.read(name)
        yield name, content


def _hub_rows(source: SourceConfig) -> Iterator[tuple[str, Row]]:
    name = source.path.removeprefix(HUB)
    try:
        import datasets

        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # a line for each try
        loaded: Any = datasets.load_dataset(name, source.subset, split=source.split)
    except Exception as e:  # network, names, formats: datasets and the hub client have dozens
        raise UserError(f"{source.path}: cannot be loaded: {' '.join(str(e).split())[:300]}") from None
    yield from _arrow_rows(source.path, loaded)


def _arrow_rows(name: str, loaded: Any) -> Iterator[tuple[str, Row]]:
    """The rows of a `datasets.Dataset`."""
    tables = loaded.with_format("arrow").iter(1000)
    for number, row in enumerate(itertools.chain.from_iterable(map(arrow_rows, tables)), 1):
        yield f"{name} row {number}", row


_SAVED = "state.json"  # that a folder of `datasets.Dataset.save_to_disk` has


def _is_saved(path: str) -> bool:
    try:
        return "://" not in path and (locate(path) / _SAVED).is_file()
    except (OSError, ValueError, RuntimeError):  # no name of a file; `_files` says so
        return False


def _saved_rows(path: str) -> Iterator[tuple[str, Row]]:
    import datasets

    try:
        loaded: Any = datasets.load_from_disk(str(locate(path)))
    except Exception as e:  # as in `_hub_rows`
        why = " ".join(str(e).split())[:300]
        raise UserError(f"{path} has a {_SAVED}, and is no whole folder of save_to_disk: {why}") from None
    yield from _arrow_rows(path, loaded)


def _generated_rows(source: SourceConfig) -> Iterator[tuple[str, Row]]:
    prefix, _, name = source.path.partition(":")
    module = extension.load("problems", prefix, source.path)
    for number, row in enumerate(module.rows(name, source.options), 1):
        yield f"{source.path} row {number}", row
