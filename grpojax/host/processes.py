"""Several processes, each with some of the devices: agreement between them, and work for only one.

Every process runs the same program in the same order. Each reads the data and scores its own rows of every batch. Only
the first writes the run's files. With a single process, all of this does nothing. `grpojax.device` brings arrays to the
devices of all processes, and back.
"""

import base64
import contextlib
import itertools
import json
import math
import os
import socket
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from grpojax.host import coordination, internals, joining
from grpojax.host.console import log
from grpojax.host.errors import PassingError, UserError

_LEAVE_S = 20.0  # time that a failed process waits for the others, so that all of them can report it
_WAIT_S = 3600.0  # time for a process that reads a large model from a slow disk; a lost one is noticed sooner


def join() -> None:
    """Joins the other processes, if there are any (`grpojax.host.joining.find`). It does not look for devices.

    Raises:
      UserError: there should be other processes, but none was found, or they do not come.
    """
    if jax.distributed.is_initialized():
        return
    company = joining.find(os.environ, tpu=joining.on_tpu())
    if company is not None:
        # On CPUs, programs in flight, and those that another process compiled, receive each other's messages.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        joining.join(company)


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
