"""Curves as inline SVG, without scripts or anything to fetch. The style sheet sets the colours by class."""

import math
from collections.abc import Iterable, Sequence
from html import escape

from grpojax.extensions.experiments.report_curves import Curve, Line

WIDTH, HEIGHT = 360, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 8, 34
_DOTTED_UP_TO = 30  # points that get a dot of their own, with the numbers behind it
COLOURS = 8
DASHES = ("none", "7 3", "2 3", "9 3 2 3")


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``: steps of 1, 2 or 5 times a power of ten, at most ``most`` of them.

    Example:
      >>> ticks(0.13, 0.91), ticks(0, 60)
      ([0.2, 0.4, 0.6, 0.8], [0.0, 20.0, 40.0, 60.0])
    """
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            return [float(f"{i * step:.12g}") for i in range(first, last + 1)]
    return [low, high]


def number(x: float) -> str:
    """A tick's label.

    Example:
      >>> [number(x) for x in (0.0, 0.25, 40.0, 1500.0, 2.5e6, 3e-7)]
      ['0', '0.25', '40', '1.5k', '2.5M', '3e-07']
    """
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:.3g}{letter}"
    return f"{x:.3g}"


def look(method: int) -> tuple[int, str]:
    """Colour and dashes of the method at this index. Two methods differ in both if possible."""
    return method % COLOURS, DASHES[(method + method // COLOURS) % len(DASHES)]


# The text under an axis.
LABELS = {
    "steps": "step",
    "tokens": "tokens drawn",
    "flops": "useful FLOPs",
    "minutes": "minutes of training",
    "rate": "learning rate, log scale",
}


def chart(curve: Curve, names: Sequence[str], axis: str, ident: str) -> str:
    """A curve as an SVG element.

    Args:
      curve: what to draw.
      names: names of the methods.
      axis: an axis of `Line.at`; ``by-AXIS`` is a class of the element.
      ident: id of the element's title, unique on the page.

    Returns:
      The element; empty if no line has such an axis.
    """
    drawn = [(line, line.at[axis]) for line in curve.lines if axis in line.at]
    if not drawn:
        return ""
    log = axis == "rate"
    x_low, x_high = _bounds(math.log(x) if log else x for _, xs in drawn for x in xs)
    y_low, y_high = _bounds([y for line, _ in drawn for y in (*line.low, *line.high)])
    margin = 0.04 * (y_high - y_low)
    y_low, y_high = y_low - margin, y_high + margin

    def place(x: float, y: float) -> tuple[float, float]:
        across = ((math.log(x) if log else x) - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT)
        return _LEFT + across, HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - _TOP - _BOTTOM)

    title = f"{curve.title} by {LABELS[axis]}; last: " + ", ".join(
        f"{names[line.method]} {_value(line.mean[-1])}" for line, _ in drawn
    )
    parts = [
        f'<svg class="by-{axis}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{ident}">',
        f'<title id="{ident}">{escape(title)}</title>',
    ]
    for y in ticks(y_low, y_high):
        height = HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - _TOP - _BOTTOM)
        parts.append(f'<path class="grid" d="M{_LEFT} {height:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 5}" y="{height + 4:.1f}" text-anchor="end">{number(y)}</text>')
    bottom = HEIGHT - _BOTTOM
    marks = sorted({x for _, xs in drawn for x in xs}) if log else ticks(x_low, x_high)
    for x in (x for x in marks if axis != "steps" or x.is_integer()):
        at = place(x, y_low)[0]
        parts.append(f'<path class="grid" d="M{at:.1f} {bottom}v4"/>')
        anchor = "end" if log and at > WIDTH - 2 * _RIGHT else "middle"
        parts.append(f'<text class="tick" x="{at:.1f}" y="{bottom + 16}" text-anchor="{anchor}">{number(x)}</text>')
    called = LABELS[axis]
    parts.append(f'<text class="tick" x="{WIDTH - _RIGHT}" y="{HEIGHT - 3}" text-anchor="end">{called}</text>')
    for line, xs in drawn:
        parts.append(_line(line, xs, place, names[line.method], called))
    return "".join([*parts, "</svg>"])


def _line(line: Line, xs: Sequence[float], place, name: str, called: str) -> str:
    colour, dashes = look(line.method)
    means = [place(x, y) for x, y in zip(xs, line.mean, strict=True)]
    parts = [f'<g class="line-{line.method} colour-{colour}">']
    if max(line.seeds) > 1:
        upper = [place(x, y) for x, y in zip(xs, line.high, strict=True)]
        lower = [place(x, y) for x, y in zip(xs, line.low, strict=True)]
        parts.append(f'<path class="band" d="{_path([*upper, *lower[::-1]])}Z"/>')
    parts.append(f'<path class="mean" stroke-dasharray="{dashes}" d="{_path(means)}"/>')
    for x, values in zip(xs, line.each, strict=False):
        parts += [f'<path class="seed" d="M{place(x, y)[0]:.1f} {place(x, y)[1]:.1f}h0"/>' for y in values]
    if len(means) <= _DOTTED_UP_TO:
        for (x, y), at, mean, seeds in zip(means, xs, line.mean, line.seeds, strict=True):
            label = f"{name}: {_value(mean)} at {called} {number(at)}" + (f", {seeds} seeds" if seeds > 1 else "")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(label)}</title></circle>')
    return "".join([*parts, "</g>"])


def swatch(method: int) -> str:
    """A piece of a method's line, for the legend."""
    colour, dashes = look(method)
    return (
        f'<svg class="swatch colour-{colour}" viewBox="0 0 34 10" aria-hidden="true">'
        f'<path class="mean" stroke-dasharray="{dashes}" d="M1 5H33"/></svg>'
    )


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _bounds(values: Iterable[float]) -> tuple[float, float]:
    """The lowest and the highest value, which are never the same."""
    known = list(values)
    low, high = min(known), max(known)
    if high > low:
        return low, high
    around = abs(low) / 10 or 0.5
    return low - around, high + around


def _value(x: float) -> str:
    return f"{x:.3g}"
