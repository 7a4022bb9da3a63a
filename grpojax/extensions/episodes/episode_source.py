"""Episodes of several turns (``environment``): the policy's turns, and what its environments answer."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpojax import data
from grpojax.evaluation import submit
from grpojax.extensions.episodes import players
from grpojax.extensions.episodes.dry_players import DryPlayers
from grpojax.extensions.episodes.environment_config import EnvironmentConfig
from grpojax.extensions.episodes.environment_types import Environments
from grpojax.extensions.episodes.open_episodes import Notes
from grpojax.extensions.episodes.players import Begun, Place, Played, Players
from grpojax.host import processes
from grpojax.host.console import log
from grpojax.run.batch import Batch
from grpojax.run.parts.part import Part, mean
from grpojax.run.source import Plain
from grpojax.types import Array


class Episodes(Plain):
    """As `Plain`, with samples that are episodes of several turns.

    Rewards read the policy's own text, each turn on a line of its own, and get
    `grpojax.extensions.episodes.players.COLUMNS`. An episode that its environment made invalid has no reward. Between
    two steps no episode is open: those of a step that was not finished are drawn again, with the same draws
    (`grpojax.extensions.episodes.open_episodes`).

    Args:
      given, options: as of `Plain`.
      players: what plays the episodes.
    """

    def __init__(self, *given: Any, players: Players, **options: Any):
        super().__init__(*given, **options)
        self._players = players
        folder = self.context.folder
        self._notes = None if folder is None else Notes(folder / "episodes")

    def draw(self, params: Any, problems: Sequence[data.Problem], number: int) -> Batch:
        """Opens the environments and dispatches the first turns of a rollout; as `Plain.draw`."""
        if self._notes is not None:
            self._notes.begin(number)
        playing = self._players.begin(params, problems, self.key(number), self.config, notes=self._notes)
        arrive = functools.partial(self._finished, playing)
        return Batch(number=number, problems=playing.problems, arrive=arrive)

    def _finished(self, playing: Begun, batch: Batch) -> Batch:
        """Plays the episodes to their ends, and submits them to the rewards."""
        played = playing.finish(self.sync)
        _tell(played)
        wait = submit(
            self.rewards,
            played.problems,
            played.rollout,
            self.policy.texts,
            self.columns,
            more=played.columns,
        )
        return dataclasses.replace(
            batch,
            arrive=None,
            problems=played.problems,
            rollout=played.rollout,
            pending=[functools.partial(self.rewarded, wait), functools.partial(without, played.invalid)],
            signals={"full_lengths": played.lengths},
            known=played.counts,
            metrics={f"episode/{name}": float(n) for name, n in played.events.items() if n},
        )


class OfSeveralTurns(Part):
    """``environment``. What plays the episodes is made before the part, and serves evaluations too."""

    draws = Episodes
    longer_prompts = True  # by tools and what `reset` returns
    players_of = Players.of
    dry_players_of = DryPlayers.dry

    def metrics(self, drawn: Sequence[Batch]) -> dict[str, float]:
        """As of `of_episodes`."""
        return of_episodes(drawn)

    def columns(self, batch: Batch) -> dict[str, Array]:
        """Counts of each episode. How many turns it has is seen from these."""
        return {name: x for name, x in batch.known.items() if name != "turns"}

    @staticmethod
    def environments_of(config: EnvironmentConfig, tokenizer: Any) -> Environments:
        """The environments of a run, which `players_of` takes."""
        return players.environments_of(config, tokenizer)


def of_episodes(drawn: Sequence[Batch]) -> dict[str, float]:
    """Metrics of episodes.

    Args:
      drawn: the rollouts of a step.

    Returns:
      Means over episodes: ``episode/turns``, ``episode/calls`` of tools, ``episode/answer_tokens`` that environments
      answered. ``episode/calling``, the share of episodes with a call, and ``episode/invalid``, that of those which
      their environment made invalid. ``episode/failures``, the share of calls that failed, and ``episode/malformed``,
      that of calls which reached no tool. What befell episodes (`Played.events`), counted.
    """
    turns, calls, failures, malformed = (
        np.concatenate([d.known[name].reshape(-1) for d in drawn])
        for name in ("turns", "calls", "failures", "malformed")
    )
    invalid = sum(n for d in drawn for reason, n in d.invalid.items() if reason.startswith("environment/"))
    events = sum((Counter(d.metrics) for d in drawn), Counter[str]())
    answered = np.concatenate([(d.rollout.lengths - d.own_lengths).reshape(-1) for d in drawn])
    return {
        "episode/turns": mean(turns),
        "episode/calls": mean(calls),
        "episode/calling": mean(calls > 0),
        "episode/failures": float(failures.sum() / calls.sum()) if calls.sum() else math.nan,
        "episode/malformed": float(malformed.sum() / calls.sum()) if calls.sum() else math.nan,
        "episode/invalid": invalid / len(turns),
        "episode/answer_tokens": mean(answered),
        **events,
    }


def _tell(played: Played) -> None:
    """Says what became of the episodes that were open when the run was stopped."""
    events, every = played.events, played.rollout.lengths.size
    if not processes.is_first():
        return
    if n := events["redrawn/resumed"]:
        log.info("%d episodes were open when the run was stopped, and are drawn again", n)
    if n := events["replay_differs"]:
        log.warning(
            "%d of %d episodes: their environment states deterministic = True, but the same actions had brought other "
            "observations before the run was stopped; leave it out of the class if they may differ",
            n,
            every,
        )


def without(invalid: Mapping[Place, str], batch: Batch) -> Batch:
    """The batch without the rewards of episodes that are invalid, each for a reason."""
    counts = np.ones(batch.total.shape, bool)
    for at in invalid:
        counts[at] = False
    reasons = Counter(f"environment/{reason}" for reason in invalid.values())
    return dataclasses.replace(
        batch,
        total=np.where(counts, batch.total, np.nan),
        reward=np.where(counts, batch.reward, np.nan),
        by_name={name: np.where(counts, x, np.nan) for name, x in batch.by_name.items()},
        invalid=dict(Counter(batch.invalid) + reasons),
    )
