"""What one update learns from: its share of a step's batch in rows on the devices, and the way back to the host."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpojax.host import processes
from grpojax.programs import batch_shards
from grpojax.programs.packing import Layout, Packed
from grpojax.programs.policy import Policy
from grpojax.programs.state import place_rows
from grpojax.types import Tokens, TrainBatch


@dataclasses.dataclass
class PackedBatch:
    """One update's share of a step, in rows. Its per-token arrays fill up as they become known.

    Attributes:
      places: of its prompts in the batch, ``[p]``.
      batch: its samples on the host, spread over the shards.
      packed: its rows on the devices.
      layout: where its tokens ``[p, G, T]`` stand in them.
      live: whether any token of it weighs anything.
    """

    places: np.ndarray
    batch: TrainBatch
    packed: Packed
    layout: Layout
    live: bool = True

    def add(self, policy: Policy, host: Mapping[str, Tokens]) -> None:
        """Puts arrays ``[p, G, T]`` of the host into the rows."""
        rows = {name: self.layout.pack(np.asarray(x)) for name, x in host.items()}
        self.set(**place_rows(rows, policy.mesh))

    def of(self, lengths: np.ndarray) -> TrainBatch:
        """Its samples with other lengths, ``[p, G]``."""
        return dataclasses.replace(self.batch, lengths=lengths.reshape(np.shape(self.batch.lengths)))

    def set(self, **rows: Any) -> None:
        """Puts arrays ``[M, B, R, S]`` of the devices into the rows."""
        per_token = dataclasses.replace(self.packed.per_token, **rows)
        self.packed = dataclasses.replace(self.packed, per_token=per_token)


def whole(minis: Sequence[PackedBatch], rows: Sequence[Any]) -> Tokens:
    """Rows of every minibatch back to ``[P, G, T]`` on the host."""
    parts = [m.layout.unpack(processes.fetch(x)) for m, x in zip(minis, rows, strict=True)]
    whole = [batch_shards.gather_groups(part, len(m.places)) for m, part in zip(minis, parts, strict=True)]
    return np.concatenate(whole)[np.argsort(np.concatenate([m.places for m in minis]))]
