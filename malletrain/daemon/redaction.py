"""Cuts jobs and events to the size of one answer. :mod:`malletrain.protocol.discretion` decides
what others may see of a job.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from malletrain.protocol import wire
from malletrain.protocol.views import EventView, JobView

ROOM_BYTES = wire.MAX_MESSAGE_BYTES * 3 // 4
"""Maximum size of the jobs or events in one answer."""
SLIM_CHARACTERS, SLIM_BYTES = 300, 1000
"""Maximum length of an event's sentence and size of its data, if a page of events has to be cut. A
thousand such events fit.
"""


def fitting(
    jobs: Sequence[JobView], unfinished: Collection[str], max_bytes: int = ROOM_BYTES
) -> list[JobView]:
    """Select as many jobs as fit into one answer.

    Unfinished jobs are selected first, then the newest. When half of the size is used, further jobs
    come without their metrics.

    Args:
        jobs: views of the jobs, the oldest first.
        unfinished: states of unfinished jobs.
        max_bytes: maximum size of the selection, bytes.

    Returns:
        The selected jobs, in the same order.
    """
    views: dict[str, JobView] = {}
    used = 0
    newest = list(reversed(jobs))
    for job in sorted(newest, key=lambda j: j.state not in unfinished):
        size = _size(job)
        if used + size > max_bytes / 2:
            job = msgspec.structs.replace(job, metrics={})
            size = _size(job)
        if used + size <= max_bytes:
            views[job.id] = job
            used += size
    return [views[job.id] for job in jobs if job.id in views]


def slim(events: Sequence[EventView], max_bytes: int = ROOM_BYTES) -> list[EventView]:
    """Return the events. If they exceed ``max_bytes``, long sentences are shortened and large data
    are left out.
    """
    if sum(map(_size, events)) <= max_bytes:
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
