"""A report as one HTML page that fetches nothing."""

import string
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from grpojax.evaluation.summary import EpisodeRecord
from grpojax.extensions.experiments.report import BASELINE, CONTROL, MethodDifference, Report, verdict_text
from grpojax.extensions.experiments.report_charts import LABELS, chart, swatch
from grpojax.extensions.experiments.report_curves import AXES, Curve

_FOLDER = "page"

# What an environment answered, in a page that shows some.
_TOOL_STYLE = "\n.samples pre.tool { border-left: 4px solid var(--colour-4); color: var(--faint); margin-left: 1rem; }"


def page(report: Report) -> str:
    """The whole page."""
    folder = resources.files("grpojax.extensions.experiments") / _FOLDER
    style, script, template = ((folder / n).read_text("utf-8") for n in ("style.css", "script.js", "page.html"))
    names = [m.name for m in report.methods]
    runs = sum(len(m.runs) for m in report.methods)
    summary = f"{_count(runs, 'run')} of {_count(len(names), 'method')}"
    summary += f". What decides: {report.title()}." if report.metric else "."
    summary += f" Baseline: {report.baseline}." if report.metric and report.baseline else ""
    sections = (
        _results(report),
        _episodes(report),
        _curves(report.curves, names),
        _rates(report),
        _levels(report),
        _samples(report),
        _methods(report),
        _runs(report),
    )
    hidden = "".join(f"\nbody:has(#show-{i}:not(:checked)) .line-{i} {{ display: none; }}" for i in range(len(names)))
    hidden += "".join(f"\nbody:has(#axis-{x}:not(:checked)) .by-{x} {{ display: none; }}" for x in AXES)
    hidden += _TOOL_STYLE if any(shown.episodes for shown in report.samples) else ""
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
    roles = [role for role in (CONTROL, BASELINE) if any(role in c.roles for c in report.comparisons)]
    rows = []
    for r in report.results:
        reasons = "; ".join(dict.fromkeys(r.failed.values()))
        mean = _lines(_value(r.mean, share), _interval(r.low, r.high, share))
        failed = f"{len(r.failed)}: {reasons}" if r.failed else "0"
        rows.append([r.method, str(len(r.values)), mean])
        rows[-1] += [*(_compared(report, r.method, role, share) for role in roles), failed]
    called = {CONTROL: "difference from its control", BASELINE: f"difference from the baseline, {report.baseline}"}
    heads = ["method", "seeds", "mean over seeds", *(called[role] for role in roles), "failed seeds"]
    unit = " in %" if share else ""
    caption = f"{report.title().capitalize()}{unit} at the end; below it, its 95 % interval, and the verdict"
    parts = [
        _table(caption, heads, rows, text=(len(heads) - 1,)),
        _reading(report),
        _details(report, share),
        _seed_tests(report),
    ]
    return '<section>\n<h2 id="result">Result</h2>\n' + "\n".join(x for x in parts if x) + "\n</section>"


def _episodes(report: Report) -> str:
    """What episodes were, on the held-out problems and in training."""
    if not report.episodes:
        return ""
    rows = []
    for x in report.episodes:
        shares = [_value(share, True) for share in (x.calling, x.failures, x.malformed)]
        reasons = ", ".join(f"{n} {reason}" for reason, n in x.reasons.items())
        counts = [_mean(n) for n in (x.turns, x.calls, x.own_tokens, x.answer_tokens)]
        rows.append([x.method, x.where, *counts, *shares, _value(x.invalid, True), reasons or "-"])
    heads = ["method", "episodes of", "turns", "tool calls", "policy's tokens", "tools' tokens"]
    heads += ["with a call, %", "failed calls, %", "malformed, %", "invalid, %", "invalid, by reason"]
    table = _table("Episodes: means over seeds", heads, rows, text=(1, len(heads) - 1))
    hint = (
        "Turns, calls and tokens are those of an episode. A failed call was malformed, so that it reached no tool, or "
        "its tool raised. An invalid episode has no reward in training; the reasons count those of all steps and seeds."
    )
    return f'<section>\n<h2 id="episodes">Episodes</h2>\n{table}\n<p class="hint">{hint}</p>\n</section>'


def _compared(report: Report, method: str, role: str, share: bool) -> str:
    """A cell: difference, interval and verdict, and the control's name if it is one."""
    if role == BASELINE and method == report.baseline:
        return "baseline"
    if (c := report.compared(method, role)) is None:
        return ""
    v = c.result
    interval = _interval(v.low, v.high, share, sign=True)
    name = f"control: {c.other}" if role == CONTROL else ""
    return _lines(_value(v.difference, share, sign=True), interval, _verdict(report, c), name)


def _verdict(report: Report, c: MethodDifference) -> str:
    if report.margin is None or not is_share(report.metric or ""):
        return verdict_text(c.result, report.margin)
    return verdict_text(c.result, round(100 * report.margin, 10))


def _reading(report: Report) -> str:
    """The meaning of the columns, and what the seeds cannot show."""
    text = "Runs that failed count as 0. Intervals are Student's t over seeds."
    tested = [c for c in report.comparisons if c.result.p is not None]
    if tested:
        text += (
            " Differences are taken seed by seed. Better and worse: a paired t test at 5 %, corrected by Holm for"
            f" {_count(len(tested), 'comparison')}."
        )
        if report.margin is None:
            text += " No margin was stated (--margin), so that no two methods are called the same."
        else:
            unit = " points" if is_share(report.metric or "") else ""
            margin = _value(report.margin, is_share(report.metric or ""))
            text += (
                f" No difference of {margin}{unit} or more: two one-sided t tests show that it is under this margin."
                " Smaller differences are not tested."
            )
        text += " Inconclusive means that neither was shown, not that two methods are the same."
    elif len(report.results) > 1:
        text += " A test of a difference takes two seeds or more that both methods have."
    return f'<p class="hint">{escape(text)}</p>'


def _details(report: Report, share: bool) -> str:
    """All comparisons with their p-values."""
    if not report.comparisons:
        return ""
    rows = []
    for c in report.comparisons:
        v = c.result
        difference = _lines(_value(v.difference, share, sign=True), _interval(v.low, v.high, share, sign=True))
        ps = [_p(p) for p in (v.p, v.p_corrected, v.p_equivalent, v.p_equivalent_corrected)]
        cells = [c.method, c.other, " and ".join(c.roles), str(len(c.seeds)), difference, *ps]
        rows.append([*cells, _value(v.shown, share), _verdict(report, c)])
    heads = ["method", "compared with", "its role", "common seeds", "difference", "p, no difference", "corrected"]
    heads += ["p, margin or more", "corrected", "smallest detectable difference", "verdict"]
    table = _table("All comparisons", heads, rows)
    hint = (
        "Smallest detectable difference: a mean difference of that size would have been significant with these seeds "
        "and this spread, at 5 %, corrected. A true difference of that size is missed about every second time."
    )
    return (
        f'<details>\n<summary>All comparisons, with p-values</summary>\n{table}\n<p class="hint">{hint}</p>\n</details>'
    )


def _seed_tests(report: Report) -> str:
    if not report.seed_tests:
        return ""
    share = report.problems_by == "accuracy"
    rows = [
        [
            t.method,
            t.other,
            str(t.seed),
            str(t.problems),
            _lines(_value(t.difference, share, sign=True), _interval(t.low, t.high, share, sign=True)),
            str(t.better),
            str(t.worse),
            _p(t.p),
            _p(t.p_corrected),
        ]
        for t in report.seed_tests
    ]
    heads = ["method", "less", "seed", "problems", "difference", "better on", "worse on", "p", "p, corrected"]
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
    there = [axis for axis in AXES if any(axis in line.at for curve in curves for line in curve.lines)]
    buttons = "".join(
        f'<label><input type="radio" name="axis" id="axis-{x}"{" checked" * (x == "steps")}>{LABELS[x]}</label>'
        for x in there
    )
    across = f"<fieldset><legend>Across</legend>{buttons}</fieldset>" if len(there) > 1 else ""
    figures = []
    for i, curve in enumerate(curves):
        drawn = {axis: chart(curve, names, axis, f"chart-{i}-{axis}") for axis in there}
        note = f"<small>each point the mean of {curve.binned} steps</small>" if curve.binned > 1 else ""
        none = "".join(f'<p class="by-{x} hint">Not recorded.</p>' for x, svg in drawn.items() if not svg)
        caption = f"<figcaption>{escape(curve.title[:1].upper() + curve.title[1:])}{note}</figcaption>"
        figures.append(
            f'<figure>\n{caption}\n{"".join(drawn.values())}{none}\n<output class="readout"></output>\n</figure>'
        )
    hint = (
        "Lines are means over seeds, bands go from the lowest to the highest seed. A run that failed stays in the "
        "held-out curves as 0, and is left out of the other curves from there on; an unfinished run is in none. "
        "Rewards are left out where a quarter of the samples or more had none. In a chart that has the focus, the "
        "arrow keys read out the points one by one."
    )
    return (
        f'<section>\n<h2 id="curves">Curves</h2>\n<p class="hint">{hint}</p>\n<div class="controls">'
        f"<fieldset><legend>Methods</legend>{boxes}</fieldset>{across}</div>\n"
        f'<div class="curves">\n{"".join(figures)}\n</div>\n</section>'
    )


def _rates(report: Report) -> str:
    """Every learning rate that was tried, as a curve and a table."""
    if report.over_rates is None:
        return ""
    names, rows = [m.name for m in report.methods], []
    for name in names:
        chosen = report.rates.get(name)
        for x in chosen.curve if chosen else ():
            each = ", ".join(f"{value:.3f}" for value in x.values.values())
            mark = "" if chosen is None or x.rate != chosen.rate else "chosen"
            mark += f", still the {chosen.edge} of the range" if mark and chosen and chosen.edge else ""
            rows.append([name, f"{x.rate:g}", f"{x.mean:.3f}", each, str(len(x.failed)), mark])
    heads = ["method", "learning rate", "mean", "each seed", "of them failed", ""]
    table = _table("Last held-out reward on the validation set, by learning rate", heads, rows)
    svg = chart(report.over_rates, names, "rate", "chart-rates")
    return (
        '<section>\n<h2 id="rates">Learning rates</h2>\n<div class="curves"><figure>\n'
        f"<figcaption>{escape(report.over_rates.title.capitalize())}</figcaption>{svg}\n"
        f'<output class="readout"></output>\n</figure></div>\n{table}\n</section>'
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
            f"<div><h4>{escape(name)}: {escape(heading)}</h4>{_written(text, shown.episodes.get(name))}</div>"
            for name, (text, heading) in shown.samples.items()
        )
        parts.append(f'<div class="samples">{"".join(each)}</div>')
    return "\n".join([*parts, "</section>"])


def _written(text: str, episode: EpisodeRecord | None) -> str:
    """A sample's text; of an episode turn by turn, with what its environment answered marked."""
    if episode is None:
        return f"<pre>{escape(text.strip()) or '(nothing)'}</pre>"
    counts = [_count(episode.calls, "call"), f"{episode.failures} failed, {episode.malformed} of them malformed"]
    parts = [f'<p class="hint">{", ".join(counts if episode.failures else counts[:1])}</p>']
    for n, (turn, tokens) in enumerate(zip(episode.turns, episode.tokens, strict=True)):
        kind = ' class="tool"' if n % 2 else ""
        about = f"&lt;&lt;&lt; ({_count(tokens, 'token')}, not the policy's)" if n % 2 else ""
        about = about or f"&gt;&gt;&gt; ({_count(tokens, 'token')})"
        parts.append(f"<pre{kind}>{about} {escape(turn.strip())}</pre>")
    if episode.invalid is not None:
        parts.append(f'<p class="hint">Invalid: {escape(episode.invalid)}</p>')
    return "".join(parts)


def _methods(report: Report) -> str:
    rows = []
    for method in report.methods:
        options = ", ".join(f"{k} = {v}" for k, v in method.values.items())
        changes = report.changes.get(method.name, {})
        text = "; ".join(f"from {other}: {', '.join(lines) or 'none'}" for other, lines in changes.items())
        rows.append([method.name, options, text or ("baseline" if method.name == report.baseline else "-")])
    heads = ["method", "what makes it", "differences from its control and from the baseline"]
    table = _table("Resolved methods and all other settings, but for seed and directory", heads, rows, text=(1, 2))
    return f'<section>\n<h2 id="methods">Methods</h2>\n{table}\n</section>'


def _runs(report: Report) -> str:
    metric = report.metric
    rows = [
        [m.name, str(r.seed), _value(r.value(metric), is_share(metric)) if metric else "-", r.state(), str(r.path)]
        for m in report.methods
        for r in m.runs
    ]
    heads = ["method", "seed", "counts as", "state", "directory"]
    return f'<section>\n<h2 id="runs">Runs</h2>\n{_table("All runs read", heads, rows, text=(3, 4))}\n</section>'


# ------------------------------------------------------------------------------------------- pieces


def _table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int] = ()) -> str:
    """A table in a frame that scrolls. A line break in a cell starts its second line."""

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
    """Whether a held-out metric is a share, which is shown in percent."""
    return metric.startswith(
        tuple(f"{part}/{name}" for part in ("eval", "test") for name in ("accuracy", "pass@", "maj@"))
    )


def _value(x: float | None, share: bool, *, sign: bool = False) -> str:
    if x is None:
        return "-"
    plus = "+" if sign else ""
    return f"{100 * x:{plus}.1f}" if share else f"{x:{plus}.3f}"


def _mean(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}"


def _interval(low: float | None, high: float | None, share: bool, *, sign: bool = False) -> str:
    if low is None or high is None:
        return ""
    return f"{_value(low, share, sign=sign)} to {_value(high, share, sign=sign)}"


def _lines(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def _p(p: float | None) -> str:
    return "-" if p is None else f"{p:.3g}" if p >= 1e-9 else "under 1e-9"


def _count(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"
