"""The other processes of a run: who has failed and who is gone, known to all of them within a minute.

In a run of several processes a thread of each posts a beat every `BEAT_S` and reads those of the others. What fails
says why before it leaves; what is silent for `SILENT_S` is gone. Either way each process says it and ends, even where
its main thread waits for the devices. A process alone starts no thread.
"""

import atexit
import contextlib
import ctypes
import itertools
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax

from grpojax.host import coordination, internals, preemption
from grpojax.host.errors import UserError

BEAT_S = 2.0
# Python's lock is let go of while XLA compiles: in compiles of 35 s for CPU and TPU, and in writing and reading jax's
# cache, a thread paused for 0.5 s at most, on a machine with eight times the work that it has cores for.
SILENT_S = 30.0
START_S = 300.0  # the same of one that looks for its devices, whose drivers need not let go of Python's lock
GRACE_S = 3.0  # for a main thread that finds out by itself, to end with its own words
LEAVE_S = 10.0  # that the first process, who carries the coordination service, waits for the others to have read


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Inside, and until all processes have left it, the failure of one is the end of all.

    The one that raised keeps its error and its status, 2 for a `UserError`; the others say whose it was and end with 1.
    Where one was told to stop (`preemption.Told`) all end with 75. They must have joined; no device is looked for, and
    until it says that it is `ready`, a process may be silent for `START_S`.
    """
    if internals.joined()[1] == 1:
        yield
        return
    peers = _Peers()
    _here[:] = [peers]
    peers.start()
    _on_abort(peers)
    try:
        yield
        peers.finish()
    except BaseException as error:
        said = peers.leave(error)
        status = _status(said) if said else _status_of(error)
        # At the end Python would wait for threads, and jax for processes, that wait for who does not come any more.
        threading.Thread(target=_exit_after_main, args=(status,), daemon=True).start()
        atexit.register(_exit, status)
        if said:
            print(f"grpojax: {said}", file=sys.stderr, flush=True)
            raise SystemExit(status) from None
        raise


def ready() -> None:
    """This process has its devices."""
    for peers in _here:
        peers.starting = False
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            peers.beat()  # at once: it may be killed before the next


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Inside, an error is told to the others at once. They end when this process does, which may take long to let go of
    what it holds: to the end that needs jax's service, which ends soon after a process that left it."""
    try:
        yield
    except Exception as error:
        for peers in _here:
            peers.failing(error)
        raise


_TOLD = "was told to stop"


def _status(said: str) -> int:
    """Of a process that ends because of another one."""
    return os.EX_TEMPFAIL if said.endswith(_TOLD) else 1


def _status_of(error: BaseException) -> int:
    """Of a process that ends because of its own error."""
    if isinstance(error, preemption.Told):
        return os.EX_TEMPFAIL
    return error.status if isinstance(error, UserError) else 130 if isinstance(error, KeyboardInterrupt) else 1


def end(said: str) -> NoReturn:
    """Ends the run for all of its processes, whatever the main thread of this one waits for; status 1."""
    print(f"grpojax: {said}", file=sys.stderr, flush=True)
    for peers in _here:
        peers.fail(f"failed: {said}")
    _exit(1)


_here: list["_Peers"] = []
_numbers = itertools.count()


class _Peers(threading.Thread):
    """Posts this process's beats, and looks for what has become of the others."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="peers")
        self.me, self.count = internals.joined()
        self._host, self._place = socket.gethostname(), f"peers/{next(_numbers)}"
        self._names = {i: f"process {i}" for i in range(self.count)}
        now = time.monotonic()
        self._heard = dict.fromkeys(range(self.count), ("", now))  # the last beat, and when it was new
        self._looked = self._answered = now
        self._beats, self._finished, self.starting = 0, False, True
        self._failing = set[str]()  # who is known to end by an error
        self._verdict: str | None = None
        self._known, self._leaving, self._all_done = threading.Event(), threading.Event(), threading.Event()

    # ------------------------------------------------------------------------------------------ the thread

    def run(self) -> None:
        """Beats until all have finished, or until one has not."""
        while not self._all_done.is_set():
            try:
                self.beat()
                self._verdict = self._look()
                if self._verdict is None:
                    self._hear()
                self._answered = time.monotonic()
            except jax.errors.JaxRuntimeError:  # the service, which goes with the process that carries it
                if time.monotonic() - self._answered > SILENT_S:
                    self._verdict = f"{self._names[0]} is gone"
            if self._verdict:
                self._known.set()
                if not self._leaving.wait(GRACE_S):
                    self._leave(self._verdict)
                return
            self._leaving.wait(0.1 if self._finished else BEAT_S)

    def beat(self) -> None:
        """Says that this process is there."""
        self._beats += 1
        word = "finished" if self._finished else f"{'starting' if self.starting else ''}{self._beats}"
        coordination.post(f"{self._place}/beat/{self.me}", f"{word} {self._host}")

    def _look(self) -> str | None:
        """What is known to have gone wrong, in a line."""
        now = time.monotonic()
        # Time in which this process was held up, stopped or asleep is not theirs: it has heard nobody.
        if (lost := now - self._looked - 3 * BEAT_S) > 0:
            self._heard = {i: (beat, since + lost) for i, (beat, since) in self._heard.items()}
        self._looked = now
        for index, beat in coordination.posted(f"{self._place}/beat").items():
            if beat != self._heard[int(index)][0]:
                self._heard[int(index)] = beat, now
                self._names[int(index)] = f"process {index} ({beat.partition(' ')[2]})"
        finished = {i for i, (beat, _) in self._heard.items() if beat.startswith("finished")}
        if len(finished) == self.count:
            self._all_done.set()
        failed = coordination.posted(f"{self._place}/failed")
        for index, (beat, since) in self._heard.items():
            longest = START_S if not beat or beat.startswith("starting") else SILENT_S
            if not failed and index not in finished and index != self.me and now - since > longest:
                failed = {str(index): "is gone"}
                coordination.post(f"{self._place}/failed/{index}", "is gone")
        if not failed:
            return None
        index, what = min(failed.items())
        return f"{self._names[int(index)]} {what}"

    def _hear(self) -> None:
        """Says once of each process what it will end by."""
        for index, what in coordination.posted(f"{self._place}/failing").items():
            if self._failing.isdisjoint({index, str(self.me)}):
                said = f"grpojax: {self._names[int(index)]} {what}\ngrpojax: it lets go of what it holds, and all end"
                print(said, file=sys.stderr, flush=True)
            self._failing.add(index)

    def _leave(self, said: str) -> None:
        """Ends the process from here: its main thread waits for what will not come."""
        print(f"grpojax: {said}", file=sys.stderr, flush=True)
        self._farewell()
        _exit(_status(said))

    def _farewell(self) -> None:
        """Lets the first process go; it goes last, as all others would be aborted with it."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            coordination.post(f"{self._place}/left/{self.me}", "")
            until = time.monotonic() + LEAVE_S
            while self.me == 0 and time.monotonic() < until:
                gone = {i for i, (_, since) in self._heard.items() if time.monotonic() - since > SILENT_S}
                if len(gone | set(map(int, coordination.posted(f"{self._place}/left")))) == self.count:
                    break
                time.sleep(0.1)

    # ----------------------------------------------------------------------------------------- the main thread

    def finish(self) -> None:
        """Until all processes have come here, and the thread has ended: in a call to jax's service, which goes away at
        the end of the process, it would take the process with it."""
        self._finished = True
        while not self._all_done.wait(0.1):
            if self._known.is_set():
                raise SystemExit(_status(str(self._verdict)))
        self._leaving.set()
        self.join(SILENT_S)

    def fail(self, what: str) -> None:
        """Posts what became of this process, and lets the others read it."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            coordination.post(f"{self._place}/failed/{self.me}", what)
        self._farewell()

    def failing(self, error: Exception) -> None:
        """Says to the others what this process will end by, unless that is another one's doing."""
        if not _of_a_peer(error):
            self._failing.add(str(self.me))
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                coordination.post(f"{self._place}/failing/{self.me}", _words(error))

    def leave(self, error: BaseException) -> str | None:
        """Says what was raised here to the others; or else who is to blame for it, for what is not this process's own.

        A collective that breaks off, or a meeting that one missed, is a sign that another is gone.
        """
        said = self._verdict
        if blameless := _of_a_peer(error):
            self._known.wait(SILENT_S + 3 * BEAT_S)
            said = self._verdict
        self._leaving.set()
        if said and blameless:
            self._farewell()
            return said
        self.fail(_words(error))
        return None

    def gone(self) -> str:
        """What is said when the service is out of reach."""
        return f"grpojax: {self._names[0]} is gone"


def _words(error: BaseException) -> str:
    """What became of a process that raised this, in a line."""
    if isinstance(error, preemption.Told):
        return _TOLD
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return "failed: " + " ".join(f"{kind}{error}".split())[:300]


def _of_a_peer(error: BaseException | None) -> bool:
    """Whether an error, or one behind it, is what the loss of another process looks like."""
    if error is None:
        return False
    if isinstance(error, UserError | KeyboardInterrupt | preemption.Told) or "RESOURCE_EXHAUSTED" in str(error):
        return False
    status = re.search(r"\b(UNKNOWN|UNAVAILABLE|ABORTED|CANCELLED|INTERNAL|DEADLINE_EXCEEDED): ", str(error))
    runtime = isinstance(error, jax.errors.JaxRuntimeError | TimeoutError | SystemExit)
    return runtime or status is not None or _of_a_peer(error.__cause__)


def _exit(status: int) -> NoReturn:
    """Ends the process at once, without what jax does at the end."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


def _exit_after_main(status: int) -> None:
    """Ends the process as soon as its main thread has nothing more to do or to say."""
    threading.main_thread().join()
    _exit(status)


_kept: list[Any] = []


def _on_abort(peers: _Peers) -> None:
    """The first process carries jax's service, and jax aborts all others at once where that is gone: says so, status 1.

    Any other abort stays one. The handler is C's own, as Python's would only run after the abort.
    """
    if peers.me == 0:
        return
    host, _, port = internals.address().rpartition(":")

    def handler(number: int) -> None:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError:
            os.write(2, peers.gone().encode() + b"\n")
            os._exit(1)
        libc.signal(number, None)  # its own handling: the abort that called this goes on

    libc = ctypes.CDLL(None)
    kind: Callable[..., Any] = ctypes.CFUNCTYPE(None, ctypes.c_int)
    _kept[:] = [kind(handler)]
    libc.signal(int(signal.SIGABRT), _kept[0])
