"""Bytes, as people are told of them. Decides nothing else."""

from __future__ import annotations


def shown(number: float) -> str:
    """So many bytes, with three digits."""
    power = min(4, max(0, (len(str(int(number))) - 1) // 3))
    return f"{number / 1000**power:.3g} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"
