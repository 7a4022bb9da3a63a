"""Any variant by its name, and its advantages on tokens."""

import numpy as np

from grpojax import advantages as A
from grpojax import variants

REQUIRED = {"distill": {"teacher": "folder"}, "dr_grpo": {"constant": 8.0}}


def built(name, **options):
    """The variant, with what it must be given."""
    return variants.get(name, **REQUIRED.get(name, {}), **options)


def on_tokens(name, rewards, size=1, options=None, **signals):
    """Advantages of a batch whose samples all have ``size`` tokens (or those of ``mask``)."""
    rewards = np.asarray(rewards, np.float32)
    signals = {"mask": np.ones((*rewards.shape, size), bool)} | signals
    return variants.get(name, **(options or {})).advantage(rewards, A.Signals(**signals))
