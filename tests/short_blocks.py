"""Caches of several blocks for samples of a few tokens, as only long samples have them."""

import contextlib
from unittest import mock

from grpojax.programs import kv_cache, sampler


@contextlib.contextmanager
def blocks_of(positions):
    """Blocks of about so many positions, 16 at least on a GPU; None leaves them as they are. What was compiled for
    blocks of another size is forgotten."""
    if positions is None:
        yield
        return
    sizes = {"SHORTEST": dict.fromkeys(("cpu", "tpu"), positions), "AT_ONCE": max(16, positions)}
    sampler._sample.clear_cache()
    with mock.patch.multiple(kv_cache, **sizes):
        yield
    sampler._sample.clear_cache()
