"""What happens when a run ends, at its last step, by a notice that stops it, or by a `UserError`: its state is saved.

All processes decide together that it stops, in `grpojax.run.control`.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

import jax

from grpojax.host import coordination, preemption, processes, watchdog
from grpojax.host.console import log
from grpojax.host.errors import PassingError, UserError
from grpojax.run.control import RunControl, Stopped
from grpojax.run.store import Store

RESCUE_S = 20.0  # time that a process with an error waits for errors of the others


@dataclasses.dataclass
class Outcome:
    """Whether a loop finished or was stopped."""

    finished: bool = True


@contextlib.contextmanager
def conducted(
    store: Store, control: RunControl, dog: watchdog.Watchdog, rescue: Callable[[], int]
) -> Iterator[Outcome]:
    """Inside the context, a loop runs to its end or until the run is to stop. The state is saved either way, and after
    a `UserError`. Another error passes through.

    Args:
      store: of the run.
      control: learns of notices to stop.
      dog: watches the loop.
      rescue: saves the learned state, if that is not done yet; returns the step.

    Returns:
      A context that says, after it is left, whether the loop finished.

    Raises:
      UserError: raised by the loop.
      PassingError: the last save failed, or the directory was removed or moved away.
    """
    outcome = Outcome()
    with preemption.notices(control.ask), dog:
        try:
            try:
                yield outcome
            except Stopped:
                outcome.finished = False
            step = rescue()
        except UserError as e:
            _gather(store, control, str(e))
            if store.together:
                step = rescue()
                store.wait()
                if processes.is_first() and not isinstance(e, PassingError):
                    reason = str(e).partition("\n")[0].removeprefix(f"{store.directory} ")
                    store.run_directory.failed(step, reason)
            raise
        store.wait()
    store.together = True
    if store.problem:
        raise PassingError(
            f"the last save failed: {store.problem}\n"
            f"see to it and run the same command: it goes on from step {store.checkpoints.latest() or 0}"
        )
    if store.lost:
        raise PassingError(
            f"{store.directory} was removed or moved away during the run, with its metrics and samples\n"
            f"the state of step {step} is saved there again, and the same command goes on from it"
        )
    if processes.is_first() and outcome.finished:
        store.run_directory.finished(step)
    elif processes.is_first():
        store.run_directory.stopped(step, notice=control.reason, seconds=time.monotonic() - control.since)


def _gather(store: Store, control: RunControl, error: str) -> None:
    """Finds out whether all processes have an error, since one process by itself cannot save."""
    with contextlib.suppress(TimeoutError):
        coordination.exchange(f"{control.place}/rescue", error[:300], seconds=RESCUE_S)
        store.together = True


def hang(option: str, message: str) -> None:
    """What a watchdog does if a step takes far too long, by ``train.hang_policy``."""
    if option == "stop":
        processes.end(f"{message}; train.hang_policy=stop ends the run, which goes on from its last save")
    log.warning("%s", message)


@contextlib.contextmanager
def enough_memory(when: Callable[[], str], remedies: str) -> Iterator[None]:
    """Inside the context, memory that runs out is a `UserError` with ``when`` that was and the ``remedies``."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as e:
        if not isinstance(e, MemoryError) and "RESOURCE_EXHAUSTED" not in str(e):
            raise
        raise UserError(f"out of memory {when()}: {remedies}\n{' '.join(str(e).split())[:300]}") from e
