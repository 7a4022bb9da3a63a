"""The logger of the whole library, its lines on standard output, and messages on standard error."""

import contextlib
import io
import logging
import os
import sys
from typing import Any, TextIO

log = logging.getLogger("grpojax")


class _Console(logging.Handler):
    """Writes lines to the current standard output. If nobody can read them any more, the work goes on without them."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), flush=True)
        except OSError as e:  # a full disk, or a pipe or a terminal that is gone
            drop(sys.stdout)
            tell(f"standard output cannot be written ({e.strerror}): this goes on without it")
        except RuntimeError:  # the handler of a signal logs while a line is being written
            return


def setup_console(level: int = logging.INFO) -> None:
    """Plain lines on standard output, each with the time."""
    handler = _Console()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.handlers[:] = [handler]
    log.setLevel(level)
    log.propagate = False


def prepare_streams() -> None:
    """Has standard output escape what its encoding lacks, and opens closed streams on nothing: a file of the command
    would get a closed one's number, and with it what libraries print."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def never_fail() -> None:
    """Has standard output and error escape what their encoding lacks, and drop what cannot be written: a reward
    function that prints must not fail because nobody reads."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        buffer = io.BufferedWriter(_Dropping(number, "wb", closefd=False))
        encoding = getattr(getattr(sys, name), "encoding", None) or "utf-8"
        setattr(sys, name, io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=True))


class _Dropping(io.FileIO):
    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError:
            return memoryview(content).nbytes


def tell(message: str) -> None:
    """Prints a message for the user to standard error, if anybody can read it."""
    try:
        print(f"grpojax: {message}", file=sys.stderr, flush=True)
    except OSError:
        drop(sys.stderr)


def drop(stream: TextIO) -> None:
    """Sends nowhere what a stream still holds and all that follows; Python would fail with it at the end."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
