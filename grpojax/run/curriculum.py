"""Which problems a rollout is of: their order, and what a run leaves out because it is solved."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from grpojax import allocation, data
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.run.judged import Judged
from grpojax.run.sections import RetireConfig
from grpojax.types import Samples


class Curriculum:
    """The problems of each rollout of a run.

    Where solved prompts are retired, a rollout has as many prompts as any other: the passes over the data get shorter,
    and what they no longer spend goes to the prompts that are left. With fewer left than a rollout takes, these stand
    in it again. Once all of a source are solved, they are all drawn again.

    Args:
      problems: all there are.
      size: prompts of a rollout.
      seed: of their order.
      retire: when one is solved, and for how long it is left out; None for no such thing.
      deciding: the reward that says so.
      state: the record of a run that goes on (`state`).
    """

    def __init__(
        self,
        problems: data.Problems,
        size: int,
        seed: int,
        *,
        retire: RetireConfig | None,
        deciding: str,
        state: Mapping[str, Any],
    ):
        self._retire, self._deciding = retire, deciding
        self._plain = data.Batches(problems, size, seed, problems.weights)
        self._batches: data.RetiringBatches | None = None
        if retire is not None:
            self._batches = data.RetiringBatches(problems, size, seed, problems.weights, retire.readmit_after)
            self._passes = tuple(data.Pass(**p) for p in state.get("passes", ())) or self._batches.begin()
        self._solved: dict[int, int] = dict(state.get("solved", ()))

    def state(self) -> dict[str, Any]:
        """What the next problems follow from besides the rollout's number: JSON."""
        if self._retire is None:
            return {}
        return {"passes": [dataclasses.asdict(p) for p in self._passes], "solved": sorted(self._solved.items())}

    def draw(self, number: int) -> tuple[Sequence[data.Problem], Sequence[int]]:
        """The problems of that rollout, and the pass over its source that each belongs to."""
        if self._batches is None:
            problems = self._plain[number]
            return problems, [0] * len(problems)
        problems, passes, now = self._batches.draw(number, self._passes, self._solved)
        for source, (before, after) in enumerate(zip(self._passes, now, strict=True)):
            if after.since > before.since:
                log.warning(
                    "rollout %d: all problems of source %d are solved; they are drawn again", number, source + 1
                )
        self._passes = now
        return problems, passes

    def note(self, drawn: Iterable[tuple[Judged, Sequence[int]]]) -> None:
        """Notes which problems are solved, each with the pass that it was drawn in."""
        if self._retire is None:
            return
        share, success = self._retire.share, self._retire.success
        assert share is not None, "of a method it is filled in"
        passing = 1.0 if success is None else success
        for judged, passes in drawn:
            if success is None:
                self._check_binary(judged.by_name[self._deciding])
            done = np.asarray(allocation.solved(judged.by_name[self._deciding], share, success=passing))
            if judged.seeded is not None:
                done = done & ~judged.seeded  # with others' solutions before them
            for problem, number, over in zip(judged.problems, passes, done, strict=True):
                if over:
                    self._solved[problem.uid] = max(number, self._solved.get(problem.uid, 0))

    def _check_binary(self, values: Samples) -> None:
        graded = values[np.isfinite(values) & (values != 0) & (values != 1)]
        if graded.size:
            raise UserError(
                f"prompts are retired by the reward {self._deciding!r}, which gave {graded[0]:g}: say from where on a "
                "sample passes, with rollout.retire.success"
            )
