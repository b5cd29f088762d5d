"""Small pieces of text: counts, rates, ages, sparklines, and a metric over time as a curve. Decides
the format of numbers, and axes and dots of a curve. Each Braille character has two by four dots,
which gives smooth lines.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from decimal import Decimal

from rich.text import Text

from malletrain.config.units import show_duration
from malletrain.protocol.counting import counted
from malletrain.protocol.views import SeriesView

BLOCKS = "▁▂▃▄▅▆▇█"

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """Return ``text`` without control characters, so that a job's name or output cannot move the
    cursor or recolour the screen.

    Line feeds and tabs stay; each other control character becomes ``·``.
    """
    return _CONTROL.sub("·", text.replace("\r\n", "\n"))


def count(value: float) -> str:
    """Return a number of samples or steps with thousands separated: ``12,345``; from ten million
    on ``12.3 M``.
    """
    for limit, factor, unit in ((1e13, 1e12, "T"), (1e10, 1e9, "G"), (1e7, 1e6, "M")):
        if abs(value) >= limit:
            return f"{value / factor:,.1f} {unit}"
    return f"{value:,.0f}"


def rate(value: float) -> str:
    """Return a throughput, samples/s, with three digits: ``0.53/s``, ``42.1/s``, ``1,234/s``."""
    if value <= 0:
        return "0/s"
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}/s"


def figure(value: float) -> str:
    """Return a number of any size with four digits and no exponent: ``0.9844``, ``10,690``, ``12.3
    M``, ``0.00003``.
    """
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return count(value)
    return f"{Decimal(f'{value:.4g}'):f}" if abs(value) >= 1e-12 else "0"


def span(low: int, high: int) -> str:
    """Return ``MIN:MAX`` as the user gave it."""
    return f"{low}" if low == high else f"{low}:{high}"


def since(moment: float | None, now: float) -> str:
    """Return how long ago ``moment`` was: ``12 s``, ``3 min 20 s``; "never" if it is None."""
    return (
        "never"
        if moment is None
        else show_duration(max(0.0, round(now - moment)) if now - moment >= 1 else 0.0)
    )


def clock(moment: float) -> str:
    """Return the local time of day, ``14:03:59``."""
    return time.strftime("%H:%M:%S", time.localtime(moment))


def date(moment: float | None) -> str:
    """Return the local date and time, ``2026-01-31 14:03:59``."""
    return (
        "not yet" if moment is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    )


def spark(values: Sequence[float], width: int) -> str:
    """Return the last ``width`` values as a line of blocks on a scale from 0 to their maximum,
    padded on the left; 0 is a blank.
    """
    shown = list(values)[-width:]
    top = max(shown, default=0.0)
    if top <= 0:
        return " " * width
    return "".join(
        " " if v <= 0 else BLOCKS[min(len(BLOCKS) - 1, int(v / top * len(BLOCKS)))] for v in shown
    ).rjust(width)


def bar(value: int, high: int, width: int = 16) -> str:
    """Return the present number of nodes of the maximum as ``●●●○○``; above ``width`` only the
    numbers."""
    return "●" * value + "○" * (high - value) if 0 <= value <= high <= width else f"{value}/{high}"


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
