"""Tensorboard events of a run: local files, or one object every few minutes if the run is in a bucket."""

import itertools
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from grpojax.host import files

EVERY_S = 300.0  # a run that is killed may lose so much
FLUSH_S = 10.0  # or so much on a disk
_BINS = 1e-12 * 1.1 ** np.arange(774)  # tensorflow's, up to 1e20


class Board:
    """Takes events; the first creates the files.

    Args:
      folder: where they go.
      purge_step: events of this step and later ones no longer count; None keeps all.
      uploads: writes the files of a bucket.
    """

    def __init__(self, folder: epath.Path, purge_step: int | None, uploads: files.Uploads):
        self._folder, self._purge_step, self._uploads = folder, purge_step, uploads
        self._draft: tempfile.TemporaryDirectory[str] | None = None  # of what goes to a bucket
        self._writer: Events | None = None
        self._begun, self._numbers = 0.0, itertools.count()
        self._lock = threading.RLock()  # samples come from a thread of their own

    def add(self, write: Callable[["Events"], None]) -> None:
        """Calls ``write`` with the `Events`."""
        with self._lock:
            if self._draft is not None and time.monotonic() - self._begun > EVERY_S:
                self.close()
            if self._writer is None:
                self._begin()
            assert self._writer is not None
            write(self._writer)

    def _begin(self) -> None:
        place, suffix = str(self._folder), ""
        if files.in_bucket(self._folder):
            self._draft, self._begun = tempfile.TemporaryDirectory(), time.monotonic()
            place, suffix = self._draft.name, f".{next(self._numbers):04d}"
        self._writer = Events(place, self._purge_step, suffix)
        self._purge_step = None

    def close(self) -> None:
        """Ends the file."""
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        if self._draft is not None:
            with self._draft as folder:
                for file in sorted(Path(folder).iterdir()):
                    self._uploads.write(self._folder / file.name, file.read_bytes())
            self._draft = None


class Events:
    """A file of events, written in the caller's thread: the thread of tensorboardX's own writer ends where the clock
    jumps, and then its end waits for ever.

    Args:
      folder: where it goes.
      purge_step: earlier events of this step and later ones no longer count; None keeps all.
      suffix: end of the file's name.
    """

    def __init__(self, folder: str, purge_step: int | None, suffix: str):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog  # pyrefly: ignore

        os.makedirs(folder, exist_ok=True)
        self._file, self._flushed = EventsWriter(os.path.join(folder, "events"), suffix), -math.inf
        if purge_step is not None:
            self._add(purge_step, session_log=SessionLog(status=SessionLog.START))

    def _add(self, step: int, **what: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event  # pyrefly: ignore

        self._file.write_event(Event(wall_time=time.time(), step=step, **what))
        if time.monotonic() - self._flushed > FLUSH_S:
            self._file.flush()
            self._flushed = time.monotonic()

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """A number of a step."""
        from tensorboardX import summary

        self._add(step, summary=summary.scalar(name, value))

    def add_text(self, name: str, text: str, step: int) -> None:
        """A text of a step, in Markdown."""
        from tensorboardX import summary

        self._add(step, summary=summary.text(name, text))

    def add_histogram(self, name: str, values: np.ndarray, step: int) -> None:
        """The distribution of some values of a step."""
        from tensorboardX import summary

        self._add(step, summary=summary.histogram(name, values, np.concatenate([-_BINS[::-1], [0.0], _BINS])))

    def close(self) -> None:
        """Ends the file."""
        self._file.close()
