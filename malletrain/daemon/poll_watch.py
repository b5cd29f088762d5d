"""Tracks whether the main scheduler answers: failed polls in a row, and a late poll. Pure.

Decides when a poll counts as missed and what is reported. :mod:`malletrain.daemon.lease_reconciler`
decides when the next poll is made.
"""

from __future__ import annotations

from malletrain.config.units import show_duration


class PollWatch:
    """Of one daemon. Times in seconds since the epoch.

    Args:
        patience_s: a poll that takes longer is missed, unless the one before it took half as long.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._took_s = 0.0
        self._began: float | None = None
        """When the poll under way began."""
        self._answered: float | None = None
        """When the last answer came."""
        self._failed = 0
        self.error = ""
        """Why the last poll failed, as a sentence; empty: it did not."""

    def began(self, now: float) -> None:
        """A poll begins."""
        self._began = now

    def answered(self, now: float) -> None:
        """The poll under way was answered."""
        self._took_s = now - self._began if self._began is not None else 0.0
        self._began, self._answered, self._failed, self.error = None, now, 0, ""

    def failed(self, error: str) -> None:
        """The poll under way failed; ``error``: why, as a sentence."""
        self._began, self.error = None, error
        self._failed += 1

    def missed(self, now: float) -> int:
        """Polls in a row that brought nothing, one that is late among them; 0: it answers."""
        return self._failed + (self._late_s(now) > 0)

    def trouble(self, now: float) -> str:
        """What is wrong, as a sentence; empty: the scheduler answers."""
        if not self.missed(now):
            return ""
        late_s = self._late_s(now)
        what = self.error or f"it has not answered for {show_duration(late_s)}."
        if self._answered is None:
            return f"{what} It has not answered since the daemon's start."
        return f"{what} Its last answer came {show_duration(now - self._answered)} ago."

    def _late_s(self, now: float) -> float:
        """How long the poll under way has taken, seconds; 0: not longer than it may."""
        took_s = now - self._began if self._began is not None else 0.0
        return took_s if took_s > max(self._patience_s, 2 * self._took_s) else 0.0
