"""The groups of a rollout of which some go on from the one before (``rollout.overlap``).

A rollout has P places. A group with unfinished samples stays in its place, and so on its devices; its finished samples
wait with it, and nothing is drawn again. The other places go to the next problems. Problems are drawn a batch at a
time, as without overlap, and stand in a queue until there is a place for them.
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
class Carried:
    """Groups that go on in the next rollout, each in its place.

    Attributes:
      samples: ``[P, G, ...]``; of length 0 in places that a new problem gets.
      versions: ``[P, G, T]`` int32, updates behind the weights that each token was drawn under.
    """

    samples: Rollout
    versions: Tokens

    @property
    def waiting(self) -> PerPrompt:
        """``[P]`` bool: the places that are taken."""
        return self.samples.lengths.any(1)

    def continued(self, version: int) -> Tokens:
        """The versions where all further tokens are drawn under this one."""
        drawn = np.arange(self.versions.shape[-1]) < self.samples.lengths[..., None]
        return np.where(drawn, self.versions, np.int32(version))


class PartialGroups:
    """The places of a run's rollouts, and the queue before them.

    Args:
      shape: P, G and T of a rollout.
      problems: all that may be asked.
      state: of a run that goes on.
    """

    def __init__(self, shape: tuple[int, int, int], problems: Sequence[data.Problem], state: RunState):
        self._shape = shape
        self._placed: list[tuple[data.Problem, int]] = []  # of the rollout before, each with its pass
        self.carried, self._queue, self._batches = self._nothing(), deque[tuple[data.Problem, int]](), 0
        if (record := state.partial) is None:
            return
        of_uid = {p.uid: p for p in problems}
        self._batches = record["batches"]
        self._queue.extend((of_uid[uid], number) for uid, number in record["queue"])
        self._placed = [(of_uid[uid], number) for uid, number in record["placed"]]
        for name, rows in record["carried"].items():
            self._array(name)[record["waiting"]] = from_text(rows)

    def _nothing(self) -> Carried:
        return Carried(samples=no_samples(*self._shape), versions=np.zeros(self._shape, np.int32))

    def _array(self, name: str) -> np.ndarray:
        return self.carried.versions if name == "versions" else getattr(self.carried.samples, name)

    def write(self, state: RunState) -> None:
        """Puts down what the next rollouts follow from, but for groups of a rollout in flight."""
        waiting = np.flatnonzero(self.carried.waiting)
        names = ("versions", *(f.name for f in dataclasses.fields(Rollout)))
        state.partial = {
            "batches": self._batches,
            "queue": [(p.uid, number) for p, number in self._queue],
            "placed": [(p.uid, number) for p, number in self._placed],
            "waiting": waiting.tolist(),
            "carried": {name: to_text(self._array(name)[waiting]) for name in names},
        }

    def fill(self, draw: Draw) -> tuple[list[data.Problem], list[int], Carried]:
        """Gives the free places to the next problems: all problems of a rollout, the pass over the data of each, and
        the groups among them that go on. ``draw`` is of a batch's number (`grpojax.run.curriculum.Curriculum.draw`)."""
        carried, self.carried = self.carried, self._nothing()
        waiting = carried.waiting
        while len(self._queue) < (~waiting).sum():
            self._queue.extend(zip(*draw(self._batches), strict=True))
            self._batches += 1
        self._placed = [self._placed[place] if taken else self._queue.popleft() for place, taken in enumerate(waiting)]
        problems, passes = zip(*self._placed, strict=True)
        return list(problems), list(passes), carried

    def keep(self, in_flight: InFlight, rest: Rollout) -> None:
        """Has the groups of a rollout that are not whole stay: ``rest`` is what there is of them."""
        assert in_flight.versions is not None
        self._placed = list(zip(in_flight.problems, in_flight.passes, strict=True))
        there = np.arange(self._shape[2]) < rest.lengths[..., None]
        self.carried = Carried(samples=rest, versions=np.where(there, in_flight.versions, np.int32(0)))


def oldest(in_flight: InFlight, samples: Rollout) -> PerPrompt:
    """``[P]`` int: updates behind the weights that the oldest token of each group was drawn under; of a group without
    samples those behind the newest."""
    if in_flight.versions is None:
        return np.full(len(in_flight.problems), in_flight.version)
    there = np.arange(samples.tokens.shape[-1]) < samples.lengths[..., None]
    return np.where(there, in_flight.versions, in_flight.version).min((1, 2))
