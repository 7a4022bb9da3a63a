"""Which problems each step gets, as padded prompts.

The batch of step n is a function of the seed and n, through grain's random access, and where problems are retired also
of a `Pass`. Batches are those of the whole run, whatever the number of hosts.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import grain
import numpy as np

from grpojax.data.problems import Problem
from grpojax.host.errors import UserError
from grpojax.types import Prompts


class Batches:
    """``batches[n]``: the problems of step n. Each pass over a source has an order of its own.

    Args:
      problems: what to draw from; each has the number of its source.
      size: prompts in a batch.
      seed: of the orders.
      weights: of the sources, by number; None is one source.
    """

    def __init__(self, problems: Sequence[Problem], size: int, seed: int, weights: Sequence[float] | None = None):
        if len(problems) < size:
            raise _too_few(len(problems), size, 0)
        self._problems = problems
        orders = []
        for number in range(len(weights or [1.0])):
            places = [i for i, p in enumerate(problems) if weights is None or p.source == number]
            order = grain.MapDataset.source(places).seed(seed + 1_000_003 * number).shuffle().repeat()
            orders.append(order)
        mixed = orders[0] if len(orders) == 1 else grain.MapDataset.mix(orders, weights=list(weights or ()))
        self._batches = mixed.batch(size, batch_fn=list)

    def __getitem__(self, step: int) -> list[Problem]:
        return [self._problems[i] for i in self._batches[step] or ()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass over the problems that were not retired when it began; ``dataclasses.asdict`` of it is JSON.

    Attributes:
      number: passes before it.
      start: prompts drawn before it.
      retired: uids that it leaves out, in order.
    """

    number: int = 0
    start: int = 0
    retired: tuple[int, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "retired", tuple(sorted(self.retired)))


class RetiringBatches:
    """`Batches` in which a problem that was retired is not drawn again once the pass under way is over.

    Each pass has an order of its own, by the seed and its number. While nothing is retired, batch n is ``Batches[n]``.

    Args:
      problems, size, seed, weights: as of `Batches`, with one source.

    Raises:
      UserError: there are several sources, or fewer problems than a batch takes.

    Example:
      >>> problems = [Problem(uid, (1,), "", None, {}) for uid in range(3)]
      >>> batches = RetiringBatches(problems, 2, seed=0)
      >>> batch, now = batches.draw(0, Pass(), retired=())
      >>> batch, now = batches.draw(1, now, retired={1})  # the last of the first pass, the first of the second
      >>> now
      Pass(number=1, start=3, retired=(1,))
      >>> sorted(p.uid for n in (2, 3) for p in batches.draw(n, now, retired={1})[0])
      [0, 0, 2, 2]
    """

    def __init__(self, problems: Sequence[Problem], size: int, seed: int, weights: Sequence[float] | None = None):
        if weights is not None and len(weights) > 1:
            raise UserError(f"problems can be retired from one source only, and data.train has {len(weights)}")
        self._problems, self._size, self._seed = problems, size, seed
        self._cached: tuple[Pass, Any] | None = None
        self._order(Pass())

    def draw(self, number: int, now: Pass, retired: Collection[int]) -> tuple[list[Problem], Pass]:
        """A batch, and the pass that its last problem belongs to; what is given is all that they depend on.

        Args:
          number: of the batch in the run; ``now`` must have begun by then.
          now: the pass that the draw of the batch before returned; `Pass()` at the start of a run. Saved together with
            ``retired``, it is all that a run needs to go on.
          retired: uids retired so far, or since the pass began. A pass that begins in this batch leaves them out.

        Raises:
          UserError: a pass begins, and the problems left do not fill a batch.
        """
        first = number * self._size
        if first < now.start:
            raise ValueError(f"batch {number} begins before its pass does, at prompt {now.start}; give the pass before")
        order, batch = self._order(now), []
        for at in range(first, first + self._size):
            while at >= now.start + len(order):
                left_out = tuple({*now.retired, *retired})
                now = Pass(number=now.number + 1, start=now.start + len(order), retired=left_out)
                order = self._order(now)
            batch.append(order[now.number * len(order) + at - now.start])
        return batch, now

    def _order(self, now: Pass) -> Any:
        """The problems of a pass, shuffled; index ``number * length`` is the first of it."""
        if self._cached is None or self._cached[0] != now:
            left_out = set(now.retired)
            active = [p for p in self._problems if p.uid not in left_out]
            if len(active) < self._size:
                raise _too_few(len(active), self._size, len(self._problems) - len(active))
            self._cached = now, grain.MapDataset.source(active).seed(self._seed).shuffle()
        return self._cached[1]


def _too_few(problems: int, size: int, retired: int) -> UserError:
    if not retired:
        return UserError(f"rollout.prompts={size} is more than the {problems} problems of the data")
    return UserError(
        f"rollout.prompts={size} is more than the {problems} problems left; {retired} are retired. End the run "
        "here, or give it more problems"
    )


def in_order(problems: list[Problem], size: int) -> Iterator[tuple[list[Problem], int]]:
    """Batches of ``size`` once through; the last is filled up with its own problems. Yields (batch, real ones)."""
    for start in range(0, len(problems), size):
        batch = problems[start : start + size]
        real = len(batch)
        yield [batch[i % real] for i in range(size)], real


def to_prompts(problems: Sequence[Problem], length: int, group: int = 0) -> Prompts:
    """Right-padded prompts ``[P, length]``.

    A problem that stands in the batch again (at the end of a small source) goes on with the sample after its
    ``group``, so that it does not get the same draws again.
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
