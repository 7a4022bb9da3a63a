"""Reports a step that takes far longer than those before it, with the current stack of every thread."""

import faulthandler
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable

TIMES = 10.0  # times the median: a step that takes longer hangs
SEEN = 5  # steps that are needed for a median
FLOOR_S = 30.0  # a shorter step never hangs
LOOK_S = 1.0
_LAST = 101  # steps that the median is taken over


class Watchdog:
    """Times the steps of a run in a thread of its own; used in a ``with`` statement.

    Between `end` and the next `begin`, as in an evaluation or a save, nothing is timed.

    Args:
      hang: called by the thread with a message about a step that hangs, once for each step.
      excused: whether the current work may take long, such as compiling. Then the step's time restarts and does not
        count.
    """

    def __init__(self, hang: Callable[[str], None], excused: Callable[[], bool]):
        self._hang, self._excused = hang, excused
        self._seconds: deque[float] = deque(maxlen=_LAST)
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._number: int | None = None
        self._since, self._told, self._unlike = 0.0, False, False

    def __enter__(self) -> "Watchdog":
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()

    def begin(self, number: int) -> None:
        """Call it when a step begins."""
        with self._lock:
            self._number, self._since, self._told, self._unlike = number, time.monotonic(), False, False

    def end(self) -> None:
        """Call it when the step has ended."""
        with self._lock:
            if self._number is not None and not self._told and not self._unlike:
                self._seconds.append(time.monotonic() - self._since)
            self._number = None

    def limit(self) -> float | None:
        """Seconds after which a step hangs; None as long as there is no median."""
        if len(self._seconds) < SEEN:
            return None
        return max(FLOOR_S, TIMES * statistics.median(self._seconds))

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            with self._lock:
                if self._excused():
                    self._since, self._unlike = time.monotonic(), True
                limit, seconds = self.limit(), time.monotonic() - self._since
                late = self._number is not None and limit is not None and not self._told and seconds > limit
                number, self._told = self._number, self._told or late
                median = statistics.median(self._seconds) if late else 0.0
            if late:
                faulthandler.dump_traceback(file=2, all_threads=True)
                message = f"step {number} has taken {seconds:.0f} s, over {TIMES:g} times the median of {median:.2g} s"
                self._hang(f"{message}; the lines above show what each thread does")
