"""Runs the small arithmetic between a rollout and its updates on the host's CPU, which does not wait for devices."""

import contextlib
import functools
from collections.abc import Iterator

import jax

from grpojax.host.console import log


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Inside the context, jax computes with arrays of the host on the host. It is also a decorator.

    A device runs its work in order: work that is dispatched during a rollout waits for its end (``rollout.ahead``). Do
    not call programs of the policy inside: they would be compiled once more.

    Example:
      >>> import jax.numpy as jnp, numpy as np
      >>> with on_host():
      ...     total = jnp.sum(np.array([1.0, 2.0], np.float32))
      >>> float(total), {d.platform for d in total.devices()}
      (3.0, {'cpu'})
    """
    with jax.default_device(device()):
        yield


@functools.cache
def device() -> jax.Device | None:
    """The first CPU of this process; None, with a warning, if JAX_PLATFORMS names only the accelerator."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        known = jax.config.values["jax_platforms"]
        log.warning(
            "advantages wait for the device's other work, since jax has no CPU backend here: set JAX_PLATFORMS=%s,cpu",
            known,
        )
        return None
