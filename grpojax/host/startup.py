"""What a process needs before jax or anything else heavy is imported."""

import ctypes
import os
import platform
import sys

from grpojax.host.console import setup_console

# glibc's mallopt parameters.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def prepare() -> None:
    """Console, allocator and import path. Reward functions may stand in the folder one is in."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    keep_memory()
    setup_console()


def keep_memory() -> None:
    """Keeps freed memory in the process (glibc only); call before the first large allocation.

    On a CPU a program's buffers are gigabytes. Giving them back to the system after each call costs more, in page
    faults at the next one, than many of the kernels that fill them.
    """
    if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 64 * 2**20), (_ARENA_MAX, 1)):
            libc.mallopt(option, value)
