"""Looks at a run's metrics as they come, and says when they look like the start of a collapse."""

from collections import deque
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from grpojax import diagnostics
from grpojax.host.console import log

# What each alarm of `grpojax.diagnostics.Alarm` tells the user.
SAID = {
    "entropy_collapse": "the policy hardly varies any more (entropy collapse)",
    "entropy_explosion": "the policy draws almost at random (entropy explosion)",
    "entropy_falling": "the entropy falls fast",
    "not_finite": "the entropy is not a finite number",
}


class Watch:
    """Warns once of each kind of trouble.

    Args:
      directory: of the run, for what to look at.
      limits: when it rings.
    """

    def __init__(self, directory: Path, limits: diagnostics.CollapseLimits = diagnostics.CollapseLimits()):  # noqa: B008
        self._directory, self._limits = directory, limits
        self._entropy: deque[float] = deque(maxlen=limits.window)
        self._rung: set[str] = set()

    def step(self, number: int, values: Mapping[str, float]) -> list[str]:
        """Takes a step's metrics in; the names of the alarms that ring for the first time."""
        if "entropy" not in values:  # no update was taken
            return []
        self._entropy.append(values["entropy"])
        if len(self._entropy) < self._limits.window:
            return []
        alarm = diagnostics.collapse_alarm(np.asarray(self._entropy, np.float32), limits=self._limits)
        fresh = [name for name in SAID if bool(getattr(alarm, name)) and name not in self._rung]
        for name in fresh:
            self._rung.add(name)
            log.warning(
                "step %d: %s: %.3g nats a token, %.3g %d steps before; lower optimizer.learning_rate, add "
                "variant.entropy_coef, or look at the samples: grpojax show %s",
                number,
                SAID[name],
                self._entropy[-1],
                self._entropy[0],
                len(self._entropy) - 1,
                self._directory,
            )
        return fresh
