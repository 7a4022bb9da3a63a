"""The greedy completion of each prompt, whose reward is the baseline of its samples (ReMax)."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from grpojax import data
from grpojax.evaluation import submit
from grpojax.models import quantised
from grpojax.programs.sampler import SamplerConfig
from grpojax.rewards import Scores
from grpojax.run.batch import RolloutBatch
from grpojax.run.sources.source import Dispatched, Plain
from grpojax.types import Array, PerPrompt, Rollout


def sampler_of(config: SamplerConfig) -> SamplerConfig:
    """The settings that draw a greedy completion. It is the policy's own as far as the weights are."""
    cache_dtype = quantised.exact(config.cache_dtype)
    return SamplerConfig(group=1, temperature=0.0, max_tokens=config.max_tokens, cache_dtype=cache_dtype)


class Greedy:
    """Draws and scores greedy completions with the samples of ``source``: a `grpojax.run.sources.source.Companion`."""

    def __init__(self, source: Plain):
        self._source, self._sampler = source, sampler_of(source.config)

    def draw(self, params: Any, problems: Sequence[data.Problem], key: Array) -> Dispatched:
        """Dispatches them."""
        source = self._source
        return source.dispatch_any(params, source.prompts(problems), key, self._sampler, name="greedy")

    def submit(self, problems: Sequence[data.Problem], drawn: Rollout) -> "Baseline":
        """Submits them to the rewards."""
        source = self._source
        wait = submit(source.rewards, problems, drawn, source.policy.texts, source.columns)
        return Baseline(wait, drawn.lengths[:, 0])


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Rewards of greedy completions, for which ``wait`` waits, and their lengths ``[P]``."""

    wait: Callable[[], Scores]
    lengths: PerPrompt

    def rewarded(self, batch: RolloutBatch) -> RolloutBatch:
        """The batch with them."""
        scores = self.wait()
        return dataclasses.replace(
            batch,
            invalid={**batch.invalid} | {f"greedy/{kind}": n for kind, n in scores.invalid.items()},
            signals={**batch.signals, "greedy_rewards": scores.total},
            greedy_lengths=self.lengths,
        )
