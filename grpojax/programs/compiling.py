"""Says what compiles."""

import time
from collections.abc import Callable
from typing import Any

import jax

from grpojax.host.console import log


class Programs:
    """Calls jitted functions and says when one compiles: which, for what shapes, and how long its first call took.

    Attributes:
      compiling: whether one does.
    """

    def __init__(self):
        self._seen: set[Any] = set()
        self.compiling = False

    def __call__(self, name: str, function: Callable[..., Any], *args, static: Any = None):
        """``function(*args)``; ``static`` is what it was made with beyond its arguments and compiles anew for."""
        shapes = tuple(str(getattr(x, "shape", x)) for x in jax.tree.leaves(args[1:]))
        if (name, static, shapes) in self._seen:
            return function(*args)
        self._seen.add((name, static, shapes))
        log.info("compiling %s %s", name, max(shapes, key=len, default=""))
        start = time.perf_counter()
        self.compiling = True
        try:
            out = jax.block_until_ready(function(*args))
        finally:
            self.compiling = False
        log.info("compiled %s: first call %.1f s", name, time.perf_counter() - start)
        return out
