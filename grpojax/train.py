"""A run, from the top: `train` repeats `step`, and saves, evaluates and stops where a step has returned.

`open_run` opens a run of a recipe. A `Run` is what its steps are made of, a `State` is what they change::

    train(open_run(recipe.load("configs/quickstart.yaml")))

A loop of one's own calls `step`: docs/understand/loop.md shows one.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpojax.host import processes
from grpojax.host.console import log
from grpojax.run import learn
from grpojax.run.ending import conducted, enough_memory
from grpojax.run.lesson import Clock, Lesson, Updates
from grpojax.run.opening import open_run
from grpojax.run.run import Run
from grpojax.run.run_state import State

__all__ = ["Lesson", "Run", "State", "Updates", "open_run", "save", "step", "train"]


def train(run: Run, on_step: Callable[[Updates], None] = lambda updates: None) -> bool:
    """Trains to the end, and closes the run. The state is saved at the end, when the run is stopped, and after a
    `UserError` of a step or between steps. After another error, such as no memory, only the last save is left.

    Args:
      run: an open run, new or resumed.
      on_step: called after each step, with updates that may still be in flight.

    Returns:
      False if the run was stopped before its end.

    Raises:
      UserError: an error with a remedy, such as memory that ran out or an alarm that stops the run.
    """
    first = run.state.step
    try:
        with processes.telling(), enough_memory(lambda: f"after step {run.state.step}", run.memory):
            with conducted(run.store, run.control, run.watchdog, functools.partial(_rescue, run)) as outcome:
                _repeat(run, on_step)
        if not outcome.finished:
            return False
        if run.state.step > first:
            log.info("finished after step %d: %s", run.state.step, run.store.directory)
        for part in run.parts:
            if (line := part.warning(run.state)) is not None:
                log.warning("%s", line)
        return True
    finally:
        run.close()


def _repeat(run: Run, on_step: Callable[[Updates], None]) -> None:
    """Steps to the end of the run, and between them records, evaluations and saves."""
    journal, schedule, done = run.journal, run.config.train, run.state.step
    # The evaluation that was due after the last step of a stopped run.
    if run.held_out.best is not None and (done == 0 or (_evaluates(run) and journal.evaluated < done)):
        _evaluate(run)
    while run.progress(run.state) < 1:
        number = run.state.step + 1
        run.watchdog.begin(number)
        run.profile.begin(number, run.state.networks)
        journal.begin(run.steps_in_flight)
        state, updates = step(run, run.state, meanwhile=functools.partial(_catch_up, run))
        journal.add(state, updates)
        on_step(updates)
        run.profile.end(number, state.networks)
        journal.finish(leave=1)
        every, evaluates = schedule.checkpoint_every, _evaluates(run)
        saves = run.progress(state) >= 1 or (every and number % every == 0) or run.control.due
        if evaluates or saves:
            journal.finish()
        run.watchdog.end()
        if run.store.gone:
            run.control.ask(f"{run.store.directory} is gone")
        if saves:  # saved first, as an evaluation takes long and may fail
            save(run, run.state, evaluation_follows=evaluates)
        if evaluates:
            _evaluate(run)
    if not journal.tested and (values := run.held_out.read_test(run.state)) is not None:
        journal.write_test(run.state.step, values)


def step(run: Run, state: State, meanwhile: Callable[[State], State] = lambda state: state) -> tuple[State, Updates]:
    """One step: gets samples, and learns from them.

    Args:
      run: an open run.
      state: before the step. Its networks are taken over: read them from the state that is returned.
      meanwhile: called while the devices draw the samples, such as to record the step before. Returns the state as it
        is to be from then on.

    Returns:
      The state after the step, and its updates, which may still run on the devices (`Updates.wait`).

    Raises:
      grpojax.run.control.Stopped: the run is to stop. What is in flight is in `grpojax.run.source.Source.saved`.
    """
    number, clock = state.step + 1, Clock(time.perf_counter())
    first = run.source.begin(state)
    if first.arrive is None:  # its samples are there
        clock.lap("rollout")
    state = meanwhile(state)
    clock.leave_out(until=run.journal.since)  # while the updates of the step before were waited for
    batch = run.source.next(state, first)
    del first  # and with it the weights and caches that the rollout had on the devices
    clock.lap("rollout")
    lesson = run.learn_from(run, state, batch, clock)

    before = run.progress(state)
    state = _with_counts(state, lesson)
    progress = run.progress(dataclasses.replace(state, step=number))
    clock.lap(None)
    # From here to the end of the step nothing waits for the device.
    entropy_coef = learn.entropy_of(run, state)["applied"]
    of_schedule = (before, min(progress, 1.0)) if run.by_progress else None
    state, metrics = learn.update(run, state, lesson.minibatches, progress=of_schedule)
    clock.lap("update")
    state = learn.end_step(run, state)
    if lesson.lines is not None:
        run.journal.write_samples(number, lesson.lines)
    state = dataclasses.replace(state, step=number).having(run.source.after_step())
    known = {**lesson.facts, "num_tokens": float(state.num_tokens)}
    if run.samples:
        known |= _of_sampling(run, state, lesson, metrics, clock)
    if run.objective.entropy_target is not None:
        known["entropy_coef"] = entropy_coef
    return state, Updates(
        number=number,
        batch=lesson.batch,
        tokens=lesson.tokens,
        flops=lesson.flops,
        known=known,
        metrics=metrics,
        progress=progress,
        waited=clock.seconds["update"] if run.samples else None,
    )


def _with_counts(state: State, lesson: Lesson) -> State:
    """The state with the tokens and FLOPs of a step counted."""
    return dataclasses.replace(
        state,
        num_tokens=state.num_tokens + lesson.prompt_tokens + lesson.tokens,
        sampled_tokens=state.sampled_tokens + lesson.tokens,
        flops=state.flops + sum(lesson.flops.values()),
    )


def _of_sampling(
    run: Run, state: State, lesson: Lesson, metrics: Sequence[Mapping[str, Any]], clock: Clock
) -> dict[str, float]:
    """What the metrics of a step that draws samples say of the run so far, and the seconds of its phases."""
    seconds = clock.seconds + run.source.seconds
    run.source.seconds.clear()
    return {
        "sampled_tokens": float(state.sampled_tokens),
        "flops": float(state.flops),
        "empty_updates": float(run.ppo_epochs * len(lesson.minibatches) - len(metrics)),
        **{f"time/{name}_s": float(seconds[name]) for name in ("data", "rollout", "score", "reward")},
    }


# -------------------------------------------------------------------------------------------- between the steps


def _catch_up(run: Run, state: State) -> State:
    """Records the step before while the devices draw the samples of this one. What is recorded may change the run's
    state, such as an alarm does."""
    run.journal.finish(leave=run.steps_in_flight)
    return run.state


def _evaluates(run: Run) -> bool:
    """Whether the validation set is due after the step that was last done."""
    every, done = run.config.train.eval_every, run.state.step
    return run.held_out.best is not None and (run.progress(run.state) >= 1 or (every > 0 and done % every == 0))


def _evaluate(run: Run) -> None:
    """Records the current policy's metrics on the validation set. If it is stopped, the resumed run repeats it."""
    number = run.state.step
    values, scores = run.held_out.evaluate(run.state)
    run.journal.write(number, values)
    run.store.score(number, scores)
    run.journal.heed(number)


def save(run: Run, state: State, *, evaluation_follows: bool = False) -> None:
    """Starts a save. If it fails, the run goes on, and the next save tries again.

    Args:
      run: between two steps.
      state: what the last step has returned.
      evaluation_follows: whether an evaluation of this state follows, which may show that it is bad.
    """
    run.journal.saved_step = state.step
    run.journal.flush()
    rest = dataclasses.replace(state, in_flight=run.source.saved())
    run.store.save(run.of_checkpoint(state.networks), rest, evaluation_follows=evaluation_follows)
    run.control.save_started()


def _rescue(run: Run) -> int:
    """Saves the learned state when the run ends, if that is not done yet. Returns the step that is saved."""
    try:
        run.journal.finish()
    finally:
        gone = run.store.make_again()
        run.store.wait()  # a save that is under way may fail
        if gone or run.store.problem or run.state.step != run.journal.saved_step:
            save(run, run.state)
    return run.state.step
