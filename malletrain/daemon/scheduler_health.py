"""Reports whether the main scheduler answers: metrics for Prometheus, and an event when it becomes
overloaded or unreachable and when it answers again.

Decides the sentences. :mod:`scavenger.batch.calls` and :mod:`scavenger.batch.poll_pause` decide how
long the scheduler is not called.
"""

from __future__ import annotations

from malletrain.daemon.core import Core
from malletrain.daemon.daemon_state import DaemonState
from malletrain.protocol.event_kinds import EventKind
from scavenger.interface import Contact


class SchedulerHealth:
    """The health of one daemon's main scheduler."""

    def __init__(self, core: Core, state: DaemonState) -> None:
        self._core = core
        self._state = state
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
        with self._core.transaction():
            self._state.audit.record(kind, sentence)
