"""Short texts between the processes of a run, over the service through which they joined; no device takes part.

A key is written only once. With a single process, a dictionary takes the place of the service.
"""

import threading
import time

import jax

from grpojax.host import internals

_SLICE_S = 1.0  # length of one wait: a signal's handler can run between two
_lock = threading.Lock()
_alone: dict[str, str] = {}


def post(key: str, text: str) -> None:
    """Posts a text for all processes; raises `RuntimeError` if the service is gone."""
    if (client := internals.client()) is not None:
        client.key_value_set(f"grpojax/{key}", text, allow_overwrite=True)
    else:
        with _lock:
            _alone[key] = text


def posted(folder: str) -> dict[str, str]:
    """Everything posted under ``folder/`` so far, by the rest of the key. It never waits."""
    if (client := internals.client()) is not None:
        place = f"grpojax/{folder}/"
        return {key.removeprefix(place): text for key, text in client.key_value_dir_get(place)}
    with _lock:
        return {k.removeprefix(f"{folder}/"): text for k, text in _alone.items() if k.startswith(f"{folder}/")}


def heard(key: str, seconds: float) -> str | None:
    """The text posted as ``key``; None if none comes in this time. Other threads and signal handlers run meanwhile."""
    if (client := internals.client()) is None:
        with _lock:
            return _alone.get(key)
    until = time.monotonic() + seconds
    while True:
        left = until - time.monotonic()
        try:
            return client.blocking_key_value_get(f"grpojax/{key}", max(1, int(1000 * min(left, _SLICE_S))))
        except jax.errors.JaxRuntimeError as e:
            if "DEADLINE_EXCEEDED" not in str(e):
                raise
        if left <= _SLICE_S:
            return None


def forget(key: str) -> None:
    """Removes the text posted as ``key``, and all texts below it."""
    if (client := internals.client()) is not None:
        client.key_value_delete(f"grpojax/{key}")
    else:
        with _lock:
            for name in [k for k in _alone if k == key or k.startswith(f"{key}/")]:
                del _alone[name]


def exchange(name: str, text: str, *, seconds: float = 300.0) -> list[str]:
    """The texts of all processes in their order, on every process. All must call it, with the same new ``name``.

    Args:
      name: name of this exchange; no other may have it.
      text: this process's message.
      seconds: how long to wait for the others.

    Raises:
      TimeoutError: a process did not call it in time.

    Example:
      >>> exchange("example", "here")
      ['here']
    """
    if internals.client() is None:
        return [text]
    post(f"{name}/{jax.process_index()}", text)
    messages = []
    for index in range(jax.process_count()):
        if (message := heard(f"{name}/{index}", seconds)) is None:
            raise TimeoutError(f"{name}: process {index} did not arrive within {seconds:g} s")
        messages.append(message)
    return messages
