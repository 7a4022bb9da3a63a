"""Caches of several blocks for samples of a few tokens, as only long samples have them."""

import contextlib
import functools
from unittest import mock

from grpojax.programs import kv_cache, sampler


@contextlib.contextmanager
def blocks_of(positions):
    """Blocks of about so many positions, 16 at least on a GPU; None leaves them as they are."""
    if positions is None:
        yield
        return
    sizes = {"SHORTEST": dict.fromkeys(("cpu", "tpu"), positions), "AT_ONCE": max(16, positions)}
    with (
        mock.patch.multiple(kv_cache, **sizes),
        mock.patch.object(sampler, "_program", _programs_for(positions)),
    ):
        yield


@functools.cache
def _programs_for(positions):
    """Programs for each size: what was compiled for one is never taken for another, nor compiled twice."""
    return functools.cache(sampler._program.__wrapped__)
