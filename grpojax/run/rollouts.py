"""Where samples come from: draws, rewards under way, and dynamic sampling.

The loop knows `Rollouts.draw` and `Rollouts.state` alone, so that samples drawn ahead by something else can take its
place.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from grpojax import allocation, data
from grpojax.evaluation import columns_of, submit
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.programs import packing
from grpojax.programs.policy import Policy
from grpojax.rewards import Rewards
from grpojax.rewards.scoring import weighted_sum
from grpojax.run.method import Method
from grpojax.run.sections import RolloutConfig
from grpojax.types import PerPrompt, Rollout, Samples, Tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """Groups on the host with their rewards.

    Attributes:
      problems: of the P prompts.
      rollout: ``[P, G, ...]``.
      total: ``[P, G]`` what advantages are made of, NaN where a sample has none.
      reward: ``[P, G]`` the weighted sum of the rewards; the same, unless each is normalised in its group first.
      by_name: each reward by itself, ``[P, G]``.
      invalid: how many samples have no reward, by reward and reason.
    """

    problems: Sequence[data.Problem]
    rollout: Rollout
    total: Samples
    reward: Samples
    by_name: dict[str, Samples]
    invalid: dict[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled:
    """The samples of a step, and their rewards once they are asked for.

    Attributes:
      problems: of the P prompts that the step learns from.
      rollout: their samples, ``[P, G, ...]`` on the host.
      dropped: ``[P]`` bool, groups that fill up the batch and weigh nothing.
      kept_share: of all groups drawn, those that the filter kept.
      judged: waits for the rewards: ``(batch, drawn)``, of the problems above, dropped groups included, and of all that
        was drawn.
    """

    problems: Sequence[data.Problem]
    rollout: Rollout
    dropped: PerPrompt
    kept_share: float = 1.0
    judged: Callable[[], tuple[Judged, list[Judged]]]


class Rollouts:
    """Draws a step's groups from the policy as it is.

    Args:
      policy: what samples.
      weights: gives its current weights.
      config: how much to draw.
      method: rewards and filter.
      rewards: judges.
      problems: what is asked.
      seed: of the data's order and of all draws.
      max_prompt_tokens: longest prompt.
      truncated: what samples cut at the limit do (`grpojax.run.sections.TrainConfig`).
      state: the record of a run that goes on (`state`).
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
        truncated: str,
        state: Mapping[str, Any],
    ):
        self.policy, self.weights, self.config, self.method = policy, weights, config, method
        self.rewards, self.columns = rewards, columns_of(problems)
        self.seed, self.max_prompt_tokens, self.truncated = seed, max_prompt_tokens, truncated
        kind = data.Batches if method.variant.retire is None else data.RetiringBatches
        self.batches: Any = kind(problems, config.prompts, seed, problems.weights)
        self.drawn: int = state["rollouts"]
        self.pass_ = data.Pass(**state.get("pass", {}))
        self.retired: set[int] = set(state.get("retired", ()))

    def state(self) -> dict[str, Any]:
        """What the next draws follow from, for the run's record."""
        state: dict[str, Any] = {"rollouts": self.drawn}
        if self.method.variant.retire is not None:
            state |= {"pass": dataclasses.asdict(self.pass_), "retired": sorted(self.retired)}
        return state

    def draw(self, step: int) -> Callable[[], Sampled]:
        """Dispatches the rollout of a step; what it returns waits for it, and draws more where a filter asks for it."""
        return functools.partial(self._collect, step, *self._dispatch())

    def _dispatch(self) -> tuple[list[data.Problem], Rollout]:
        """Starts the next rollout; its problems and its draws follow from its number in the run."""
        number, config = self.drawn, self.config
        self.drawn += 1
        if self.method.variant.retire is None:
            problems = self.batches[number]
        else:
            problems, self.pass_ = self.batches.draw(number, self.pass_, self.retired)
        longest = packing.bucket(max(len(p.ids) for p in problems), self.max_prompt_tokens)
        key = jax.random.fold_in(jax.random.key(self.seed), number)
        params = self.policy.reshard(self.weights())
        prompts = data.to_prompts(problems, longest, config.group)
        return problems, self.policy.sample(params, prompts, key, config)

    def _collect(self, step: int, problems: list[data.Problem], dispatched: Rollout) -> Sampled:
        size, chosen = self.config.prompts, self.method.filter
        drawn = [self._submit(problems, self.policy.fetch(dispatched, size))]
        if chosen is None:
            problems, rollout, wait = drawn[0]
            return Sampled(
                problems=problems,
                rollout=rollout,
                dropped=np.zeros(size, bool),
                judged=functools.cache(lambda: (wait(), self._retire([wait()]))),
            )
        keeps = [self._keep(drawn[0][2]())]
        while sum(k.sum() for k in keeps) < size and len(drawn) < chosen.max_rollouts:
            problems, dispatched = self._dispatch()
            drawn.append(self._submit(problems, self.policy.fetch(dispatched, size)))
            keeps.append(self._keep(drawn[-1][2]()))
        keep = np.concatenate(keeps)
        if not keep.any():
            log.warning(
                "step %d: the filter dropped all %d groups by %r: this step teaches nothing",
                step,
                len(keep),
                self.method.deciding,
            )
        order = np.argsort(~keep, kind="stable")[:size]
        everything = [wait() for _, _, wait in drawn]
        merged = _take(everything, order)
        return Sampled(
            problems=merged.problems,
            rollout=merged.rollout,
            dropped=~keep[order],
            kept_share=float(keep.mean()),
            judged=functools.cache(lambda: (merged, self._retire(everything))),
        )

    def _keep(self, judged: Judged) -> PerPrompt:
        """``[P]`` bool: the groups that dynamic sampling keeps."""
        variant, chosen, by_name = self.method.variant, self.method.filter, judged.by_name
        if self.truncated != "train":  # what was cut at the limit teaches nothing
            by_name = {name: np.where(judged.rollout.stopped, x, np.nan) for name, x in by_name.items()}
        keep = allocation.keep_prompts if variant.keep is None else variant.keep
        success = {} if chosen is None or chosen.success is None else {"success": chosen.success}
        try:
            return np.asarray(keep(by_name, self.method.deciding, **success))
        except ValueError as e:
            raise UserError(f"filter of variant {variant.name!r}: {e}") from e

    def _retire(self, drawn: list[Judged]) -> list[Judged]:
        """Notes the prompts that are not drawn again once the pass over the data is through."""
        share, chosen = self.method.variant.retire, self.method.filter
        if share is None:
            return drawn
        success = 1.0 if chosen is None or chosen.success is None else chosen.success
        for judged in drawn:
            done = np.asarray(allocation.solved(judged.by_name[self.method.deciding], share, success=success))
            self.retired |= {p.uid for p, over in zip(judged.problems, done, strict=True) if over}
        return drawn

    def _submit(
        self, problems: list[data.Problem], rollout: Rollout
    ) -> tuple[list[data.Problem], Rollout, Callable[[], Judged]]:
        """Submits a rollout to the rewards: each process its own rows."""
        wait = submit(self.rewards, problems, rollout, self.policy.decode, self.columns)

        @functools.cache
        def judged() -> Judged:
            scores, shape, config = wait(), rollout.lengths.shape, self.rewards.config
            plain = scores.total if config.combine == "sum" else weighted_sum(config.terms, scores.by_name)
            return Judged(
                problems=problems,
                rollout=rollout,
                total=scores.total.reshape(shape),
                reward=plain.reshape(shape),
                by_name={name: x.reshape(shape) for name, x in scores.by_name.items()},
                invalid=scores.invalid,
            )

        return problems, rollout, judged


def _take(drawn: Sequence[Judged], order: np.ndarray) -> Judged:
    """Groups of several rollouts as one."""

    def take(*xs: Any) -> np.ndarray:
        return np.concatenate(xs)[order]

    everything = [p for d in drawn for p in d.problems]
    return Judged(
        problems=[everything[i] for i in order],
        rollout=jax.tree.map(take, *(d.rollout for d in drawn)),
        total=take(*(d.total for d in drawn)),
        reward=take(*(d.reward for d in drawn)),
        by_name={name: take(*(d.by_name[name] for d in drawn)) for name in drawn[0].by_name},
        invalid=dict(sum((Counter(d.invalid) for d in drawn), Counter())),
    )


def sample_rows(
    judged: Judged, advantages: Tokens, decode: Callable[[Sequence[int]], str], answer: Callable[[str], str | None]
) -> list[dict[str, Any]]:
    """A row for each sample, for `grpojax.records.samples`: what it was asked, what it said, and what became of it."""
    rollout = judged.rollout
    mean = advantages.sum(-1) / np.maximum(rollout.lengths, 1)
    rows = []
    for p, problem in enumerate(judged.problems):
        for g, n in enumerate(rollout.lengths[p].tolist()):
            text = decode(rollout.tokens[p, g, :n].tolist())
            rows.append(
                {
                    "uid": problem.uid,
                    "sample": g,
                    "prompt": problem.prompt,
                    "completion": text,
                    "reward": _finite(judged.reward[p, g]),
                    "rewards": {name: _finite(x[p, g]) for name, x in judged.by_name.items()},
                    "advantage": _finite(mean[p, g]),
                    "length": n,
                    "stop": "eos" if rollout.stopped[p, g] else "length",
                    "gold": problem.gold,
                    "answer": answer(text),
                }
            )
    return rows


def _finite(x: Any) -> float | None:
    return float(x) if np.isfinite(x) else None
