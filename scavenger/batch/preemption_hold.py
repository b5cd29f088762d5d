"""Pauses lease requests while the main scheduler takes leases back: the part that all schedulers
share.
"""

from __future__ import annotations

HOLD_RANGE_S = (3.0, 15.0)
"""Minimum and maximum pause after a sign of a preemption, seconds. Between them, it is one
scheduling cycle.
"""


class PreemptionHold:
    """Remembers when the main scheduler last took a lease back."""

    def __init__(self) -> None:
        self._at = float("-inf")

    def note(self, now: float) -> None:
        """Note that the main scheduler takes a lease back at ``now``."""
        self._at = now

    def reason(self, hold_s: float, now: float) -> str:
        """Return why no lease may be requested at ``now``; empty if leases may be."""
        since = now - self._at
        return (
            f"the main scheduler took leases back {since:.0f} s ago and may need more nodes"
            if 0 <= since < hold_s
            else ""
        )


def hold_for(cycle_s: float) -> float:
    """Return the pause in seconds if the site configures none."""
    return min(max(cycle_s, HOLD_RANGE_S[0]), HOLD_RANGE_S[1])
