"""Draw a line chart as SVG: curves with bands, in the colours of the page that shows it.

Written by hand rather than with a plotting library: a chart is 2 to 20 KB, follows the page's light
and dark colours, and costs a run that writes its report no import and about a millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from steadyrl.training.analysis.curves import Curve, Points, limits

WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 450, 10, 196  # of the area that curves are drawn in
COLOURS = 7  # classes c0 … c6 of the page; then again with other dashes
DASHES = ("", "7 3", "2 3", "8 3 2 3")
MOST_LINES = COLOURS * len(DASHES)
DOTTED = 60  # curves of at most so many points show each one, with its value as a tooltip
LARGEST = 1e100  # beyond, differences overflow


class Line(NamedTuple):
    """A curve with its label; `look` chooses its colour and dash."""

    label: str
    curve: Curve
    look: int


def chart(title: str, lines: Sequence[Line], *, points: int, from_zero: bool) -> str:
    """Return a figure with caption, chart and legend; each line has at most `points` points.

    `from_zero`: the y axis includes 0.
    """
    shown = [
        line._replace(curve=_thinned(line.curve, points))
        for line in lines[:MOST_LINES]
        if max(np.abs(part).max() for part in line.curve[:4]) < LARGEST
    ]
    drawn = _svg(title, shown, from_zero) if shown else "<p>Its values are too large to draw.</p>"
    missing = len(lines) - len(shown)
    more = [f"<li>{missing} more not drawn</li>"] if missing else []
    if [line.label for line in lines] == [title] and shown:  # no legend needed
        caption, legend = f"{escape(title)} <b>{_value(shown[0].curve, -1)}</b>", ""
    else:
        caption, legend = escape(title), "".join([_legend(line) for line in shown] + more)
    caption = f"<figcaption>{caption}</figcaption>"
    return f"<figure>{caption}{drawn}<ul class=legend>{legend}</ul></figure>"


def short(value: float) -> str:
    """Return a number in few characters: 950, 12.5k, 3M, 0.0002."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e12:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers in a range, some `about` of them."""
    least = (high - low) / about
    size = 10.0 ** math.floor(math.log10(least))
    step = next((k * size for k in (1, 2, 2.5, 5) if k * size >= least), 10 * size)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _thinned(curve: Curve, points: int) -> Curve:
    """Return a curve of at most so many points, the first and the last included."""
    at = np.unique(np.linspace(0, len(curve.x) - 1, min(len(curve.x), points)).round().astype(int))
    x, centre, low, high = (part[at] for part in curve[:4])
    return curve._replace(x=x, centre=centre, low=low, high=high)


def _svg(title: str, lines: Sequence[Line], from_zero: bool) -> str:
    low, high = limits([line.curve for line in lines], -math.inf)
    low = min(low, 0.0) if from_zero else low
    end = max(float(line.curve.x.max()) for line in lines)
    begin = min(0.0, *(float(line.curve.x.min()) for line in lines))
    end = end if end > begin else begin + 1

    def x(values: Points) -> Points:
        return LEFT + (values - begin) / (end - begin) * (RIGHT - LEFT)

    def y(values: Points) -> Points:
        fraction = (np.clip(values, low, high) - low) / (high - low)
        return BOTTOM - fraction * (BOTTOM - TOP)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role=img aria-label="{escape(title)}">']
    for value in ticks(low, high):
        at = float(y(np.array(value)))
        parts.append(f'<path class=grid d="M{LEFT} {at:.1f}H{RIGHT}"/>')
        parts.append(f'<text x={LEFT - 6} y="{at + 3.5:.1f}" class=y>{short(value)}</text>')
    for value in ticks(begin, end):
        at = float(x(np.array(value)))
        parts.append(f'<path class=grid d="M{at:.1f} {TOP}V{BOTTOM}"/>')
        parts.append(f'<text x="{at:.1f}" y={BOTTOM + 16} class=x>{short(value)}</text>')
    for line in lines:
        parts += _drawn(line, x(line.curve.x), *(y(part) for part in line.curve[1:4]))
    return "".join([*parts, "</svg>"])


def _drawn(line: Line, x: Points, centre: Points, low: Points, high: Points) -> Iterator[str]:
    """Yield the band, the line and the points of a curve, from their positions."""
    colour, dash = _look(line)
    if len(x) > 1 and (high != low).any():
        edges = _path(x, high), _path(x[::-1], low[::-1])
        yield f'<path class="band {colour}" d="M{edges[0]}L{edges[1]}Z"/>'
    if len(x) > 1:
        yield f'<path class="line {colour}"{dash} d="M{_path(x, centre)}"/>'
    elif (high != low).any():
        yield f'<path class="line {colour}" d="M{x[0]:.1f} {low[0]:.1f}V{high[0]:.1f}"/>'
    for at in range(len(x)) if len(x) <= DOTTED else ():
        hover = f"{line.label}, step {line.curve.x[at]:,.0f}: {_value(line.curve, at)}"
        where = f'cx="{x[at]:.1f}" cy="{centre[at]:.1f}"'
        yield f'<circle class="dot {colour}" {where} r=2.2><title>{escape(hover)}</title></circle>'


def _path(x: Points, y: Points) -> str:
    return "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def _look(line: Line) -> tuple[str, str]:
    dash = DASHES[line.look // COLOURS % len(DASHES)]
    return f"c{line.look % COLOURS}", f' stroke-dasharray="{dash}"' if dash else ""


def _value(curve: Curve, at: int) -> str:
    low, centre, high = (f"{part[at]:.5g}" for part in (curve.low, curve.centre, curve.high))
    return centre if low == high else f"{centre} [{low}, {high}]"


def _legend(line: Line) -> str:
    colour, dash = _look(line)
    swatch = f'<svg viewBox="0 0 24 8"><path class="line {colour}"{dash} d="M0 4H24"/></svg>'
    return f"<li>{swatch}{escape(line.label)} <b>{_value(line.curve, -1)}</b></li>"
