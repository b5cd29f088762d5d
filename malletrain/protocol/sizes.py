"""Sizes in bytes as text, written and read. Decides nothing else."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def shown(number: float) -> str:
    """Return a number of bytes as text, with three digits and a unit."""
    power = min(4, max(0, (len(str(int(number))) - 1) // 3))
    return f"{number / 1000**power:.3g} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"


def share_or_size(text: str | int, total: int) -> int:
    """Return the number of bytes that ``text`` means: a part of ``total`` such as ``25%``, or a
    size such as ``8G`` (K, M, G, T: powers of 1024) or ``8000000``.

    Raises:
        ValueError: it is neither; the message says what is accepted.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%|[KMGT]?)(?:i?B)?\s*", str(text), re.I)
    if match is not None:
        number, unit = float(match[1]), match[2].upper()
        if unit == "%" and 0 < number <= 100:
            return int(total * number / 100)
        if unit != "%" and number > 0:
            return int(number * _UNITS[unit])
    raise ValueError(
        f"{text!r} is no size of memory. Accepted are a part of the node's memory, such as 25%, "
        "and a size, such as 8G."
    )
