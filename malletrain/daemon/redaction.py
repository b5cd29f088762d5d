"""Cuts jobs and events to what one answer can hold. :mod:`malletrain.protocol.discretion` decides
what others may see of a job.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from malletrain.protocol import wire
from malletrain.protocol.views import EventView, JobView

ROOM_BYTES = wire.MAX_MESSAGE_BYTES * 3 // 4
SLIM_CHARACTERS, SLIM_BYTES = 300, 1000
"""Of an event's sentence and data, where a page of events has to be made to fit; a thousand such
events do.
"""


def fitting(
    jobs: Sequence[JobView], unfinished: Collection[str], room: int = ROOM_BYTES
) -> list[JobView]:
    """Of ``jobs`` (oldest first) as many as ``room`` bytes hold, in the same order.

    Those whose state is ``unfinished`` come first, then the newest. From half of the room on,
    metrics are left out.
    """
    views: dict[str, JobView] = {}
    used = 0
    newest = list(reversed(jobs))
    for job in sorted(newest, key=lambda j: j.state not in unfinished):
        size = _size(job)
        if used + size > room / 2:
            job = msgspec.structs.replace(job, metrics={})
            size = _size(job)
        if used + size <= room:
            views[job.id] = job
            used += size
    return [views[job.id] for job in jobs if job.id in views]


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
