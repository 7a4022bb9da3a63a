"""Which problems each step gets where their levels of difficulty are drawn by how often they are solved."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from grpojax.data.problems import Problem, Problems
from grpojax.extensions.methods.method_sections import CurriculumConfig
from grpojax.host.errors import UserError
from grpojax.run.batch import Batch, success_of
from grpojax.run.parts.part import Part
from grpojax.run.run_state import State
from grpojax.run.source import Plain

_APART = 1_000_003  # between the seeds of two levels
MOST = 32  # levels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
    """Where a run is with one level; its ``asdict`` is JSON.

    Attributes:
      rate: running solve rate.
      drawn: prompts drawn so far.
      due: prompts that its share has come to, less those drawn.
    """

    rate: float = 0.5
    drawn: int = 0
    due: float = 0.0


def shares(rates: Sequence[float], floor: float) -> list[float]:
    """The share of the prompts that each level gets, by its solve rate p::

      floor / L + (1 - floor) p (1 - p) / Σ p (1 - p)

    ``p (1 - p)`` is the variance of a reward of 0 and 1, largest at 1/2, and what a group's advantages live on.
    Sampling by it is from Foster et al., Learning to Reason at the Frontier of Learnability (arXiv 2502.12272), who
    have it for each problem; here it is for a level, whose many problems tell its rate with a few samples of each.

    Args:
      rates: of the L levels, in [0, 1]; where all are 0 or 1 the shares are even.
      floor: what is spread evenly, in [0, 1].

    Example:
      >>> [round(x, 3) for x in shares([0.5, 0.9, 0.0], 0.3)]
      [0.615, 0.285, 0.1]
    """
    weights = [p * (1.0 - p) for p in rates]
    total = math.fsum(weights)
    if not total:
        return [1.0 / len(weights)] * len(weights)
    return [floor / len(weights) + (1.0 - floor) * w / total for w in weights]


class LevelBatches:
    """Batches whose levels are drawn by their shares. All that a batch depends on is given.

    With each prompt, every level has its share of one more due. The level with most due gives the next problem (ties go
    to the first), so that after any number of prompts no level is far from its shares. Each level has an order
    of its own, by the seed and its number, and goes through all its problems before it begins again in another order.

    Args:
      problems: with a level each (`check_levels`), of one or more sources.
      size: prompts in a batch.
      seed: of the orders.

    Example:
      >>> problems = [Problem(uid, (1,), "", None, {}, level=str(uid % 2)) for uid in range(6)]
      >>> batches = LevelBatches(problems, 4, seed=0)
      >>> batch, after = batches.draw({"0": 0.75, "1": 0.25}, batches.begin())
      >>> [p.level for p in batch], after["0"]
      (['0', '0', '1', '0'], Level(rate=0.5, drawn=3, due=0.0))
    """

    def __init__(self, problems: Sequence[Problem], size: int, seed: int):
        self._size = size
        self.levels = levels_of(problems)
        self._orders: dict[str, Any] = {}
        for number, level in enumerate(self.levels):
            mine = [p for p in problems if p.level == level]
            self._orders[level] = grain.MapDataset.source(mine).seed(seed + _APART * number).shuffle().repeat()

    def begin(self) -> dict[str, Level]:
        """Where a run begins, level by level."""
        return dict.fromkeys(self.levels, Level())

    def draw(self, of: Mapping[str, float], now: Mapping[str, Level]) -> tuple[list[Problem], dict[str, Level]]:
        """A batch, and where the levels are after it.

        Args:
          of: the share of each level.
          now: where the levels are: what the draw before returned, or `begin`.
        """
        due = {level: now[level].due for level in self.levels}
        drawn = {level: now[level].drawn for level in self.levels}
        batch = []
        for _ in range(self._size):
            due = {level: x + of[level] for level, x in due.items()}
            level = max(self.levels, key=due.__getitem__)
            batch.append(self._orders[level][drawn[level]])
            due[level] -= 1.0
            drawn[level] += 1
        after = {x: dataclasses.replace(now[x], drawn=drawn[x], due=due[x]) for x in self.levels}
        return batch, after


def levels_of(problems: Sequence[Problem]) -> tuple[str, ...]:
    """The levels that there are: numbers by their size, then other names.

    Example:
      >>> levels_of([Problem(0, (1,), "", None, {}, level=x) for x in ("b", "10", "9", "b")])
      ('9', '10', 'b')
    """
    return tuple(sorted({p.level for p in problems if p.level is not None}, key=_place))


def _place(level: str) -> tuple[float, str]:
    try:
        size = float(level)
    except ValueError:
        size = math.inf
    return size if math.isfinite(size) else math.inf, level


def check_levels(problems: Problems) -> None:
    """Raises `UserError` where the problems cannot be drawn by level."""
    if without := [p for p in problems if p.level is None]:
        raise UserError(
            f"rollout.curriculum: {len(without)} of {len(problems)} problems have no level, such as "
            f"{without[0].prompt[:60]!r}; name their column with data.level, or give their source a level"
        )
    found = levels_of(problems)
    if not 2 <= len(found) <= MOST:
        raise UserError(
            f"rollout.curriculum: the problems have {len(found)} levels, such as {found[0]!r}; 2 to {MOST} are needed"
        )
    if len(set(problems.weights)) > 1:
        raise UserError(
            "rollout.curriculum: problems are drawn by their levels, whatever their source; leave the sources' weights "
            "out"
        )


class LevelCurriculum:
    """The problems of each rollout of a run, drawn by level: more from levels that are solved half the time. It has the
    methods of `grpojax.run.problem_order.ProblemOrder`.

    After a rollout, a level's running solve rate moves by ``1 - memory`` towards the share of its samples that passed.
    The next draws depend on these rates (`shares`) and on earlier draws (`LevelBatches`), so
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
        problems: Problems,
        size: int,
        seed: int,
        *,
        config: CurriculumConfig,
        deciding: str,
        state: State,
    ):
        self._config, self._deciding = config, deciding
        self._batches = LevelBatches(problems, size, seed)
        saved = {level: Level(**x) for level, x in state.kept.get("levels", {}).items()}
        self._now = saved or self._batches.begin()

    def saved(self) -> dict[str, Any]:
        """What the next problems depend on: fields of `State`."""
        return {"levels": {level: dataclasses.asdict(x) for level, x in self._now.items()}}

    def draw(self, number: int) -> tuple[Sequence[Problem], Sequence[int]]:
        """The problems of the next rollout. They belong to no pass over the data."""
        problems, self._now = self._batches.draw(self._shares(), self._now)
        return problems, [0] * len(problems)

    def note(self, drawn: Iterable[tuple[Batch, Sequence[int]]]) -> None:
        """Updates the solve rates of the samples' levels."""
        for batch, _ in drawn:
            values, levels = batch.by_name[self._deciding], [p.level for p in batch.problems]
            if batch.aided is not None:
                values = np.where(batch.aided[:, None], np.nan, values)
            if batch.set_aside is not None:
                values = np.concatenate([values, batch.set_aside.by_name[self._deciding]])
                levels += [p.level for p in batch.set_aside.problems]
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
        return dict(zip(levels, shares([self._now[x].rate for x in levels], self._config.floor), strict=True))

    def metrics(self) -> dict[str, float]:
        """The running solve rate of each level, and its share of the next prompts."""
        rates = {f"levels/{level}/solve_rate": x.rate for level, x in self._now.items()}
        return rates | {f"levels/{level}/share": x for level, x in self._shares().items()}


class ByLevel(Part):
    """``rollout.curriculum``."""

    check = staticmethod(check_levels)

    def source(self, source: Plain) -> Plain:
        """The source, with problems drawn by level."""
        config, rollout, deciding = self.config, self.config.rollout, self.method.deciding
        assert rollout.curriculum is not None
        source.order = LevelCurriculum(
            source.problems,
            rollout.prompts,
            config.train.seed,
            config=rollout.curriculum,
            deciding=deciding,
            state=source.context.state,
        )
        return source
