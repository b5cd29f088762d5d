"""When not to ask for leases because the main scheduler is just taking some back: the part that is
the same for all of them.
"""

from __future__ import annotations

HOLD_S = (3.0, 15.0)
"""Least and longest hold after a sign of a preemption; in between, one scheduling cycle."""


class TakenBack:
    """Remembers when the main scheduler last took a lease back."""

    def __init__(self) -> None:
        self._at = float("-inf")

    def mark(self, now: float) -> None:
        """It does so now."""
        self._at = now

    def why(self, hold_s: float, now: float) -> str:
        """Why no lease may be asked for at ``now``; empty when they may."""
        since = now - self._at
        return (
            f"the main scheduler took leases back {since:.0f} s ago and may need more nodes"
            if 0 <= since < hold_s
            else ""
        )


def hold_for(cycle_s: float) -> float:
    """How long to hold where the site says nothing."""
    return min(max(cycle_s, HOLD_S[0]), HOLD_S[1])
