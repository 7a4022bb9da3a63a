"""What a step learns from, and its updates while the devices still work on them."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpojax.device import Device
from grpojax.run import step_metrics
from grpojax.run.batch import Batch
from grpojax.run.minibatch import Minibatch


class Clock:
    """Seconds of the phases of a step, by name; the first began at ``since``, by `time.perf_counter`."""

    def __init__(self, since: float) -> None:
        self.seconds, self._since = Counter[str](), since

    def lap(self, name: str | None) -> None:
        """Ends a phase of the step; None ends a time span that belongs to no phase."""
        now = time.perf_counter()
        if name is not None:
            self.seconds[name] += now - self._since  # pyrefly: ignore
        self._since = now

    def leave_out(self, until: float) -> None:
        """The time until then, by `time.perf_counter`, belongs to no phase. Nothing if it is over already."""
        self._since = max(self._since, until)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lesson:
    """What a step learns from.

    Attributes:
      batch: its samples, with their rewards and advantages.
      minibatches: their rows on the devices, one minibatch for each update of a pass.
      facts: metrics of both.
      prompt_tokens, tokens: tokens of all prompts and completions that were drawn, or that the data gave.
      flops: useful FLOPs of the step, by phase.
      lines: makes the lines of the samples file; None if those of this step are not stored.
    """

    batch: Batch
    minibatches: Sequence[Minibatch]
    facts: Mapping[str, float]
    prompt_tokens: int
    tokens: int
    flops: Mapping[str, float]
    lines: Callable[[], Sequence[Mapping[str, Any]]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Updates:
    """A step's updates, which may be in flight: the metrics that the host has already, and those of the devices.

    Attributes:
      number: number of the step.
      batch: the samples that it learned from. Their rows on the devices are not kept.
      tokens, flops: as of the `Lesson`.
      known: metrics that the host has.
      metrics: the metrics of each update; on the host once the updates are over.
      progress: share of the whole run that is done after the step.
      waited: seconds that the host waited for the updates so far; None if a step does nothing else.
      over: when the updates were over, by `time.perf_counter`; None while they may run.
    """

    number: int
    batch: Batch
    tokens: int
    flops: Mapping[str, float]
    known: Mapping[str, float]
    metrics: Sequence[Mapping[str, Any]]
    progress: float
    waited: float | None = None
    over: float | None = None

    def wait(self, device: Device) -> "Updates":
        """The updates once they are over, with their metrics on the host."""
        if self.over is not None:
            return self
        asked = time.perf_counter()
        metrics = device.get(self.metrics)
        over = time.perf_counter()
        waited = None if self.waited is None else self.waited + over - asked
        return dataclasses.replace(self, metrics=metrics, over=over, waited=waited)

    def values(self) -> dict[str, float]:
        """All metrics of a step whose updates are over (`wait`)."""
        return {**self.known, **step_metrics.of_updates(self.metrics)}
