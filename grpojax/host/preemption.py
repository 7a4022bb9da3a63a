"""The notices that stop a run: a signal, or a cloud's message before it takes a machine away.

On Google's machines, the metadata server has the message (``instance/preempted``, ``instance/maintenance-event``),
often before SIGTERM comes.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from grpojax.host import metadata
from grpojax.host.console import log

POLL_S = 2.0
_came: list[int] = []


class StopRequested(SystemExit):
    """Raised by a notice if there is nothing to save. It ends a process with status 75: start it again."""

    def __init__(self) -> None:
        super().__init__(os.EX_TEMPFAIL)


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Inside the context, but not in `notices`, SIGTERM raises `StopRequested` in the main thread."""
    _came.clear()
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: Any) -> None:
        _came.append(number)
        log.info("SIGTERM: stopping; there is nothing to save yet")
        raise StopRequested

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def notices(notice: Callable[[str], None]) -> Iterator[None]:
    """Inside the context, SIGTERM, SIGINT and the notices of `watched` are passed to ``notice``; a second signal acts
    at once.

    Use it in the main thread. ``notice`` may be called more than once, by a signal's handler and by another thread.
    """
    came: list[int] = []
    if _came:  # `StopRequested` was raised where exceptions are swallowed, such as in a callback
        notice(signal.Signals(_came[0]).name)

    def on_signal(number: int, frame: Any) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)
        notice(signal.Signals(number).name)
        log.info("%s: saving and stopping; again to stop at once", signal.Signals(number).name)

    handlers = {s: signal.signal(s, on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        with watched(notice):
            yield
    finally:
        for s, handler in handlers.items():
            signal.signal(s, handler)


@contextlib.contextmanager
def watched(notice: Callable[[str], None]) -> Iterator[None]:
    """Inside the context, a thread calls ``notice`` once with the metadata server's message, if there is a server."""
    if not metadata.likely():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_poll, args=(notice, ended), daemon=True, name="preemption")
    thread.start()
    try:
        yield
    finally:
        ended.set()


def announced() -> str | None:
    """The server's message of a coming end; None if there is none, or if the server does not answer."""
    for name, nothing in (("preempted", "FALSE"), ("maintenance-event", "NONE")):
        with contextlib.suppress(OSError):
            value = metadata.get(name, POLL_S).strip()[:100]
            if value and value != nothing and not value.startswith("MIGRATE"):
                return f"{name} {value}"
    return None


def _poll(notice: Callable[[str], None], ended: threading.Event) -> None:
    while not ended.wait(POLL_S):
        if (value := announced()) is not None:
            return notice(value)
