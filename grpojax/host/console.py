"""The logger of the whole library, and its lines on standard output."""

import logging

log = logging.getLogger("grpojax")


class _Console(logging.Handler):
    """Writes lines to the current standard output."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), flush=True)


def setup_console(level: int = logging.INFO) -> None:
    """Plain lines on standard output, each with the time."""
    handler = _Console()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.handlers[:] = [handler]
    log.setLevel(level)
    log.propagate = False
