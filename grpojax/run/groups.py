"""Groups of samples: drawn from the policy as it is, and given to the rewards."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from grpojax import data
from grpojax.evaluation import columns_of, submit
from grpojax.host.errors import UserError
from grpojax.models import quantised
from grpojax.programs import batch_shards, calls, packing
from grpojax.programs.calls import Call
from grpojax.programs.policy import Policy, PolicyShape
from grpojax.programs.sampler import SamplerConfig, most_left, unfinished
from grpojax.rewards import Rewards, Scores
from grpojax.rewards.scoring import weighted_sum
from grpojax.run.batch import RolloutBatch, among, only
from grpojax.run.in_flight import InFlight, Sync, from_text, samples_of
from grpojax.run.method import Method
from grpojax.run.recipe import Config
from grpojax.run.run_state import RunState
from grpojax.run.sections import RolloutConfig
from grpojax.types import Prompts, Rollout


def greedy_of(config: SamplerConfig) -> SamplerConfig:
    """The greedy completion of a prompt beside its samples; the policy's own as far as its weights are."""
    cache_dtype = quantised.exact(config.cache_dtype)
    return SamplerConfig(group=1, temperature=0.0, max_tokens=config.max_tokens, cache_dtype=cache_dtype)


class Groups:
    """Draws a group of samples for each of some problems; with `Method` asking for it a greedy completion too.

    Args:
      policy: what samples.
      weights: gives its current weights.
      config: how much to draw.
      method: what the variant needs beside the samples.
      rewards: judges.
      problems: all that may be asked.
      seed: of all draws.
      max_prompt_tokens: longest prompt.
      sync: how a rollout is waited for.
    """

    def __init__(
        self,
        policy: Policy,
        weights: Callable[[], Any],
        config: RolloutConfig,
        method: Method,
        rewards: Rewards,
        problems: data.Problems,
        *,
        seed: int,
        max_prompt_tokens: int,
        sync: Sync,
    ):
        self.sync = sync
        self.policy, self.weights, self.config, self.method = policy, weights, config, method
        self.rewards, self.columns = rewards, columns_of(problems)
        self.seed, self.max_prompt_tokens = seed, max_prompt_tokens
        self._greedy: SamplerConfig | None = None
        if "greedy" in method.variant.needs:
            self._greedy = greedy_of(config)

    def write(self, state: RunState) -> None:
        """Puts down what draws follow from besides the policy and the rollout's number."""

    def note(self, batch: RolloutBatch) -> None:
        """Takes from samples with rewards what later draws follow from."""

    def start(self, problems: Sequence[data.Problem], number: int, carried: Rollout | None = None) -> InFlight:
        """Dispatches the rollout of that number in the run.

        Args:
          problems: of its prompts.
          number: of the rollout.
          carried: with ``rollout.overlap``, the groups that go on in it (`grpojax.run.partial_groups.Carried`).
        """
        params, key, config = self._params(), self._key(number), self.config
        longest = packing.bucket(max(len(p.ids) for p in problems), self.max_prompt_tokens)
        left = 0
        if carried is not None:
            left = most_left(config.overlap, len(problems), config.group, self.policy.sampling.shards)
        prompts = data.to_prompts(problems, longest, config.group)
        sampled = self.policy.sample(params, prompts, key, config, partial=carried, left=left)
        fetches = [functools.partial(_fetch, self.policy, sampled, len(problems))]
        if self._greedy is not None:
            fetches.append(self._rows(params, data.to_prompts(problems, longest), key, self._greedy, after=sampled))
        if self.config.ahead and not self.policy.disaggregated:
            self.policy.wait_on_cpu(sampled)  # the step before it is yet to be scored and learned from
        submit = functools.partial(self._submit, problems)
        return InFlight(number=number, problems=problems, submit=submit, sync=self.sync, fetches=fetches)

    def resumed(self, record: Mapping[str, Any], problems: Mapping[int, data.Problem]) -> InFlight:
        """A rollout that the run had drawn before it was stopped, of `InFlight.record`; ``problems`` by uid."""
        mine = [problems[uid] for uid in record["uids"]]
        return InFlight(
            number=record["number"],
            problems=mine,
            submit=functools.partial(self._submit, mine),
            sync=self.sync,
            fetches=(),
            samples=samples_of(record),
            version=record["version"],
            passes=record["passes"],
            versions=from_text(record["versions"]) if "versions" in record else None,
        )

    def _params(self) -> Any:
        return self.policy.reshard(self.weights(), self.config.weights)

    def _key(self, number: int) -> Any:
        return jax.random.fold_in(jax.random.key(self.seed), number)

    def _rows(
        self, params: Any, prompts: Prompts, key: Any, config: SamplerConfig, *, after: Rollout | None = None
    ) -> Callable[[Sync], Rollout]:
        """Dispatches samples of any number of prompts: the last shards get prompts again where they do not divide."""
        if after is not None:
            self.policy.wait_on_cpu(after)
        n = len(prompts.lengths)
        padded = batch_shards.filled(n, self.policy.sampling.shards)
        rollout = self.policy.sample(params, jax.tree.map(lambda x: x[np.arange(padded) % n], prompts), key, config)
        return lambda sync: jax.tree.map(lambda x: x[:n], _fetch(self.policy, rollout, padded, sync))

    def _submit(
        self, problems: Sequence[data.Problem], rollout: Rollout, greedy: Rollout | None = None
    ) -> RolloutBatch:
        """Submits a rollout to the rewards: each process its own rows."""
        if self.config.overlap:
            return self._submit_whole(problems, rollout)
        wait = submit(self.rewards, problems, rollout, self.policy.texts, self.columns)
        if greedy is None:
            rewarded = functools.cache(lambda: self._rewarded(problems, rollout, wait()))
            return RolloutBatch(problems=problems, rollout=rollout, pending=rewarded)
        baseline = submit(self.rewards, problems, greedy, self.policy.texts, self.columns)

        @functools.cache
        def with_greedy() -> RolloutBatch:
            samples, scores = self._rewarded(problems, rollout, wait()), baseline()
            return dataclasses.replace(
                samples,
                invalid={**samples.invalid} | {f"greedy/{kind}": n for kind, n in scores.invalid.items()},
                signals={**samples.signals, "greedy_rewards": scores.total},
                greedy_lengths=greedy.lengths[:, 0],
            )

        return RolloutBatch(problems=problems, rollout=rollout, pending=with_greedy)

    def _submit_whole(self, problems: Sequence[data.Problem], rollout: Rollout) -> RolloutBatch:
        """Submits the groups of which no sample wants another token."""
        whole = ~unfinished(rollout).any(1)
        asked = [p for p, done in zip(problems, whole, strict=True) if done]
        samples, learned = jax.tree.map(lambda x: x[whole], rollout), only(rollout, whole)
        wait = submit(self.rewards, asked, samples, self.policy.texts, self.columns)

        @functools.cache
        def rewarded() -> RolloutBatch:
            return among(self._rewarded(asked, samples, wait()), whole, problems, learned)

        return RolloutBatch(problems=problems, rollout=learned, pending=rewarded, unfinished=only(rollout, ~whole))

    def _rewarded(self, problems: Sequence[data.Problem], rollout: Rollout, scores: Scores) -> RolloutBatch:
        shape, signals = rollout.lengths.shape, {}
        if "step_rewards" in self.method.variant.needs:
            steps = _step_rewards(scores, self.method.variant.name, self.config.max_tokens)
            signals["step_rewards"] = steps.reshape(rollout.tokens.shape)
        elif scores.stepped:
            raise UserError(
                f"reward {scores.stepped[0]!r} gives rewards to steps, and variant {self.method.variant.name!r} reads "
                "none: take grpo_process, or give that reward weight 0"
            )
        return RolloutBatch(
            problems=problems,
            rollout=rollout,
            total=scores.total.reshape(shape),
            reward=weighted_sum(self.rewards.config.terms, scores.by_name).reshape(shape),
            by_name={name: x.reshape(shape) for name, x in scores.by_name.items()},
            invalid=scores.invalid,
            signals=signals,
        )


def _fetch(policy: Policy, rollout: Rollout, n_prompts: int, sync: Sync) -> Rollout:
    sync(rollout)
    return policy.fetch(rollout, n_prompts)


def _step_rewards(scores: Scores, variant: str, longest: int) -> np.ndarray:
    """``[P * G, T]``, NaN where no step ends."""
    if scores.step_rewards is not None:
        return scores.step_rewards
    if np.isfinite(scores.total).any():
        raise UserError(
            f"variant {variant!r} learns from rewards of steps, and no reward of the run gives "
            "any: take equations, or a function that returns a list of (token end, reward) for a sample"
        )
    return np.full((scores.total.size, longest), np.nan, np.float32)


def abstract_rollouts(config: Config, policy: PolicyShape, weights: Any) -> dict[str, Call]:
    """The programs of `Groups`.

    Args:
      config: the recipe.
      policy: the model.
      weights: that it samples with (`grpojax.programs.calls.reshard`).
    """
    sampling, longest = config.rollout, config.data.max_prompt_tokens
    prompts = calls.longest_prompts(sampling.prompts, longest)
    found = {"rollout": calls.rollout(policy, weights, prompts, sampling, overlap=sampling.overlap)}
    if "greedy" in config.method.variant.needs:
        prompts = calls.longest_prompts(batch_shards.filled(sampling.prompts, policy.sampling.shards), longest)
        found["greedy"] = calls.rollout(policy, weights, prompts, greedy_of(sampling))
    return found
