"""Several processes, each with some of the devices: what they share, what they agree on, and what only one does.

Every process runs the same program in the same order; each reads the data and judges its own rows of every batch. One
only, the first, writes the run's files. With a single process all of this does nothing.
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
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from grpojax.host import coordination, internals, joining
from grpojax.host.console import log
from grpojax.host.errors import PassingError, UserError

_LEAVE_S = 20.0  # that one that failed waits for the others, so that all of them can say so
_WAIT_S = 3600.0  # for one that reads a large model from a slow disk; one that is gone is noticed sooner


def join() -> None:
    """Joins the other processes, where there are some (`grpojax.host.joining.find`); no device is looked for.

    Raises:
      UserError: there should be other processes and none was found, or they do not come.
    """
    if jax.distributed.is_initialized():
        return
    company = joining.find(os.environ, tpu=joining.on_tpu())
    if company is not None:
        # On CPUs: programs in flight, and those that another process compiled, take each other's messages.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        joining.join(company)


def start() -> None:
    """Joins the other processes (`join`), and looks for the devices of all; all but the first then only warn.

    Raises:
      UserError: also where there are other processes than have joined.
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


def place(x: Any, sharding: NamedSharding | None):
    """A host array, the same on every process, on the devices."""
    if jax.process_count() == 1 or sharding is None:
        return jax.device_put(x, sharding)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def fetch(x: Any) -> np.ndarray:
    """An array of the devices, whole, on every process."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def rows(n: int) -> np.ndarray:
    """Which of ``n`` rows of a batch this process takes: every k-th of k processes."""
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
    """A text of each process, in their order; the one before, which all have read by then, is taken back."""
    number = next(_gathers)
    texts = coordination.exchange(f"gather/{number}", text, seconds=math.inf)
    coordination.forget(f"gather/{number - 1}/{jax.process_index()}")
    return texts


def any_of(flag: bool) -> bool:
    """Whether it is so on any process."""
    return total([int(flag)])[0] > 0


_meetings = itertools.count()


def meet(message: str = "") -> list[str]:
    """A message of each process, in their order, on every process: all must come here. No device takes part.

    Raises:
      PassingError: on all that came, where a process failed in `AllOrNone` on its way here, or is gone.
    """
    messages = _exchange({"message": message})
    if failed := [(i, w["failed"]) for i, w in enumerate(messages) if "failed" in w]:
        raise _Elsewhere("; ".join(f"process {i} could not go on, {message}" for i, message in failed))
    return [w["message"] for w in messages]


def _exchange(message: Mapping[str, str], seconds: float = _WAIT_S) -> list[dict[str, str]]:
    try:
        messages = coordination.exchange(f"meeting/{next(_meetings)}", json.dumps(message), seconds=seconds)
    except TimeoutError as e:
        raise _Elsewhere(str(e)) from None
    return [json.loads(text) for text in messages]


class _Elsewhere(PassingError):
    """Another process's failure, which all know of."""


class AllOrNone:
    """A part of a run in which a process may fail by itself: the others learn why, and nobody waits for it in vain.

    Inside, processes may `meet`; other collective work has no place there.
    """

    def __enter__(self) -> "AllOrNone":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            meet()
        elif isinstance(error, Exception) and not isinstance(error, _Elsewhere):
            host = socket.gethostname()
            with contextlib.suppress(Exception):  # its own error is what counts
                message = " ".join(str(error).split())[:300] or type(error).__name__
                _exchange({"failed": f"{host}: {message}"}, _LEAVE_S)
