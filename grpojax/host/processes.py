"""Several processes, each with some of the devices: what they share, what they agree on, and what one does alone.

Every process runs the same program in the same order; each reads the data and judges its own rows of every batch. One
alone, the first, writes the run's files. With a single process all of this does nothing.
"""

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from grpojax.host.errors import UserError


def start() -> None:
    """Joins the other processes, where the environment says that there are some.

    On a TPU slice of several hosts they find each other. Elsewhere ``JAX_COORDINATOR_ADDRESS`` (``host:port`` of the
    first), ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID`` say who they are.
    """
    if os.environ.get("JAX_COORDINATOR_ADDRESS"):
        try:
            count, index = int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
        except (KeyError, ValueError):
            raise UserError(
                "JAX_COORDINATOR_ADDRESS is set; JAX_NUM_PROCESSES and JAX_PROCESS_ID must be numbers beside it"
            ) from None
        # On CPUs: programs in flight, and those that another process compiled, take each other's messages.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        jax.distributed.initialize(num_processes=count, process_id=index)
        if jax.default_backend() == "cpu":
            jax.config.update("jax_enable_compilation_cache", False)
    elif "," in os.environ.get("TPU_WORKER_HOSTNAMES", ""):
        jax.distributed.initialize()


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
    """Each process's `rows` ``[r, ...]`` as the whole batch ``[n, ...]``, on every process."""
    count = jax.process_count()
    if count == 1:
        return mine
    most = -(-n // count)
    padded = np.zeros((most, *mine.shape[1:]), mine.dtype)
    padded[: len(mine)] = mine
    together = np.asarray(multihost_utils.process_allgather(padded))  # [processes, most, ...]
    return np.swapaxes(together, 0, 1).reshape(most * count, *mine.shape[1:])[:n]


def total(counts: Sequence[int]) -> list[int]:
    """The sum of each number over the processes."""
    if jax.process_count() == 1:
        return list(counts)
    return np.asarray(multihost_utils.process_allgather(np.asarray(counts, np.int32))).sum(0).tolist()


def any_of(flag: bool) -> bool:
    """Whether it is so on any process."""
    return total([int(flag)])[0] > 0


class AllOrNone:
    """A part of the start in which no process waits for another: if one fails there, the others do not wait for it."""

    def __enter__(self) -> "AllOrNone":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if any_of(error is not None) and error is None:
            raise UserError("another process could not start; its own message says why")
