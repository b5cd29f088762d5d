"""What is shown to whom: of a job that somebody else owns less than of one's own, and of everything
as much as one answer holds.

Everybody sees which jobs there are and how they do. What a script said itself (notices, the words
it failed with, its metrics) is for its owner and for operators (docs/several-users.md).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from malletrain.core.events import JobState
from malletrain.protocol import wire
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import EventView, JobView

PRIVATE: dict[str, str] = {
    EventKind.JOB_NOTICE: "The job's owner was told something.",
    EventKind.WORKERS_FAILED: "A round of the job broke.",
    EventKind.JOB_FAILED: "The job failed.",
    EventKind.DRAIN_WITHOUT_SNAPSHOT: "The job stopped without a snapshot.",
}
"""Kinds of events that quote a script, with what others read instead."""
FAILED = "it failed; its owner sees why"
ROOM_BYTES = wire.MAX_MESSAGE_BYTES * 3 // 4
SLIM_CHARACTERS, SLIM_BYTES = 300, 1000
"""Of an event's sentence and data, where a page of events has to be made to fit; a thousand such
events do.
"""


def event_for_others(event: EventView) -> EventView:
    """The event as everybody may see it."""
    if event.kind not in PRIVATE:
        return event
    return msgspec.structs.replace(event, sentence=PRIVATE[event.kind], data={})


def job_for_others(job: JobView) -> JobView:
    """The job as everybody may see it."""
    reason = FAILED if job.state == JobState.FAILED.value else job.reason
    return msgspec.structs.replace(job, reason=reason, metrics={}, goal=None)


def fitting(
    jobs: Sequence[JobView], unfinished: Collection[str], room: int = ROOM_BYTES
) -> list[JobView]:
    """Of ``jobs`` (oldest first) as many as ``room`` bytes hold, in the same order.

    Those whose state is ``unfinished`` come first, then the newest. From half of the room on,
    metrics are left out.
    """
    kept: dict[str, JobView] = {}
    used = 0
    newest = list(reversed(jobs))
    for job in sorted(newest, key=lambda j: j.state not in unfinished):
        size = _size(job)
        if used + size > room / 2:
            job = msgspec.structs.replace(job, metrics={})
            size = _size(job)
        if used + size <= room:
            kept[job.id] = job
            used += size
    return [kept[job.id] for job in jobs if job.id in kept]


def slim(events: Sequence[EventView], room: int = ROOM_BYTES) -> list[EventView]:
    """The same events; where they are too many for ``room`` bytes, with long sentences shortened
    and large data left out.
    """
    if sum(map(_size, events)) <= room:
        return list(events)
    return [_slimmed(event) for event in events]


def _slimmed(event: EventView) -> EventView:
    sentence, data = event.sentence, event.data
    if len(sentence) > SLIM_CHARACTERS:
        sentence = sentence[: SLIM_CHARACTERS - 1] + "…"
    return msgspec.structs.replace(
        event, sentence=sentence, data=data if _size(data) <= SLIM_BYTES else {}
    )


def _size(shown: object) -> int:
    return len(msgspec.msgpack.encode(shown))
