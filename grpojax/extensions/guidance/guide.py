"""Which prompts are guided, and by how much of a solution. It runs on the host, on plain numbers."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from grpojax.data import Problem
from grpojax.extensions.guidance.guidance_config import GuidanceConfig

MEMORY = 0.1  # weight of the newest group in the length that a prompt's first prefix has


class Guide:
    """The prompts that failed as a whole, each with the length of its prefix.

    Args:
      config: the section of the recipe.
      problems: all of the run.
      encode: the token ids of a text.
      longest: tokens of a prompt with its prefix, at most.
      kept: number of right samples that are kept for ``prefix: own``, the newest ones, of one prompt each.
      state: `saved` of the guide that goes on; None for a new one.
    """

    def __init__(
        self,
        config: GuidanceConfig,
        problems: Iterable[Problem],
        encode: Callable[[str], Sequence[int]],
        *,
        longest: int,
        kept: int = 1024,
        state: Mapping[str, Any] | None = None,
    ):
        self._config, self._encode, self._longest, self._kept = config, encode, longest, kept
        self._problems = {p.uid: p for p in problems}
        state = state or {}
        # By uid, as a share of the solution. The prompt that was guided longest ago stands first.
        self._lengths: dict[int, float] = {uid: length for uid, length in state.get("lengths", ())}
        self._start: float = state.get("start", config.start)  # of the next prompt that fails
        self._right: dict[int, str] = {uid: text for uid, text in state.get("right", ())}

    def __len__(self) -> int:
        """How many prompts wait for a group that passes without a prefix."""
        return len(self._lengths)

    @property
    def mean_length(self) -> float:
        """Mean length of the prefixes, as a share of the solutions; 0 without any."""
        return sum(self._lengths.values()) / len(self._lengths) if self._lengths else 0.0

    def saved(self) -> dict[str, Any]:
        """All that the next prefixes follow from, as JSON."""
        return {"lengths": list(self._lengths.items()), "start": self._start, "right": list(self._right.items())}

    def take(self, most: int) -> list[Problem]:
        """Up to so many problems with a prefix after the prompt, those that were guided longest ago."""
        found = []
        for uid in list(self._lengths):
            if len(found) == most:
                break
            if (guided := self._with_prefix(uid)) is not None:
                found.append(guided)
                self._lengths[uid] = self._lengths.pop(uid)  # to the end
        return found

    def prefix_of(self, problem: Problem) -> tuple[int, ...]:
        """The prefix that a problem from `take` has; empty for others."""
        return problem.ids[len(self._problems[problem.uid].ids) :]

    def note(self, problem: Problem, passed: Sequence[bool], right: str = "") -> None:
        """Notes a group.

        Args:
          problem: of the group, from `take` or without a prefix.
          passed: for each sample with a reward whether it is right.
          right: text of a right sample with its prefix; empty if none is to be kept.
        """
        if not len(passed):
            return
        uid, prefix, share = problem.uid, self.prefix_of(problem), sum(passed) / len(passed)
        if right:
            self._right.pop(uid, None)
            self._right[uid] = right
            if len(self._right) > self._kept:
                del self._right[next(iter(self._right))]
        if not prefix:
            if share:
                self._lengths.pop(uid, None)
            else:
                self._lengths.setdefault(uid, self._start)
        elif uid in self._lengths:
            length = self._lengths[uid] + self._config.step * (self._config.target - share)
            self._lengths[uid] = length = min(max(length, 0.0), 1.0)
            self._start += MEMORY * (length - self._start)

    def _with_prefix(self, uid: int) -> Problem | None:
        """The problem with its prefix; None if it has no solution, or none of it fits."""
        problem, solution = self._problems[uid], self._solution(uid)
        room = self._longest - len(problem.ids)
        length = min(max(math.ceil(self._lengths[uid] * len(solution)), 1), len(solution), room)
        return dataclasses.replace(problem, ids=(*problem.ids, *solution[:length])) if length > 0 else None

    def _solution(self, uid: int) -> Sequence[int]:
        """Token ids of the solution, without the answer at its end and what is after it."""
        problem, own = self._problems[uid], self._config.prefix == "own"
        text = str((self._right.get(uid) if own else problem.columns.get(self._config.column)) or "")
        gold = problem.gold or ""
        # If the answer does not stand in it, or is all of it, the last line is taken for the answer.
        end = gold if gold in text and gold.strip() not in ("", text.strip()) else "\n"
        return self._encode(text.rpartition(end)[0].rstrip())
