"""Tracks whether the main scheduler answers, and reports it: metrics for Prometheus, and an event
when the scheduler becomes overloaded or unreachable and when it answers again.

Decides when a poll counts as missed, and the sentences. :mod:`malletrain.daemon.leases.reconciler`
decides when to poll next, :mod:`scavenger.batch.calls` how long the scheduler is not called.
"""

from __future__ import annotations

from malletrain.config.units import show_duration
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import Transactions
from malletrain.protocol.event_kinds import EventKind
from scavenger.interface import Contact


class PollWatch:
    """The polls of one daemon. Times are in seconds since the epoch.

    Args:
        timeout_s: time after which a poll counts as missed, unless the previous one took more than
            half as long as this one, seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last_duration_s = 0.0
        self._started_at: float | None = None
        """Start of the running poll; None if no poll runs."""
        self._answered_at: float | None = None
        """Time of the last answer; None before the first."""
        self._failed = 0
        self.error = ""
        """Why the last poll failed, as a sentence; empty if it did not."""

    def began(self, now: float) -> None:
        """Record the start of a poll."""
        self._started_at = now

    def answered(self, now: float) -> None:
        """Record the answer to the running poll."""
        self._last_duration_s = now - self._started_at if self._started_at is not None else 0.0
        self._started_at, self._answered_at, self._failed, self.error = None, now, 0, ""

    def failed(self, error: str) -> None:
        """Record the failure of the running poll. ``error``: why, as a sentence."""
        self._started_at, self.error = None, error
        self._failed += 1

    def missed(self, now: float) -> int:
        """Return the number of consecutive polls without an answer, including a late one; 0 if the
        scheduler answers.
        """
        return self._failed + (self._late_s(now) > 0)

    def trouble(self, now: float) -> str:
        """Return what is wrong, as a sentence; empty if the scheduler answers."""
        if not self.missed(now):
            return ""
        late_s = self._late_s(now)
        problem = self.error or f"it has not answered for {show_duration(late_s)}."
        if self._answered_at is None:
            return f"{problem} It has not answered since the daemon's start."
        return f"{problem} Its last answer came {show_duration(now - self._answered_at)} ago."

    def _late_s(self, now: float) -> float:
        """Return for how long the running poll has taken, seconds; 0 if it is not late."""
        took_s = now - self._started_at if self._started_at is not None else 0.0
        return took_s if took_s > max(self._timeout_s, 2 * self._last_duration_s) else 0.0


class SchedulerHealth:
    """The health of one daemon's main scheduler."""

    def __init__(self, state: SiteState, transactions: Transactions) -> None:
        self._state = state
        self._transactions = transactions
        self._busy = ""

    def update(self, contact: Contact, poll_error: str) -> None:
        """Update metrics and record a change. Call it regularly.

        Args:
            contact: calls of the scheduler and pauses between them.
            poll_error: why the last poll failed, as a sentence; empty if it did not.
        """
        metrics, now = self._state.metrics, self._state.clock.now()
        metrics.scheduler_calls(contact.calls)
        for cause, remaining_s in (
            ("busy", contact.busy_s),
            ("refused", contact.refused_s),
            ("nothing", self._state.controller.gaps.backing_off_s(now)),
        ):
            metrics.scheduler_backoff(cause, remaining_s)
        starts = self._state.controller.gaps.failed_starts
        metrics.failed_starts(max((starts.in_a_row(o, now) for o in starts.owners), default=0))
        busy = contact.busy or poll_error
        if bool(busy) == bool(self._busy):
            return
        self._busy = busy
        if busy:
            problem = "has too much to do" if contact.busy else "cannot be asked"
            sentence = (
                f"The main scheduler {problem} ({busy.rstrip('.')}). It is asked more and "
                "more rarely, and for no leases, until it answers again."
            )
            self._record(EventKind.SCHEDULER_BUSY, sentence)
        else:
            sentence = "The main scheduler answers again as it should."
            self._record(EventKind.SCHEDULER_ANSWERS, sentence)

    def _record(self, kind: EventKind, sentence: str) -> None:
        with self._transactions.begin():
            self._state.audit.record(kind, sentence)
