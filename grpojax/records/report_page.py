"""A report as one HTML page that fetches nothing."""

import string
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from grpojax.records import comparison
from grpojax.records.report import Report, Result
from grpojax.records.report_charts import chart, swatch
from grpojax.records.report_curves import Curve

_FOLDER = "assets/report"


def page(report: Report) -> str:
    """The whole page."""
    folder = resources.files("grpojax") / _FOLDER
    style, script, template = ((folder / n).read_text("utf-8") for n in ("style.css", "script.js", "page.html"))
    names = [m.name for m in report.methods]
    runs = sum(len(m.runs) for m in report.methods)
    summary = f"{_count(runs, 'run')} of {_count(len(names), 'method')}"
    summary += f". What decides: {report.title()}. Baseline: {report.baseline}." if report.metric else "."
    sections = (
        _results(report),
        _curves(report.curves, names),
        _levels(report),
        _samples(report),
        _methods(report),
        _runs(report),
    )
    hidden = "".join(f"\nbody:has(#show-{i}:not(:checked)) .line-{i} {{ display: none; }}" for i in range(len(names)))
    return string.Template(template).substitute(
        title=escape(" and ".join(names) if len(names) < 4 else f"{len(names)} methods compared"),
        style=style + hidden,
        script=script,
        summary=escape(summary),
        notes=_list(report.notes, "notes"),
        main="\n".join(s for s in sections if s),
    )


def _results(report: Report) -> str:
    if not report.metric:
        return ""
    share = is_share(report.metric)
    rows, any_test = [], [r for r in report.results if r.difference is not None]
    for r in report.results:
        mean = _with(_value(r.mean, share), _interval(r.low, r.high, share))
        cells = [r.method, str(len(r.values)), mean]
        if any_test:
            difference = _with(
                _value(r.difference, share, sign=True), _interval(r.difference_low, r.difference_high, share, sign=True)
            )
            cells += (
                ["baseline", "", "", ""]
                if r.method == report.baseline
                else [
                    _with(difference, "" if r.difference is None else f"{len(r.common)} common"),
                    _p(r.p),
                    _p(r.p_holm),
                    _could(r, share),
                ]
            )
        rows.append(cells)
    heads = ["method", "seeds", "mean over seeds"]
    heads += ["less the baseline", "p", "p, corrected", "shown from"] if any_test else []
    unit = " in %" if share else ""
    table = _table(f"Last {report.title()}{unit} of finished runs; below it, its 95 % interval", heads, rows)
    return f'<section>\n<h2 id="result">Result</h2>\n{table}\n{_reading(report)}\n{_seed_tests(report)}\n</section>'


def _reading(report: Report) -> str:
    """What the table's columns mean, and what so few seeds cannot say."""
    tested = [r for r in report.results if r.p is not None]
    said = "Intervals are bootstraps over seeds; of few seeds they are too narrow."
    if tested:
        said += (
            " p: the share of all choices of signs of the differences, seed by seed, with a mean at least as far from 0"
            f" (exact up to 16 seeds); corrected by Holm for {_count(len(tested), 'comparison')}."
            " Shown from: the mean difference that these seeds, scattering as they do, would have shown at 5 %,"
            " corrected; a true difference of that size is missed about every second time."
        )
        fewest = min(len(r.common) for r in tested)
        needed = comparison.seeds_needed(len(tested))
        if fewest < needed:
            said += (
                f" {fewest} common seeds give no p under {2 / 2**fewest:.3g}: whatever the difference, it takes"
                f" {needed} to show one at 5 %."
            )
    elif len(report.results) > 1:
        said += " A test of a difference takes two finished seeds or more that a method and the baseline share."
    return f'<p class="hint">{escape(said)}</p>'


def _seed_tests(report: Report) -> str:
    if not report.seed_tests:
        return ""
    share = report.problems_by == "accuracy"
    rows = [
        [
            t.method,
            str(t.seed),
            str(t.problems),
            _with(_value(t.difference, share, sign=True), _interval(t.low, t.high, share, sign=True)),
            str(t.better),
            str(t.worse),
            _p(t.p),
            _p(t.p_holm),
        ]
        for t in report.seed_tests
    ]
    heads = ["method", "seed", "problems", "less the baseline", "better on", "worse on", "p", "p, corrected"]
    unit = " in %" if share else ""
    table = _table(f"{report.problems_by.capitalize()}{unit} on the held-out problems, one seed at a time", heads, rows)
    hint = (
        "Whether these two trained models differ on problems of this kind; another seed may fall otherwise. "
        "Sign-flip test over problems, corrected by Holm over all rows."
    )
    return f'<details>\n<summary>Seed by seed, over problems</summary>\n{table}\n<p class="hint">{hint}</p>\n</details>'


def _curves(curves: Sequence[Curve], names: Sequence[str]) -> str:
    if not curves:
        return ""
    boxes = "".join(
        f'<label><input type="checkbox" id="show-{i}" checked>{swatch(i)}{escape(name)}</label>'
        for i, name in enumerate(names)
    )
    tokens = any(line.tokens for curve in curves for line in curve.lines)
    axis = (
        "<fieldset><legend>Across</legend>"
        '<label><input type="radio" name="axis" id="axis-steps" checked>steps</label>'
        '<label><input type="radio" name="axis" id="axis-tokens">tokens drawn</label></fieldset>'
    )
    figures = []
    for i, curve in enumerate(curves):
        drawn = [chart(curve, names, axis, f"chart-{i}-{axis}") for axis in ("steps", "tokens")]
        note = f"<small>each point the mean of {curve.binned} steps</small>" if curve.binned > 1 else ""
        none = "" if drawn[1] else '<p class="by-tokens hint">No tokens are recorded.</p>'
        caption = f"<figcaption>{escape(curve.title[:1].upper() + curve.title[1:])}{note}</figcaption>"
        figures.append(f'<figure>\n{caption}\n{"".join(drawn)}{none}\n<output class="readout"></output>\n</figure>')
    hint = (
        "Lines are means over seeds, bands go from the lowest to the highest seed. Of a method with finished runs, "
        "only those are drawn. A chart that has the focus tells its points one by one with the arrow keys."
    )
    return (
        f'<section>\n<h2 id="curves">Curves</h2>\n<p class="hint">{hint}</p>\n<div class="controls">'
        f"<fieldset><legend>Methods</legend>{boxes}</fieldset>{axis if tokens else ''}</div>\n"
        f'<div class="curves">\n{"".join(figures)}\n</div>\n</section>'
    )


def _levels(report: Report) -> str:
    if not report.levels:
        return ""
    share, names = report.problems_by == "accuracy", [m.name for m in report.methods]
    rows = [[x.name, str(x.problems), *(_value(x.rates[n], share) for n in names)] for x in report.levels]
    unit = " in %" if share else ""
    caption = f"{report.problems_by.capitalize()}{unit} by the column {report.column!r} of the held-out data, all seeds"
    table = _table(caption, [str(report.column), "problems", *names], rows)
    return f'<section>\n<h2 id="levels">By difficulty</h2>\n{table}\n</section>'


def _samples(report: Report) -> str:
    if not report.samples:
        return ""
    parts = ['<section>\n<h2 id="samples">Samples side by side</h2>']
    parts.append(
        '<p class="hint">The prompts on which the methods differ most, the first sample of each, one seed.</p>'
    )
    for number, shown in enumerate(report.samples, 1):
        gold = "" if shown.gold is None else f'<p class="hint">Gold answer: {escape(shown.gold)}</p>'
        parts.append(f"<h3>Prompt {number}</h3>\n<pre>{escape(shown.prompt)}</pre>{gold}")
        each = (
            f"<div><h4>{escape(name)}: {escape(said)}</h4><pre>{escape(text.strip()) or '(nothing)'}</pre></div>"
            for name, (text, said) in shown.samples.items()
        )
        parts.append(f'<div class="samples">{"".join(each)}</div>')
    return "\n".join([*parts, "</section>"])


def _methods(report: Report) -> str:
    rows = []
    for method in report.methods:
        options = ", ".join(f"{k} = {v}" for k, v in method.values.items())
        changes = "; ".join(report.changes.get(method.name, ())) or (
            "-" if method.name != report.baseline else "baseline"
        )
        rows.append([method.name, options, changes])
    heads = ["method", "what makes it", "other settings than the baseline's"]
    table = _table("Settings; seed and directory aside", heads, rows, text=(1, 2))
    return f'<section>\n<h2 id="methods">Methods</h2>\n{table}\n</section>'


def _runs(report: Report) -> str:
    metric = report.metric
    rows = [
        [m.name, str(r.seed), _value(r.last(metric), is_share(metric)) if metric else "-", r.state(), str(r.path)]
        for m in report.methods
        for r in m.runs
    ]
    heads = ["method", "seed", "last value", "state", "directory"]
    return f'<section>\n<h2 id="runs">Runs</h2>\n{_table("All runs read", heads, rows, text=(3, 4))}\n</section>'


# ------------------------------------------------------------------------------------------- pieces


def _table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int] = ()) -> str:
    """A table in a frame that scrolls; a cell may have a second line after a line break."""

    def cell(i: int, value: str) -> str:
        first, *small = value.split("\n") if i not in text else [value]
        body = escape(first) + "".join(f"<small>{escape(x)}</small>" for x in small)
        if i == 0:
            return f'<th scope="row">{body}</th>'
        return f'<td class="text">{body}</td>' if i in text else f"<td>{body}</td>"

    kinds = (' class="text"' if i in text else "" for i in range(len(heads)))
    head = "".join(f'<th scope="col"{kind}>{escape(h)}</th>' for kind, h in zip(kinds, heads, strict=True))
    body = "\n".join("<tr>" + "".join(cell(i, v) for i, v in enumerate(row)) + "</tr>" for row in rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table>\n'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _list(lines: Iterable[str], kind: str) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def is_share(metric: str) -> bool:
    """Whether a held-out metric is a share, shown in percent."""
    return metric.startswith(("eval/accuracy", "eval/pass@", "eval/maj@"))


def _value(x: float | None, share: bool, *, sign: bool = False) -> str:
    if x is None:
        return "-"
    plus = "+" if sign else ""
    return f"{100 * x:{plus}.1f}" if share else f"{x:{plus}.3f}"


def _interval(low: float | None, high: float | None, share: bool, *, sign: bool = False) -> str:
    if low is None or high is None:
        return ""
    return f"{_value(low, share, sign=sign)} to {_value(high, share, sign=sign)}"


def _with(first: str, second: str) -> str:
    return f"{first}\n{second}" if second else first


def _p(p: float | None) -> str:
    return "-" if p is None else f"{p:.3g}" if p >= 1e-9 else "under 1e-9"


def _could(result: Result, share: bool) -> str:
    if result.p is None:
        return "-"
    return "none\ntoo few seeds" if result.shown is None else _value(result.shown, share)


def _count(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"
