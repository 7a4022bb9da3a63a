"""The comparison of several runs: the result of each method, and how it differs from its control and the baseline."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from etils import epath

from grpojax.extensions.experiments import comparison, measures, report_episodes, report_problems, sweeps
from grpojax.extensions.experiments.comparison import Verdict
from grpojax.extensions.experiments.report_curves import Curve, draw, number, over_rates, title_of
from grpojax.extensions.experiments.runs import (
    FAILED,
    UNFINISHED,
    MethodRuns,
    PastRun,
    by_method,
    control_of,
    differences,
    of_sweep,
    read_runs,
    read_sweep,
)
from grpojax.host.errors import UserError
from grpojax.records.lines import is_sound

CONTROL, BASELINE = "control", "baseline"
_PARTS = ("", "eval/", "test/")  # of a run's metrics: training, and its held-out sets
NO_METHOD = "the resolved method is not recorded: a run of an older version"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a method.

    Attributes:
      method: its name.
      values: seed -> last value of the metric, for runs that are finished or failed (`PastRun.value`).
      mean: of the values.
      low, high: the mean's 95 % interval (`comparison.t_interval`); None if there is none.
      failed: seed -> why that run failed.
      unfinished: seeds whose runs do not count in the result.
    """

    method: str
    values: dict[int, float]
    mean: float | None
    low: float | None
    high: float | None
    failed: dict[int, str]
    unfinished: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodDifference:
    """A method minus another one, over the seeds that both have.

    Attributes:
      method, other: their names.
      roles: the role of the other method: `CONTROL`, `BASELINE` or both.
      seeds: the seeds that both have.
      result: the result of `comparison.verdicts`, corrected over all comparisons that are tested.
    """

    method: str
    other: str
    roles: tuple[str, ...]
    seeds: tuple[int, ...]
    result: Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The contents of a report.

    Attributes:
      metric: the held-out metric that decides; None if no run has one.
      margin: differences within it count as none; None if none was given.
      baseline: the method that others are compared with; None in a sweep without GRPO.
      methods: the methods with their runs.
      results: the result of each method.
      comparisons: each method with its control and with the baseline.
      seed_tests: tests over problems, for each seed; ``problems_by`` is the value they compare: "accuracy" or "reward".
      column: the column of the data that ``levels`` come from.
      levels: sorted from easy to hard if they are numbers, otherwise by name.
      samples: samples of one seed.
      episodes: what the episodes of methods with an environment were.
      curves: the curves of the metrics.
      rates: label -> the learning rates that a sweep tried for it; ``over_rates`` is their curve.
      changes: method -> other -> how the method differs from it, in lines.
      notes: what a reader must know.
    """

    metric: str | None
    margin: float | None
    baseline: str | None
    methods: Sequence[MethodRuns]
    results: Sequence[Result]
    comparisons: Sequence[MethodDifference]
    seed_tests: Sequence[report_problems.SeedTest]
    problems_by: str
    column: str | None
    levels: Sequence[report_problems.LevelRates]
    samples: Sequence[report_problems.Shown]
    episodes: Sequence[report_episodes.EpisodeRow]
    curves: Sequence[Curve]
    rates: Mapping[str, sweeps.Chosen]
    over_rates: Curve | None
    changes: dict[str, dict[str, list[str]]]
    notes: Sequence[str]

    def title(self) -> str:
        """The name of the metric."""
        return title_of(self.metric) if self.metric else "no held-out value"

    def compared(self, method: str, role: str) -> MethodDifference | None:
        """The comparison of a method with its control or with the baseline."""
        return next((c for c in self.comparisons if c.method == method and role in c.roles), None)


def build(
    paths: Iterable[epath.PathLike],
    *,
    by: Sequence[str] | None = None,
    baseline: str | None = None,
    metric: str | None = None,
    margin: float | None = None,
    family: Literal["all", "controls"] = "all",
) -> Report:
    """Reads the runs and compares them.

    Args:
      paths: run directories, or folders of them, or the folder of a sweep, whose ``sweep.json`` lists its methods and
        what each is compared with.
      by: settings that distinguish methods; None takes those of ``sweep.json``, or ``variant`` if there is none.
      baseline: the method that others are compared with; None takes that of ``sweep.json``, or grpo, or the first.
      metric: None takes accuracy if every finished run has it, otherwise the reward. It is that of the test set if
        every finished run has read it, otherwise that of the validation set.
      margin: differences within it count as none, in units of the metric; None takes that of ``sweep.json``.
      family: which comparisons are tested: "all", or "controls" for those with a method's own control. The others are
        described, without a verdict.

    Raises:
      UserError: there is no run, no such baseline, or no run with such a metric.
    """
    paths = list(paths)
    runs, notes = read_runs(paths)
    swept = read_sweep(paths) if by is None else None
    record = None
    if swept is None:
        methods = by_method(runs, by or ("variant",))
    else:
        record, (methods, more) = swept[0], of_sweep(*swept, runs)
        runs, notes = [run for m in methods for run in m.runs], notes + more
    margin = record.margin if margin is None and record else margin
    if margin is not None and not margin > 0:
        raise UserError(f"--margin {margin:g}: give a number over 0, in units of the metric, such as 0.02")
    base = _baseline(methods, baseline, record)
    pairs, more = _pairs(methods, base if record is None or baseline else None, record)
    measured, about_metric = _metric(runs, metric)
    notes += more + about_metric
    for method in methods:
        notes += _about(method, measured)
    notes += _unequal_cost(methods)
    tests, kind, more = report_problems.seed_tests(methods, [(p.method, p.other) for p in pairs])
    column, levels = report_problems.levels(methods, kind)
    rates = sweeps.read_rates(swept[1]) if swept else {}
    return Report(
        metric=measured,
        margin=margin,
        baseline=base.name if base else None,
        methods=methods,
        results=[_result(m, measured) for m in methods] if measured else [],
        comparisons=_compare(pairs, measured, margin, family) if measured else [],
        seed_tests=tests,
        problems_by=kind,
        column=column,
        levels=levels,
        samples=report_problems.samples(methods, kind),
        episodes=report_episodes.episodes(methods),
        curves=draw(methods),
        rates=rates,
        over_rates=over_rates([m.name for m in methods], rates),
        changes=_changes(pairs, by or ("variant",)),
        notes=[*notes, *more],
    )


class _Pair(NamedTuple):
    method: MethodRuns
    other: MethodRuns
    roles: tuple[str, ...]


def _pairs(
    methods: Sequence[MethodRuns], base: MethodRuns | None, record: sweeps.SweepRecord | None
) -> tuple[list[_Pair], list[str]]:
    """The pairs of each method with its control and with the baseline, one pair if these are the same; and notes.

    Args:
      methods: all of them.
      base: the method that all others are compared with; None takes the record's.
      record: the record of a sweep; without one, controls are looked for among the methods (`control_of`).
    """
    by_name, found, notes = {m.name: m for m in methods}, [], []
    for method in methods:
        roles: dict[str, tuple[str, ...]] = {}
        its = record.methods[method.name] if record else None
        control = control_of(method, methods) if its is None else None
        others = [
            (CONTROL, its.control if its else control and control.name),
            (BASELINE, its.baseline if its and base is None else base and base.name),
        ]
        for role, name in others:
            if name == method.name:
                continue
            if name in by_name:
                roles[name] = (*roles.get(name, ()), role)
            elif name is not None:
                notes.append(f"{method.name}: its {role} {name} has no runs yet")
        for name, its_roles in roles.items():
            if [run.path for run in by_name[name].runs] == [run.path for run in method.runs]:
                notes.append(f"{method.name} and {name} have the same recipe and the same runs: not compared")
            else:
                found.append(_Pair(method, by_name[name], its_roles))
    return found, notes


def _changes(pairs: Sequence[_Pair], by: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """How each method differs from those it is compared with: in the resolved method, and in other settings."""
    found: dict[str, dict[str, list[str]]] = {}
    for method, other, _ in pairs:
        lines = differences(other.runs[0], method.runs[0])
        made = {*method.values, *other.values, *(f"{name}.name" for name in by)}
        lines = [x for x in lines if x.partition(":")[0] not in made]
        if not all("method" in m.runs[0].config for m in (method, other)):
            lines.append(NO_METHOD)
        found.setdefault(method.name, {})[other.name] = lines
    return found


def _baseline(
    methods: Sequence[MethodRuns], wanted: str | None, record: sweeps.SweepRecord | None
) -> MethodRuns | None:
    names = {m.name: m for m in methods}
    if wanted is None and record is not None:
        return next((names[c.baseline] for c in record.methods.values() if c.baseline in names), None)
    if wanted is None:
        return names.get("grpo", methods[0])
    if wanted in names:
        return names[wanted]
    raise UserError(f"--baseline {wanted!r}: no such method; there are {', '.join(map(repr, names))}")


def _metric(runs: Sequence[PastRun], wanted: str | None) -> tuple[str | None, list[str]]:
    """The metric that decides, and notes on it."""
    finished = [run for run in runs if run.finished]
    if wanted is not None:
        if not wanted.startswith(("eval/", "test/")) or all(run.last(wanted) is None for run in finished):
            raise UserError(f"--metric {wanted}: no finished run has it; give a held-out one, such as eval/reward")
        return wanted, []
    ended = finished or [run for run in runs if run.ending[0] == FAILED]
    tested = [run for run in ended if run.last("test/reward") is not None]
    validated = [run for run in ended if run.last("eval/reward") is not None]
    if tested and len(tested) == len(ended):
        part, measured, notes = "test", tested, []
    elif validated:
        part, measured = "eval", validated
        read = f"only {len(tested)} of {len(ended)} runs have read a test set" if tested else "no test set was read"
        notes = [f"The figures are of the validation set, by which rates and checkpoints are picked: {read}."]
    else:
        return None, ["No finished run has held-out values (data.validation), so that nothing is tested here."]
    accuracy = all(run.last(f"{part}/accuracy") is not None for run in measured)
    return f"{part}/accuracy" if accuracy else f"{part}/reward", notes


def _about(method: MethodRuns, metric: str | None) -> list[str]:
    """Notes on a method: what it equals, how its runs differ in their settings, and which of them did not finish."""
    notes = [f"{method.name}: {twin}"] if (twin := method.twin()) else []
    if unlike := method.differences():
        notes.append(f"{method.name}: its runs differ in more than the seed: {'; '.join(unlike)[:300]}")
    for run in method.runs:
        if few := [line["step"] for line in run.lines if not all(is_sound(line, f"{p}reward") for p in _PARTS)]:
            notes.append(
                f"{run.path}: a quarter of the samples or more had no valid reward at {len(few)} points, the last of "
                f"step {few[-1]} of {run.done}; curves leave these out"
            )
        if run.ending[0] == UNFINISHED:
            notes.append(f"{run.path}: {run.state()}; it is in no result")
        elif run.ending[0] == FAILED:
            counts = "" if metric is None else f"; it counts as {run.value(metric):.3g}"
            notes.append(f"{run.path}: {run.state()}{counts}")
        else:
            try:
                _ = run.attempts
            except UserError as e:
                notes.append(f"its problems are not compared: {e}")
    return notes


def _unequal_cost(methods: Sequence[MethodRuns]) -> list[str]:
    """A note if one method has drawn over a tenth more tokens than another by its end."""
    drawn = {}
    for method in methods:
        if tokens := [x for run in method.runs if run.finished and (x := run.last("sampled_tokens")) is not None]:
            drawn[method.name] = sum(tokens) / len(tokens)
    if not drawn or max(drawn.values()) <= 1.1 * min(drawn.values()):
        return []
    each = ", ".join(f"{name} {number(x)}" for name, x in drawn.items())
    return [f"Not at equal cost, see the curves by tokens drawn; each run's in all: {each}"]


def _result(method: MethodRuns, metric: str) -> Result:
    values = _values(method, metric)
    low, high = comparison.t_interval(list(values.values())) if values else (np.nan, np.nan)
    ends = {run.seed: run.ending for run in method.runs}
    return Result(
        method=method.name,
        values=values,
        mean=float(np.mean(list(values.values()))) if values else None,
        low=None if np.isnan(low) else float(low),
        high=None if np.isnan(high) else float(high),
        failed={seed: why for seed, (kind, why) in ends.items() if kind == FAILED},
        unfinished=tuple(seed for seed, (kind, _) in ends.items() if kind == UNFINISHED),
    )


def _compare(pairs: Sequence[_Pair], metric: str, margin: float | None, family: str) -> list[MethodDifference]:
    """All comparisons of methods that have a common seed, with the verdicts of those that are tested."""
    each = []
    for pair in pairs:
        mine, theirs = _values(pair.method, metric), _values(pair.other, metric)
        if common := tuple(sorted(mine.keys() & theirs.keys())):
            each.append((pair, common, [mine[seed] - theirs[seed] for seed in common]))
    inside = [family == "all" or CONTROL in pair.roles for pair, _, _ in each]
    found = comparison.verdicts([d for _, _, d in each], margin, inside)
    return [
        MethodDifference(method=pair.method.name, other=pair.other.name, roles=pair.roles, seeds=common, result=verdict)
        for (pair, common, _), verdict in zip(each, found, strict=True)
    ]


def _values(method: MethodRuns, metric: str) -> dict[int, float]:
    return {run.seed: x for run in method.runs if (x := run.value(metric)) is not None}


def headlines(report: Report) -> list[str]:
    """The results and the verdicts, one line each."""
    lines = []
    for r in report.results:
        text = f"{r.method}: {report.title()} " + ("-" if r.mean is None else f"{r.mean:.3f}")
        text += "" if r.low is None else f" ({r.low:.3f} to {r.high:.3f})"
        text += f" over {len(r.values)} seed" + "s" * (len(r.values) != 1)
        lines.append(text + (f", {len(r.failed)} of them failed" if r.failed else ""))
    for c in report.comparisons:
        v = c.result
        text = f"{c.method} less {c.other} ({' and '.join(c.roles)}): {v.difference:+.3f}"
        text += "" if v.low is None else f" ({v.low:+.3f} to {v.high:+.3f})"
        text += f": {verdict_text(v, report.margin)}"
        lines.append(text + ("" if v.p_corrected is None else f" (p = {v.p_corrected:.3g}, corrected)"))
    return lines


def verdict_text(verdict: Verdict, margin: float | None) -> str:
    """The verdict in words. Equivalence is always one up to a margin, and says nothing of smaller differences."""
    return f"no difference of {margin:g} or more" if verdict.verdict == comparison.EQUIVALENT else verdict.verdict


def to_json(report: Report) -> dict[str, Any]:
    """The numbers of a report as plain data; unknown ones are None."""
    return {
        "metric": report.metric,
        "margin": report.margin,
        "level": comparison.LEVEL,
        "baseline": report.baseline,
        "methods": [
            {
                "name": m.name,
                "settings": dict(m.values),
                "method": m.runs[0].config.get("method"),
                "runs": [
                    {"path": str(r.path), "seed": r.seed, "ended": r.ending[0], "why": r.ending[1], "state": r.state()}
                    for r in m.runs
                ],
            }
            for m in report.methods
        ],
        "results": [dataclasses.asdict(r) for r in report.results],
        "comparisons": [
            {"method": c.method, "other": c.other, "roles": c.roles, "seeds": c.seeds, **dataclasses.asdict(c.result)}
            for c in report.comparisons
        ],
        "problems_by": report.problems_by,
        "seed_tests": [dataclasses.asdict(t) for t in report.seed_tests],
        "levels": {"column": report.column, "levels": [dataclasses.asdict(x) for x in report.levels]},
        **({"episodes": [dataclasses.asdict(x) for x in report.episodes]} if report.episodes else {}),
        "curves": [dataclasses.asdict(c) for c in report.curves],
        "measures": {m.name: {r.seed: measures.measure(r) for r in m.runs} for m in report.methods},
        "rates": {name: dataclasses.asdict(chosen) for name, chosen in report.rates.items()},
        "changes": report.changes,
        "notes": list(report.notes),
    }
