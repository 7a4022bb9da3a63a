"""All uses of private names of jax and orbax, and one of Python; no other file has any.

Each function says what would be lost without it. If a version of jax or orbax moves one of these names,
``tests/host/test_internals.py`` fails and names the versions of `CHECKED`.
"""

import contextlib
import itertools
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from jax._src import cloud_tpu_init, distributed, hardware_utils

CHECKED = {"jax": "0.10.2", "orbax-checkpoint": "0.12.8"}  # the versions that this file was written for


def client() -> Any:
    """The client of jax's coordination service; None for a process that did not join others.

    Without it, processes can exchange texts only through the devices, behind all queued work: a notice of preemption
    would wait for a rollout, and no process could say why it ends.
    """
    return distributed.global_state.client


def joined() -> tuple[int, int]:
    """This process's index and the number of processes, from when they joined.

    `jax.process_index` looks for the devices first, on a TPU slice together with all other hosts. If a host failed in
    that, the waiting hosts could not be told which one.
    """
    return distributed.global_state.process_id, distributed.global_state.num_processes


def exit_at_once(status: int) -> NoReturn:
    """Ends the process without the work at exit of Python and jax, but for what multiprocessing removes then.

    Without that its resource tracker would warn of leaked semaphores, behind the error that ended the process.
    """
    _ends.acquire()  # another thread that comes here too waits for the end
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        multiprocessing.util._run_finalizers()  # pyrefly: ignore
    os._exit(status)


_ends = threading.Lock()


def has_tpu_runtime() -> bool:
    """Whether this machine has TPU chips and libtpu, as jax found when it was imported.

    `jax.devices` would be too late: the hosts of a slice have to join before they look for their chips.
    """
    return cloud_tpu_init.running_in_cloud_tpu_vm


def tpu_chips() -> int:
    """The number of TPU chips of this machine. Without it, a missing libtpu is a slow run on the CPU and no error."""
    return hardware_utils.num_available_tpu_chips_and_device_id()[0]


def wait_for_saves_in(barrier: Callable[..., None]) -> None:
    """Makes orbax call ``barrier(key=, timeout_ms=)`` wherever the processes of a save or a restore wait for each
    other.

    By default orbax waits on the devices, behind all queued work. Its public options (``AsyncOptions.barrier_sync_fn``,
    ``MultiprocessingOptions.active_processes``) change only some of its waits. If a process's disk is full, the others
    would still wait until the timeout.
    """
    from orbax.checkpoint._src.multihost import multihost

    multihost.get_barrier_sync_fn = lambda *, processes=None: barrier
    multihost.EXPERIMENTAL_ORBAX_USE_DISTRIBUTED_BARRIER = _On()  # pyrefly: ignore


class _On:
    """A set flag of absl, for a program that does not parse absl's flags."""

    value = True


def save_count() -> int:
    """The number of saves and restores that this process has started: orbax's count for the names of its barriers."""
    from orbax.checkpoint._src.futures import synchronization

    return int(synchronization.OperationIdGenerator.get_current_operation_id())


def set_save_count(count: int) -> None:
    """Sets the number of `save_count`.

    A save that failed on some processes may have been counted only there. Then the processes would wait at barriers
    with different names, and no later save would work.
    """
    from orbax.checkpoint._src.futures import synchronization

    ids = synchronization.OperationIdGenerator
    ids._operation_id_counter, ids._operation_id = itertools.count(count + 1), count
