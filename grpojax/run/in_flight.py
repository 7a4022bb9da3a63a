"""A rollout under way, and what a checkpoint has of one: its samples, since the weights they are of are left behind."""

import base64
import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from grpojax import data
from grpojax.run.batch import RolloutBatch
from grpojax.types import Rollout, Tokens

# Waits for arrays of the devices; in a run, all processes agree there whether it goes on.
Sync = Callable[[Any], object]


@dataclasses.dataclass(kw_only=True)
class InFlight:
    """A rollout that was dispatched.

    Attributes:
      number: of the rollout in the run.
      problems: of its P prompts.
      submit: gives samples on the host to the rewards.
      sync: how `collect` waits.
      fetches: for the samples, and for the greedy completions where there are any: each waits as it is told and brings
        them to the host. None for a rollout of several phases, which is drawn as it is collected.
      samples: these on the host; None until they are there.
      version: of the weights that it is drawn under: the policy's updates behind them.
      passes: over the data that each problem belongs to.
      versions: ``[P, G, T]`` int32, that of each token, where some were drawn by rollouts before
        (`grpojax.run.partial_groups`); else None.
    """

    number: int
    problems: Sequence[data.Problem]
    submit: Callable[..., RolloutBatch]
    sync: Sync
    fetches: Sequence[Callable[[Sync], Rollout]] | None = None
    samples: Sequence[Rollout] | None = None
    version: int = 0
    passes: Sequence[int] = ()
    versions: Tokens | None = None

    def collect(self) -> RolloutBatch:
        """Waits for the samples, where the run may stop, and submits them to the rewards."""
        return self.submit() if self.fetches is None else self.submit(*self._on_host(self.sync))

    def _on_host(self, sync: Sync) -> Sequence[Rollout]:
        if self.samples is not None:
            sync(())
            return self.samples
        assert self.fetches is not None, "a rollout of several phases is not drawn ahead"
        self.samples = [fetch(sync) for fetch in self.fetches]
        return self.samples

    def record(self) -> dict[str, Any]:
        """What a run that goes on makes it of again: JSON. Waits for the samples, and is the same on all processes."""
        samples = self._on_host(jax.block_until_ready)
        versions = {} if self.versions is None else {"versions": to_text(self.versions)}
        return versions | {
            "number": self.number,
            "version": self.version,
            "uids": [p.uid for p in self.problems],
            "passes": list(self.passes),
            "samples": [{f.name: to_text(getattr(x, f.name)) for f in dataclasses.fields(x)} for x in samples],
        }


def samples_of(record: Mapping[str, Any]) -> list[Rollout]:
    """The samples of an `InFlight.record`."""
    return [Rollout(**{name: from_text(x) for name, x in each.items()}) for each in record["samples"]]


def to_text(x: np.ndarray) -> dict[str, Any]:
    """An array as JSON, bit for bit.

    Example:
      >>> from_text(to_text(np.float32([[0.1, 0.2]]))).tolist() == np.float32([[0.1, 0.2]]).tolist()
      True
    """
    packed = zlib.compress(np.ascontiguousarray(x).tobytes(), 1)
    return {"dtype": str(x.dtype), "shape": list(x.shape), "zlib": base64.b64encode(packed).decode()}


def from_text(record: Mapping[str, Any]) -> np.ndarray:
    """The array that `to_text` was given."""
    numbers = np.frombuffer(zlib.decompress(base64.b64decode(record["zlib"])), record["dtype"])
    return numbers.reshape(record["shape"]).copy()
