"""Search in a corpus of our own by BM25. Runs offline; needs the extra ``search``."""

import contextlib
import functools
import logging
from typing import Any

from grpojax.data.readers import SourceConfig, open_source
from grpojax.host.errors import UserError

with contextlib.suppress(ImportError):  # here, so that a worker has it before its limits of time and memory hold
    import bm25s  # pyrefly: ignore[missing-import]

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it tells of each index

Passages = tuple[tuple[str, str], ...]  # title, text


class Search:
    """Finds passages of a corpus: an environment with one tool.

    Args:
      corpus: a file, a glob or a URL of rows, in a format that ``data.train`` takes; of a text file each line.
      top: passages that a search shows.
      text: the rows' column with the passage.
      title: the rows' column with its title, where they have one.
      most_characters: of a passage; what is longer is cut.
    """

    deterministic = True
    stateless = True

    def __init__(
        self, corpus: str, top: int = 3, text: str = "text", title: str = "title", most_characters: int = 1000
    ):
        self._passages, self._index = _indexed(corpus, text, title)
        self._top, self._most = top, most_characters

    def reset(self, **columns: object) -> None:
        """Nothing: the corpus is the same for all."""

    def search(self, query: str) -> str:
        """Searches for passages that have the words of a query.

        Args:
            query: words to look for
        """
        words = bm25s.tokenize([query], stopwords="en", show_progress=False, return_ids=False)
        if not words[0]:
            return "Nothing was found."
        top = min(self._top, len(self._passages))
        found, scores = self._index.retrieve(words, k=top, show_progress=False)
        shown = [self._shown(int(i)) for i, score in zip(found[0], scores[0], strict=True) if score > 0]
        return "\n\n".join(f"[{n}] {text}" for n, text in enumerate(shown, 1)) or "Nothing was found."

    def _shown(self, index: int) -> str:
        title, text = self._passages[index]
        cut = text if len(text) <= self._most else f"{text[: self._most]} ..."
        return f"{title}: {cut}" if title else cut


@functools.cache
def _indexed(corpus: str, text: str, title: str) -> tuple[Passages, Any]:
    """The passages of a corpus and their index, made once in each process."""
    if "bm25s" not in globals():
        raise UserError("the environment search needs the package bm25s: pip install 'grpojax[search]'")
    passages: list[tuple[str, str]] = []
    for where, row in open_source(SourceConfig(path=corpus)):
        if isinstance(row, str):  # it cannot be read
            raise UserError(f"{where}: {row}")
        if not isinstance(row.get(text), str):
            raise UserError(f"{where}: no text in column {text!r}; it has {', '.join(map(str, row))}")
        passages.append((str(row.get(title) or ""), row[text]))
    if not passages:
        raise UserError(f"{corpus}: it has no passages")
    words = bm25s.tokenize([f"{a}\n{b}" for a, b in passages], stopwords="en", show_progress=False)
    index = bm25s.BM25()
    index.index(words, show_progress=False)
    return tuple(passages), index
