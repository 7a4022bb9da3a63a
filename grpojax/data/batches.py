"""Which problems each step gets, as padded prompts.

The batch of step n is a function of the seed and n, through grain's random access, and where problems are retired also
of the `Pass` that each source is in. Batches are those of the whole run, whatever the number of hosts.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from grpojax.data.problems import Problem
from grpojax.types import Prompts

_APART = 1_000_003  # between the seeds of two sources


def _datasets() -> Any:
    """grain's; imported when a run orders its problems, since grain takes half a second to import."""
    import grain

    return grain.MapDataset


class Batches:
    """``batches[n]``: the problems of step n. Each pass over a source has an order of its own.

    Passes follow one another without a gap: the end of one and the start of the next may be in the same batch, and of a
    source with fewer problems than a batch takes, whole passes. A problem then stands in the batch more than once
    (`to_prompts` gives each of them other draws).

    Args:
      problems: what to draw from; each has the number of its source.
      size: prompts in a batch.
      seed: of the orders.
      weights: of the sources, by number; None is one source.

    Example:
      >>> problems = [Problem(uid, (1,), "", None, {}) for uid in range(3)]
      >>> [p.uid for p in Batches(problems, 7, seed=0)[0]]
      [1, 2, 0, 0, 2, 1, 1]
    """

    def __init__(self, problems: Sequence[Problem], size: int, seed: int, weights: Sequence[float] | None = None):
        self._problems = problems
        orders = []
        for number in range(len(weights or [1.0])):
            places = [i for i, p in enumerate(problems) if weights is None or p.source == number]
            order = _datasets().source(places).seed(seed + _APART * number).shuffle().repeat()
            orders.append(order)
        mixed = orders[0] if len(orders) == 1 else _datasets().mix(orders, weights=list(weights or ()))
        self._batches = mixed.batch(size, batch_fn=list)

    def __getitem__(self, step: int) -> list[Problem]:
        return [self._problems[i] for i in self._batches[step] or ()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass over the problems of a source that were not left out when it began; its ``asdict`` is JSON.

    Attributes:
      number: passes before it.
      start: prompts drawn from the source before it.
      left_out: uids that it leaves out, in order.
      since: the first pass whose verdicts count: the last that took all problems again, because all were solved.
    """

    number: int = 0
    start: int = 0
    left_out: tuple[int, ...] = ()
    since: int = 0

    def __post_init__(self):
        object.__setattr__(self, "left_out", tuple(sorted(self.left_out)))


class RetiringBatches:
    """`Batches` in which a problem that was solved is left out of the passes that begin later.

    Each source has its own passes, each with an order of its own, by the seed and its number; which source a prompt is
    drawn from does not depend on them. While nothing is solved, batch n is ``Batches[n]``. A problem that was solved in
    pass e (`grpojax.allocation.solved`) is left out from pass e + 1 on (e + 2, if that had started), for
    ``readmit_after`` passes; a pass from which all would be left out takes all of them.

    Args:
      problems, size, seed, weights: as of `Batches`.
      readmit_after: passes that a solved problem is left out of; None for all.

    Example:
      >>> problems = [Problem(uid, (1,), "", None, {}) for uid in range(3)]
      >>> batches = RetiringBatches(problems, 2, seed=0)
      >>> batch, passes, now = batches.draw(0, batches.begin(), solved={})
      >>> batch, passes, now = batches.draw(1, now, solved={1: 0})  # of both passes
      >>> passes, now
      ([0, 1], (Pass(number=1, start=3, left_out=(1,), since=0),))
      >>> sorted(p.uid for n in (2, 3) for p in batches.draw(n, now, solved={1: 0})[0])
      [0, 0, 2, 2]
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        size: int,
        seed: int,
        weights: Sequence[float] | None = None,
        readmit_after: int | None = None,
    ):
        self._size, self._seed, self._readmit_after = size, seed, readmit_after
        numbers = range(len(weights or [1.0]))
        self._sources = [[p for p in problems if weights is None or p.source == n] for n in numbers]
        # For every prompt drawn: its source, and its place among those drawn from there.
        places = [_datasets().source([n]).repeat().map_with_index(lambda i, n: (n, i)) for n in numbers]
        self._places = places[0] if len(places) == 1 else _datasets().mix(places, weights=list(weights or ()))
        self._cached: dict[int, tuple[Pass, Any]] = {}

    def begin(self) -> tuple[Pass, ...]:
        """The passes that a run begins with, one a source."""
        return tuple(Pass() for _ in self._sources)

    def draw(
        self, number: int, now: Sequence[Pass], solved: Mapping[int, int]
    ) -> tuple[list[Problem], list[int], tuple[Pass, ...]]:
        """A batch, the number of the pass that each problem is of, and the passes that the sources are in after it.

        What is given is all that they depend on.

        Args:
          number: of the batch in the run; ``now`` must have started by then.
          now: the passes that the draw of the batch before returned; `begin` at the start of a run. Saved together with
            ``solved``, it is all that a run needs to go on.
          solved: by uid, the last pass in which it was found solved. A pass that begins in this batch leaves them out.
        """
        passes, batch, numbers = list(now), [], []
        for at in range(number * self._size, (number + 1) * self._size):
            source, place = self._places[at] or (0, at)
            if place < passes[source].start:
                raise ValueError(
                    f"batch {number} begins before its pass does, at prompt {passes[source].start} of source {source}; "
                    "give the passes before"
                )
            order = self._order(source, passes[source])
            while place >= passes[source].start + len(order):
                passes[source] = self._after(source, passes[source], len(order), solved)
                order = self._order(source, passes[source])
            current = passes[source]
            batch.append(order[current.number * len(order) + place - current.start])
            numbers.append(current.number)
        return batch, numbers, tuple(passes)

    def _after(self, source: int, now: Pass, drawn: int, solved: Mapping[int, int]) -> Pass:
        """The pass after one of so many prompts."""
        number, longest = now.number + 1, self._readmit_after
        left_out = []
        for problem in self._sources[source]:
            e = solved.get(problem.uid, -1)
            if now.since <= e < number and (longest is None or number - e <= longest):
                left_out.append(problem.uid)
        if len(left_out) == len(self._sources[source]):
            return Pass(number=number, start=now.start + drawn, since=number)
        return Pass(number=number, start=now.start + drawn, left_out=tuple(left_out), since=now.since)

    def _order(self, source: int, now: Pass) -> Any:
        """The problems of a pass, shuffled; index ``number * length`` is the first of it."""
        if source not in self._cached or self._cached[source][0] != now:
            left_out = set(now.left_out)
            active = [p for p in self._sources[source] if p.uid not in left_out]
            order = _datasets().source(active).seed(self._seed + _APART * source).shuffle()
            self._cached[source] = now, order
        return self._cached[source][1]


def in_order(problems: list[Problem], size: int) -> Iterator[tuple[list[Problem], int]]:
    """Batches of ``size`` once through; the last is filled up with its own problems. Yields (batch, real ones)."""
    for start in range(0, len(problems), size):
        batch = problems[start : start + size]
        real = len(batch)
        yield [batch[i % real] for i in range(size)], real


def to_prompts(problems: Sequence[Problem], length: int, group: int = 0) -> Prompts:
    """Right-padded prompts ``[P, length]``.

    A problem that stands in the batch again (where a pass over a source ends in it) goes on with the sample after its
    ``group``, so that it does not get the same draws again.

    Example:
      >>> one, other = (Problem(uid, (1,), "", None, {}) for uid in (0, 1))
      >>> to_prompts([one, other, one, one], 1, group=4).first_sample.tolist()
      [0, 0, 4, 8]
    """
    tokens = np.zeros((len(problems), length), np.int32)
    seen: Counter[int] = Counter()
    first = np.zeros(len(problems), np.int32)
    for i, problem in enumerate(problems):
        tokens[i, : len(problem.ids)] = problem.ids
        first[i] = group * seen[problem.uid]
        seen[problem.uid] += 1
    return Prompts(
        tokens=tokens,
        lengths=np.array([len(p.ids) for p in problems], np.int32),
        uids=np.array([p.uid for p in problems], np.uint32),
        first_sample=first,
    )
