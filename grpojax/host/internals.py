"""Everything that this package uses of jax and orbax without a public name, in this file only.

Each function says what would be lost without it. A version of either that moves one of these things fails
``tests/host/test_internals.py``, which names the versions of `CHECKED`.
"""

import itertools
from collections.abc import Callable
from typing import Any

from jax._src import cloud_tpu_init, distributed, hardware_utils

CHECKED = {"jax": "0.10.2", "orbax-checkpoint": "0.12.8"}  # the versions that all this was written for


def client() -> Any:
    """The client of jax's coordination service; None for a process that joined no others.

    Without it processes can exchange texts through the devices only, behind whatever these have to do: a notice of
    preemption would wait for a rollout, and no process could say why it ends.
    """
    return distributed.global_state.client


def joined() -> tuple[int, int]:
    """This process's index, and how many processes there are, as they joined.

    `jax.process_index` looks for the devices first, on a TPU slice together with all other hosts. A host that fails
    there could not be named to those that wait for it.
    """
    return distributed.global_state.process_id, distributed.global_state.num_processes


def has_tpu_runtime() -> bool:
    """Whether this machine has TPU chips and libtpu, as jax found out when it was imported.

    `jax.devices` would tell too late: the hosts of a slice have to join before they look for their chips.
    """
    return cloud_tpu_init.running_in_cloud_tpu_vm


def tpu_chips() -> int:
    """How many TPU chips this machine has. Without it a missing libtpu is a slow run on the CPU, and no error."""
    return hardware_utils.num_available_tpu_chips_and_device_id()[0]


def wait_for_saves_in(barrier: Callable[..., None]) -> None:
    """Has orbax call ``barrier(key=, timeout_ms=)`` wherever the processes of a save or a restore wait for each other.

    By itself orbax waits on the devices, behind whatever they have to do; its public options
    (``AsyncOptions.barrier_sync_fn``, ``MultiprocessingOptions.active_processes``) change that for some of its waits
    alone, and a process whose disk is full would still leave the others waiting until the time is out.
    """
    from orbax.checkpoint._src.multihost import multihost

    multihost.get_barrier_sync_fn = lambda *, processes=None: barrier
    multihost.EXPERIMENTAL_ORBAX_USE_DISTRIBUTED_BARRIER = _On()  # pyrefly: ignore


class _On:
    """A flag of absl that is set, for a program that does not parse absl's flags."""

    value = True


def save_count() -> int:
    """How many saves and restores this process has started, as orbax counts them for the names of its barriers."""
    from orbax.checkpoint._src.futures import synchronization

    return int(synchronization.OperationIdGenerator.get_current_operation_id())


def set_save_count(count: int) -> None:
    """Makes it ``count``.

    One that failed on some processes may have counted on these only. After that the processes would wait at barriers of
    different names, and no later save would work.
    """
    from orbax.checkpoint._src.futures import synchronization

    ids = synchronization.OperationIdGenerator
    ids._operation_id_counter, ids._operation_id = itertools.count(count + 1), count
