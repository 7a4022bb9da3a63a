"""Metrics of a method's runs as one curve: the mean over seeds, and the lowest and the highest value.

A run that failed stays in the held-out curves as it does in the results
(`grpojax.extensions.experiments.runs.of_failed`). Rewards of too few samples (`grpojax.records.lines.is_sound`) are
left out.
"""

import dataclasses
import fnmatch
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from grpojax.extensions.experiments.runs import FAILED, MethodRuns, PastRun, of_failed
from grpojax.extensions.experiments.sweeps import Chosen
from grpojax.records.lines import is_sound

# The metrics that are drawn, in this order: a pattern of names, and the title.
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
    ("episode/turns", "turns an episode"),
    ("episode/calls", "tool calls an episode"),
    ("episode/answer_tokens", "tokens of tools' answers an episode"),
    ("episode/failures", "failed calls, share of all calls"),
    ("episode/malformed", "malformed calls, share of all calls"),
    ("episode/invalid", "invalid episodes, share of all"),
    ("*displacement*", "{} (likelihood displacement)"),
)
MOST_POINTS = 200

# The axes of a curve: name -> the metric of a step that it is read from, and whether that is summed up.
AXES = {
    "steps": ("step", False),
    "tokens": ("sampled_tokens", False),
    "flops": ("flops", False),
    "minutes": ("time/step_s", True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A method's curve; all tuples have one entry for each point.

    Attributes:
      method: its index among the methods.
      at: for each axis the positions of the points: steps, tokens drawn, useful FLOPs and minutes of training until
        then. The last three are means over seeds. An axis that is not recorded is left out.
      mean, low, high: the mean, the lowest and the highest value over seeds.
      seeds: number of seeds.
      each: the seeds' own values, if these are drawn too.
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
    """One metric of all methods. A method without it has no line.

    Attributes:
      metric: its name in ``metrics.jsonl``.
      title: its title.
      lines: a line for each method.
      binned: number of steps that a point averages; 1 for no averaging.
    """

    metric: str
    title: str
    lines: tuple[Line, ...]
    binned: int


def title_of(metric: str) -> str:
    """The title of a metric in a report."""
    for pattern, title in SHOWN:
        if fnmatch.fnmatchcase(metric, pattern):
            return title.format(metric.removeprefix("eval/pass@"))
    return metric.replace("eval/", "held-out ", 1).replace("test/", "test ", 1)


def number(x: float) -> str:
    """A number in few letters.

    Example:
      >>> [number(x) for x in (0.0, 0.25, 40.0, 1500.0, 2.5e6, 3e-7)]
      ['0', '0.25', '40', '1.5k', '2.5M', '3e-07']
    """
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:.3g}{letter}"
    return f"{x:.3g}"


def draw(methods: Sequence[MethodRuns]) -> list[Curve]:
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
    at: Mapping[str, float]  # by axis; empty for what a failed run counts as


def _series(run: PastRun, name: str) -> list[_Point]:
    """The points of a run at which the metric has a value. If a step is there twice, the later one counts."""
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
        sound = not (name == "reward" or name.startswith("eval/")) or is_sound(line, name)
        if sound and isinstance(value, int | float) and math.isfinite(value):
            found[line["step"]] = _Point(line["step"], float(value), dict(at))
    return [found[step] for step in sorted(found)]


def _line(index: int, method: MethodRuns, name: str, width: int) -> Line | None:
    each = [_series(run, name) for run in method.drawn]
    if name.startswith("eval/"):
        steps = sorted({point.step for series in each for point in series})
        for run, series in zip(method.drawn, each, strict=True):
            if run.ending[0] == FAILED:
                last = series[-1] if series else _Point(-1, 0.0, {})
                series += [_Point(step, of_failed(last.value), {}) for step in steps if step > last.step]
    bins: dict[int, list[_Point]] = {}  # one entry for each seed
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
      names: names of the methods, in their order.
      chosen: the chosen rates of a sweep, by label; labels of other methods are left out.
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
