"""Where the groups of a rollout sit when some of them go on from the one before (``rollout.overlap``).

A rollout has P seats. A group with unfinished samples stays in its seat, and so on its devices; its finished samples
wait with it, and nothing is drawn again. The other seats go to the next problems. Problems are drawn a batch at a time,
as without overlap, and stand in a queue until there is a seat for them.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from grpojax import data
from grpojax.programs.sampler import no_samples
from grpojax.run.in_flight import InFlight, from_text, to_text
from grpojax.run.run_state import RunState
from grpojax.types import PerPrompt, Rollout, Tokens

Draw = Callable[[int], tuple[Sequence[data.Problem], Sequence[int]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Begun:
    """Groups under way, each in its seat.

    Attributes:
      samples: ``[P, G, ...]``; of length 0 in seats that a new problem gets.
      versions: ``[P, G, T]`` int32, updates behind the weights that each token was drawn under.
    """

    samples: Rollout
    versions: Tokens

    @property
    def waiting(self) -> PerPrompt:
        """``[P]`` bool: the seats that are taken."""
        return self.samples.lengths.any(1)

    def continued(self, version: int) -> Tokens:
        """The versions where all further tokens are drawn under this one."""
        drawn = np.arange(self.versions.shape[-1]) < self.samples.lengths[..., None]
        return np.where(drawn, self.versions, np.int32(version))


class Seats:
    """The seats of a run's rollouts, and the queue before them.

    Args:
      shape: P, G and T of a rollout.
      problems: all that may be asked.
      state: of a run that goes on.
    """

    def __init__(self, shape: tuple[int, int, int], problems: Sequence[data.Problem], state: RunState):
        self._shape = shape
        self._seated: list[tuple[data.Problem, int]] = []  # of the rollout before, each with its pass
        self.begun, self._queue, self._batches = self._nothing(), deque[tuple[data.Problem, int]](), 0
        if (record := state.partial) is None:
            return
        of_uid = {p.uid: p for p in problems}
        self._batches = record["batches"]
        self._queue.extend((of_uid[uid], number) for uid, number in record["queue"])
        self._seated = [(of_uid[uid], number) for uid, number in record["seated"]]
        for name, rows in record["begun"].items():
            self._array(name)[record["waiting"]] = from_text(rows)

    def _nothing(self) -> Begun:
        return Begun(samples=no_samples(*self._shape), versions=np.zeros(self._shape, np.int32))

    def _array(self, name: str) -> np.ndarray:
        return self.begun.versions if name == "versions" else getattr(self.begun.samples, name)

    def write(self, state: RunState) -> None:
        """Puts down what the next rollouts follow from, but for groups that sit in a rollout in flight."""
        waiting = np.flatnonzero(self.begun.waiting)
        names = ("versions", *(f.name for f in dataclasses.fields(Rollout)))
        state.partial = {
            "batches": self._batches,
            "queue": [(p.uid, number) for p, number in self._queue],
            "seated": [(p.uid, number) for p, number in self._seated],
            "waiting": waiting.tolist(),
            "begun": {name: to_text(self._array(name)[waiting]) for name in names},
        }

    def fill(self, draw: Draw) -> tuple[list[data.Problem], list[int], Begun]:
        """Gives the free seats to the next problems: all problems of a rollout, the pass over the data of each, and
        the groups among them that go on. ``draw`` is of a batch's number (`grpojax.run.curriculum.Curriculum.draw`)."""
        begun, self.begun = self.begun, self._nothing()
        waiting = begun.waiting
        while len(self._queue) < (~waiting).sum():
            self._queue.extend(zip(*draw(self._batches), strict=True))
            self._batches += 1
        self._seated = [self._seated[seat] if taken else self._queue.popleft() for seat, taken in enumerate(waiting)]
        problems, passes = zip(*self._seated, strict=True)
        return list(problems), list(passes), begun

    def keep(self, flight: InFlight, rest: Rollout) -> None:
        """Has the groups of a rollout that are not whole stay: ``rest`` is what there is of them."""
        assert flight.versions is not None
        self._seated = list(zip(flight.problems, flight.passes, strict=True))
        there = np.arange(self._shape[2]) < rest.lengths[..., None]
        self.begun = Begun(samples=rest, versions=np.where(there, flight.versions, np.int32(0)))


def oldest(flight: InFlight, samples: Rollout) -> PerPrompt:
    """``[P]`` int: updates behind the weights that the oldest token of each group was drawn under; of a group without
    samples those behind the newest."""
    if flight.versions is None:
        return np.full(len(flight.problems), flight.version)
    there = np.arange(samples.tokens.shape[-1]) < samples.lengths[..., None]
    return np.where(there, flight.versions, flight.version).min((1, 2))
