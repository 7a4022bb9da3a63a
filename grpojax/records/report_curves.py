"""Metrics of several runs of a method as one curve: the mean over seeds, and the lowest and highest of them."""

import dataclasses
import fnmatch
import itertools
import math
from collections.abc import Sequence

from grpojax.records.runs import Method, Run

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A method's curve; all tuples have one entry a point.

    Attributes:
      method: its place among the methods.
      steps: where the points are.
      tokens: all tokens drawn until then, the mean over seeds; None where that is not recorded.
      mean, low, high: over seeds.
      seeds: how many there are.
    """

    method: int
    steps: tuple[int, ...]
    tokens: tuple[float, ...] | None
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    seeds: tuple[int, ...]


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
    """What a metric is called in a report."""
    for pattern, title in SHOWN:
        if fnmatch.fnmatchcase(metric, pattern):
            return title.format(metric.removeprefix("eval/pass@"))
    return metric.replace("eval/", "held-out ", 1)


def draw(methods: Sequence[Method]) -> list[Curve]:
    """A curve for each metric of `SHOWN` that any of the runs has."""
    recorded = {name for m in methods for run in m.told for line in run.lines for name in line}
    names = [n for pattern, _ in SHOWN for n in sorted(recorded, key=_natural) if fnmatch.fnmatchcase(n, pattern)]
    curves = []
    for name in names:
        each = [[step for step, _, _ in _series(run, name)] for m in methods for run in m.told]
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


def _series(run: Run, name: str) -> list[tuple[int, float, float | None]]:
    """``(step, value, tokens drawn)`` where the metric has a value; a step that stands twice counts once, the later."""
    tokens: float | None = 0.0 if any("sampled_tokens" in line for line in run.lines) else None
    found = {}
    for line in run.lines:
        tokens = line.get("sampled_tokens") or tokens
        value = line.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            found[line["step"]] = (line["step"], float(value), tokens)
    return [found[step] for step in sorted(found)]


def _line(index: int, method: Method, name: str, width: int) -> Line | None:
    bins: dict[int, list[tuple[int, float, float | None]]] = {}  # one entry a seed
    for run in method.told:
        for number, group in itertools.groupby(_series(run, name), key=lambda point: (point[0] - 1) // width):
            part = list(group)
            mean = sum(value for _, value, _ in part) / len(part)
            bins.setdefault(number, []).append((part[-1][0], mean, part[-1][2]))
    if not bins:
        return None
    points = [bins[number] for number in sorted(bins)]
    values = [[value for _, value, _ in point] for point in points]
    tokens = [[t for _, _, t in point if t is not None] for point in points]
    return Line(
        method=index,
        steps=tuple(max(step for step, _, _ in point) for point in points),
        tokens=tuple(sum(t) / len(t) for t in tokens) if all(tokens) else None,
        mean=tuple(sum(v) / len(v) for v in values),
        low=tuple(map(min, values)),
        high=tuple(map(max, values)),
        seeds=tuple(map(len, values)),
    )
