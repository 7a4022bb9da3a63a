"""Writes to a bucket that the run does not wait for."""

import queue
import threading

from etils import epath

from grpojax.host import files
from grpojax.host.console import log


class Uploads:
    """Writes whole files in the order in which they were given: those of a bucket in a thread, local ones at once.

    A write to a bucket that fails for good is a warning. Where storage is slower than the run for long, the run waits.

    Args:
      ahead: writes that may wait at a time.
    """

    def __init__(self, ahead: int = 64):
        self._queue: queue.Queue[tuple[epath.Path, bytes] | None] = queue.Queue(ahead)
        self._thread: threading.Thread | None = None

    def write(self, file: epath.Path, content: bytes) -> None:
        """As `files.write`; raises `OSError` for a local file."""
        if not files.in_bucket(file):
            return files.write(file, content)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
            self._thread.start()
        self._queue.put((file, content))

    def wait(self) -> None:
        """Until all that was given is written, or has failed."""
        self._queue.join()

    def close(self) -> None:
        """Waits, and ends the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                files.write(*job)
            except Exception as e:
                log.warning("%s could not be written: %s", job[0], e)
            finally:
                self._queue.task_done()
        self._queue.task_done()
