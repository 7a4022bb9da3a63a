"""A worker process and what may be done in it: no jax, no Ctrl-C, a limit to its memory."""

import contextlib
import ctypes
import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

_here = {"worker": False}


def in_worker() -> bool:
    """Whether this process is a worker, which may be stopped at any time."""
    return _here["worker"]


def start(memory_mb: int, functions: Sequence[str], ready: Any) -> None:
    """Prepares this process: no jax on an accelerator, no Ctrl-C, the rewards imported, and then the memory limit.

    ``ready`` is a semaphore that it releases in the end.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _here["worker"] = True
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not to outlive the fork server
    for path in functions:
        with contextlib.suppress(BaseException):  # said by `probe`, or by the samples
            imported(path)
    if memory_mb:
        _limit_memory(memory_mb)
    ready.release()


def _limit_memory(megabytes: int) -> None:
    """Allows that much address space over what is mapped already."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    used = 0
    with contextlib.suppress(OSError):
        with open("/proc/self/statm", encoding="ascii") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
    with contextlib.suppress(ValueError, OSError):  # a lower limit is in force
        resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * 2**20,) * 2)


@functools.cache
def imported(path: str) -> Callable[..., Any]:
    """The function behind ``package.module:function``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def probe(path: str) -> str:
    """Why ``path`` is no function that can be imported; "" if it is one."""
    try:
        return "" if callable(imported(path)) else f"{path} is not a function"
    except BaseException as e:
        return f"{type(e).__name__}: {e}"
