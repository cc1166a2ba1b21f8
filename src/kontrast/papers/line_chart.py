"""Line charts as SVG text. The same numbers give the same bytes, and no plotting library is needed."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 860, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 300, 44, 52  # the legend is on the right
ROW, LETTERS = 18, 36  # height of a row of the legend, and letters per row
LETTER = 8  # a digit's width
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8a6d3b")
"""Okabe and Ito's palette for color-blind readers, without the yellow, which is too faint on white."""
DASHES = ("", ' stroke-dasharray="2 3"', ' stroke-dasharray="10 3"')
Point = tuple[float, float]


class Line(NamedTuple):
    """A line and, if given, a reference that is dashed in the same color."""

    label: str
    points: Sequence[Point]
    reference: Sequence[Point] = ()


class Axis(NamedTuple):
    """Maps numbers between two ends to 0 to 1, on a linear or logarithmic scale."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def position(self, value: float) -> float:
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)


def round_axis(values: Sequence[float]) -> Axis:
    """An axis with about six round ticks around the values."""
    low, high = min(values), max(values)
    rough = (high - low or abs(high) or 1.0) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    ticks = tuple(round(n * step, 12) for n in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks)


def exact_axis(values: Sequence[float]) -> Axis:
    """An axis with a tick at every value, logarithmic if the values span a factor of eight."""
    ticks = tuple(sorted(set(values)))
    return Axis(ticks[0], ticks[-1], ticks, log=ticks[0] > 0 and ticks[-1] >= 8 * ticks[0])


def line_chart(title: str, x_label: str, lines: Sequence[Line], unit: str = "", exact: bool = False) -> str:
    """Draw lines as SVG. unit: of y. exact: put ticks at the values of x themselves and mark the points."""
    xs = [x for line in lines for x, _ in (*line.points, *line.reference)]
    ys = [y for line in lines for _, y in (*line.points, *line.reference)]
    x_axis, y_axis = exact_axis(xs) if exact else round_axis(xs), round_axis(ys)
    parts = [
        text(LEFT, 24, title, size=15),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label, anchor="middle"),
        *draw_grid(x_axis, y_axis, unit),
    ]
    y = TOP + 10
    for number, line in enumerate(lines):
        color, dash = COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)]
        parts += draw_line(line, color, dash, x_axis, y_axis, marked=exact)
        label = textwrap.wrap(line.label, LETTERS)
        parts += draw_legend_entry(label, color, dash, y)
        y += ROW * len(label) + 4
    height = max(HEIGHT, y)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="13" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def draw_grid(x_axis: Axis, y_axis: Axis, unit: str) -> list[str]:
    parts = []
    for tick in y_axis.ticks:
        _, y = place((x_axis.low, tick), x_axis, y_axis)
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(text(LEFT - 8, y + 4, f"{tick:g}{unit}", anchor="end", fill="#555"))
    end = 0.0  # where the last number below the axis ends: numbers that would overlap it are left out
    for tick in x_axis.ticks:
        x, y = place((tick, y_axis.low), x_axis, y_axis)
        number = f"{tick:g}"
        half = LETTER * len(number) / 2
        parts.append(f'<path d="M{x} {y}v5" stroke="#555"/>')
        if x - half > end:
            parts.append(text(x, y + 19, number, anchor="middle", fill="#555"))
            end = x + half
    return parts


def draw_legend_entry(label: Sequence[str], color: str, dash: str, y: float) -> list[str]:
    """A sample of the line and its label, which may take several rows."""
    x = WIDTH - RIGHT + 16
    sample = f'<path d="M{x} {y}h22" stroke="{color}" stroke-width="2"{dash}/>'
    return [sample, *(text(x + 30, y + 4 + ROW * row, part) for row, part in enumerate(label))]


def draw_line(line: Line, color: str, dash: str, x_axis: Axis, y_axis: Axis, marked: bool) -> list[str]:
    """The line and its dashed reference."""
    parts = []
    for points, style in ((line.points, dash), (line.reference, ' stroke-dasharray="6 4" opacity="0.55"')):
        places = [place(point, x_axis, y_axis) for point in points]
        if len(places) > 1:
            path = "L".join(f"{x} {y}" for x, y in places)
            parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"{style}/>')
        if points is line.points and (marked or len(places) == 1):
            parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>' for x, y in places]
    return parts


def place(point: Point, x_axis: Axis, y_axis: Axis) -> tuple[float, float]:
    x = LEFT + x_axis.position(point[0]) * (WIDTH - RIGHT - LEFT)
    y = HEIGHT - BOTTOM - y_axis.position(point[1]) * (HEIGHT - BOTTOM - TOP)
    return round(x, 1), round(y, 1)


def text(x: float, y: float, content: str, *, anchor: str = "start", fill: str = "#111", size: int = 0) -> str:
    font = f' font-size="{size}"' if size else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}"{font}>{escape(content)}</text>'
