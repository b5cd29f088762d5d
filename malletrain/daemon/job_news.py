"""Records which jobs have reported a metric or have ended, for clients that wait for that.

Decides what is remembered. Each piece of news has a number, and a client names the last one that it
has seen, so nothing is missed between two requests.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from malletrain.daemon.waiting import happens

MOST_REMEMBERED = 10_000
"""Jobs of which it is known when they last had news."""


class JobNews:
    """The news of all jobs, since the daemon was started."""

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        self._most = most
        self._newest: OrderedDict[str, int] = OrderedDict()
        self._forgotten = 0
        """The newest number of a job that is not remembered any more."""
        self._came = asyncio.Event()
        self.number = 0
        """Of the newest."""

    def came(self, job: str) -> None:
        """There is news of ``job``."""
        self.number += 1
        self._newest[job] = self.number
        self._newest.move_to_end(job)
        while len(self._newest) > self._most:
            _, self._forgotten = self._newest.popitem(last=False)
        self._came.set()
        self._came = asyncio.Event()

    def since(self, number: int, jobs: Sequence[str]) -> list[str]:
        """Those of ``jobs`` with news after ``number``, and those that may have had some."""
        return [job for job in jobs if self._newest.get(job, self._forgotten) > number]

    async def more(self, wait_s: float) -> None:
        """Return at the next news, or after ``wait_s``."""
        await happens(self._came, wait_s)
