"""The notices by which a run is told to stop: a signal, or what a cloud says before it takes a machine away.

On Google's machines the metadata server tells it (``instance/preempted``, ``instance/maintenance-event``), often before
SIGTERM comes. ``GCE_METADATA_HOST`` names another server, as in Google's own libraries.
"""

import contextlib
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grpojax.host.console import log

POLL_S = 2.0
_HOST = "metadata.google.internal"
_PRODUCT = Path("/sys/class/dmi/id/product_name")  # says what machine this is, without the network


@contextlib.contextmanager
def notices(notice: Callable[[str], None]) -> Iterator[None]:
    """Inside, SIGTERM, SIGINT and what `watched` hears are given to ``notice``; a second signal is obeyed at once.

    For the main thread. ``notice`` may be called more than once, by a signal's handler and by another thread.
    """
    came: list[int] = []

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
    """Inside, ``notice`` is called once with what the metadata server says, by a thread; elsewhere there is none."""
    host = server()
    if host is None:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_poll, args=(host, notice, ended), daemon=True, name="preemption")
    thread.start()
    try:
        yield
    finally:
        ended.set()


def server() -> str | None:
    """The metadata server's host; None where there is none."""
    if host := os.environ.get("GCE_METADATA_HOST"):
        return host
    with contextlib.suppress(OSError):
        if "Google" in _PRODUCT.read_text(encoding="utf-8"):
            return _HOST
    return None


def said(host: str) -> str | None:
    """What the server says of an end that is near; None for nothing, or where it does not answer."""
    for name, nothing in (("preempted", "FALSE"), ("maintenance-event", "NONE")):
        url = f"http://{host}/computeMetadata/v1/instance/{name}"
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        with contextlib.suppress(OSError, urllib.error.URLError):
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=POLL_S) as answer:
                value = answer.read(100).decode(errors="replace").strip()
            if value and value != nothing and not value.startswith("MIGRATE"):
                return f"{name} {value}"
    return None


def _poll(host: str, notice: Callable[[str], None], ended: threading.Event) -> None:
    while not ended.wait(POLL_S):
        if (value := said(host)) is not None:
            return notice(value)
