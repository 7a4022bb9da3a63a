"""Several runs compared: what each method comes to, whether it differs from the baseline, and what seeds could show."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from etils import epath

from grpojax.evaluation import bootstrap
from grpojax.host.errors import UserError
from grpojax.records import comparison, report_problems
from grpojax.records.report_charts import number
from grpojax.records.report_curves import Curve, draw, title_of
from grpojax.records.runs import Method, Run, by_method, differences, read_runs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A method's last held-out value: the mean over its finished seeds, and its 95 % interval from two seeds on.

    ``values`` is by seed. Against the baseline, over the seeds that both have: ``difference`` with its interval, ``p``
    and ``p_holm`` of `comparison.sign_flip`, and ``shown``, the `comparison.smallest_shown` difference at the level
    that Holm's correction begins with; None where that cannot be told.
    """

    method: str
    values: dict[int, float]
    mean: float | None
    low: float | None
    high: float | None
    common: tuple[int, ...] = ()
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    shown: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All that a report says.

    Attributes:
      metric: the held-out metric that decides; None where no run has any.
      baseline: the method that others are compared with.
      methods: with their runs.
      results: by method.
      seed_tests: over problems, seed by seed; ``problems_by`` is what they compare: "accuracy" or "reward".
      column: the column of ``levels``.
      levels: from easy to hard if they are numbers, by name if not.
      samples: of one seed.
      curves: of the metrics.
      changes: by method, settings in which it differs from the baseline.
      notes: what a reader must know.
    """

    metric: str | None
    baseline: str
    methods: Sequence[Method]
    results: Sequence[Result]
    seed_tests: Sequence[report_problems.SeedTest]
    problems_by: str
    column: str | None
    levels: Sequence[report_problems.Level]
    samples: Sequence[report_problems.Shown]
    curves: Sequence[Curve]
    changes: dict[str, list[str]]
    notes: Sequence[str]

    def title(self) -> str:
        """What the metric is called."""
        return title_of(self.metric) if self.metric else "no held-out value"


def build(
    paths: Iterable[epath.PathLike],
    *,
    by: Sequence[str] = ("variant",),
    baseline: str | None = None,
    metric: str | None = None,
) -> Report:
    """Reads the runs and compares them.

    Args:
      paths: run directories, or folders of them.
      by: settings that make a method.
      baseline: the method that others are compared with; None takes grpo, or the first.
      metric: None takes ``eval/accuracy`` where every finished run has it, otherwise ``eval/reward``.

    Raises:
      UserError: there is no run, no such baseline, or no run with such a metric.
    """
    runs, notes = read_runs(paths)
    methods = by_method(runs, by)
    base = _baseline(methods, baseline)
    measured = _metric(runs, metric)
    if measured is None:
        notes.append("No finished run has held-out values (data.validation), so that nothing is tested here.")
    for method in methods:
        notes += _about(method)
    notes += _unequal_cost(methods)
    results = _results(methods, base, measured) if measured else []
    tests, kind, more = report_problems.seed_tests(methods, base)
    column, levels = report_problems.levels(methods, kind)
    return Report(
        metric=measured,
        baseline=base.name,
        methods=methods,
        results=results,
        seed_tests=tests,
        problems_by=kind,
        column=column,
        levels=levels,
        samples=report_problems.samples(methods, kind),
        curves=draw(methods),
        changes={m.name: _changes(base, m, by) for m in methods if m is not base},
        notes=[*notes, *more],
    )


def _changes(base: Method, method: Method, by: Sequence[str]) -> list[str]:
    """Settings that are not the baseline's, those aside that make the method."""
    made = {*method.values, *base.values, *(f"{name}.name" for name in by)}
    return [x for x in differences(base.runs[0], method.runs[0]) if x.partition(":")[0] not in made]


def _baseline(methods: Sequence[Method], wanted: str | None) -> Method:
    if wanted is None:
        return next((m for m in methods if m.name == "grpo"), methods[0])
    for method in methods:
        if wanted == method.name:
            return method
    raise UserError(f"--baseline {wanted!r}: no such method; there are {', '.join(repr(m.name) for m in methods)}")


def _metric(runs: Sequence[Run], wanted: str | None) -> str | None:
    ended = [run for run in runs if run.finished and run.last("eval/reward" if wanted is None else wanted) is not None]
    if wanted is not None:
        if not wanted.startswith("eval/") or not ended:
            raise UserError(f"--metric {wanted}: no finished run has it; give a held-out one, such as eval/reward")
        return wanted
    if not ended:
        return None
    return "eval/accuracy" if all(run.last("eval/accuracy") is not None for run in ended) else "eval/reward"


def _about(method: Method) -> list[str]:
    """What must be known of a method: what it equals, and how its runs are not alike."""
    notes = [f"{method.name}: {twin}"] if (twin := method.twin()) else []
    if unlike := method.differences():
        notes.append(f"{method.name}: its runs differ in more than the seed: {'; '.join(unlike)[:300]}")
    notes += [f"{run.path}: {run.state()}; it is in no result" for run in method.runs if not run.finished]
    for run in (r for r in method.runs if r.finished):
        try:
            _ = run.attempts
        except UserError as e:
            notes.append(f"its problems are not compared: {e}")
    return notes


def _unequal_cost(methods: Sequence[Method]) -> list[str]:
    """Says so where one method has drawn over a tenth more tokens than another by its end."""
    drawn = {}
    for method in methods:
        if tokens := [x for run in method.runs if run.finished and (x := run.last("sampled_tokens")) is not None]:
            drawn[method.name] = sum(tokens) / len(tokens)
    if not drawn or max(drawn.values()) <= 1.1 * min(drawn.values()):
        return []
    each = ", ".join(f"{name} {number(x)}" for name, x in drawn.items())
    return [f"Not at equal cost, see the curves by tokens drawn; each run's in all: {each}"]


def _results(methods: Sequence[Method], base: Method, metric: str) -> list[Result]:
    each = {m.name: _values(m, metric) for m in methods}
    results = []
    for method in methods:
        values = each[method.name]
        low, high = bootstrap(list(values.values())) if len(values) > 1 else (None, None)
        mean = float(np.mean(list(values.values()))) if values else None
        result = Result(method=method.name, values=values, mean=mean, low=low, high=high)
        common = tuple(sorted(values.keys() & each[base.name].keys()))
        if method is not base and common:
            d = np.array([values[seed] - each[base.name][seed] for seed in common])
            low, high = bootstrap(d) if len(d) > 1 else (None, None)
            result = dataclasses.replace(
                result,
                common=common,
                difference=float(d.mean()),
                difference_low=low,
                difference_high=high,
                p=comparison.sign_flip(d) if len(d) > 1 else None,
            )
        results.append(result)
    tested = [i for i, r in enumerate(results) if r.p is not None]
    corrected = comparison.holm([p for r in results if (p := r.p) is not None])
    for i, p in zip(tested, corrected, strict=True):
        values, of_base = results[i].values, each[base.name]
        d = [values[seed] - of_base[seed] for seed in results[i].common]
        shown = comparison.smallest_shown(d, 0.05 / len(tested))
        results[i] = dataclasses.replace(results[i], p_holm=p, shown=shown)
    return results


def _values(method: Method, metric: str) -> dict[int, float]:
    """The last value by seed, of finished runs."""
    return {run.seed: x for run in method.runs if run.finished and (x := run.last(metric)) is not None}


def headlines(report: Report) -> list[str]:
    """The results in a line each."""
    lines = []
    for r in report.results:
        text = f"{r.method}: {report.title()} " + ("-" if r.mean is None else f"{r.mean:.3f}")
        text += f" over {len(r.values)} seed" + "s" * (len(r.values) != 1)
        if r.difference is not None:
            text += f", {r.difference:+.3f} to {report.baseline}"
            text += "" if r.p_holm is None else f" (p = {r.p_holm:.3g}, corrected)"
        lines.append(text)
    return lines


def to_json(report: Report) -> dict[str, Any]:
    """The numbers of a report as plain data; what is unknown is None."""
    return {
        "metric": report.metric,
        "baseline": report.baseline,
        "methods": [
            {
                "name": m.name,
                "settings": dict(m.values),
                "runs": [{"path": str(r.path), "seed": r.seed, "state": r.state()} for r in m.runs],
            }
            for m in report.methods
        ],
        "results": [dataclasses.asdict(r) for r in report.results],
        "problems_by": report.problems_by,
        "seed_tests": [dataclasses.asdict(t) for t in report.seed_tests],
        "levels": {"column": report.column, "levels": [dataclasses.asdict(x) for x in report.levels]},
        "curves": [dataclasses.asdict(c) for c in report.curves],
        "changes": report.changes,
        "notes": list(report.notes),
    }
