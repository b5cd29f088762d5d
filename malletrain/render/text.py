"""Small pieces of text: counts, rates, ages, sparklines. Decides the format of numbers."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from decimal import Decimal

from malletrain.config.units import show_duration

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
