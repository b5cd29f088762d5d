"""The audit log: every decision and every change is one event, which is stored, logged, and sent to
the clients that wait for events.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from malletrain.daemon.site.clock import Clock
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import EventView
from malletrain.store.records import EventRow
from malletrain.store.store import Store
from malletrain.waits import happens

log = structlog.get_logger(__name__)


class AuditLog:
    """Writes events and wakes the clients that follow them."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._news = asyncio.Event()
        self._start = self._newest()
        """Number of the newest event from before this daemon's start."""

    def record(
        self,
        kind: EventKind,
        sentence: str,
        *,
        job: str = "",
        node: str = "",
        lease: str = "",
        generation: int | None = None,
        **data: Any,
    ) -> None:
        """Append one event.

        Args:
            kind: kind of the event.
            sentence: description for users.
            job: id of the job; empty if the event is not about a job.
            node: name of the node; empty if the event is not about a node.
            lease: id of the lease; empty if the event is not about a lease.
            generation: number of the round; None if the event is not about a round.
            data: values for programs.
        """
        row = EventRow(
            self._clock.now(), kind, job, node, lease, generation, {"sentence": sentence, **data}
        )
        self._store.add_event(row)
        bound = {
            k: v
            for k, v in (("job", job), ("node", node), ("lease", lease), ("generation", generation))
            if v
        }
        log.info(f"{kind}: {sentence}", **bound)
        self._news.set()
        self._news = asyncio.Event()

    def since(self, seq: int, limit: int, job: str | None) -> list[EventView]:
        """Return the stored events after an event number. A number that no event has yet is from a
        log that was replaced by an older one, as by a restore of the database: the events since
        the daemon's start are returned, so that a client that follows goes on.

        Args:
            seq: number of the event; a negative number selects the last ``-seq`` events.
            limit: maximum number of events.
            job: id of the job to which the events are limited; None for all events.
        """
        if seq < 0:
            return [_view(row) for row in self._store.last_events(min(limit, -seq), job=job)]
        rows = self._store.events_since(seq, limit, job=job)
        if not rows and seq > self._newest():
            rows = self._store.events_since(self._start, limit, job=job)
        return [_view(row) for row in rows]

    def _newest(self) -> int:
        """Return the number of the newest event; 0 if there is none."""
        return next((row.seq for row in self._store.last_events(1)), 0)

    async def news(self, wait_s: float) -> None:
        """Return at the next event, or after ``wait_s``."""
        await happens(self._news, wait_s)


def _view(row: EventRow) -> EventView:
    data = dict(row.data)
    sentence = str(data.pop("sentence", ""))
    if row.generation is not None:
        data["generation"] = row.generation
    return EventView(row.seq, row.time, row.kind, row.job, row.node, row.lease, sentence, data)
