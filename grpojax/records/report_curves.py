"""Metrics of several runs of a method as one curve: the mean over seeds, and the lowest and highest of them.

A run that failed stays in the held-out curves with its last value, as it does in the results.
"""

import dataclasses
import fnmatch
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from grpojax.records.runs import FAILED, Method, Run
from grpojax.records.sweeps import Chosen

# What is drawn, in this order: a pattern of names, and what it is called.
SHOWN = (
    ("eval/accuracy", "held-out accuracy"),
    ("eval/reward", "held-out reward"),
    ("eval/pass@*", "held-out pass@{}"),
    ("reward", "reward of the samples"),
    ("groups/all_fail", "groups without any success"),
    ("entropy", "entropy, nats a token"),
    ("kl", "KL to the reference, nats a token"),
    ("grad_norm", "gradient norm"),
    ("completions/mean_length", "completion length, tokens"),
    ("*displacement*", "{} (likelihood displacement)"),
)
MOST_POINTS = 200

# What a curve may be drawn over: its name -> the metric of a step that it is read from, and whether that is summed up.
AXES = {
    "steps": ("step", False),
    "tokens": ("sampled_tokens", False),
    "flops": ("flops", False),
    "minutes": ("time/step_s", True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A method's curve; all tuples have one entry a point.

    Attributes:
      method: its place among the methods.
      at: where the points are, by the axis: steps, tokens drawn, useful FLOPs and minutes of training until then, the
        last three as means over seeds; without an axis that is not recorded.
      mean, low, high: over seeds.
      seeds: how many there are.
      each: the seeds' own values, where they are drawn, too.
    """

    method: int
    at: dict[str, tuple[float, ...]]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    seeds: tuple[int, ...]
    each: tuple[tuple[float, ...], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric of all methods; those that do not have it have no line.

    Attributes:
      metric: its name in ``metrics.jsonl``.
      title: what it is called.
      lines: by method.
      binned: steps whose values a point is the mean of; 1 for none.
    """

    metric: str
    title: str
    lines: tuple[Line, ...]
    binned: int


def title_of(metric: str) -> str:
    """The name of a metric in a report."""
    for pattern, title in SHOWN:
        if fnmatch.fnmatchcase(metric, pattern):
            return title.format(metric.removeprefix("eval/pass@"))
    return metric.replace("eval/", "held-out ", 1).replace("test/", "test ", 1)


def draw(methods: Sequence[Method]) -> list[Curve]:
    """A curve for each metric of `SHOWN` that any of the runs has."""
    recorded = {name for m in methods for run in m.drawn for line in run.lines for name in line}
    names = [n for pattern, _ in SHOWN for n in sorted(recorded, key=_natural) if fnmatch.fnmatchcase(n, pattern)]
    curves = []
    for name in names:
        each = [[point.step for point in _series(run, name)] for m in methods for run in m.drawn]
        every = [step for steps in each for step in steps]
        many = max(map(len, each)) > MOST_POINTS
        width = math.ceil((max(every) - min(every) + 1) / MOST_POINTS) if many else 1
        lines = [line for i, m in enumerate(methods) if (line := _line(i, m, name, width))]
        if lines:
            curves.append(Curve(metric=name, title=title_of(name), lines=tuple(lines), binned=width))
    return curves


def _natural(name: str) -> tuple[str, int]:
    head, _, number = name.rpartition("@")
    return (head, int(number)) if number.isdigit() else (name, 0)


class _Point(NamedTuple):
    step: int
    value: float
    at: Mapping[str, float]  # by axis; empty for a value that a failed run only keeps


def _series(run: Run, name: str) -> list[_Point]:
    """The points of a run where the metric has a value; a step that stands twice counts once, the later."""
    at = {axis: 0.0 for axis, (metric, _) in AXES.items() if any(metric in line for line in run.lines)}
    found, summed = {}, set()
    for line in run.lines:
        for axis in at:
            metric, adds = AXES[axis]
            if (x := line.get(metric)) is not None:
                once = adds and (axis, line["step"]) in summed
                at[axis] = at[axis] + x / 60 * (not once) if adds else x
                summed.add((axis, line["step"]))
        value = line.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            found[line["step"]] = _Point(line["step"], float(value), dict(at))
    return [found[step] for step in sorted(found)]


def _line(index: int, method: Method, name: str, width: int) -> Line | None:
    each = [_series(run, name) for run in method.drawn]
    if name.startswith("eval/"):
        steps = sorted({point.step for series in each for point in series})
        for run, series in zip(method.drawn, each, strict=True):
            if run.ending[0] == FAILED:
                last = series[-1] if series else _Point(-1, 0.0, {})
                series += [_Point(step, last.value, {}) for step in steps if step > last.step]
    bins: dict[int, list[_Point]] = {}  # one entry a seed
    for series in each:
        for number, group in itertools.groupby(series, key=lambda point: (point.step - 1) // width):
            part = list(group)
            mean = sum(point.value for point in part) / len(part)
            bins.setdefault(number, []).append(part[-1]._replace(value=mean))
    if not bins:
        return None
    points = [bins[number] for number in sorted(bins)]
    values = [[p.value for p in point] for point in points]
    at: dict[str, tuple[float, ...]] = {"steps": tuple(max(p.step for p in point) for point in points)}
    for axis in list(AXES)[1:]:
        known = [[p.at[axis] for p in point if axis in p.at] for point in points]
        if all(known):
            at[axis] = tuple(sum(x) / len(x) for x in known)
    return Line(
        method=index,
        at=at,
        mean=tuple(sum(v) / len(v) for v in values),
        low=tuple(map(min, values)),
        high=tuple(map(max, values)),
        seeds=tuple(map(len, values)),
    )


def over_rates(names: Sequence[str], chosen: Mapping[str, Chosen]) -> Curve | None:
    """The held-out reward of each learning rate that was tried, by method: the mean and each seed.

    Args:
      names: of the methods, in their order.
      chosen: of a sweep, by label; others than the methods are left out.
    """
    lines = []
    for i, name in enumerate(names):
        if tried := chosen[name].curve if name in chosen else ():
            values = [list(x.values.values()) for x in tried]
            lines.append(
                Line(
                    method=i,
                    at={"rate": tuple(x.rate for x in tried)},
                    mean=tuple(x.mean for x in tried),
                    low=tuple(map(min, values)),
                    high=tuple(map(max, values)),
                    seeds=tuple(map(len, values)),
                    each=tuple(map(tuple, values)),
                )
            )
    title = "held-out reward at the end, by learning rate"
    return Curve(metric="eval/reward", title=title, lines=tuple(lines), binned=1) if lines else None
