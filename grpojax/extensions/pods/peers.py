"""The other processes of a run: who has failed, known to all of them within a minute.

In a run of several processes, each has a thread that looks every `LOOK_S` for posts of the others. A process that fails
posts the reason before it leaves. Each of the others prints it too and ends, even if its main thread waits for the
devices. A process that is killed or unreachable can post nothing. jax's heartbeats detect that: within
`joining.HEARTBEAT_S` they abort all other processes (SIGABRT, status 134), and jax prints the index of the lost one. If
the lost one is the first, which runs jax's service, they are aborted at once and without an index. A process that
joined no others starts no thread.
"""

import atexit
import contextlib
import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Iterator

import jax

from grpojax.extensions.pods import joining
from grpojax.host import coordination, internals, preemption
from grpojax.host.console import tell
from grpojax.host.errors import UserError

LOOK_S = 2.0
GRACE_S = 3.0  # time for a main thread that notices the failure itself to end with its own message
LEAVE_S = 10.0  # time that the first process, which runs the coordination service, waits until the others have read


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Inside the context, and until all processes have left it, the failure of one ends all.

    The process that raised keeps its error and its status, 2 for a `UserError`. The others print which process failed
    and end with 1. If one was stopped (`preemption.StopRequested`), all end with 75. The processes must have joined;
    the context does not look for devices.
    """
    if internals.joined()[1] == 1:
        yield
        return
    peers = _Peers()
    _here[:] = [peers]
    peers.start()
    try:
        yield
        peers.finish()
    except BaseException as error:
        message = peers.leave(error)
        status = _status(message) if message else _status_of(error)
        # At exit, Python would wait for threads, and jax for processes, that wait for a process that is gone.
        threading.Thread(target=_exit_after_main, args=(status,), daemon=True).start()
        atexit.register(internals.exit_at_once, status)
        if message:
            tell(message)
            raise SystemExit(status) from None
        raise


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Inside the context, an error is sent to the others at once. They end when this process does, which may need a
    long time to release its resources. Until then it needs jax's service, which ends soon after a process has left it.
    """
    try:
        yield
    except Exception as error:
        for peers in _here:
            peers.failing(error)
        raise


_STOPPED = "was stopped"


def _status(message: str) -> int:
    """The exit status of a process that ends because of another one."""
    return os.EX_TEMPFAIL if message.endswith(_STOPPED) else 1


def _status_of(error: BaseException) -> int:
    """The exit status of a process that ends because of its own error."""
    if isinstance(error, preemption.StopRequested):
        return os.EX_TEMPFAIL
    return error.status if isinstance(error, UserError) else 130 if isinstance(error, KeyboardInterrupt) else 1


def leave(reason: str) -> None:
    """Tells the others that this process ends by its own decision, and why."""
    for peers in _here:
        peers.fail(f"failed: {reason}")


_here: list["_Peers"] = []
_numbers = itertools.count()


class _Peers(threading.Thread):
    """Watches the state of the other processes, and posts that of this one."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="peers")
        self.me, self.count = internals.joined()
        self._host, self._place = socket.gethostname(), f"peers/{next(_numbers)}"
        self._finished = False
        self._failing = set[str]()  # processes that are known to end by an error
        self._verdict: str | None = None
        self._known, self._leaving, self._all_done = threading.Event(), threading.Event(), threading.Event()

    # ------------------------------------------------------------------------------------------ the thread

    def run(self) -> None:
        """Looks until all have finished or one has failed."""
        while not self._all_done.is_set():
            # A call to the service may fail once. If the service is gone, jax ends this process.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._verdict = self._look()
                if self._verdict is None:
                    self._hear()
            if self._verdict:
                self._known.set()
                if not self._leaving.wait(GRACE_S):
                    self._leave(self._verdict)
                return
            self._leaving.wait(0.1 if self._finished else LOOK_S)

    def _look(self) -> str | None:
        """The known failure in one line; None if there is none."""
        if self._finished:
            coordination.post(f"{self._place}/finished/{self.me}", "")
            if len(coordination.posted(f"{self._place}/finished")) == self.count:
                self._all_done.set()
        failed = coordination.posted(f"{self._place}/failed")
        return _named(*min(failed.items())) if failed else None

    def _hear(self) -> None:
        """Prints once for each process the error that will end it."""
        for index, what in coordination.posted(f"{self._place}/failing").items():
            if self._failing.isdisjoint({index, str(self.me)}):
                tell(_named(index, what))
                tell("it lets go of what it holds, and all end")
            self._failing.add(index)

    def _leave(self, message: str) -> None:
        """Ends the process from this thread, since the main thread waits for something that will not come."""
        tell(message)
        self._farewell()
        internals.exit_at_once(_status(message))

    def _farewell(self) -> None:
        """Reports that this process leaves. The first one leaves last, since all others would be aborted with it."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            coordination.post(f"{self._place}/left/{self.me}", "")
            until = time.monotonic() + LEAVE_S
            while self.me == 0 and time.monotonic() < until:
                if len(coordination.posted(f"{self._place}/left")) == self.count:
                    break
                time.sleep(0.1)

    # ----------------------------------------------------------------------------------------- the main thread

    def finish(self) -> None:
        """Waits until all processes are here and the thread has ended. jax's service goes away at the end of the
        process, and a thread in a call to it would abort the process."""
        self._finished = True
        while not self._all_done.wait(0.1):
            if self._known.is_set():
                raise SystemExit(_status(str(self._verdict)))
        self._leaving.set()
        self.join(LEAVE_S)

    def fail(self, what: str) -> None:
        """Posts why this process ends, and gives the others time to read it."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            coordination.post(f"{self._place}/failed/{self.me}", f"{self._host} {what}")
        self._farewell()

    def failing(self, error: Exception) -> None:
        """Posts the error that will end this process, unless another process caused it."""
        if not _of_a_peer(error):
            self._failing.add(str(self.me))
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                coordination.post(f"{self._place}/failing/{self.me}", f"{self._host} {_words(error)}")

    def leave(self, error: BaseException) -> str | None:
        """Posts the error that was raised here. If another process caused it, returns a message that names that
        process.

        A collective that breaks off, or a meeting that a process missed, is a sign that another process is gone. If
        that one was killed, jax ends this process while it waits here.
        """
        message = self._verdict
        if blameless := _of_a_peer(error):
            if not self._known.wait(2 * LOOK_S) and not self._failing:
                message = "another process seems to be gone; jax says which, and all end within a minute"
                tell(message)
            self._known.wait(joining.HEARTBEAT_S + LOOK_S)
            message = self._verdict
        self._leaving.set()
        if message and blameless:
            self._farewell()
            return message
        self.fail(_words(error))
        return None


def _named(index: str, posted: str) -> str:
    """The text that a process posted, with its index and host."""
    host, _, what = posted.partition(" ")
    return f"process {index} ({host}) {what}"


def _words(error: BaseException) -> str:
    """The end of a process that raised this error, in one line."""
    if isinstance(error, preemption.StopRequested):
        return _STOPPED
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return "failed: " + " ".join(f"{kind}{error}".split())[:300]


def _of_a_peer(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, is typical of the loss of another process."""
    if error is None:
        return False
    if isinstance(error, UserError | KeyboardInterrupt | preemption.StopRequested) or "RESOURCE_EXHAUSTED" in str(
        error
    ):
        return False
    status = re.search(r"\b(UNKNOWN|UNAVAILABLE|ABORTED|CANCELLED|INTERNAL|DEADLINE_EXCEEDED): ", str(error))
    runtime = isinstance(error, jax.errors.JaxRuntimeError | TimeoutError | SystemExit)
    return runtime or status is not None or _of_a_peer(error.__cause__)


def _exit_after_main(status: int) -> None:
    """Ends the process as soon as its main thread has nothing more to do or to print."""
    threading.main_thread().join()
    internals.exit_at_once(status)
