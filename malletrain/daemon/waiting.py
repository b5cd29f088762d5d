"""Waits for an event for a limited time, in a task that can be cancelled at any moment."""

from __future__ import annotations

import asyncio

MAX_WAIT_S = 10.0
"""Maximum time for which a request waits, seconds."""


async def happens(event: asyncio.Event, within_s: float) -> bool:
    """Wait for ``event``, ``within_s`` seconds at most. Returns whether it is set.

    Before Python 3.12 ``asyncio.wait_for`` loses a cancel that comes together with the event, and a
    daemon that waits for its tasks to end would wait for ever.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=within_s)
    finally:
        waiting.cancel()
    return event.is_set()
