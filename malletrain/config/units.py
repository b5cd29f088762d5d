"""Quantities with units: durations in seconds and sizes in bytes, read from and written as text.

Decides which units exist and how a quantity looks on the screen. A plain number is refused if a
unit is needed, because one reader takes "30" in a configuration file for minutes and another for
seconds. (pydantic's ByteSize takes "30", and "10%" for 10 bytes.)
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

DURATION_UNITS: dict[str, float] = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
"""Unit to seconds."""

SIZE_UNITS: dict[str, int] = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
"""Unit to bytes."""

DURATION_HELP = (
    'a number with one of the units ms, s, min, h, d, such as "30 s", "5 min" or "1.5 h"'
)
SIZE_HELP = (
    'a number with one of the units B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, such as "2 '
    'GiB" or "500 MB"'
)

_QUANTITY = re.compile(
    r"\s*(?P<number>[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*(?P<unit>[A-Za-zµ%]*)\s*"
)


class UnitError(ValueError):
    """A quantity that cannot be read; the message states the value and what is valid."""


def _split(text: object, accepted: str) -> tuple[str, str]:
    """Return (number, unit) of ``text``; raises UnitError if it is not a number with a unit."""
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise UnitError(f"{text!r} is not a quantity; accepted is {accepted}.")
    if not isinstance(text, str):
        raise UnitError(f"{text!r} has no unit; accepted is {accepted}.")
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise UnitError(f'"{text}" is not a quantity; accepted is {accepted}.')
    if not match["unit"]:
        raise UnitError(f'"{text}" has no unit; accepted is {accepted}.')
    if not math.isfinite(float(match["number"])):
        raise UnitError(f'"{text}" is too large; accepted is {accepted}.')
    return match["number"], match["unit"]


def _unknown_unit(
    text: object, unit: str, other: dict[str, float] | dict[str, int], other_is: str, want: str
) -> UnitError:
    hint = f" ({unit} is {other_is})" if unit in other else ""
    return UnitError(f'"{text}" has the wrong unit "{unit}"{hint}; accepted is {want}.')


def parse_duration(text: object) -> float:
    """Return the seconds of a duration such as ``"30 s"``, ``"5 min"``, ``"1.5 h"``.

    Raises UnitError; negative durations are refused.
    """
    number, unit = _split(text, DURATION_HELP)
    if unit not in DURATION_UNITS:
        raise _unknown_unit(text, unit, SIZE_UNITS, "a unit of size", DURATION_HELP)
    seconds = float(number) * DURATION_UNITS[unit]
    if seconds < 0 or not math.isfinite(seconds):
        raise UnitError(
            f'"{text}" is {"negative" if seconds < 0 else "too large"}; accepted is '
            f"{DURATION_HELP}."
        )
    return seconds


def parse_size(text: object) -> int:
    """Return the bytes of a size such as ``"2 GiB"``. Raises UnitError; negative sizes and
    fractions of a byte are refused.
    """
    number, unit = _split(text, SIZE_HELP)
    if unit in ("K", "M", "G", "T"):
        thousands, binary = f"{unit.replace('K', 'k')}B", f"{unit}iB"
        raise UnitError(
            f'"{text}" is not clear: write "{number} {thousands}" (powers of 1000) or "{number} '
            f'{binary}" (powers of 1024, as the {unit} of sbatch).'
        )
    if unit not in SIZE_UNITS:
        raise _unknown_unit(text, unit, DURATION_UNITS, "a unit of time", SIZE_HELP)
    size = Fraction(number) * SIZE_UNITS[unit]
    if size < 0 or (unit == "B" and size.denominator != 1):
        raise UnitError(f'"{text}" is not a possible size; accepted is {SIZE_HELP}.')
    return round(size)


def _shortest(number: float) -> str:
    return str(int(number)) if number == int(number) and abs(number) < 1e15 else repr(number)


def format_duration(seconds: float) -> str:
    """Return the duration as text, in the largest unit of which it is a multiple.
    :func:`parse_duration` converts it back to the same number of seconds.
    """
    for unit, factor in sorted(DURATION_UNITS.items(), key=lambda item: -item[1]):
        number = seconds / factor
        if seconds and factor > 1 and number == int(number) and number * factor == seconds:
            return f"{_shortest(number)} {unit}"
    return f"{_shortest(seconds)} s"


def format_size(size: int) -> str:
    """Return the size as text, in the largest unit of which it is a multiple. :func:`parse_size`
    converts it back to the same number of bytes.
    """
    for unit, factor in sorted(SIZE_UNITS.items(), key=lambda item: -item[1]):
        if size and factor > 1 and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def show_duration(seconds: float) -> str:
    """Return the duration, rounded for display: ``0.4 s``, ``12 s``, ``3 min 20 s``, ``2 h 5
    min``, ``4 d 3 h``.
    """
    if seconds < 0:
        return "-" + show_duration(-seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for (big, size), (small, fraction) in (
        (("d", 86400), ("h", 3600)),
        (("h", 3600), ("min", 60)),
        (("min", 60), ("s", 1)),
    ):
        if whole >= size:
            rest = whole % size // fraction
            return f"{whole // size} {big}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"
