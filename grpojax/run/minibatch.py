"""One update's samples in rows on the devices, and the way back to the host."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpojax.device import Device
from grpojax.programs import batch_shards
from grpojax.programs.packing import Layout
from grpojax.types import Array, PerPrompt, Rows, Tokens


@dataclasses.dataclass(frozen=True)
class Minibatch:
    """One update's share of a step.

    Attributes:
      prompts: indices of its prompts in the batch, ``[p]``.
      rows: its rows on the devices. Their arrays fill up as they become known.
      layout: the positions of its tokens ``[p, G, T]`` in the rows.
      any_live: whether any of its tokens counts.
    """

    prompts: PerPrompt
    rows: Rows
    layout: Layout
    any_live: bool = True

    def with_arrays(self, arrays: Mapping[str, Array]) -> "Minibatch":
        """The minibatch with these arrays ``[M, B, R, S]`` of the devices too."""
        return dataclasses.replace(self, rows=self.rows.with_arrays(arrays))


def whole(device: Device, minis: Sequence[Minibatch], rows: Sequence[Any]) -> Tokens:
    """Rows of every minibatch back to ``[P, G, T]`` on the host."""
    unpacked = [m.layout.unpack(device.get(x)) for m, x in zip(minis, rows, strict=True)]
    whole = [batch_shards.gather_groups(x, len(m.prompts)) for m, x in zip(minis, unpacked, strict=True)]
    return np.concatenate(whole)[np.argsort(np.concatenate([m.prompts for m in minis]))]


def room(most: int, longest: int = 0) -> int:
    """T for spliced samples of up to ``longest`` tokens and drawn ones of ``most``: 16 more than drawn, or twice that,
    and so on.

    It depends only on the step's own samples, so that a resumed run has the same shapes.

    Example:
      >>> room(8), room(8, 24), room(8, 25)
      (24, 24, 40)
    """
    more = 16
    while most + more < longest:
        more *= 2
    return most + more
