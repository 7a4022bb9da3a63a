"""Decides whether a run goes on, saves, or stops: one decision for all of its processes, made without the devices.

The processes of a run do the same things in the same order. Each wait for a rollout, for an evaluation's samples or for
an environment is a *sync point*, and sync points are counted. At each, the first process posts its decision, and the
others read the decision for that point. So the decision takes effect at the same place of the program on all processes.
The first process posts "stop" as soon as it was asked to, and "go" or "save" once its own rollout is there. So waiting
for the decision costs no time: the other processes wait for their rollouts anyway. Any process can ask for a stop by a
post of its own; the first looks for these while it waits.
"""

import itertools
import time
from typing import Any

import jax

from grpojax.host import coordination

_LOOK_S = 0.002  # between two checks of the devices' progress
_ASK_S = 0.25  # between two checks of other processes' requests
_KEPT = 64  # number of decisions that are kept; no process is as far behind
_numbers = itertools.count()


class Stopped(Exception):
    """The run is to stop here, on all processes. The state is saved, and of work in flight what the source saves."""


class RunControl:
    """The sync points of one run.

    Args:
      minutes: minutes between two saves, by the clock of the first process; 0 for none.

    Attributes:
      place: the key under which its decisions are posted; no other run of these processes has it.
      reason: the reason to stop, once this process knows one; None while the run goes on.
      since: when this process learned that, on the monotonic clock.
      due: whether the clock asks for a save after this step; the same on all processes.
    """

    def __init__(self, minutes: float = 0.0):
        self.place = f"control/{next(_numbers)}"
        self._me, self._single = jax.process_index(), jax.process_count() == 1
        self._every_s, self._saved, self._looked = 60 * minutes, time.monotonic(), 0.0
        self._points, self._asked = 0, False
        self.reason: str | None = None
        self.since = 0.0
        self.due = False

    def ask(self, reason: str) -> None:
        """Asks for the run to stop; may be called by a signal's handler and by any thread."""
        if self.reason is None:
            self.since, self.reason = time.monotonic(), reason

    def save_started(self) -> None:
        """Call it when a save has started: the clock counts from here."""
        self.due, self._saved = False, time.monotonic()

    def sync(self, awaited: Any = ()) -> None:
        """Waits for the device arrays ``awaited``, unless the run is to stop.

        All processes come to the same sync points.

        Raises:
          Stopped: on all processes or on none.
        """
        self._points += 1
        decision = self._decide(awaited) if self._me == 0 else self._hear()
        if decision == "stop":
            raise Stopped
        self.due = self.due or decision == "save"

    def _decide(self, awaited: Any) -> str:
        """The first process's decision."""
        self._looked = 0.0
        while not (stop := self._is_asked()) and not _ready(awaited):
            time.sleep(_LOOK_S)
        late = self._every_s > 0 and not self.due and time.monotonic() - self._saved >= self._every_s
        decision = "stop" if stop else "save" if late else "go"
        if not self._single:
            coordination.post(f"{self.place}/decision/{self._points}", decision)
            coordination.forget(f"{self.place}/decision/{self._points - _KEPT}")
        return decision

    def _is_asked(self) -> bool:
        if self.reason is None and not self._single and time.monotonic() - self._looked > _ASK_S:
            self._looked = time.monotonic()
            for index, reason in coordination.posted(f"{self.place}/asked").items():
                self.ask(f"{reason} of process {index}")
        return self.reason is not None

    def _hear(self) -> str:
        """Waits for the first process's decision on another process. If the first is gone, jax ends this process."""
        while True:
            if self.reason is not None and not self._asked:
                coordination.post(f"{self.place}/asked/{self._me}", self.reason)
                self._asked = True
            if (decision := coordination.heard(f"{self.place}/decision/{self._points}", _ASK_S)) is not None:
                return decision


def _ready(awaited: Any) -> bool:
    arrays: list[Any] = [x for x in jax.tree.leaves(awaited) if isinstance(x, jax.Array)]
    return all(x.is_ready() for x in arrays)
