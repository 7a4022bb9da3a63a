"""Changes that several processes make to shared files: they succeed on all processes or on none.

Within a save and a restore, orbax meets at barriers. By default these run on the devices, behind all queued work. Here
they go through the coordination service, and a process that waits at a barrier is released if another one failed before
it.
"""

import contextlib
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from grpojax.host import coordination, internals, processes
from grpojax.host.processes import PeerError

T = TypeVar("T")
_numbers = itertools.count()
_current: list["MeetingPoint"] = []


class MeetingPoint:
    """The meeting point of a run's processes; all of them must create and use it in the same order."""

    def __init__(self) -> None:
        internals.wait_for_saves_in(_barrier)
        self._begin()

    def _begin(self) -> None:
        self._place = f"saves/{next(_numbers)}"
        self._behind: set[threading.Thread] = set()  # of failed saves, for which no other process waits any more
        self._barriers: Counter[str] = Counter()
        _current[:] = [self]

    def together(self, act: Callable[[], T]) -> T:
        """Returns the result of ``act`` if it succeeds on all processes.

        Raises:
          PeerError: ``act`` failed on another process. A process on which it fails raises its own error.
        """
        error: Exception | None = None
        result: Any = None
        try:
            result = act()
        except Exception as e:
            error = e
            if not isinstance(e, PeerError) and not isinstance(e.__cause__, PeerError):
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    coordination.post(f"{self._place}/failed/{jax.process_index()}", _line(e))
        messages = processes.meet("" if error is None else _line(error))
        if error is not None and self._blamed() in (None, jax.process_index()):
            raise error
        if any(messages):
            blamed = self._blamed()
            index = next(i for i, message in enumerate(messages) if message) if blamed is None else blamed
            raise PeerError(f"process {index}: {messages[index]}") from error
        return result

    def _blamed(self) -> int | None:
        """The first process with a failure of its own."""
        return min(map(int, coordination.posted(f"{self._place}/failed")), default=None)

    def of_first(self, value: T) -> T:
        """The ``value`` of the first process on all processes; it must be JSON."""
        return json.loads(processes.meet(json.dumps(value))[0])

    def anew(self) -> None:
        """Call on all processes after a failure: evens out counters that only some of them have advanced."""
        internals.set_save_count(max(map(int, processes.meet(str(internals.save_count())))))
        self._begin()
        self._behind = set(threading.enumerate()) - {threading.current_thread(), threading.main_thread()}

    def barrier(self, key: str, timeout_ms: int) -> None:
        """Waits for all processes, or until one has failed."""
        if threading.current_thread() in self._behind:
            raise PeerError(f"{key}: the save that this belongs to has failed")
        self._barriers[key] += 1
        place, failed = f"{self._place}/barrier/{key}/{self._barriers[key]}", f"{self._place}/failed"
        until = time.monotonic() + timeout_ms / 1000
        coordination.post(f"{place}/{jax.process_index()}", "")
        pause = 0.01
        while len(coordination.posted(place)) < jax.process_count():
            if fallen := coordination.posted(failed):
                if len(coordination.posted(place)) == jax.process_count():
                    break  # it arrived, left and failed between the two queries
                index, what = min(fallen.items())
                raise PeerError(f"process {index}: {what}")
            if time.monotonic() > until:
                raise TimeoutError(f"{key}: not all processes came within {timeout_ms / 1000:g} s")
            time.sleep(pause)
            pause = min(1.5 * pause, 0.2)  # with hundreds of processes, each queries the first


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _barrier(*, key: str, timeout_ms: int) -> None:
    _current[0].barrier(key, timeout_ms)
