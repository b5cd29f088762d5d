"""Numbers of things in sentences. Decides when a noun has its plural."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 node``, ``12,000 nodes``. ``noun``: its singular, whose
    plural ends with s.
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
