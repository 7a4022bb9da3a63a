"""How long devices have nothing to do, as the process that calls their programs sees it."""

import atexit
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax

from grpojax.programs.compiling import Programs

_Waits = queue.SimpleQueue[tuple[Callable[[], None], Any] | None]
_waits: dict[str, _Waits] = {}  # each with a thread


class Idle:
    """Seconds in which some devices owed nothing: no program had been called whose results were still to come.

    A program is owed from its call, in which it may compile, until its results are there.

    Args:
      clock: seconds.

    Example:
      >>> import itertools
      >>> idle = Idle(itertools.count().__next__)  # of a clock that goes on by 1 whenever it is read
      >>> idle.call(); idle.settle(); idle.take()
      2.0
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._lock = clock, threading.Lock()
        self._owed, self._since, self._seconds = 0, clock(), 0.0

    def call(self) -> None:
        """A program is about to be called."""
        with self._lock:
            if self._owed == 0:
                self._seconds += self._clock() - self._since
            self._owed += 1

    def settle(self) -> None:
        """A program's results are there."""
        with self._lock:
            self._owed -= 1
            if self._owed == 0:
                self._since = self._clock()

    def take(self) -> float:
        """The seconds since it was asked last."""
        with self._lock:
            if self._owed == 0:
                now = self._clock()
                self._seconds, self._since = self._seconds + now - self._since, now
            seconds, self._seconds = self._seconds, 0.0
        return float(seconds)


class Clocked(Programs):
    """`Programs`, and how long the devices wait for the next of them.

    Attributes:
      idle: of the devices that learn, and draw where no others do.
    """

    def __init__(self):
        super().__init__()
        self.idle = Idle()

    def __call__(self, name: str, function: Callable[..., Any], *args, static: Any = None, idle: Idle | None = None):
        """As `Programs`; ``idle`` is of the devices that it runs on, where that is another one."""
        apart = idle is not None and idle is not self.idle
        idle = idle or self.idle
        idle.call()
        try:
            out = super().__call__(name, function, *args, static=static)
        except BaseException:
            idle.settle()
            raise
        # Of all results the last: an update's state comes first, and the next update takes that over.
        _when(jax.tree.leaves(out)[-1], idle.settle, "apart" if apart else "learning")
        return out


def arrival(output: jax.Array) -> Callable[[], float]:
    """When ``output`` of the last program called is there, by `time.perf_counter`; what it returns waits for that.

    Who waits for an array may notice late: a GPU's host drives the loops of the programs that it has called since.
    """
    at: futures.Future[float] = futures.Future()
    _when(output, lambda: at.set_result(time.perf_counter()), "learning")
    return at.result


def _when(output: Any, then: Callable[[], None], devices: str) -> None:
    """Devices work off what they are given in order, so that one thread can wait for one program after the other."""
    if devices not in _waits:
        _waits[devices] = queue.SimpleQueue()
        thread = threading.Thread(target=_wait, args=(_waits[devices],), name=f"idle {devices}", daemon=True)
        thread.start()
        atexit.register(_end, _waits[devices], thread)
    _waits[devices].put((then, output))


def _end(waits: _Waits, thread: threading.Thread) -> None:
    """Before Python's end: a thread that comes back from jax during it would abort the process."""
    waits.put(None)
    thread.join()


def _wait(waits: _Waits) -> None:
    while (waited := waits.get()) is not None:
        then, output = waited
        with contextlib.suppress(Exception):  # who called the program hears of it
            output.block_until_ready()
        del output, waited
        then()
