"""Plots a metric over time in a terminal. Decides axes and dots. Each Braille character has two by
four dots, which gives smooth lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from malletrain.config.units import show_duration
from malletrain.protocol.counting import counted
from malletrain.protocol.views import SeriesView
from malletrain.render.text import count, figure, plain

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of a Braille character, by row and column."""
BLANK = 0x2800
Point = tuple[float, float]


def curve(series: SeriesView, *, over: str = "samples", width: int = 80, height: int = 15) -> Text:
    """Return the plot of one metric: its values on the vertical axis, ``over`` on the horizontal
    axis.

    Args:
        series: the metric.
        over: ``time``, ``samples`` or ``step``; without steps, the numbers of its values.
        width, height: size of the plot with its axes, characters.
    """
    right = _right(series, over)
    values = series.values
    if not values:
        return Text(f"{plain(series.name)} has no values.", "dim")
    points = [(x, y) for x, y in zip(right, values, strict=True) if math.isfinite(y)]
    if not points:
        return Text(f"{plain(series.name)} has no value that is a number.", "dim")
    low, high = min(y for _, y in points), max(y for _, y in points)
    labels = {height - 3: figure(low), 0: figure(high)}
    margin = max(map(len, labels.values())) + 1
    columns, rows = max(4, width - margin - 1), max(2, height - 2)
    grid = dots(points, columns, rows)
    text = Text(plain(series.name), "bold")
    many = counted(series.count, "value")
    text.append(f" over {over}, {many}, the last {figure(values[-1])}\n", "dim")
    for number, line in enumerate(grid):
        label = labels.get(number, "") if rows > 1 else ""
        text.append(f"{label:>{margin - 1}} ┤" if label else f"{'':>{margin}}│", "dim")
        text.append(line.rstrip("\u2800") + "\n", "cyan")
    begin, end = _shown(right[0], over, series), _shown(right[-1], over, series)
    gap = max(1, columns - len(begin) - len(end))
    text.append(f"{'':>{margin}}└{begin}{' ' * gap}{end}", "dim")
    return text


def dots(points: Sequence[Point], columns: int, rows: int) -> list[str]:
    """Return the line through these points as ``rows`` lines of ``columns`` Braille characters."""
    cells = [[BLANK] * columns for _ in range(rows)]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_min, y_min = min(xs), min(ys)
    x_range, y_range = (max(xs) - x_min) or 1.0, (max(ys) - y_min) or 1.0
    placed = [
        (
            round((x - x_min) / x_range * (2 * columns - 1)),
            round((1 - (y - y_min) / y_range) * (4 * rows - 1)),
        )
        for x, y in points
    ]
    for (x0, y0), (x1, y1) in zip(placed, placed[1:] or placed, strict=False):
        length = max(abs(x1 - x0), abs(y1 - y0), 1)
        for step in range(length + 1):
            x, y = x0 + (x1 - x0) * step // length, y0 + (y1 - y0) * step // length
            cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]
    return ["".join(map(chr, line)) for line in cells]


def _right(series: SeriesView, over: str) -> list[float]:
    if over == "time":
        return list(series.times)
    if over == "samples":
        return list(series.samples)
    return [float(n if step is None else step) for n, step in enumerate(series.steps)]


def _shown(value: float, over: str, series: SeriesView) -> str:
    if over == "time":
        return show_duration(round(value - series.times[0]))
    return count(value)
