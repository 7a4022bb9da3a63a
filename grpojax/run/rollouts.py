"""Where a step's groups come from: the order of the problems, dynamic sampling, and what is not drawn again.

The loop knows `Rollouts.draw` and `Rollouts.state` alone, so that samples drawn ahead by something else can take its
place.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from grpojax import allocation, data
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.programs.policy import Policy
from grpojax.rewards import Rewards
from grpojax.run.allocated_rollouts import PlannedGroups
from grpojax.run.curriculum import Curriculum, LevelCurriculum
from grpojax.run.groups import Drawn, Groups
from grpojax.run.judged import Judged, Sampled, take
from grpojax.run.method import Method
from grpojax.run.sections import RolloutConfig
from grpojax.types import PerPrompt


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
        self.config, self.method, self.truncated = config, method, truncated
        given = policy, weights, config, method, rewards, problems
        if method.plan is None:
            self.groups = Groups(*given, seed=seed, max_prompt_tokens=max_prompt_tokens)
        else:
            self.groups = PlannedGroups(*given, seed=seed, max_prompt_tokens=max_prompt_tokens, state=state)
        own, given = method.deciding, config.curriculum
        if given is None:
            self.curriculum = Curriculum(
                problems, config.prompts, seed, retire=method.retire, deciding=own, state=state
            )
        else:
            self.curriculum = LevelCurriculum(problems, config.prompts, seed, config=given, deciding=own, state=state)
        self.drawn: int = state["rollouts"]

    def state(self) -> dict[str, Any]:
        """What the next draws follow from, for the run's record."""
        return {"rollouts": self.drawn, **self.curriculum.state(), **self.groups.state()}

    def draw(self, step: int) -> Callable[[], Sampled]:
        """Dispatches the rollout of a step; what it returns waits for it, and draws more where a filter asks for it."""
        return functools.partial(self._collect, step, *self._dispatch())

    def _dispatch(self) -> tuple[Callable[[], Drawn], Sequence[int]]:
        """Starts the next rollout; its problems and its draws follow from its number in the run.

        Also which passes over the data its problems are of.
        """
        number = self.drawn
        self.drawn += 1
        problems, passes = self.curriculum.draw(number)
        return self.groups.start(problems, number), passes

    def _collect(self, step: int, dispatched: Callable[[], Drawn], passes: Sequence[int]) -> Sampled:
        size, chosen = self.config.prompts, self.method.filter
        drawn, of_passes = [dispatched()], [passes]

        @functools.cache
        def everything() -> list[Judged]:
            judged = [d.judged() for d in drawn]
            self.curriculum.note(zip(judged, of_passes, strict=True))
            for j in judged:
                self.groups.note(j)
            return judged + [j.failed for j in judged if j.failed is not None]

        if chosen is None:
            return Sampled(
                problems=drawn[0].problems,
                rollout=drawn[0].rollout,
                dropped=np.zeros(size, bool),
                judged=lambda: (everything()[0], everything()),
                told=self.curriculum.told,
            )
        keeps = [self._keep(drawn[0].judged())]
        while sum(k.sum() for k in keeps) < size and len(drawn) < chosen.max_rollouts:
            dispatched, passes = self._dispatch()
            drawn.append(dispatched())
            of_passes.append(passes)
            keeps.append(self._keep(drawn[-1].judged()))
        keep = np.concatenate(keeps)
        if not keep.any():
            log.warning(
                "step %d: the filter dropped all %d groups by %r: this step teaches nothing",
                step,
                len(keep),
                self.method.deciding,
            )
        order = np.argsort(~keep, kind="stable")[:size]
        merged = take([d.judged() for d in drawn], order)
        return Sampled(
            problems=merged.problems,
            rollout=merged.rollout,
            dropped=~keep[order],
            kept_share=float(keep.mean()),
            judged=lambda: (merged, everything()),
            told=self.curriculum.told,
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
