"""An open run: what its steps are made of, what it keeps on disk, and what decides whether it goes on."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

from grpojax.host.watchdog import Watchdog
from grpojax.run.batch import Batch
from grpojax.run.control import RunControl
from grpojax.run.journal import Journal
from grpojax.run.lesson import Clock, Lesson
from grpojax.run.profiling import Profile
from grpojax.run.run_state import State
from grpojax.run.setup import Setup
from grpojax.run.source import Source
from grpojax.run.store import Store


class Evaluation(Protocol):
    """What a run is evaluated on.

    Attributes:
      best: the metric whose largest value's checkpoint stays; None without a validation set.
    """

    best: str | None

    def evaluate(self, state: State) -> tuple[dict[str, float], dict[str, float]]:
        """Metrics of the policy on the validation set, and the scores that choose the best checkpoint."""
        ...

    def read_test(self, state: State) -> dict[str, float] | None:
        """Metrics of the final policy on the test set, ``test/problems`` among them; None without one."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Setup):
    """An open run. `grpojax.train.step` takes it with a `State`.

    `grpojax.run.opening.open_run` opens one that samples; an extension opens one that learns from given answers. Close
    it, or use it in a ``with`` statement.

    Attributes:
      source: gives each step its samples.
      learn_from: makes a step's `Lesson` from them, `grpojax.run.learn.from_rewards` in a run that samples.
      held_out: evaluates the policy.
      progress: share of the whole run that is done at a state.
      by_progress: whether the optimiser's schedules follow ``progress``, and not the number of updates.
      samples: whether steps draw samples. Their metrics then say what was drawn, and how long each phase took.
      steps_in_flight: number of steps whose updates may still run while the next step's samples are got. 0 if these are
        drawn by the weights after them.
      lines_of: of a step's batch, a function that makes the lines of the samples file.
      store: its directory and checkpoints.
      journal: its newest state, and the records of its steps.
      control: decides whether it goes on.
      watchdog: times its steps.
      profile: traces some of them.
      held: is closed with the run: worker processes, files, the claim on the directory.
      memory: the remedy for the error if memory runs out.
    """

    source: Source
    learn_from: "Callable[[Run, State, Batch, Clock], Lesson]"
    held_out: Evaluation
    progress: Callable[[State], float]
    by_progress: bool = False
    samples: bool = True
    steps_in_flight: int = 0
    lines_of: Callable[[Batch], Callable[[], Sequence[Mapping[str, Any]]]] = lambda batch: lambda: ()
    store: Store
    journal: Journal
    control: RunControl
    watchdog: Watchdog
    profile: Profile
    held: contextlib.ExitStack
    memory: str

    @property
    def state(self) -> State:
        """The run's newest state: after the step that was last done."""
        return self.journal.state

    def close(self) -> None:
        """Releases what the run holds."""
        self.held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
