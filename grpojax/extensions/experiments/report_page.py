"""A report as one HTML page that fetches nothing. ``page/page.html`` is its template."""

import jinja2

from grpojax.extensions.experiments.report import BASELINE, CONTROL, MethodDifference, Report, verdict_text
from grpojax.extensions.experiments.report_charts import LABELS, chart, look
from grpojax.extensions.experiments.report_curves import AXES


def page(report: Report) -> str:
    """The whole page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("grpojax.extensions.experiments", "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"value": _value, "interval": _interval, "p": _p, "count": _count}
    names = [m.name for m in report.methods]
    there = [axis for axis in AXES if any(axis in line.at for curve in report.curves for line in curve.lines)]
    charts = [{x: chart(curve, names, x, f"chart-{i}-{x}") for x in there} for i, curve in enumerate(report.curves)]
    roles = {CONTROL: "difference from its control", BASELINE: f"difference from the baseline, {report.baseline}"}
    return environment.get_template("page.html").render(
        report=report,
        names=names,
        looks=[look(i) for i in range(len(names))],
        labels={axis: LABELS[axis] for axis in there},
        axes=list(AXES),
        curves=list(zip(report.curves, charts, strict=True)),
        over_rates=chart(report.over_rates, names, "rate", "chart-rates") if report.over_rates else "",
        share=_is_share(report.metric),
        problems_share=report.problems_by == "accuracy",
        roles={role: text for role, text in roles.items() if any(role in c.roles for c in report.comparisons)},
        tested=sum(c.result.p is not None for c in report.comparisons),
        verdict=lambda c: _verdict(report, c),
    )


def _verdict(report: Report, c: MethodDifference) -> str:
    if report.margin is not None and _is_share(report.metric):
        return verdict_text(c.result, round(100 * report.margin, 10))
    return verdict_text(c.result, report.margin)


def _is_share(metric: str | None) -> bool:
    """Whether a held-out metric is a share, which is shown in percent."""
    kinds = tuple(f"{part}/{name}" for part in ("eval", "test") for name in ("accuracy", "pass@", "maj@"))
    return metric is not None and metric.startswith(kinds)


def _value(x: float | None, share: bool = False, *, sign: bool = False, digits: int = 3) -> str:
    if x is None:
        return "-"
    plus = "+" if sign else ""
    return f"{100 * x:{plus}.1f}" if share else f"{x:{plus}.{digits}f}"


def _interval(of, share: bool, *, sign: bool = False) -> str:
    """From ``of.low`` to ``of.high``, if they are known."""
    if of.low is None or of.high is None:
        return ""
    return f"{_value(of.low, share, sign=sign)} to {_value(of.high, share, sign=sign)}"


def _p(p: float | None) -> str:
    return "-" if p is None else f"{p:.3g}" if p >= 1e-9 else "under 1e-9"


def _count(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"
