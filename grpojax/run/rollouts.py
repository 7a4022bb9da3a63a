"""Where a step's groups come from: the order of the problems, dynamic sampling, and what is not drawn again.

The loop knows four methods: `Rollouts.start` dispatches a rollout, `Rollouts.collect` makes a step's batch of it,
`Rollouts.write` puts down what the next ones follow from, and `Rollouts.resumed` gives back the one that a checkpoint
has.

With ``rollout.ahead: 0`` a step starts its rollout after the updates of the step before. With 1 the rollout of step n+1
is started once the samples of step n are on the host, before they are judged and learned from: its samples are drawn
under the weights after step n-1 and learned from by those after step n. So a sample is at most one step's updates old
(``rollout/staleness``). What a filter draws in addition is drawn when it asks for it, under the weights of that moment.
The problems of rollout n+1 are chosen before the rewards of rollout n are known: what is solved, or how often a level
is solved, is heeded one rollout later.

With ``rollout.overlap`` a rollout leaves groups behind that are not whole (`grpojax.run.partial_groups`). In the batch
of its step these have no samples and no rewards, and are dropped as a filter drops groups: they are judged, counted and
learned from in the step in which they become whole.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from grpojax import allocation, data
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.host.on_host import on_host
from grpojax.programs.policy import Policy
from grpojax.rewards import Rewards
from grpojax.run.allocated_rollouts import PlannedGroups
from grpojax.run.batch import RolloutBatch, take
from grpojax.run.curriculum import Curriculum, LevelCurriculum
from grpojax.run.groups import Groups
from grpojax.run.in_flight import InFlight, Sync
from grpojax.run.method import Method
from grpojax.run.partial_groups import PartialGroups, oldest
from grpojax.run.run_state import RunState
from grpojax.run.sections import RolloutConfig
from grpojax.types import PerPrompt


class Rollouts:
    """Draws a step's groups from the policy as it is.

    Args:
      policy: what samples.
      weights: gives its current weights, and how many updates are behind them.
      config: how much to draw.
      method: rewards and filter.
      rewards: judges.
      problems: what is asked.
      seed: of the data's order and of all draws.
      max_prompt_tokens: longest prompt.
      truncated: what samples cut at the limit do (`grpojax.run.sections.TrainConfig`).
      state: of a run that goes on.
      sync: how a rollout is waited for.

    Attributes:
      data_s: seconds spent on choosing problems since it was last set to 0.
    """

    def __init__(
        self,
        policy: Policy,
        weights: Callable[[], tuple[Any, int]],
        config: RolloutConfig,
        method: Method,
        rewards: Rewards,
        problems: data.Problems,
        *,
        seed: int,
        max_prompt_tokens: int,
        truncated: str,
        state: RunState,
        sync: Sync = jax.block_until_ready,
    ):
        self.config, self.method, self.truncated = config, method, truncated
        self._weights, self._problems = weights, problems
        given = policy, lambda: weights()[0], config, method, rewards, problems
        if method.plan is None:
            self.groups = Groups(*given, seed=seed, max_prompt_tokens=max_prompt_tokens, sync=sync)
        else:
            self.groups = PlannedGroups(*given, seed=seed, max_prompt_tokens=max_prompt_tokens, sync=sync, state=state)
        own, given = method.deciding, config.curriculum
        if given is None:
            self.curriculum = Curriculum(
                problems, config.prompts, seed, retire=method.retire, deciding=own, state=state
            )
        else:
            self.curriculum = LevelCurriculum(problems, config.prompts, seed, config=given, deciding=own, state=state)
        self.drawn = state.rollouts
        self.data_s = 0.0
        self.partial = None
        if config.overlap:
            self.partial = PartialGroups((config.prompts, config.group, config.max_tokens), problems, state)

    def write(self, state: RunState) -> None:
        """Puts down what the next draws follow from."""
        state.rollouts = self.drawn
        self.curriculum.write(state)
        self.groups.write(state)
        if self.partial is not None:
            self.partial.write(state)

    def next(self, step: int) -> RolloutBatch:
        """Dispatches the rollout of a step and waits for its samples."""
        return self.collect(step, self.start())

    def start(self) -> InFlight:
        """Dispatches the next rollout; its problems and its draws follow from its number in the run."""
        number = self.drawn
        self.drawn += 1
        version = self._weights()[1]
        if self.partial is None:
            problems, passes = self._choose(number)
            started, versions = self.groups.start(problems, number), None
        else:
            problems, passes, carried = self.partial.fill(self._choose)
            started, versions = self.groups.start(problems, number, carried.samples), carried.continued(version)
        return dataclasses.replace(started, version=version, passes=passes, versions=versions)

    def _choose(self, number: int) -> tuple[Sequence[data.Problem], Sequence[int]]:
        started = time.perf_counter()
        chosen = self.curriculum.draw(number)
        self.data_s += time.perf_counter() - started
        return chosen

    def resumed(self, record: Mapping[str, Any]) -> InFlight:
        """The rollout that a checkpoint has (`InFlight.record`)."""
        return self.groups.resumed(record, {p.uid: p for p in self._problems})

    def _collect(self, in_flight: InFlight) -> RolloutBatch:
        """The groups of a rollout; those that are not whole are kept for the next one."""
        batch = in_flight.collect()
        if self.partial is not None and batch.unfinished is not None:
            self.partial.keep(in_flight, batch.unfinished)
        return batch

    @property
    def waiting(self) -> PerPrompt | None:
        """``[P]`` bool: groups that go on in the next rollout; None without ``rollout.overlap``."""
        return None if self.partial is None else self.partial.carried.waiting

    def collect(self, step: int, first: InFlight) -> RolloutBatch:
        """The batch of a step, once the samples of its first rollout are there; its rewards are under way.

        A filter waits for them, and draws more where it asks for it.
        """
        size, chosen = self.config.prompts, self.method.filter
        started, batches = [first], [self._collect(first)]

        def with_rewards(groups: Callable[[], RolloutBatch], **of_step: Any) -> RolloutBatch:
            drawn = [b.with_rewards() for b in batches]
            self.curriculum.note(zip(drawn, [f.passes for f in started], strict=True))
            for each in drawn:
                self.groups.note(each)
            everything = [*drawn, *(b.failed for b in drawn if b.failed is not None)]
            metrics = self.curriculum.metrics()
            return dataclasses.replace(groups(), **of_step, pending=None, everything=everything, metrics=metrics)

        if chosen is None:
            waits = np.zeros(size, bool) if self.waiting is None else self.waiting
            of_step = {"dropped": waits, "version": _oldest(started, batches), "waiting": self.waiting}
            pending = functools.cache(functools.partial(with_rewards, batches[0].with_rewards, **of_step))
            return dataclasses.replace(batches[0], **of_step, pending=pending)
        keeps = [self._keep(batches[0].with_rewards())]
        wanted = size if self.waiting is None else size - int(self.waiting.sum())  # a group that goes on is not dropped
        assert chosen.max_rollouts is not None, "of a method it is filled in"
        while sum(k.sum() for k in keeps) < wanted and len(batches) < chosen.max_rollouts:
            started.append(self.start())
            batches.append(self._collect(started[-1]))
            keeps.append(self._keep(batches[-1].with_rewards()))
        keep, whole = np.concatenate(keeps), np.concatenate([b.rollout.lengths.any(1) for b in batches])
        if not keep.any():
            log.warning(
                "step %d: the filter dropped all %d groups by %r: this step teaches nothing",
                step,
                whole.sum(),
                self.method.deciding,
            )
        order = np.argsort(~keep, kind="stable")[:size]
        merged = take([b.with_rewards() for b in batches], order)
        learned = np.zeros_like(keep)
        learned[order] = keep[order]
        of_step = {
            "dropped": ~keep[order],
            "kept_share": float(keep[whole].mean()),
            "version": _oldest(started, batches, learned),
            "waiting": self.waiting,
        }
        pending = functools.cache(functools.partial(with_rewards, lambda: merged, **of_step))
        return dataclasses.replace(merged, **of_step, pending=pending)

    @on_host()
    def _keep(self, batch: RolloutBatch) -> PerPrompt:
        """``[P]`` bool: the groups that dynamic sampling keeps."""
        variant, chosen, by_name = self.method.variant, self.method.filter, batch.by_name
        if self.truncated != "train":  # what was cut at the limit teaches nothing
            by_name = {name: np.where(batch.rollout.stopped, x, np.nan) for name, x in by_name.items()}
        keep = allocation.keep_prompts if variant.keep is None else variant.keep
        success = {} if chosen is None or chosen.success is None else {"success": chosen.success}
        try:
            return np.asarray(keep(by_name, self.method.deciding, **success)) & batch.rollout.lengths.any(1)
        except ValueError as e:
            raise UserError(f"filter of variant {variant.name!r}: {e}") from e


def _oldest(started: Sequence[InFlight], drawn: Sequence[RolloutBatch], learned: PerPrompt | None = None) -> int:
    """Updates behind the weights of the oldest token that is learned from, or without ``rollout.overlap`` of the first
    rollout; ``learned`` says which groups of all rollouts are learned from, where not all whole ones are."""
    if started[0].versions is None:
        return started[0].version
    known = np.concatenate([oldest(f, d.rollout) for f, d in zip(started, drawn, strict=True)])
    which = np.concatenate([d.rollout.lengths.any(1) for d in drawn])
    which = which if learned is None or not learned.any() else learned
    return int(known[which].min())
