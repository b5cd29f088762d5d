"""How the daemon and the main scheduler get on: counted for Prometheus, and told once when the
scheduler has too much to do or cannot be asked, and once when it answers again.

Decides the sentences. For how long the scheduler is left alone is decided where it is called.
"""

from __future__ import annotations

from malletrain.daemon.core import Core
from malletrain.daemon.parts import Parts
from malletrain.protocol.event_kinds import EventKind
from scavenger.interface import Contact


class Manners:
    """Of one daemon and its main scheduler."""

    def __init__(self, core: Core, parts: Parts) -> None:
        self._core = core
        self._parts = parts
        self._busy = ""

    def notice(self, contact: Contact, poll_error: str) -> None:
        """How it stands now. Call it again and again. ``poll_error``: why the last poll failed, as
        a sentence; empty: it did not.
        """
        metrics, now = self._parts.metrics, self._parts.clock.now()
        metrics.scheduler_calls(contact.calls)
        for cause, left_s in (
            ("busy", contact.busy_s),
            ("refused", contact.refused_s),
            ("nothing", self._parts.controller.gaps.backing_off_s(now)),
        ):
            metrics.scheduler_backoff(cause, left_s)
        busy = contact.busy or poll_error
        if bool(busy) == bool(self._busy):
            return
        self._busy = busy
        if busy:
            what = "has too much to do" if contact.busy else "cannot be asked"
            sentence = (
                f"The main scheduler {what} ({busy.rstrip('.')}). It is asked more and "
                "more rarely, and for no leases, until it answers again."
            )
            self._record(EventKind.SCHEDULER_BUSY, sentence)
        else:
            sentence = "The main scheduler answers again as it should."
            self._record(EventKind.SCHEDULER_ANSWERS, sentence)

    def _record(self, kind: EventKind, sentence: str) -> None:
        with self._core.step():
            self._parts.audit.record(kind, sentence)
