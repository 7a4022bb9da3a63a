"""Episodes on devices that compute nothing (`grpojax.device.Dry`): their rounds without environments."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from grpojax import data
from grpojax.evaluation.summary import EpisodeRecord
from grpojax.extensions.episodes.episode_sampler import EpisodeSampler
from grpojax.extensions.episodes.open_episodes import Notes
from grpojax.extensions.episodes.players import COUNTS, Begun, Played, Players
from grpojax.programs.policy import DryPolicy
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.run.recipe import Config
from grpojax.types import Array


class DryPlayers(Players):
    """Plays as many rounds as episodes have whose turns are as long as they may be; or two of one token each."""

    @classmethod
    def dry(cls, recipe: Config, policy: DryPolicy) -> "DryPlayers":
        """The players of a recipe."""
        nothing: Any = None
        assert recipe.environment is not None
        return cls(
            policy=policy,
            environments=nothing,
            tokenize=nothing,
            config=recipe.environment,
            turn_tokens=recipe.rollout.max_turn_tokens,
            longest_prompt=recipe.data.max_prompt_tokens,
        )

    def begin(
        self,
        params: Any,
        problems: Sequence[data.Problem],
        key: Array,
        config: SamplerConfig,
        *,
        notes: Notes | None = None,
    ) -> Begun:
        """Dispatches the first round."""
        prompts = data.to_prompts(problems, self.longest_prompt, config.group)
        sampler = EpisodeSampler(self.policy, params, prompts, key, config, turn_tokens=self.turn_tokens)
        turn = self.turn_tokens or config.max_tokens
        rounds = -(-config.max_tokens // turn) if self.policy.sampling_device.longest else 2  # pyrefly: ignore
        shape = len(problems), config.group, config.max_tokens
        return _Playing(problems, sampler, shape, min(rounds, self.config.max_turns))

    def records(self, played: Played) -> list[EpisodeRecord]:
        """None."""
        return []


@dataclasses.dataclass
class _Playing:
    """Samples ``[P, G, T]`` of some problems, and how many rounds they take in all."""

    problems: Sequence[data.Problem]
    sampler: EpisodeSampler
    shape: tuple[int, int, int]
    rounds: int

    def finish(self, sync: Callable[[Any], object]) -> Played:
        for _ in range(self.rounds - 1):
            self.sampler.go_on(np.zeros(self.shape, np.int32), np.ones(self.shape[:2], np.int32))
        out = self.sampler.fetch()
        return Played(
            problems=self.problems,
            rollout=out,
            lengths=out.lengths,
            columns={},
            counts={name: np.zeros(self.shape[:2], np.int32) for name in COUNTS},
            invalid={},
            events=dict.fromkeys(("redrawn/resumed", "redrawn/neighbour", "replay_differs"), 0),
        )
