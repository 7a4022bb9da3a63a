"""Worker processes that may be killed: a hard time limit for each job, a memory limit for each process.

They come from a fork server, a fresh process that never saw jax: nothing is forked after jax has started. The limits
are settings (`grpojax.rewards.reward_config`); `grpojax.rewards.scoring` says what becomes of a sample whose reward is
late.
"""

import contextlib
import functools
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from grpojax.host import isolation
from grpojax.host.errors import UserError
from grpojax.rewards import sandbox

log = logging.getLogger("grpojax")

# Seconds over the time limit without any job done after which the workers are taken for lost.
GRACE = 60.0
# Seconds that the processes have for their start before they may be stopped.
START_S = 10.0
# What multiprocessing gives for the exit status of a process whose fork server is gone.
NO_SERVER = 255


class _Process(ForkServerProcess):
    """Does not run the main script again: one without a guard would start its run anew, and most import jax."""

    @staticmethod
    def _Popen(process_obj):
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            return ForkServerProcess._Popen(process_obj)  # type: ignore[attr-defined]
        finally:
            sys.modules["__main__"] = main

    def start(self) -> None:
        """A daemonic process may start it too, as one of `multiprocessing.Pool`. None waits for it when it ends."""
        own = multiprocessing.current_process()
        daemonic, own.daemon, self.daemon = own.daemon, False, True
        try:
            super().start()
        finally:
            own.daemon = daemonic

    @property
    def exitcode(self) -> int | None:
        """pebble waits for the result of a process that ended with 0, as by ``os._exit(0)``."""
        return 1 if (code := super().exitcode) == 0 else code


class _Context(ForkServerContext):
    Process = _Process


class WorkerPool:
    """Processes that call functions with a time limit.

    Args:
      count: processes; 0 takes one for each core, up to 16.
      timeout_s: seconds that a job may take.
      memory_mb: MiB that a process may take on top of its imports; 0 sets no limit.
      functions: import paths of what the processes shall have imported before their first job.
      preload: modules imported once, before the processes part.
      network: whether the processes have the network. False needs `grpojax.host.isolation.network_can_be_cut`.
      first: called in each process before it imports the functions.
    """

    def __init__(
        self,
        *,
        count: int = 0,
        timeout_s: float = 10.0,
        memory_mb: int = 2048,
        functions: Sequence[str] = (),
        preload: Sequence[str] = (),
        network: bool = True,
        first: Callable[[], object] | None = None,
    ):
        self.timeout_s = timeout_s
        self.count = count or min(16, cores())
        contained = isolation.processes_can_be_contained()
        self._arguments = (memory_mb, tuple(functions), network, first, contained)
        multiprocessing.get_context("forkserver").set_forkserver_preload(["grpojax.rewards.worker", *preload])
        self._pool = self._start()

    def _start(self):
        import pebble

        context = _Context()
        try:
            ready, self._started = context.Semaphore(0), context.SimpleQueue()
        except OSError as e:
            raise UserError(f"workers of rewards and tools need /dev/shm to be writable: {e.strerror}") from None
        self._groups: set[int] = set()
        pool = pebble.ProcessPool(
            self.count,
            initializer=sandbox.start,
            initargs=(*self._arguments, self._started, ready),
            context=context,
        )
        with _uninterrupted():
            try:
                for _ in range(self.count):
                    pool.schedule(_nothing)  # starts the processes
            except (
                BaseException
            ):  # of a signal too: what has started in part would start again where its state is asked
                pool.stop()
                pool.join()
                raise
            self._finalizer = weakref.finalize(self, _stop, pool, ready, self.count, self._started, self._groups)
        return pool

    def submit(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Future:
        """Schedules a call. Its future gives what it returned or raises: see `failure`."""
        try:
            return self._pool.schedule(function, args=args, timeout=timeout_s or self.timeout_s)
        except RuntimeError:  # the pool has lost its processes
            self.restart()
            return self._pool.schedule(function, args=args, timeout=timeout_s or self.timeout_s)

    def next_done(self, futures: Sequence[Future]) -> Future:
        """Waits for one of the futures. If none comes in the time that a job may take, all are given up as broken."""
        done, pending = wait(futures, timeout=self.timeout_s + GRACE, return_when=FIRST_COMPLETED)
        if not done:
            self.restart()
            for future in pending:
                with contextlib.suppress(Exception):  # done meanwhile
                    future.set_exception(BrokenProcessPool("the workers were lost"))
            done = pending
        return next(iter(done))

    def end_orphans(self) -> None:
        """Ends what workers that are gone had started: a program that outlived its time limit."""
        _end_orphans(self._started, self._groups)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls in a worker and waits; None where it failed."""
        future = self.next_done([self.submit(function, *args)])
        return None if future.exception() else future.result()

    def restart(self) -> None:
        """Starts new processes in place of all."""
        log.warning("workers died; starting new ones")
        self._finalizer()
        self._pool = self._start()

    def close(self) -> None:
        """Ends the processes; what they were doing is lost."""
        self._finalizer()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Puts off Ctrl-C: processes that start then, and those whose parent is gone then, print where they were."""
    if sys.platform == "win32":
        yield
        return
    caught: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # for the processes, which inherit it
    # For this one, some thread of which may take the signal all the same.
    handler = signal.signal(signal.SIGINT, lambda *_: caught.append(1)) if in_main else None
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if in_main:
            signal.signal(signal.SIGINT, handler or signal.SIG_DFL)
            if caught:
                signal.raise_signal(signal.SIGINT)


def failure(future: Future) -> str | None:
    """Why a job's future has no result; None if it has one.

    "timeout", "memory" and "crash" are the job's own; "broken" need not be.
    """
    from pebble import ProcessExpired

    error = future.exception()
    if error is None:
        return None
    if isinstance(error, TimeoutError):
        return "timeout"
    if not isinstance(error, ProcessExpired):
        return "broken"
    if error.exitcode in (sandbox.SPOILED, NO_SERVER):
        return "broken"
    return "memory" if error.exitcode == sandbox.OUT_OF_MEMORY else "crash"


def _end_orphans(started, groups: set[int]) -> None:
    while not started.empty():
        groups.add(started.get())
    for leader in list(groups):
        try:
            os.kill(leader, 0)
        except ProcessLookupError:
            groups.discard(leader)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(leader, signal.SIGKILL)


def close_all(every: Sequence[WorkerPool]) -> None:
    """Closes several at once, in the time that one takes."""
    held = [each._finalizer.detach() for each in every]
    _stop_all([found[2] for found in held if found is not None])


def _stop(*of_pool: Any) -> None:
    _stop_all([of_pool])


def _stop_all(every: Sequence[tuple[Any, ...]]) -> None:
    # One that is stopped while it starts says so, with a traceback.
    deadline = time.monotonic() + START_S
    for pool, ready, count, *_ in every:
        for _ in range(count):
            if not pool.active or not ready.acquire(timeout=max(0.0, deadline - time.monotonic())):
                break
    for pool, *_ in every:
        pool.stop()
    for pool, _, _, started, groups in every:
        pool.join()
        _end_orphans(started, groups)


def _nothing() -> None:
    pass


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shared() -> WorkerPool:
    """One worker of the process, for `check_answer`; started on first use.

    Raises:
      UserError: the process was forked from one that has such a worker.
    """
    process, workers = _shared()
    if process != os.getpid():
        raise UserError(
            "answers were checked before this process was forked, and it cannot use the worker of its parent\n"
            "start processes by multiprocessing.get_context('spawn'), or check no answer before"
        )
    return workers


@functools.cache
def _shared() -> tuple[int, WorkerPool]:
    return os.getpid(), WorkerPool(count=1, preload=["math_verify"])
