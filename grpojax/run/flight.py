"""A rollout under way, and what a checkpoint has of one: its samples, since the weights they are of are left behind."""

import base64
import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from grpojax import data
from grpojax.run.groups import Drawn, Groups, Started
from grpojax.types import Rollout, Tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flight:
    """A rollout that was dispatched.

    Attributes:
      number: of the rollout in the run.
      version: of the weights that it is drawn under: the policy's updates behind them.
      problems: of its P prompts.
      passes: over the data that each of them belongs to.
      wait: waits for the samples, and submits their rewards.
      versions: ``[P, G, T]`` int32, that of each token, where some were drawn by rollouts before
        (`grpojax.run.seats`); else None.
    """

    number: int
    version: int
    problems: Sequence[data.Problem]
    passes: Sequence[int]
    wait: Callable[[], Drawn]
    versions: Tokens | None = None

    def record(self) -> dict[str, Any]:
        """What `resumed` makes it of again: JSON. Waits for the samples, and is the same on all processes."""
        assert isinstance(self.wait, Started), "a rollout of several phases is not drawn ahead"
        samples = self.wait.samples()
        versions = {} if self.versions is None else {"versions": to_text(self.versions)}
        return versions | {
            "number": self.number,
            "version": self.version,
            "uids": [p.uid for p in self.problems],
            "passes": list(self.passes),
            "samples": [{f.name: to_text(getattr(x, f.name)) for f in dataclasses.fields(x)} for x in samples],
        }


def resumed(record: Mapping[str, Any], groups: Groups, problems: data.Problems) -> Flight:
    """The rollout of a `Flight.record`, which is not drawn again."""
    of_uid = {p.uid: p for p in problems}
    mine = [of_uid[uid] for uid in record["uids"]]
    samples = [Rollout(**{name: from_text(x) for name, x in each.items()}) for each in record["samples"]]
    return Flight(
        number=record["number"],
        version=record["version"],
        problems=mine,
        passes=record["passes"],
        wait=groups.resumed(mine, samples),
        versions=from_text(record["versions"]) if "versions" in record else None,
    )


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
