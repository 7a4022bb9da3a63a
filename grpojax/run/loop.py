"""The loop of every run: steps, and between them records, evaluations and saves, until the run ends or is stopped.

A `Task` defines the step, the evaluations and what is saved: `grpojax.run.trainer.Trainer` samples and learns from
rewards. The device never waits for the host: the metrics of an update are read after the next work has been dispatched.
"""

import abc
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax

from grpojax.host import peers, processes
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.models import flops
from grpojax.programs.policy import Policy
from grpojax.records import metrics
from grpojax.run import checks, recorder, step_metrics, watch
from grpojax.run.run_state import State
from grpojax.run.session import Recipe, Session, enough_memory
from grpojax.run.today import with_day
from grpojax.run.watch import Watch

R = TypeVar("R", bound=Recipe)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Updates:
    """A step's updates in flight: the metrics that the host has already, and those that are still on the device.

    Attributes:
      number: number of the step.
      known: metrics that the host has.
      metrics: the metrics of each update; on the host once the updates are over.
      tokens: completion tokens of the step.
      flops: useful FLOPs of the step.
      share: share of the whole run that is done after the step.
      waited: seconds that the host waited for the updates so far; None if a step does nothing else.
      over: when the updates were over, by `time.perf_counter`; None while they may run.
      follow: makes the run's state follow the step's metrics, once they are known; None if it does not.
    """

    number: int
    known: dict[str, float]
    metrics: list[dict[str, Any]]
    tokens: int
    flops: float
    share: float
    waited: float | None = None
    over: float | None = None
    follow: Callable[[State, Mapping[str, float]], State] | None = None


class Task(abc.ABC):
    """The step that a loop repeats, its evaluations, and the state to save.

    Attributes:
      loop: the loop that repeats it.
      policy: the model that learns.
    """

    loop: "Loop"
    policy: Policy

    @property
    def session(self) -> Session:
        """The run's directory, checkpoints and notices."""
        return self.loop.session

    @property
    def state(self) -> State:
        """The run's state after the step that was last done."""
        return self.loop.state

    @property
    def done(self) -> int:
        """Steps behind the run."""
        return self.loop.done

    def run(self) -> bool:
        """Trains to the end; False if it was stopped before (the state is saved either way)."""
        return self.loop.run()

    def close(self) -> None:
        """Releases the run's resources: worker processes, files, the directory's lock."""
        self.loop.close()

    @abc.abstractmethod
    def step(self, state: State) -> tuple[State, Updates]:
        """Dispatches the step that follows a state. Returns the state after it, and its updates, which may run on."""

    @property
    @abc.abstractmethod
    def networks(self) -> Mapping[str, Any]:
        """What is saved of the weights, by role."""

    def record(self) -> State:
        """The rest of what is saved."""
        return self.state

    @abc.abstractmethod
    def evaluate(self, number: int) -> tuple[dict[str, float], dict[str, float]]:
        """Metrics of the policy on the validation set after a step, and the scores that choose the best checkpoint."""

    @abc.abstractmethod
    def test(self, number: int) -> dict[str, float] | None:
        """Metrics of the final policy on the test set, ``test/problems`` among them; None without one."""


class Loop:
    """Repeats a task's steps.

    A task opens it in this order: inside `opening`, `prepare` makes the session, `restore` reads the newest checkpoint,
    and `start` opens the records.

    Args:
      task: the task to repeat.
      memory: remedy for the error if memory runs out.
      gradient: remedy for the error if gradients are not finite.
      ahead: number of steps whose updates may still run while the next step is dispatched.
      take_over: break another process's claim on a run directory in a bucket.

    Attributes:
      session: the run's directory.
      state: the run's state after the step that was last done.
      share: share of the whole run that is done.
      since: when the updates before those in flight were over, or the step began.
      metrics: the recorder of metrics and samples.
      watch: the alarms; None without any.
    """

    def __init__(self, task: Task, *, memory: str, gradient: str, take_over: bool, ahead: int = 1):
        self.task, self.ahead = task, ahead
        self._memory, self._gradient, self._take_over = memory, gradient, take_over
        self.state, self.since = State(), 0.0
        self._pending: list[Updates] = []

    @property
    def done(self) -> int:
        """Steps behind the run."""
        return self.state.step

    # ---------------------------------------------------------------------------------------- the opening

    @contextlib.contextmanager
    def opening(self) -> Iterator[contextlib.ExitStack]:
        """A context in which the run is opened. Its resources are released if that raises, and otherwise by `close`."""
        with contextlib.ExitStack() as held, peers.telling(), enough_memory(lambda: self.done, self._memory):
            yield held
            self._held = held.pop_all()

    def prepare(self, recipe: R, tokenizer: Any) -> R:
        """The recipe with the day that its prompts are written on; opens its session."""
        recipe = with_day(recipe, tokenizer, recipe.run.dir)
        self.session = Session(recipe, take_over=self._take_over)
        return recipe

    def restore(
        self, held: contextlib.ExitStack, abstract: Mapping[str, Any], *, best: str | None
    ) -> dict[str, Any] | None:
        """Weights by role of the newest checkpoint, whose state becomes the run's; None in a new run.

        Args:
          held: releases the checkpoints.
          abstract: of `Task.networks`: shapes, dtypes and shardings.
          best: the metric whose largest value's checkpoint stays; None without a validation set.
        """
        self._validates = best is not None
        self.session.open(held, best)
        restored = self.session.restore(abstract)
        if restored is None:
            return None
        weights, self.state = restored
        return weights

    def start(
        self,
        held: contextlib.ExitStack,
        steps: int | None,
        *,
        share: float,
        columns: Sequence[tuple[str, str, str]] = metrics.Table.COLUMNS,
        alarms: Watch | None = None,
    ) -> None:
        """Opens the records, once nothing can be refused any more.

        Args:
          held: closes them.
          steps: number of steps of the whole run; None if it ends by something else.
          share: share of the whole run that is done.
          columns: columns of the table on the console.
          alarms: looks at all metrics, including those of earlier steps.
        """
        self.watch, self.share, self._saved = alarms, share, self.done
        with processes.AllOrNone():  # the first process rewrites these files once all have read them
            lines = [x for x in metrics.read_metrics(self.session.directory) if x["step"] <= self.done]
            if alarms is not None:
                watch.replay(alarms, self.session, lines)
        self._evaluated = max((x["step"] for x in lines if any(n.startswith("eval/") for n in x)), default=-1)
        self._tested = any("test/problems" in x and x["step"] == self.done for x in lines)
        session = self.session
        self.metrics = recorder.Recorder(session.directory, self.done, session.config.tracking, session.wandb)
        held.callback(self.metrics.close)
        self.table = metrics.Table(steps, columns=columns)
        self._began = self.done
        self.session.settle(finished=share >= 1)
        if share >= 1 and self._tested:
            log.info(
                "%s is finished: step %d was the last; another run.dir starts another run",
                self.session.directory,
                self.done,
            )

    # ------------------------------------------------------------------------------------------ the steps

    def run(self) -> bool:
        """Trains to the end; False if it was stopped before (the state is saved either way)."""
        try:
            with peers.telling(), enough_memory(lambda: self.done, self._memory):
                with self.session.conduct(self._rescue) as outcome:
                    self._repeat()
            if outcome.finished and self.done > self._began:
                log.info("finished after step %d: %s", self.done, self.session.directory)
            return outcome.finished
        finally:
            self.close()

    def close(self) -> None:
        """Releases the run's resources."""
        self._held.close()

    def _rescue(self) -> int:
        """Saves the learned state whatever ends the run. Returns the step that is saved."""
        try:
            self.finish()
        finally:
            if self.session.make_again() or self.done != self._saved:
                self._save()
        return self.done

    def _repeat(self) -> None:
        task, session, train = self.task, self.session, self.session.config.train
        # The evaluation that was due after the last step of a stopped run.
        if self._validates and (self.done == 0 or (self._evaluates() and self._evaluated < self.done)):
            self._evaluate()
        while self.share < 1:
            session.watchdog.begin(self.done + 1)
            session.profile.begin(self.done + 1, task.networks)
            if not self._pending:  # the time of an evaluation or a save does not count for the step
                self.since = time.perf_counter()
            self.state, updates = task.step(self.state)
            self._pending.append(updates)
            self.share = updates.share
            session.profile.end(self.done, task.networks)
            self.finish(self.ahead)
            saves = self.share >= 1 or (train.checkpoint_every and self.done % train.checkpoint_every == 0)
            saves, evaluates = saves or session.control.due, self._evaluates()
            if evaluates or saves:
                self.finish()
            session.watchdog.end()
            session.look()
            if saves:  # saved first, as an evaluation takes long and may fail
                self._save(evaluation_follows=evaluates)
            if evaluates:
                self._evaluate()
        if not self._tested:
            self._test()

    def begin(self, start: Callable[[], T]) -> tuple[T, State]:
        """Gives ``start()``, which dispatches a step's rollout, and the run's state. While the device works on the
        rollout, the step before is waited for and recorded; the state follows its metrics."""
        if jax.default_backend() == "gpu":
            # There the host drives a program's loops: the call of a rollout returns at its end, and the time of the
            # updates before it would count as the rollout's.
            self._pending = [self._over(updates) for updates in self._pending]
        started = start()
        self.finish()
        return started, self.state

    def finish(self, ahead: int = 0) -> None:
        """Waits for the updates in flight and records their steps, but for those of the newest ``ahead`` steps."""
        try:
            while len(self._pending) > ahead:
                self._record(self._over(self._pending.pop(0)))
        except UserError:
            with contextlib.suppress(UserError):  # the run ends with this step; the steps after it are recorded too
                self.finish()
            raise

    def _over(self, updates: Updates) -> Updates:
        """Waits until the updates are over, and returns them with their metrics on the host."""
        if updates.over is not None:
            return updates
        asked = time.perf_counter()
        values = self.task.policy.device.get(updates.metrics)
        over = time.perf_counter()
        waited = None if updates.waited is None else updates.waited + over - asked
        return dataclasses.replace(updates, metrics=values, over=over, waited=waited)

    def _record(self, updates: Updates) -> None:
        """Records a step whose updates are over. The next one may be on the device by now, so that nothing here may ask
        the device for anything else."""
        assert updates.over is not None
        seconds, self.since = updates.over - self.since, updates.over  # the next work is queued behind the updates
        train, number = self.session.config.train, updates.number
        values = updates.known | step_metrics.of_updates(updates.metrics)
        skipped = [step_metrics.skipped(m) for m in updates.metrics]
        in_a_row = self.state.skipped
        for each in skipped:
            in_a_row = in_a_row + 1 if each else 0
        self.state = dataclasses.replace(self.state, skipped=in_a_row)
        values |= {"skipped_updates": float(sum(skipped)), "time/step_s": seconds}
        if updates.waited is not None:
            values["time/update_s"] = updates.waited
        values["time/checkpoint_s"], self.session.save_s = self.session.save_s, 0.0
        values["tokens_per_s"] = updates.tokens / seconds
        if peak := flops.PEAK_FLOPS.get(jax.devices()[0].device_kind):
            values["utilisation"] = updates.flops / seconds / peak / self.task.policy.count
        if updates.follow is not None:
            self.state = updates.follow(self.state, values)
        self._write(number, values)
        if number % train.log_every == 0:
            self.table.row(number, values, share=updates.share)
        checks.finite(number, values["skipped_updates"], in_a_row, most=train.max_skipped, remedy=self._gradient)
        self._heed(number)

    def _write(self, number: int, values: Mapping[str, float]) -> None:
        """Records metrics, and the alarms that they set off."""
        rings = {} if self.watch is None else self.watch.note(number, values)
        self.metrics.write(number, {**values, **rings})

    def _heed(self, number: int) -> None:
        if self.watch is not None and self.watch.rings:
            self.state = watch.heed(self.watch, number, self.session, self.state, ends=self.share >= 1)
            watch.stop(self.session, self.state)

    def _save(self, *, evaluation_follows: bool = False) -> None:
        self._saved = self.done
        self.metrics.flush()
        self.session.save(self.task.networks, self.task.record(), evaluation_follows=evaluation_follows)

    # ------------------------------------------------------------------------------------------ held-out data

    def _evaluates(self) -> bool:
        """Whether the validation set is due after the step that was last done."""
        every = self.session.config.train.eval_every
        return self._validates and (self.share >= 1 or (every > 0 and self.done % every == 0))

    def _evaluate(self) -> None:
        """Records the current policy's metrics on the validation set. If it is stopped, the resumed run repeats it."""
        number = self.done
        values, scores = self.task.evaluate(number)
        self._write(number, values)
        self.session.score(number, scores)
        self._heed(number)

    def _test(self) -> None:
        """Records the final policy's metrics on the test set. If it is stopped, the resumed run does it."""
        if (values := self.task.test(self.done)) is not None:
            self.metrics.write(self.done, values)
            self._tested = True
