"""Partial rollouts (``rollout.overlap``): groups with unfinished samples go on in the next rollout.

A rollout has P places. A group with unfinished samples stays in its place, and so on its devices. Its finished samples
wait with it, and nothing is drawn again. The other places go to the next problems. Problems are drawn one batch at a
time, as without overlap, and wait in a queue for a free place.

In the batch of its step, an unfinished group has no samples and no rewards, and is dropped like a group that a filter
drops. It is scored, counted and learned from in the step in which it becomes complete.
"""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from grpojax import data
from grpojax.programs.sampler import no_samples, unfinished
from grpojax.run import checks
from grpojax.run.batch import Batch
from grpojax.run.parts.part import Part
from grpojax.run.run_state import State
from grpojax.run.source import Plain, fetching, from_text, to_text
from grpojax.types import Array, PerPrompt, Rollout, Tokens

Draw = Callable[[int], tuple[Sequence[data.Problem], Sequence[int]]]


class Partial(Plain):
    """As `Plain`, with rollouts that leave incomplete groups for the next one.

    Args:
      given, options: as of `Plain`.

    Attributes:
      places: the groups of its rollouts.
    """

    def __init__(self, *given: Any, **options: Any):
        super().__init__(*given, **options)
        config = self.config
        shape = config.prompts, config.group, config.max_tokens
        self.places = Places(shape, self.problems, self.context.state)
        self._left = checks.most_left(config, self.policy.sampling.shards)

    def after_step(self) -> dict[str, Any]:
        """As `Plain`, and the groups that continue."""
        return super().after_step() | {"partial": self.places.saved()}

    def start(self, state: State) -> Batch:
        """Dispatches the next rollout, in which some groups continue."""
        number = self.rollouts
        self.rollouts += 1
        version, config = state.updates, self.config
        problems, passes, carried = self.places.fill(self.choose)
        prompts, goes_on = self.prompts(problems, config.group), {"partial": carried.samples, "left": self._left}
        sampled = self.policy.sample(self.params(state), prompts, self.key(number), config, **goes_on)
        return Batch(
            number=number,
            problems=problems,
            fetches=[fetching(self.policy, sampled, len(problems), len(problems))],
            arrive=self.arrived,
            version=version,
            versions=carried.continued(version),
            passes=passes,
        )

    def arrived(self, batch: Batch) -> Batch:
        """Submits the groups whose samples are all finished; keeps the others for the next rollout."""
        problems, (rollout,) = batch.problems, (fetch(self.sync) for fetch in batch.fetches)
        whole = ~unfinished(rollout).any(1)
        asked = [p for p, done in zip(problems, whole, strict=True) if done]
        submitted = self.submit(asked, jax.tree.map(lambda x: x[whole], rollout))
        self.places.keep(batch, only(rollout, ~whole))
        add = functools.partial(among, submitted, whole)
        return dataclasses.replace(batch, fetches=(), arrive=None, rollout=only(rollout, whole), pending=[add])

    def next(self, state: State, first: Batch) -> Batch:
        """As `Plain`, with the groups that continue."""
        made = super().next(state, first)
        waiting = float(self.places.carried.waiting.mean())
        return dataclasses.replace(made, metrics={**made.metrics, "rollout/waiting": waiting})

    def version(self, started: Sequence[Batch], drawn: Sequence[Batch], learned: PerPrompt | None = None) -> int:
        """Number of updates in the weights that drew the oldest token to learn from; as `Plain`."""
        known = np.concatenate([oldest(f, d.rollout) for f, d in zip(started, drawn, strict=True)])
        whole = np.concatenate([d.rollout.lengths.any(1) for d in drawn])
        return int(known[whole if learned is None or not learned.any() else learned].min())


class DrawsPartially(Part):
    """``rollout.overlap``."""

    draws = Partial

    def warning(self, state: State) -> str | None:
        """The groups whose samples are lost."""
        if not (left := len(state.kept.get("partial", {}).get("waiting", ()))):
            return None
        return f"{left} groups were under way when the run ended: their samples are not learned from"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Carried:
    """Groups that continue in the next rollout, each in its place.

    Attributes:
      samples: ``[P, G, ...]``; length 0 in places that a new problem gets.
      versions: ``[P, G, T]`` int32, number of updates in the weights that drew each token.
    """

    samples: Rollout
    versions: Tokens

    @property
    def waiting(self) -> PerPrompt:
        """``[P]`` bool: the places that are taken."""
        return self.samples.lengths.any(1)

    def continued(self, version: int) -> Tokens:
        """The versions if all further tokens are drawn with this one."""
        drawn = np.arange(self.versions.shape[-1]) < self.samples.lengths[..., None]
        return np.where(drawn, self.versions, np.int32(version))


class Places:
    """The places of a run's rollouts, and the queue before them.

    Args:
      shape: P, G and T of a rollout.
      problems: all problems.
      state: of a run that goes on.
    """

    def __init__(self, shape: tuple[int, int, int], problems: Sequence[data.Problem], state: State):
        self._shape = shape
        self._placed: list[tuple[data.Problem, int]] = []  # problems of the previous rollout, each with its pass
        self.carried, self._queue, self._batches = self._nothing(), deque[tuple[data.Problem, int]](), 0
        if (record := state.kept.get("partial")) is None:
            return
        of_uid = {p.uid: p for p in problems}
        self._batches = record["batches"]
        self._queue.extend((of_uid[uid], number) for uid, number in record["queue"])
        self._placed = [(of_uid[uid], number) for uid, number in record["placed"]]
        for name, rows in record["carried"].items():
            self._array(name)[record["waiting"]] = from_text(rows)

    def _nothing(self) -> Carried:
        return Carried(samples=no_samples(*self._shape), versions=np.zeros(self._shape, np.int32))

    def _array(self, name: str) -> np.ndarray:
        return self.carried.versions if name == "versions" else getattr(self.carried.samples, name)

    def saved(self) -> dict[str, Any]:
        """What the next rollouts depend on, as JSON, except for groups of a rollout in flight."""
        waiting = np.flatnonzero(self.carried.waiting)
        names = ("versions", *(name for name, x in vars(self.carried.samples).items() if x is not None))
        return {
            "batches": self._batches,
            "queue": [(p.uid, number) for p, number in self._queue],
            "placed": [(p.uid, number) for p, number in self._placed],
            "waiting": waiting.tolist(),
            "carried": {name: to_text(self._array(name)[waiting]) for name in names},
        }

    def fill(self, draw: Draw) -> tuple[list[data.Problem], list[int], Carried]:
        """Gives the free places to the next problems: all problems of a rollout, the pass over the data of each, and
        the groups among them that go on.

        ``draw`` is of a batch's number (`grpojax.run.problem_order.ProblemOrder.draw`).
        """
        carried, self.carried = self.carried, self._nothing()
        waiting = carried.waiting
        while len(self._queue) < (~waiting).sum():
            self._queue.extend(zip(*draw(self._batches), strict=True))
            self._batches += 1
        self._placed = [self._placed[place] if taken else self._queue.popleft() for place, taken in enumerate(waiting)]
        problems, passes = zip(*self._placed, strict=True)
        return list(problems), list(passes), carried

    def keep(self, drawn: Batch, rest: Rollout) -> None:
        """Keeps the incomplete groups of a rollout in their places; ``rest`` has their samples so far."""
        self._placed = list(zip(drawn.problems, drawn.passes, strict=True))
        there = np.arange(self._shape[2]) < rest.lengths[..., None]
        self.carried = Carried(samples=rest, versions=np.where(there, _versions(drawn), np.int32(0)))


def oldest(drawn: Batch, samples: Rollout) -> PerPrompt:
    """``[P]`` int: number of updates in the weights that drew the oldest token of each group; for a group without
    ``samples``, that of the newest weights."""
    there = np.arange(samples.tokens.shape[-1]) < samples.lengths[..., None]
    return np.where(there, _versions(drawn), drawn.version).min((1, 2))


def _versions(drawn: Batch) -> Tokens:
    assert drawn.versions is not None, "started or resumed here"
    return drawn.versions


def among(groups: Batch, which: PerPrompt, batch: Batch) -> Batch:
    """The batch with the rewards of some groups, for which it waits; other groups have none.

    Args:
      groups: only these groups.
      which: ``[P]`` bool, their places in the batch.
      batch: all groups.
    """
    groups = groups.with_rewards()

    def wide(x: Array) -> np.ndarray:
        out = np.full((len(which), *x.shape[1:]), np.nan, x.dtype)
        out[which] = x
        return out

    return dataclasses.replace(
        batch,
        total=wide(groups.total),
        reward=wide(groups.reward),
        by_name={name: wide(x) for name, x in groups.by_name.items()},
        invalid=groups.invalid,
        signals={name: wide(x) for name, x in groups.signals.items()},
    )


def only(rollout: Rollout, which: PerPrompt) -> Rollout:
    """Only the groups ``which [P]`` bool; the others get samples of length 0."""
    return jax.tree.map(lambda x: np.where(which.reshape(-1, *(1,) * (x.ndim - 1)), x, np.zeros((), x.dtype)), rollout)
