"""Several processes, each with some of the devices: agreement between them, and work for only one.

Every process runs the same program in the same order. Each reads the data and scores its own rows of every batch. Only
the first writes the run's files. With a single process, all of this does nothing. How several find each other, and what
happens if one is lost, is an extension's (`Pod`). `grpojax.device` brings arrays to the devices of all, and back.
"""

import base64
import contextlib
import functools
import itertools
import json
import math
import os
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import jax
import numpy as np
from etils import epath

from grpojax import extension
from grpojax.host import coordination, internals
from grpojax.host.console import log, tell
from grpojax.host.errors import PassingError, UserError

_LEAVE_S = 20.0  # time that a failed process waits for the others, so that all of them can report it
_WAIT_S = 3600.0  # time for a process that reads a large model from a slow disk; a lost one is noticed sooner


T = TypeVar("T")


class PeerError(Exception):
    """Another process failed."""


class Meeting(Protocol):
    """Where the processes of a run meet to change shared files: all succeed, or none."""

    def together(self, act: Callable[[], T]) -> T:
        """Returns the result of ``act`` if it succeeds on all processes; raises `PeerError` if it failed on another."""
        ...

    def of_first(self, value: T) -> T:
        """The ``value`` of the first process on all processes; it must be JSON."""
        ...

    def anew(self) -> None:
        """Call on all processes after a failure."""
        ...


class Pod(Protocol):
    """What an extension has for several processes (`grpojax.extension.Names.processes`): functions of a module."""

    def join(self) -> None:
        """Joins the others, if there are any, by ``jax.distributed.initialize``."""
        ...

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """As `watched`."""
        ...

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """As `telling`."""
        ...

    def leave(self, reason: str) -> None:
        """Tells the others why this process ends."""
        ...

    def prove_shared(self, folder: epath.PathLike) -> None:
        """As `prove_shared`."""
        ...

    def meeting(self) -> Meeting:
        """A new meeting point; all processes make theirs in the same order."""
        ...


class _Alone:
    """The `Meeting` of a single process."""

    def together(self, act: Callable[[], T]) -> T:
        return act()

    def of_first(self, value: T) -> T:
        return value

    def anew(self) -> None:
        pass


@functools.cache
def _pod() -> Pod | None:
    """The extension for several processes; None without one."""
    path = next((names.processes for names in extension.installed().values() if names.processes), None)
    return None if path is None else extension.imported(path)


def join() -> None:
    """Joins the other processes, if there are any. It does not look for devices.

    Raises:
      UserError: there should be other processes, but none was found, they do not come, or no extension finds them.
    """
    if jax.distributed.is_initialized():
        return
    if (pod := _pod()) is not None:
        pod.join()
    elif "JAX_COORDINATOR_ADDRESS" in os.environ:
        raise UserError(
            "JAX_COORDINATOR_ADDRESS is set, and no extension is installed that joins several processes\n"
            "install the one that does (a complete grpojax has it), or unset the variable"
        )


def watched() -> contextlib.AbstractContextManager[None]:
    """Inside the context, and until all processes have left it, the failure of one ends all."""
    pod = _pod()
    return contextlib.nullcontext() if pod is None else pod.watched()


def telling() -> contextlib.AbstractContextManager[None]:
    """Inside the context, an error is sent to the other processes at once, before this one lets go of what it holds."""
    pod = _pod()
    return contextlib.nullcontext() if pod is None else pod.telling()


def end(message: str) -> NoReturn:
    """Ends all processes of the run with status 1, even if the main thread of this one is waiting."""
    tell(message)
    if (pod := _pod()) is not None:
        pod.leave(message)
    internals.exit_at_once(1)


def prove_shared(folder: epath.PathLike) -> None:
    """Raises `UserError` on all processes unless all see the first one's ``folder``. Every process must call it."""
    if (pod := _pod()) is not None and jax.process_count() > 1:
        pod.prove_shared(folder)


def meeting() -> Meeting:
    """The meeting point of the run's processes."""
    pod = _pod()
    return _Alone() if pod is None or jax.process_count() == 1 else pod.meeting()


def start() -> None:
    """Joins the other processes (`join`) and looks for all devices. All but the first then log only warnings.

    Raises:
      UserError: as `join`, or the number of processes is not that of those that joined.
    """
    join()
    _, expected = internals.joined()
    if jax.process_count() != expected:
        raise UserError(
            f"{jax.process_count()} processes have devices here, and {expected} were expected; start the same command "
            "on all hosts, once each"
        )
    if expected > 1 and jax.default_backend() == "cpu":
        jax.config.update("jax_enable_compilation_cache", False)
    if not is_first():
        log.setLevel("WARNING")


def is_first() -> bool:
    """Whether this is the process that writes the run's files."""
    return jax.process_index() == 0


def rows(n: int) -> np.ndarray:
    """The rows, out of ``n`` of a batch, that this process takes: every k-th one with k processes."""
    return np.arange(jax.process_index(), n, jax.process_count())


def gather_rows(mine: np.ndarray, n: int) -> np.ndarray:
    """Each process's `rows` ``[r, ...]`` as the whole batch ``[n, ...]``, on every process; no device takes part."""
    count = jax.process_count()
    if count == 1:
        return mine
    whole = np.zeros((n, *mine.shape[1:]), mine.dtype)
    packed = base64.b64encode(zlib.compress(np.ascontiguousarray(mine).tobytes(), 1)).decode()
    for i, text in enumerate(_gather(packed)):
        values = np.frombuffer(zlib.decompress(base64.b64decode(text)), mine.dtype)
        whole[i::count] = values.reshape(-1, *mine.shape[1:])
    return whole


def total(counts: Sequence[int]) -> list[int]:
    """The sum of each number over the processes; no device takes part."""
    if jax.process_count() == 1:
        return list(counts)
    return [sum(of_one) for of_one in zip(*map(json.loads, _gather(json.dumps(list(counts)))), strict=True)]


_gathers = itertools.count()


def _gather(text: str) -> list[str]:
    """The texts of all processes, in their order. Removes the previous one, which all have read by then."""
    number = next(_gathers)
    texts = coordination.exchange(f"gather/{number}", text, seconds=math.inf)
    coordination.forget(f"gather/{number - 1}/{jax.process_index()}")
    return texts


def any_of(flag: bool) -> bool:
    """Whether this is true on any process."""
    return total([int(flag)])[0] > 0


_meetings = itertools.count()


def meet(message: str = "") -> list[str]:
    """The messages of all processes in their order, on every process. All must call it; no device takes part.

    Raises:
      PassingError: on all that called it, if a process failed in `AllOrNone` before it could, or is gone.
    """
    messages = _exchange({"message": message})
    if failed := [(i, w["failed"]) for i, w in enumerate(messages) if "failed" in w]:
        raise _Elsewhere("; ".join(f"process {i} could not go on, {message}" for i, message in failed))
    return [w["message"] for w in messages]


def _exchange(message: Mapping[str, str], seconds: float = _WAIT_S) -> list[dict[str, str]]:
    try:
        number = next(_meetings)
        messages = coordination.exchange(f"meeting/{number}", json.dumps(message), seconds=seconds)
    except TimeoutError as e:
        raise _Elsewhere(str(e)) from None
    coordination.forget(f"meeting/{number - 1}/{jax.process_index()}")  # all have read it by then
    return [json.loads(text) for text in messages]


class _Elsewhere(PassingError):
    """A failure of another process that all know of."""


class AllOrNone:
    """A part of a run in which a single process may fail: the others learn why, and none waits for it in vain.

    Inside, processes may `meet`, but do no other collective work.
    """

    def __enter__(self) -> "AllOrNone":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            meet()
        elif isinstance(error, Exception) and not isinstance(error, _Elsewhere):
            host = socket.gethostname()
            with contextlib.suppress(Exception):  # its own error counts
                message = " ".join(str(error).split())[:300] or type(error).__name__
                _exchange({"failed": f"{host}: {message}"}, _LEAVE_S)
