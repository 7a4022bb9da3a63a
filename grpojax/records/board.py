"""Tensorboard events of a run: local files, or one object every few minutes if the run is in a bucket."""

import itertools
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from etils import epath

from grpojax.host import files

EVERY_S = 300.0  # a run that is killed may lose so much


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
        self._writer: Any = None
        self._begun, self._numbers = 0.0, itertools.count()
        self._lock = threading.RLock()  # samples come from a thread of their own

    def add(self, write: Callable[[Any], None]) -> None:
        """Calls ``write`` with a ``SummaryWriter``."""
        with self._lock:
            if self._draft is not None and time.monotonic() - self._begun > EVERY_S:
                self.close()
            if self._writer is None:
                self._begin()
            write(self._writer)

    def _begin(self) -> None:
        from tensorboardX import SummaryWriter

        place, suffix = str(self._folder), ""
        if files.in_bucket(self._folder):
            self._draft, self._begun = tempfile.TemporaryDirectory(), time.monotonic()
            place, suffix = self._draft.name, f".{next(self._numbers):04d}"
        self._writer = SummaryWriter(place, purge_step=self._purge_step, filename_suffix=suffix)
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
