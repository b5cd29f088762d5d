"""Records which jobs have reported a metric or have ended, for clients that wait for such news.

Decides which news are kept. Each piece of news has a number, and a client states the last number
that it has received, so it misses nothing between two requests.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from malletrain.daemon.waiting import happens

MAX_JOBS = 10_000
"""Maximum number of jobs whose newest number is kept."""


class JobNews:
    """The news of all jobs since the daemon's start."""

    def __init__(self, most: int = MAX_JOBS) -> None:
        self._most = most
        self._newest: OrderedDict[str, int] = OrderedDict()
        self._newest_dropped = 0
        """Newest number of the jobs that are no longer kept."""
        self._news = asyncio.Event()
        self.number = 0
        """Number of the newest piece of news."""

    def came(self, job: str) -> None:
        """Record news of ``job``."""
        self.number += 1
        self._newest[job] = self.number
        self._newest.move_to_end(job)
        while len(self._newest) > self._most:
            _, self._newest_dropped = self._newest.popitem(last=False)
        self._news.set()
        self._news = asyncio.Event()

    def since(self, number: int, jobs: Sequence[str]) -> list[str]:
        """Return those of ``jobs`` with news after ``number``, and those that may have had news."""
        return [job for job in jobs if self._newest.get(job, self._newest_dropped) > number]

    async def more(self, wait_s: float) -> None:
        """Return at the next news, or after ``wait_s``."""
        await happens(self._news, wait_s)
