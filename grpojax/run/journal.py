"""The journal of a run: its newest state, and the record of each step once its updates are over."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from grpojax.host import processes
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.models import flops
from grpojax.programs.policy import Policy
from grpojax.records import metrics
from grpojax.run import checks, recorder, step_metrics, watch
from grpojax.run.lesson import Updates
from grpojax.run.run_state import State
from grpojax.run.store import Recipe, Store
from grpojax.run.watch import Watch


class Journal:
    """Records the steps of a run: metrics, samples, a table on the console, alarms.

    The devices never wait for it: a step's metrics are read after the next work was dispatched.

    Args:
      config: the recipe.
      store: the run's directory.

    Attributes:
      state: the run's newest state, which a save stores. It follows the metrics of a step once they are known.
      since: when the updates before those in flight were over, or the step began, by `time.perf_counter`.
      watch: the alarms; None without any.
      evaluated: the last step whose evaluation is recorded; -1 for none.
      tested: whether the test set was read after the newest step.
      saved_step: the step of the newest save.
    """

    def __init__(self, config: Recipe, store: Store):
        self._train, self._tracking, self._store = config.train, config.tracking, store
        self.state, self.since = State(), 0.0
        self._in_flight: list[Updates] = []

    def open(
        self,
        held: contextlib.ExitStack,
        policy: Policy,
        steps: int | None,
        *,
        progress: Callable[[State], float],
        gradient: str,
        columns: Sequence[tuple[str, str, str]] = metrics.Table.COLUMNS,
        alarms: Watch | None = None,
        follow: Callable[[State, Mapping[str, float]], State] = lambda state, values: state,
    ) -> None:
        """Opens the records, once nothing can be refused any more.

        Args:
          held: closes them.
          policy: the model that learns.
          steps: number of steps of the whole run; None if it ends by something else.
          progress: share of the whole run that is done at a state.
          gradient: the remedy for gradients that are not finite.
          columns: columns of the table on the console.
          alarms: looks at all metrics, including those of earlier steps.
          follow: what becomes of the state when the metrics of a step are known.
        """
        self.watch, self._policy, self._progress = alarms, policy, progress
        self._follow, self._gradient = follow, gradient
        store, done = self._store, self.state.step
        self.saved_step, over = done, progress(self.state) >= 1
        with processes.AllOrNone():  # the first process rewrites these files once all have read them
            lines = [x for x in metrics.read_metrics(store.directory) if x["step"] <= done]
            if alarms is not None:
                watch.replay(alarms, store, lines)
        self.evaluated = max((x["step"] for x in lines if any(n.startswith("eval/") for n in x)), default=-1)
        self.tested = any("test/problems" in x and x["step"] == done for x in lines)
        self._recorder = recorder.Recorder(store.directory, done, self._tracking, store.wandb)
        held.callback(self._recorder.close)
        self._table = metrics.Table(steps, columns=columns)
        store.settle(finished=over)
        if over and self.tested:
            log.info("%s is finished: step %d was the last; another run.dir starts another run", store.directory, done)

    # ------------------------------------------------------------------------------------------ steps

    def begin(self, steps_in_flight: int) -> None:
        """Call it before each step; ``steps_in_flight`` as of `grpojax.run.run.Run`."""
        if not self._in_flight:  # the time of an evaluation or a save does not count for the step
            self.since = time.perf_counter()
        elif not steps_in_flight and jax.default_backend() == "gpu":
            # There the host drives a program's loops: the call of a rollout returns at its end, and the time of the
            # updates before it would count as the rollout's.
            self._in_flight = [updates.wait(self._policy.device) for updates in self._in_flight]

    def add(self, state: State, updates: Updates) -> None:
        """Takes in a step: the state after it, and its updates, which may run on."""
        self.state, self.tested = state, False
        self._in_flight.append(updates)

    def finish(self, leave: int = 0) -> None:
        """Waits for the updates in flight and records their steps, but for those of the newest ``leave`` steps."""
        try:
            while len(self._in_flight) > leave:
                self._record(self._in_flight.pop(0).wait(self._policy.device))
        except UserError:
            with contextlib.suppress(UserError):  # the run ends with this step; the steps after it are recorded too
                self.finish()
            raise

    def _record(self, updates: Updates) -> None:
        """Records a step whose updates are over. The next one may be on the device by now, so that nothing here may ask
        the device for anything else."""
        assert updates.over is not None
        seconds, self.since = updates.over - self.since, updates.over  # the next work is queued behind the updates
        number, store = updates.number, self._store
        values = updates.values()
        skipped = [step_metrics.skipped(m) for m in updates.metrics]
        in_a_row = self.state.skipped
        for each in skipped:
            in_a_row = in_a_row + 1 if each else 0
        self.state = dataclasses.replace(self.state, skipped=in_a_row)
        values |= {"skipped_updates": float(sum(skipped)), "time/step_s": seconds}
        if updates.waited is not None:
            values["time/update_s"] = updates.waited
        values["time/checkpoint_s"], store.save_s = store.save_s, 0.0
        values["tokens_per_s"] = updates.tokens / seconds
        if peak := flops.PEAK_FLOPS.get(jax.devices()[0].device_kind):
            values["utilisation"] = sum(updates.flops.values()) / seconds / peak / self._policy.count
        self.state = self._follow(self.state, values)
        self.write(number, values)
        if number % self._train.log_every == 0:
            self._table.row(number, values, progress=updates.progress)
        most = self._train.max_skipped
        checks.finite(number, values["skipped_updates"], in_a_row, most=most, remedy=self._gradient)
        self.heed(number)

    # ------------------------------------------------------------------------------------------ what is recorded

    def write(self, number: int, values: Mapping[str, float]) -> None:
        """Records metrics of a step or of an evaluation after it, and the alarms that they set off."""
        rings = {} if self.watch is None else self.watch.note(number, values)
        self._recorder.write(number, {**values, **rings})

    def write_test(self, number: int, values: Mapping[str, float]) -> None:
        """Records metrics of the test set, which set off no alarm."""
        self._recorder.write(number, values)
        self.tested = True

    def heed(self, number: int) -> None:
        """Acts on the alarms that the last metrics have set off; raises `UserError` if one stops the run."""
        if self.watch is not None and self.watch.rings:
            self.state = watch.heed(self.watch, number, self._store, self.state, ends=self._progress(self.state) >= 1)
            watch.stop(self._store, self.state)

    def wants_samples(self, number: int) -> bool:
        """Whether the samples of a step are stored."""
        return self._recorder.wants_samples(number)

    def write_samples(self, number: int, rows: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Stores the samples of a step; a thread makes the rows."""
        self._recorder.write_samples(number, rows)

    def flush(self) -> None:
        """Waits until all records are in their files."""
        self._recorder.flush()
