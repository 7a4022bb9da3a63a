"""The greedy completion of each prompt, whose reward is the baseline of its samples (ReMax)."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from grpojax import data
from grpojax.evaluation import submit
from grpojax.programs.sampler_config import SamplerConfig, plain, unrounded
from grpojax.rewards import RewardScores
from grpojax.run.batch import Batch, Fetch
from grpojax.run.parts.part import Declared, Part
from grpojax.run.source import Plain
from grpojax.types import Array, Rollout


def sampler_of(config: SamplerConfig) -> SamplerConfig:
    """The settings that draw a greedy completion. It is the policy's own as far as the weights are."""
    exact = {"cache_dtype": unrounded(config.cache_dtype), "router_replay": False}
    return plain(config, group=1, temperature=0.0, decode_slots=0, **exact)


class WithGreedy(Plain):
    """As `Plain`; draws and scores a greedy completion with the samples of each prompt."""

    def dispatch(self, params: Any, problems: Sequence[data.Problem], key: Array) -> list[Fetch]:
        """As `Plain`, and the greedy completions."""
        drawn = super().dispatch(params, problems, key)
        sampler = sampler_of(self.config)
        return [*drawn, self.dispatch_any(params, self.prompts(problems), key, sampler, name="greedy")]

    def submit(self, problems: Sequence[data.Problem], rollout: Rollout, *more: Rollout) -> Batch:
        """As `Plain`, and the greedy completions."""
        batch, (greedy,) = super().submit(problems, rollout), more
        wait = submit(self.rewards, problems, greedy, self.policy.texts, self.columns)
        return dataclasses.replace(batch, pending=[*batch.pending, functools.partial(with_greedy, greedy, wait)])


class Greedy(Part):
    """The need "greedy"."""

    draws = WithGreedy
    signals = {"greedy_rewards": Declared("P", "rewards of the greedy completions")}

    def metrics(self, drawn: Sequence[Batch]) -> dict[str, float]:
        """The mean reward of the greedy completions."""
        rewards = np.concatenate([d.signals["greedy_rewards"] for d in drawn if "greedy_rewards" in d.signals])
        known = rewards[np.isfinite(rewards)]
        return {"greedy_reward": float(known.mean()) if known.size else math.nan}


def with_greedy(greedy: Rollout, wait: Callable[[], RewardScores], batch: Batch) -> Batch:
    """The batch with the rewards of its greedy completions, for which ``wait`` waits."""
    scores = wait()
    return dataclasses.replace(
        batch,
        invalid={**batch.invalid} | {f"greedy/{kind}": n for kind, n in scores.invalid.items()},
        signals={**batch.signals, "greedy_rewards": scores.total},
        besides=[*batch.besides, greedy],
    )
