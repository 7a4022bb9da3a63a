"""The problems of each rollout: their order, solved problems that a run leaves out, and levels by solve rate."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from grpojax import allocation, data
from grpojax.host.console import log
from grpojax.host.on_host import on_host
from grpojax.run.batch import RolloutBatch, success_of
from grpojax.run.recipe import Config
from grpojax.run.run_state import RunState
from grpojax.run.sections import CurriculumConfig, RetireConfig


class Curriculum:
    """The problems of each rollout of a run.

    If solved prompts are retired, a rollout still has as many prompts. The passes over the data get shorter, and the
    remaining prompts are drawn more often. If fewer are left than a rollout takes, they occur in it repeatedly. Once
    all problems of a source are solved, all of them are drawn again.

    Args:
      problems: all problems.
      size: prompts of a rollout.
      seed: of their order.
      retire: when a prompt is solved, and for how long it is left out; None to leave out none.
      deciding: the reward that says whether a sample passes.
      state: of a run that goes on.
    """

    def __init__(
        self,
        problems: data.Problems,
        size: int,
        seed: int,
        *,
        retire: RetireConfig | None,
        deciding: str,
        state: RunState,
    ):
        self._retire, self._deciding = retire, deciding
        self._plain = data.Batches(problems, size, seed, problems.weights)
        self._batches: data.RetiringBatches | None = None
        if retire is not None:
            self._batches = data.RetiringBatches(problems, size, seed, problems.weights, retire.readmit_after)
            self._passes = tuple(data.Pass(**p) for p in state.passes or ()) or self._batches.begin()
        self._solved: dict[int, int] = dict(state.solved or ())

    def write(self, state: RunState) -> None:
        """Stores what the next problems depend on besides the rollout's number."""
        if self._retire is not None:
            state.passes = [dataclasses.asdict(p) for p in self._passes]
            state.solved = sorted(self._solved.items())

    def draw(self, number: int) -> tuple[Sequence[data.Problem], Sequence[int]]:
        """The problems of the rollout of that number, and the pass over its source that each belongs to."""
        if self._batches is None:
            problems = self._plain[number]
            return problems, [0] * len(problems)
        problems, passes, now = self._batches.draw(number, self._passes, self._solved)
        for source, (before, after) in enumerate(zip(self._passes, now, strict=True)):
            if after.since > before.since:
                log.warning(
                    "rollout %d: all problems of source %d are solved; they are drawn again", number, source + 1
                )
        self._passes = now
        return problems, passes

    def note(self, drawn: Iterable[tuple[RolloutBatch, Sequence[int]]]) -> None:
        """Notes which problems are solved, each with the pass that it was drawn in."""
        if self._retire is None:
            return
        share, success = self._retire.share, self._retire.success
        assert share is not None, "of a method it is filled in"
        for batch, passes in drawn:
            values = batch.by_name[self._deciding]
            use, setting = "prompts are retired", "rollout.retire.success"
            passing = success_of(values, self._deciding, success, use=use, setting=setting)
            with on_host():
                there = batch.rollout.lengths > 0
                done = np.asarray(allocation.solved(values, share, success=passing, drawn=there))
            if batch.seeded is not None:
                done = done & ~batch.seeded  # these had solutions of other problems in context
            for problem, number, over in zip(batch.problems, passes, done, strict=True):
                if over:
                    self._solved[problem.uid] = max(number, self._solved.get(problem.uid, 0))

    def metrics(self) -> dict[str, float]:
        """Metrics of the state that the next problems depend on."""
        return {}


class LevelCurriculum:
    """The problems of each rollout of a run, drawn by level: more from levels that are solved half the time.

    After a rollout, a level's running solve rate moves by ``1 - memory`` towards the share of its samples that passed.
    The next draws depend on these rates (`grpojax.data.shares`) and on earlier draws (`grpojax.data.LevelBatches`), so
    only on the run's record, on any number of hosts. Samples with solved problems in context do not count for a level;
    the failed samples before them do.

    Args:
      problems: all problems, each with a level.
      size: prompts of a rollout.
      seed: seed of the orders.
      config: how rates and shares are computed.
      deciding: the reward that says whether a sample passes.
      state: of a run that goes on.
    """

    def __init__(
        self,
        problems: data.Problems,
        size: int,
        seed: int,
        *,
        config: CurriculumConfig,
        deciding: str,
        state: RunState,
    ):
        self._config, self._deciding = config, deciding
        self._batches = data.LevelBatches(problems, size, seed)
        saved = {level: data.Level(**x) for level, x in (state.levels or {}).items()}
        self._now = saved or self._batches.begin()

    def write(self, state: RunState) -> None:
        """Stores what the next problems depend on."""
        state.levels = {level: dataclasses.asdict(x) for level, x in self._now.items()}

    def draw(self, number: int) -> tuple[Sequence[data.Problem], Sequence[int]]:
        """The problems of the next rollout. They belong to no pass over the data."""
        problems, self._now = self._batches.draw(self._shares(), self._now)
        return problems, [0] * len(problems)

    def note(self, drawn: Iterable[tuple[RolloutBatch, Sequence[int]]]) -> None:
        """Updates the solve rates of the samples' levels."""
        for batch, _ in drawn:
            values, levels = batch.by_name[self._deciding], [p.level for p in batch.problems]
            if batch.seeded is not None:
                values = np.where(batch.seeded[:, None], np.nan, values)
            if batch.failed is not None:
                values = np.concatenate([values, batch.failed.by_name[self._deciding]])
                levels += [p.level for p in batch.failed.problems]
            given, use, setting = self._config.success, "levels are drawn", "rollout.curriculum.success"
            success = success_of(values, self._deciding, given, use=use, setting=setting)
            for level in self._batches.levels:
                mine = values[[x == level for x in levels]]
                if n := int(np.isfinite(mine).sum()):
                    self._move(level, int((mine >= success).sum()) / n)

    def _move(self, level: str, rate: float) -> None:
        memory, before = self._config.memory, self._now[level]
        self._now[level] = dataclasses.replace(before, rate=memory * before.rate + (1.0 - memory) * rate)

    def _shares(self) -> dict[str, float]:
        levels = self._batches.levels
        return dict(zip(levels, data.shares([self._now[x].rate for x in levels], self._config.floor), strict=True))

    def metrics(self) -> dict[str, float]:
        """The running solve rate of each level, and its share of the next prompts."""
        rates = {f"levels/{level}/solve_rate": x.rate for level, x in self._now.items()}
        return rates | {f"levels/{level}/share": x for level, x in self._shares().items()}


def make(config: Config, problems: data.Problems, state: RunState) -> Curriculum | LevelCurriculum:
    """The curriculum of a recipe's run, which resumes from ``state``."""
    rollout, method, seed = config.rollout, config.method, config.train.seed
    given, deciding = rollout.curriculum, method.deciding
    if given is not None:
        return LevelCurriculum(problems, rollout.prompts, seed, config=given, deciding=deciding, state=state)
    return Curriculum(problems, rollout.prompts, seed, retire=method.retire, deciding=deciding, state=state)
