"""The problems of each rollout: their order, and solved problems that a run leaves out."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from grpojax import allocation, data
from grpojax.host.console import log
from grpojax.host.on_host import on_host
from grpojax.run.batch import Batch, success_of
from grpojax.run.run_state import State
from grpojax.run.sections import RetireConfig


class ProblemOrder:
    """The problems of each rollout of a run.

    If solved prompts are retired, they are left out from the next pass over the data on. A rollout still has as many
    prompts: the passes get shorter, and the remaining prompts are drawn more often. If fewer are left than a rollout
    takes, they occur in it repeatedly. Once all problems of a source are solved, all of them are drawn again.

    Args:
      problems: all problems.
      size: prompts of a rollout.
      seed: of their order.
      retire: when a prompt is solved, and for how long it is left out; None to leave out none.
      deciding: the reward that says whether a sample passes.
      state: of a run that goes on.
    """

    def __init__(
        self,
        problems: data.Problems,
        size: int,
        seed: int,
        *,
        retire: RetireConfig | None,
        deciding: str,
        state: State,
    ):
        self._retire, self._deciding = retire, deciding
        self._plain = data.Batches(problems, size, seed, problems.weights)
        self._batches: data.RetiringBatches | None = None
        if retire is not None:
            self._batches = data.RetiringBatches(problems, size, seed, problems.weights, retire.readmit_after)
            self._passes = tuple(data.Pass(**p) for p in state.passes or ()) or self._batches.begin()
        self._solved: dict[int, int] = dict(state.solved or ())

    def saved(self) -> dict[str, Any]:
        """What the next problems depend on besides the rollout's number: fields of `State`."""
        if self._retire is None:
            return {}
        return {"passes": [dataclasses.asdict(p) for p in self._passes], "solved": sorted(self._solved.items())}

    def draw(self, number: int) -> tuple[Sequence[data.Problem], Sequence[int]]:
        """The problems of the rollout of that number, and the pass over its source that each belongs to."""
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

    def note(self, drawn: Iterable[tuple[Batch, Sequence[int]]]) -> None:
        """Notes which problems are solved, each with the pass that it was drawn in."""
        if self._retire is None:
            return
        share, success = self._retire.share, self._retire.success
        assert share is not None, "of a method it is filled in"
        for batch, passes in drawn:
            values = batch.by_name[self._deciding]
            use, setting = "prompts are retired", "rollout.retire.success"
            passing = success_of(values, self._deciding, success, use=use, setting=setting)
            with on_host():
                there = batch.rollout.lengths > 0
                done = np.asarray(allocation.solved(values, share, success=passing, drawn=there))
            if batch.aided is not None:
                done = done & ~batch.aided
            for problem, number, over in zip(batch.problems, passes, done, strict=True):
                if over:
                    self._solved[problem.uid] = max(number, self._solved.get(problem.uid, 0))

    def metrics(self) -> dict[str, float]:
        """Metrics of the state that the next problems depend on."""
        return {}
