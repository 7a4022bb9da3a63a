"""The curves of a report, drawn by matplotlib: each as SVG for the page, and all of them as one PNG."""

import functools
import io
import math
import re
from collections.abc import Sequence
from importlib import resources
from xml.etree import ElementTree

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from grpojax.extensions.experiments.report_curves import Curve, Line, number

# The text under an axis.
LABELS = {
    "steps": "step",
    "tokens": "tokens drawn",
    "flops": "useful FLOPs",
    "minutes": "minutes of training",
    "rate": "learning rate, log scale",
}
_COLOURS = 8  # of the style sheet
_DASHES = ((), (7, 3), (2, 3), (9, 3, 2, 3))
_DOTTED_UP_TO = 30  # points that get a dot of their own, with the numbers behind it
_STYLE = {
    "axes.axisbelow": True,
    "font.family": "DejaVu Sans",  # it comes with matplotlib
    "lines.scale_dashes": False,
    "svg.fonttype": "none",
    "text.parse_math": False,  # two dollars in a name enclose no formula
}


def look(method: int) -> tuple[str, tuple[int, ...]]:
    """The colour's name in the style sheet and the dashes of the method at this index. Two differ in both if possible.

    Example:
      >>> look(0), look(9)
      (('colour-0', ()), ('colour-1', (2, 3)))
    """
    return f"colour-{method % _COLOURS}", _DASHES[(method + method // _COLOURS) % len(_DASHES)]


def chart(curve: Curve, names: Sequence[str], axis: str, ident: str) -> str:
    """A curve as an SVG element of the page.

    It has the class ``by-AXIS``, and what belongs to a method has the class ``line-INDEX``. The points of a line have
    the class ``dot`` and their numbers as a title, if these are at most 30. The style sheet sets the colours.

    Args:
      curve: what to draw.
      names: names of the methods.
      axis: an axis of `Line.at`.
      ident: id of the element's title, unique on the page.

    Returns:
      The element; empty if no line has such an axis.
    """
    lines = [line for line in curve.lines if axis in line.at]
    if not lines:
        return ""
    file = io.StringIO()
    with style.context(["default", {**_STYLE, "font.size": 12, "svg.hashsalt": ident}]):  # ids are unique on the page
        figure = Figure(figsize=(5, 3), layout="constrained")
        _draw(figure.add_subplot(), lines, names, axis)
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = re.sub(r' xmlns\S*="[^"]*"|xlink:', "", file.getvalue())  # HTML needs no namespaces
    for name, colour in _colours().items():
        text = text.replace(colour, f"var(--{name})")
    svg = ElementTree.fromstring(text)
    svg.remove(svg[0])  # a style, which would be one of the whole page
    dotted = {f"{_class(line)} dots": _points(line, names, axis) for line in lines}
    for group in svg.iter("g"):
        kind = group.attrib.pop("id", "")
        if kind.startswith("line-"):
            group.set("class", kind)
        if kind in dotted:
            for dot, point in zip(group.iter("use"), dotted[kind], strict=True):
                dot.set("class", "dot")
                ElementTree.SubElement(dot, "title").text = point
    title = ElementTree.Element("title", id=ident)
    title.text = f"{curve.title} by {LABELS[axis]}; last: "
    title.text += ", ".join(f"{names[line.method]} {line.mean[-1]:.3g}" for line in lines)
    svg.insert(0, title)
    svg.attrib = {"class": f"by-{axis}", "viewBox": svg.attrib["viewBox"], "role": "img", "aria-labelledby": ident}
    return ElementTree.tostring(svg, encoding="unicode")


def picture(curves: Sequence[Curve], names: Sequence[str]) -> bytes:
    """Every curve by steps as one PNG, with a legend."""
    across = min(3, max(1, len(curves)))
    down = max(1, math.ceil(len(curves) / across))
    file = io.BytesIO()
    with style.context(["default", {**_STYLE, "font.size": 8}]):
        figure = Figure(figsize=(4.4 * across, 3 * down), dpi=120, layout="constrained")
        for i, curve in enumerate(curves, 1):
            axes = figure.add_subplot(down, across, i)
            _draw(axes, curve.lines, names, "steps")
            axes.set_title(curve.title)
        if curves:
            each = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes)
            handles = {label: handle for pairs in each for handle, label in pairs}
            figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4)
        figure.savefig(file, format="png")
    return file.getvalue()


def _draw(axes: Axes, lines: Sequence[Line], names: Sequence[str], axis: str) -> None:
    """Means as lines with dots, the seeds' own values as points, and a band from the lowest to the highest value.

    A `gid` becomes the class of an element.
    """
    colours = _colours()
    for line in lines:
        xs, (colour, dashes) = line.at[axis], look(line.method)
        own = {"color": colours[colour], "gid": _class(line), "clip_on": False}
        if max(line.seeds) > 1:
            axes.fill_between(xs, line.low, line.high, alpha=0.15, linewidth=0, **own)
        axes.plot(xs, line.mean, linewidth=2, linestyle=(0, dashes or None), label=names[line.method], **own)
        for x, values in zip(xs, line.each, strict=False):
            axes.plot([x] * len(values), values, "o", markersize=4, markeredgewidth=0, alpha=0.6, **own)
        if len(xs) <= _DOTTED_UP_TO:
            own["gid"] += " dots"
            axes.plot(xs, line.mean, "o", markersize=6, markeredgewidth=0, **own)
    ticks = {"nbins": 6, "steps": (1, 2, 5, 10), "min_n_ticks": 1}
    axes.yaxis.set_major_locator(MaxNLocator(**ticks))
    if axis == "rate":
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(sorted({x for line in lines for x in line.at[axis]})))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=axis == "steps", **ticks))
    axes.xaxis.set_major_formatter(lambda x, _: number(x))
    axes.yaxis.set_major_formatter(lambda y, _: number(y))
    axes.margins(x=0, y=0.04)
    axes.spines[:].set_visible(False)
    axes.grid(axis="y", color=colours["rule"], clip_on=False)
    axes.tick_params(color=colours["rule"], labelcolor=colours["faint"])
    axes.tick_params(axis="y", length=0, pad=7)
    axes.set_xlabel(LABELS[axis], loc="right", color=colours["faint"])


def _class(line: Line) -> str:
    return f"line-{line.method}"


def _points(line: Line, names: Sequence[str], axis: str) -> list[str]:
    """What each point is."""
    each = zip(line.at[axis], line.mean, line.seeds, strict=True)
    return [
        f"{names[line.method]}: {mean:.3g} at {LABELS[axis]} {number(x)}" + (f", {seeds} seeds" if seeds > 1 else "")
        for x, mean, seeds in each
    ]


@functools.cache
def _colours() -> dict[str, str]:
    """The style sheet's colours on white paper, by name."""
    sheet = (resources.files("grpojax.extensions.experiments") / "page/style.css").read_text("utf-8")
    return dict(re.findall(r"--([\w-]+): (#\w{6})", sheet.partition("@media")[0]))
