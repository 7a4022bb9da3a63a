"""Which problems a rollout is of: their order, what a run leaves out because it is solved, and levels by solve rate."""

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

    Where solved prompts are retired, a rollout has as many prompts as any other: the passes over the data get shorter,
    and what they no longer spend goes to the prompts that are left. With fewer left than a rollout takes, these stand
    in it again. Once all of a source are solved, they are all drawn again.

    Args:
      problems: all there are.
      size: prompts of a rollout.
      seed: of their order.
      retire: when one is solved, and for how long it is left out; None for no such thing.
      deciding: the reward that says so.
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
        """Puts down what the next problems follow from besides the rollout's number."""
        if self._retire is not None:
            state.passes = [dataclasses.asdict(p) for p in self._passes]
            state.solved = sorted(self._solved.items())

    def draw(self, number: int) -> tuple[Sequence[data.Problem], Sequence[int]]:
        """The problems of that rollout, and the pass over its source that each belongs to."""
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
                done = done & ~batch.seeded  # with others' solutions before them
            for problem, number, over in zip(batch.problems, passes, done, strict=True):
                if over:
                    self._solved[problem.uid] = max(number, self._solved.get(problem.uid, 0))

    def metrics(self) -> dict[str, float]:
        """Metrics of what the next problems follow from."""
        return {}


class LevelCurriculum:
    """The problems of each rollout of a run, drawn by their levels: more of those that are solved half the time.

    After a rollout, a level's running solve rate moves by ``1 - memory`` towards the share of its samples that passed.
    What is drawn next follows from these rates (`grpojax.data.shares`) and from what was drawn so far
    (`grpojax.data.LevelBatches`): only from the run's record, on any number of hosts. Samples with solved problems in
    context say nothing of a level; the failed ones before them do.

    Args:
      problems: all there are, each with a level.
      size: prompts of a rollout.
      seed: of the orders.
      config: how rates and shares follow.
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
        """Puts down what the next problems follow from."""
        state.levels = {level: dataclasses.asdict(x) for level, x in self._now.items()}

    def draw(self, number: int) -> tuple[Sequence[data.Problem], Sequence[int]]:
        """The next rollout's problems; there are no passes that they could belong to."""
        problems, self._now = self._batches.draw(self._shares(), self._now)
        return problems, [0] * len(problems)

    def note(self, drawn: Iterable[tuple[RolloutBatch, Sequence[int]]]) -> None:
        """Moves the solve rates of the levels that the samples are of."""
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
        """The running solve rate of each level, and the share of the next prompts that it gets."""
        rates = {f"levels/{level}/solve_rate": x.rate for level, x in self._now.items()}
        return rates | {f"levels/{level}/share": x for level, x in self._shares().items()}


def make(config: Config, problems: data.Problems, state: RunState) -> Curriculum | LevelCurriculum:
    """The curriculum of a recipe's run, which goes on where ``state`` says."""
    rollout, method, seed = config.rollout, config.method, config.train.seed
    given, deciding = rollout.curriculum, method.deciding
    if given is not None:
        return LevelCurriculum(problems, rollout.prompts, seed, config=given, deciding=deciding, state=state)
    return Curriculum(problems, rollout.prompts, seed, retire=method.retire, deciding=deciding, state=state)
