"""Where the small arithmetic between a rollout and its updates is done: on the host's CPU, whatever the devices do."""

import contextlib
import functools
from collections.abc import Iterator

import jax

from grpojax.host.console import log


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Inside, jax computes with arrays of the host on the host; also a decorator.

    A device works off what it is given in order: what is asked of it while a rollout is under way is answered after it
    (``rollout.ahead``). Programs of the policy are not called inside: they would be compiled once more.

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
    """The first CPU of this process; None, with a warning, where JAX_PLATFORMS names only the accelerator."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        known = jax.config.values["jax_platforms"]
        log.warning(
            "advantages wait for the device's other work, since jax has no CPU backend here: set JAX_PLATFORMS=%s,cpu",
            known,
        )
        return None
