"""Rollouts that are drawn ahead (``rollout.ahead``): while a step learns, the samples of the next one are drawn.

The rollout of step n+1 starts once the samples of step n are on the host, before these are scored and learned from. Its
samples are drawn with the weights after step n-1 and learned from by the weights after step n. So a sample is at most
one step's updates old (``rollout/staleness``). Additional rollouts of a filter are drawn when it asks for them, with
the weights of that moment. The problems of rollout n+1 are chosen before the rewards of rollout n are known. So solved
problems, and solve rates of levels, take effect one rollout later.
"""

from typing import Any

from grpojax.programs.policy import DryPolicy
from grpojax.run.batch import Batch
from grpojax.run.parts.part import Part
from grpojax.run.run_state import State
from grpojax.run.sections import TrainConfig
from grpojax.run.source import Plain, saved_of


class DrawsAhead(Part):
    """``rollout.ahead``."""

    def source(self, source: Plain) -> Any:
        """The source, one rollout ahead. On devices that compute nothing it stays as it is: the same is drawn, in
        another order."""
        return source if isinstance(source.policy, DryPolicy) else Ahead(source, self.config.train)


class Ahead:
    """A source that is one rollout ahead of the steps.

    Args:
      source: draws the rollouts.
      train: says when the run ends: after its last rollout none is started.

    Attributes:
      in_flight: the rollout of the next step, which saves contain until that step is over.
    """

    def __init__(self, source: Plain, train: TrainConfig):
        self.source, self.seconds, self._train = source, source.seconds, train
        state = source.context.state
        self.in_flight: Batch | None = None
        self._following: Batch | None = None  # the rollout of the next step, while a step is under way
        if state.in_flight is not None:
            self.in_flight = source.resumed(state.in_flight)

    def begin(self, state: State) -> Batch:
        """Waits for the samples that were drawn ahead, and starts the next rollout."""
        source = self.source
        batch = source.next(state, self.in_flight or source.begin(state))
        self._following = source.start(state) if self._train.done(state.step + 1, 0) < 1 else None
        return batch

    def next(self, state: State, first: Batch) -> Batch:
        """The samples are there."""
        return first

    def note(self, batch: Batch) -> dict[str, float]:
        """As of its source."""
        return self.source.note(batch)

    def after_step(self) -> dict[str, Any]:
        """As of its source. The rollout started in this step is the next step's."""
        self.in_flight, self._following = self._following, None
        return self.source.after_step()

    def saved(self) -> dict[str, Any] | None:
        """The rollout in flight, as a save stores it."""
        return None if self.in_flight is None else saved_of(self.in_flight)
