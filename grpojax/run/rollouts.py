"""Where a step's groups come from: the order of the problems, dynamic sampling, and what is not drawn again.

The loop knows four methods: `Rollouts.start` dispatches a rollout, `Rollouts.collect` makes a step's samples of it,
`Rollouts.state` is what the next ones follow from, and `Rollouts.resumed` gives back the one that a checkpoint has.

With ``rollout.ahead: 0`` a step starts its rollout after the updates of the step before. With 1 the rollout of step n+1
is started once the samples of step n are on the host, before they are judged and learned from: its samples are drawn
under the weights after step n-1 and learned from by those after step n. So a sample is at most one step's updates old
(``rollout/staleness``). What a filter draws in addition is drawn when it asks for it, under the weights of that moment.
The problems of rollout n+1 are chosen before the rewards of rollout n are known: what is solved, or how often a level
is solved, is heeded one rollout later.

With ``rollout.overlap`` a rollout leaves groups behind that are not whole (`grpojax.run.seats`). In the batch of its
step these have no samples and no rewards, and are dropped as a filter drops groups: they are judged, counted and
learned from in the step in which they become whole.
"""

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
from grpojax.run import flight
from grpojax.run.allocated_rollouts import PlannedGroups
from grpojax.run.curriculum import Curriculum, LevelCurriculum
from grpojax.run.flight import Flight
from grpojax.run.groups import Drawn, Groups, Sync
from grpojax.run.judged import Judged, Sampled, take
from grpojax.run.method import Method
from grpojax.run.seats import Seats, oldest
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
      state: the record of a run that goes on (`state`).
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
        state: Mapping[str, Any],
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
        self.drawn: int = state["rollouts"]
        self.data_s = 0.0
        self.seats = None
        if config.overlap:
            self.seats = Seats((config.prompts, config.group, config.max_tokens), problems, state)

    def state(self) -> dict[str, Any]:
        """What the next draws follow from, for the run's record."""
        seats = {} if self.seats is None else self.seats.state()
        return {"rollouts": self.drawn, **self.curriculum.state(), **self.groups.state(), **seats}

    def draw(self, step: int) -> Callable[[], Sampled]:
        """Dispatches the rollout of a step; what it returns waits for its samples."""
        return functools.partial(self.collect, step, self.start())

    def start(self) -> Flight:
        """Dispatches the next rollout; its problems and its draws follow from its number in the run."""
        number = self.drawn
        self.drawn += 1
        version = self._weights()[1]
        if self.seats is None:
            problems, passes = self._choose(number)
            wait = self.groups.start(problems, number)
            return Flight(number=number, version=version, problems=problems, passes=passes, wait=wait)
        problems, passes, begun = self.seats.fill(self._choose)
        wait, versions = self.groups.start(problems, number, begun.samples), begun.continued(version)
        return Flight(number=number, version=version, problems=problems, passes=passes, wait=wait, versions=versions)

    def _choose(self, number: int) -> tuple[Sequence[data.Problem], Sequence[int]]:
        started = time.perf_counter()
        chosen = self.curriculum.draw(number)
        self.data_s += time.perf_counter() - started
        return chosen

    def resumed(self, record: Mapping[str, Any]) -> Flight:
        """The rollout that a checkpoint has (`grpojax.run.flight.Flight.record`)."""
        return flight.resumed(record, self.groups, self._problems)

    def _wait(self, flight: Flight) -> Drawn:
        """The groups of a rollout; those that are not whole are kept for the next one."""
        drawn = flight.wait()
        if self.seats is not None and drawn.rest is not None:
            self.seats.keep(flight, drawn.rest)
        return drawn

    @property
    def waiting(self) -> PerPrompt | None:
        """``[P]`` bool: groups that go on in the next rollout; None without ``rollout.overlap``."""
        return None if self.seats is None else self.seats.begun.waiting

    def collect(self, step: int, first: Flight) -> Sampled:
        """The samples of a step, once its first rollout is there; draws more where a filter asks for it."""
        size, chosen = self.config.prompts, self.method.filter
        flights, drawn = [first], [self._wait(first)]

        @functools.cache
        def everything() -> list[Judged]:
            judged = [d.judged() for d in drawn]
            self.curriculum.note(zip(judged, [f.passes for f in flights], strict=True))
            for j in judged:
                self.groups.note(j)
            return judged + [j.failed for j in judged if j.failed is not None]

        if chosen is None:
            return Sampled(
                problems=drawn[0].problems,
                rollout=drawn[0].rollout,
                dropped=np.zeros(size, bool) if self.waiting is None else self.waiting,
                judged=lambda: (everything()[0], everything()),
                told=self.curriculum.told,
                version=_oldest(flights, drawn),
                waiting=self.waiting,
            )
        keeps = [self._keep(drawn[0].judged())]
        wanted = size if self.waiting is None else size - int(self.waiting.sum())  # a seat that waits is not dropped
        assert chosen.max_rollouts is not None, "of a method it is filled in"
        while sum(k.sum() for k in keeps) < wanted and len(drawn) < chosen.max_rollouts:
            flights.append(self.start())
            drawn.append(self._wait(flights[-1]))
            keeps.append(self._keep(drawn[-1].judged()))
        keep, whole = np.concatenate(keeps), np.concatenate([d.rollout.lengths.any(1) for d in drawn])
        if not keep.any():
            log.warning(
                "step %d: the filter dropped all %d groups by %r: this step teaches nothing",
                step,
                whole.sum(),
                self.method.deciding,
            )
        order = np.argsort(~keep, kind="stable")[:size]
        merged = take([d.judged() for d in drawn], order)
        learned = np.zeros_like(keep)
        learned[order] = keep[order]
        return Sampled(
            problems=merged.problems,
            rollout=merged.rollout,
            dropped=~keep[order],
            kept_share=float(keep[whole].mean()),
            judged=lambda: (merged, everything()),
            told=self.curriculum.told,
            version=_oldest(flights, drawn, learned),
            waiting=self.waiting,
        )

    @on_host()
    def _keep(self, judged: Judged) -> PerPrompt:
        """``[P]`` bool: the groups that dynamic sampling keeps."""
        variant, chosen, by_name = self.method.variant, self.method.filter, judged.by_name
        if self.truncated != "train":  # what was cut at the limit teaches nothing
            by_name = {name: np.where(judged.rollout.stopped, x, np.nan) for name, x in by_name.items()}
        keep = allocation.keep_prompts if variant.keep is None else variant.keep
        success = {} if chosen is None or chosen.success is None else {"success": chosen.success}
        try:
            return np.asarray(keep(by_name, self.method.deciding, **success)) & judged.rollout.lengths.any(1)
        except ValueError as e:
            raise UserError(f"filter of variant {variant.name!r}: {e}") from e


def _oldest(flights: Sequence[Flight], drawn: Sequence[Drawn], learned: PerPrompt | None = None) -> int:
    """Updates behind the weights of the oldest token that is learned from, or without ``rollout.overlap`` of the first
    rollout; ``learned`` says which groups of all rollouts are learned from, where not all whole ones are."""
    if flights[0].versions is None:
        return flights[0].version
    known = np.concatenate([oldest(f, d.rollout) for f, d in zip(flights, drawn, strict=True)])
    which = np.concatenate([d.rollout.lengths.any(1) for d in drawn])
    which = which if learned is None or not learned.any() else learned
    return int(known[which].min())
