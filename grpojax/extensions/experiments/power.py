"""The smallest difference that the seeds of a planned comparison can show, from the spread of earlier runs."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from etils import epath
from scipy import special

from grpojax.extensions.experiments.runs import PastRun, by_method, read_runs
from grpojax.host.errors import UserError

# The metric of a pilot's runs is the first of these that all runs with any held-out value have.
METRICS = ("test/accuracy", "test/reward", "eval/accuracy", "eval/reward")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedSpread:
    """How far the differences of two methods vary from seed to seed.

    Attributes:
      sd: standard deviation of a difference, in units of the metric.
      freedom: degrees of freedom of that estimate.
      paired: whether it comes from differences of two methods with the same seed. Otherwise it is sqrt(2) times the
        standard deviation of one method's runs, as if runs with the same seed were independent. That is an upper
        estimate.
    """

    sd: float
    freedom: int
    paired: bool


def spread(values: Mapping[str, Mapping[int, float]], baseline: str | None = None) -> SeedSpread:
    """The spread of differences between methods, pooled over the methods.

    If d are the differences of a method and the baseline over the seeds that both have, ``sd² = Σ Σ (d - mean d)² / Σ
    (n - 1)``. Without two common seeds, it is 2 times the same expression of the values.

    Args:
      values: method -> seed -> last held-out value.
      baseline: a method; None takes the first.

    Raises:
      ValueError: no method has two seeds.

    Example:
      >>> spread({"grpo": {0: 0.1, 1: 0.2}, "dapo": {0: 0.2, 1: 0.4}})  # differences 0.1 and 0.2
      SeedSpread(sd=0.07071067811865477, freedom=1, paired=True)
    """
    base = next(iter(values)) if baseline is None else baseline
    of_base = values[base]
    differences = [[x[s] - of_base[s] for s in x.keys() & of_base.keys()] for m, x in values.items() if m != base]
    if pooled := _pooled(differences):
        return SeedSpread(sd=pooled[0], freedom=pooled[1], paired=True)
    if pooled := _pooled(list(x.values()) for x in values.values()):
        return SeedSpread(sd=math.sqrt(2) * pooled[0], freedom=pooled[1], paired=False)
    raise ValueError("no method has two seeds")


def _pooled(samples: Iterable[Sequence[float]]) -> tuple[float, int] | None:
    """Standard deviation of all samples about their own means, and its degrees of freedom; None without any."""
    several = [np.asarray(x, np.float64) for x in samples if len(x) > 1]
    freedom = sum(len(x) - 1 for x in several)
    return (math.sqrt(sum(float(((x - x.mean()) ** 2).sum()) for x in several) / freedom), freedom) if freedom else None


def smallest_difference(
    sd: float, seeds: int, *, comparisons: int = 1, level: float = 0.05, power: float = 0.8
) -> float | None:
    """The smallest true mean difference that a paired t test over so many seeds shows with the given power.

    The test is two-sided at ``level / comparisons``, where Holm's correction begins. Its statistic has a noncentral t
    distribution with ``seeds - 1`` degrees of freedom and noncentrality ``difference sqrt(seeds) / sd``
    (Cohen 1988, chapter 2).

    Args:
      sd: standard deviation of the paired differences.
      seeds: number of pairs.
      comparisons: number of comparisons that the level is corrected for.

    Returns:
      The difference in units of ``sd``'s; None with fewer than two seeds.

    Example:
      >>> [round(smallest_difference(1.0, n), 2) for n in (3, 5, 8, 34)]
      [3.26, 1.68, 1.16, 0.5]
      >>> round(smallest_difference(0.02, 8, comparisons=6), 3)
      0.033
    """
    if seeds < 2:
        return None
    critical = special.stdtrit(seeds - 1, 1 - level / 2 / comparisons)
    return sd * float(special.nctdtrinc(seeds - 1, 1 - power, critical)) / math.sqrt(seeds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pilot:
    """The spread of a pilot's runs.

    Attributes:
      metric: the metric of the runs.
      spread: of differences.
      runs: number of runs.
      unfinished: how many of these did not reach their last step. They count with their last value, or 0; those that
        failed count as 0.
    """

    metric: str
    spread: SeedSpread
    runs: int
    unfinished: int


def _value(run: PastRun, metric: str) -> float:
    result = run.value(metric)
    return run.last(metric) or 0.0 if result is None else result


def read_pilot(folder: epath.PathLike) -> Pilot:
    """Reads the folder of a sweep, or of several runs.

    Raises:
      UserError: there are no runs with held-out values, or no method has two seeds.
    """
    runs, _ = read_runs([folder])
    measured = [run for run in runs if any(run.last(name) is not None for name in METRICS)]
    metric = next((name for name in METRICS if measured and all(r.last(name) is not None for r in measured)), None)
    if metric is None:
        raise UserError(f"--pilot {folder}: its runs have no held-out values; give runs of a recipe with held-out data")
    try:
        methods = by_method(runs)
    except UserError:
        raise UserError(
            f"--pilot {folder}: two of its runs have the same method and seed; give runs that differ in these"
        ) from None
    values = {m.name: {run.seed: _value(run, metric) for run in m.runs} for m in methods}
    try:
        found = spread(values, next((m.name for m in methods if m.values["variant"] == "grpo"), None))
    except ValueError as e:
        raise UserError(f"--pilot {folder}: {e}; give runs with at least two") from None
    return Pilot(metric=metric, spread=found, runs=len(runs), unfinished=sum(not run.finished for run in runs))
