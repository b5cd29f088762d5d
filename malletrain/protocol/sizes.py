"""Formats sizes in bytes for display. Decides nothing else."""

from __future__ import annotations


def shown(number: float) -> str:
    """Returns a number of bytes as text, with three digits and a unit."""
    power = min(4, max(0, (len(str(int(number))) - 1) // 3))
    return f"{number / 1000**power:.3g} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"
