"""The input of one update: its share of a step's batch in rows on the devices, and the way back to the host."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpojax.device import ROWS, Device
from grpojax.programs import batch_shards
from grpojax.programs.packing import Layout, Packed
from grpojax.types import Tokens, TrainBatch


@dataclasses.dataclass
class PackedBatch:
    """One update's share of a step, in rows. Its per-token arrays fill up as they become known.

    Attributes:
      places: indices of its prompts in the batch, ``[p]``.
      batch: its samples on the host, spread over the shards.
      packed: its rows on the devices.
      layout: the positions of its tokens ``[p, G, T]`` in the rows.
      live: whether any of its tokens has a weight.
    """

    places: np.ndarray
    batch: TrainBatch
    packed: Packed
    layout: Layout
    live: bool = True

    def add(self, device: Device, host: Mapping[str, Tokens]) -> None:
        """Copies arrays ``[p, G, T]`` of the host into the rows."""
        rows = {name: self.layout.pack(np.asarray(x)) for name, x in host.items()}
        self.set(**device.put(rows, ROWS))

    def of(self, lengths: np.ndarray) -> TrainBatch:
        """Its samples with other lengths, ``[p, G]``."""
        return dataclasses.replace(self.batch, lengths=lengths.reshape(np.shape(self.batch.lengths)))

    def set(self, **rows: Any) -> None:
        """Sets arrays ``[M, B, R, S]`` of the devices in the rows."""
        per_token = dataclasses.replace(self.packed.per_token, **rows)
        self.packed = dataclasses.replace(self.packed, per_token=per_token)


def whole(device: Device, minis: Sequence[PackedBatch], rows: Sequence[Any]) -> Tokens:
    """Rows of every minibatch back to ``[P, G, T]`` on the host."""
    unpacked = [m.layout.unpack(device.get(x)) for m, x in zip(minis, rows, strict=True)]
    whole = [batch_shards.gather_groups(x, len(m.places)) for m, x in zip(minis, unpacked, strict=True)]
    return np.concatenate(whole)[np.argsort(np.concatenate([m.places for m in minis]))]


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
