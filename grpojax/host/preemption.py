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
    """Inside the context, but not in `notices`, SIGTERM and SIGHUP raise `StopRequested` in the main thread."""
    _came.clear()

    def on_signal(number: int, frame: Any) -> None:
        _came.append(number)
        log.info("%s: stopping; there is nothing to save yet", signal.Signals(number).name)
        raise StopRequested

    with handling(on_signal, signal.SIGTERM):
        yield


@contextlib.contextmanager
def notices(notice: Callable[[str], None]) -> Iterator[None]:
    """Inside the context, SIGTERM, SIGINT, SIGHUP and the notices of `watched` are passed to ``notice``; a second
    signal acts at once, unless it is SIGHUP or the first one was: a terminal that closes may send several.

    ``notice`` may be called more than once, by a signal's handler and by another thread.
    """
    came: list[int] = []
    if _came:  # `StopRequested` was raised where exceptions are swallowed, such as in a callback
        notice(signal.Signals(_came[0]).name)

    def on_signal(number: int, frame: Any) -> None:
        notice(signal.Signals(number).name)
        if number == signal.SIGHUP:
            log.info("SIGHUP: saving and stopping")
        elif came:
            raise KeyboardInterrupt
        else:
            came.append(number)
            log.info("%s: saving and stopping; again to stop at once", signal.Signals(number).name)

    with handling(on_signal, signal.SIGTERM, signal.SIGINT), watched(notice):
        yield


@contextlib.contextmanager
def handling(act: Callable[[int, Any], None], *signals: signal.Signals) -> Iterator[None]:
    """Inside the context, ``act`` handles these signals, and SIGHUP unless it is ignored, as by ``nohup``.

    Only the main thread can set handlers. A run in another one, such as of a notebook, goes without.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hangs_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    before = {s: signal.signal(s, act) for s in (*signals, *hangs_up)}
    try:
        yield
    finally:
        for s, handler in before.items():
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
