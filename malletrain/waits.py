"""Waits with a time limit in asyncio that never lose a cancel.

Use these and not ``asyncio.wait_for``: before Python 3.12, it returns its result if the task is
cancelled in the moment in which the result comes (https://github.com/python/cpython/issues/86296).
A task that works until it is cancelled then goes on, and whoever waits for its end waits for ever.
"""

from __future__ import annotations

import asyncio
import sys

if sys.version_info >= (3, 11):
    from asyncio import timeout as time_limit
else:
    from async_timeout import timeout as time_limit

__all__ = ["happens", "time_limit"]


async def happens(event: asyncio.Event, within_s: float | None) -> bool:
    """Wait for an event. Other tasks run at least once meanwhile.

    Args:
        event: the event.
        within_s: maximum time to wait, seconds; None: without limit.

    Returns:
        Whether it came, even if it is not set any more.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        done, _ = await asyncio.wait({waiting}, timeout=within_s)
    finally:
        waiting.cancel()
    return bool(done)
