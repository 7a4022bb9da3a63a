"""Solved problems to show before one that is not solved."""

import dataclasses
from collections.abc import Iterable, Sequence

from grpojax.data.problems import Example, Problem, Problems
from grpojax.host.errors import UserError

TRIED = 4  # of the most similar problems, so many times those that are to be shown are tried for whether they fit


def similarity(one: Sequence[int], other: Sequence[int]) -> float:
    """Jaccard's index of two prompts, ``|A ∩ B| / |A ∪ B|`` of the sets of their token ids, in [0, 1].

    Example:
      >>> similarity([1, 2, 2, 3], [2, 3, 4])
      0.5
    """
    a, b = set(one), set(other)
    return len(a & b) / max(len(a | b), 1)


def _turns(problem: Problem) -> int:
    """How often the user speaks before an answer."""
    chat = problem.chat
    return 1 if chat is None or isinstance(chat, str) else sum(message["role"] == "user" for message in chat)


class Exemplars:
    """Problems that were solved, each with a completion that was right, for in-context seeding.

    XRPO (arXiv 2510.06672) retrieves them by the embeddings of another model. Here those problems are nearest whose
    prompts have the most token ids in common (`similarity`; ties go to the lower uid).

    Args:
      problems: all of a run.
      shown: solved problems before a prompt, at most.
      size: of the pool; the problem that was added longest ago leaves it first.
      longest: tokens of a prompt with those before it.
      state: `state` of the pool that goes on.
    """

    def __init__(
        self, problems: Problems, *, shown: int, size: int, longest: int, state: Iterable[tuple[int, str]] = ()
    ):
        self._problems, self._by_uid = problems, {p.uid: p for p in problems}
        self._shown, self._size, self._longest = shown, size, longest
        self._pool: dict[int, str] = dict(state)
        self.refused = ""

    def __len__(self) -> int:
        return len(self._pool)

    def state(self) -> list[tuple[int, str]]:
        """Uids and completions, the oldest first: JSON, and all that `before` follows from."""
        return list(self._pool.items())

    def add(self, uid: int, completion: str) -> None:
        """Adds a right completion of a problem, in place of an older one.

        One without any text shows nothing, nor does one of a chat's later turn by itself.
        """
        if not completion.strip() or _turns(self._by_uid[uid]) > 1:
            return
        self._pool.pop(uid, None)
        self._pool[uid] = completion
        if len(self._pool) > self._size:
            del self._pool[next(iter(self._pool))]

    def before(self, problem: Problem) -> Problem | None:
        """The problem with those solved ones before it that are most like it and fit, the nearest of them last.

        An exemplar that would make the prompt too long, or that the chat template refuses, is skipped. No
        problem is shown its own question. None where nothing can be shown.
        """
        there = [self._by_uid[uid] for uid in self._pool]
        others = [p for p in there if p.prompt != problem.prompt and p.uid != problem.uid]
        others.sort(key=lambda p: (-similarity(p.ids, problem.ids), p.uid))
        chosen: list[Example] = []
        ids: tuple[int, ...] = ()
        for other in others[: TRIED * self._shown]:
            more = [Example(prompt=other.prompt, completion=self._pool[other.uid]), *chosen]
            try:
                longer = self._problems.shown_after(more, problem)
            except UserError as e:
                self.refused = str(e)
                continue
            if len(longer) <= self._longest:
                chosen, ids = more, longer
            if len(chosen) == self._shown:
                break
        return dataclasses.replace(problem, ids=ids) if chosen else None
