"""Looks at a run's metrics as they come, and says when they look like the start of a collapse."""

from collections import deque
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from grpojax import diagnostics
from grpojax.host.console import log

# What each alarm of `grpojax.diagnostics.Alarm` tells the user, and the remedy.
_MORE = "lower optimizer.learning_rate, or add variant.entropy_coef"
SAID = {
    "entropy_collapse": ("the policy hardly varies any more (entropy collapse)", _MORE),
    "entropy_explosion": (
        "the policy draws almost at random (entropy explosion)",
        "lower optimizer.learning_rate or variant.entropy_coef",
    ),
    "entropy_falling": ("the entropy falls fast", _MORE),
    "not_finite": ("the entropy is not a finite number", "lower optimizer.learning_rate"),
}
# Of a token critic's mean |b|: over 1 it is larger than the advantages' own deviation, and it has doubled in a window.
BIAS, BIAS_LARGE, BIAS_GROWS = "critic/bias_abs", 1.0, 2.0


class Watch:
    """Warns once of each kind of trouble.

    Args:
      directory: of the run, for what to look at.
      limits: when it rings.
    """

    def __init__(self, directory: Path, limits: diagnostics.CollapseLimits = diagnostics.CollapseLimits()):  # noqa: B008
        self._directory, self._limits = directory, limits
        self._entropy: deque[float] = deque(maxlen=limits.window)
        self._bias: deque[float] = deque(maxlen=limits.window)
        self._rung: set[str] = set()
        self._number = 0

    def note(self, number: int, values: Mapping[str, float]) -> None:
        """Takes a step's metrics in; asks the device for nothing."""
        if "entropy" in values:  # else no update was taken
            self._number = number
            self._entropy.append(values["entropy"])
        if BIAS in values:
            self._bias.append(values[BIAS])
            self._number = number

    def look(self) -> list[str]:
        """The names of the alarms that ring for the first time. A small computation: for when the device is idle."""
        return self._look_at_entropy() + self._look_at_bias()

    def _look_at_bias(self) -> list[str]:
        bias = self._bias
        if len(bias) < self._limits.window or "bias_growing" in self._rung:
            return []
        if not (bias[-1] > BIAS_LARGE and bias[-1] == max(bias) and bias[-1] >= BIAS_GROWS * bias[0]):
            return []
        self._rung.add("bias_growing")
        log.warning(
            "step %d: the critic's bias grows without bound: %.3g a token on average, %.3g %d steps before, more than "
            "the advantages; set variant.bound or variant.l2, lower critic.optimizer.learning_rate, or look at the "
            "samples: grpojax show %s --critic",
            self._number,
            bias[-1],
            bias[0],
            len(bias) - 1,
            self._directory,
        )
        return ["bias_growing"]

    def _look_at_entropy(self) -> list[str]:
        if len(self._entropy) < self._limits.window:
            return []
        alarm = diagnostics.collapse_alarm(np.asarray(self._entropy, np.float32), limits=self._limits)
        alarm = jax.tree.map(bool, alarm)
        fresh = [name for name in SAID if getattr(alarm, name) and name not in self._rung]
        for name in fresh:
            self._rung.add(name)
            log.warning(
                "step %d: %s: %.3g nats a token, %.3g %d steps before; %s, or look at the samples: grpojax show %s",
                self._number,
                SAID[name][0],
                self._entropy[-1],
                self._entropy[0],
                len(self._entropy) - 1,
                SAID[name][1],
                self._directory,
            )
        return fresh
