"""Clients that wait until one of their jobs has reported a metric or has ended.

Decides which clients are informed, and when an answer is due.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from malletrain.daemon.admission import MOST_TEXT, RequestRefused, number, text
from malletrain.daemon.core import Core
from malletrain.daemon.waiting import MAX_WAIT_S
from malletrain.protocol.views import NewsView

MOST_WATCHED = 10_000
"""Jobs in one request."""
_NOTHING_HEARD = -1


def operations(
    core: Core, boot: str
) -> dict[str, Callable[[str, Mapping[str, Any]], Awaitable[Any]]]:
    """What clients may ask. ``boot`` names this start of the daemon."""

    async def news(user: str, params: Mapping[str, Any]) -> NewsView:
        """Which of ``jobs`` have news since ``cursor``: at once where any has, or one comes within
        ``wait_s``. A cursor of another start of the daemon is as none: all of them may have.
        """
        jobs = msgspec.convert(params["jobs"], list[str])
        if len(jobs) > MOST_WATCHED or any(len(job) > MOST_TEXT for job in jobs):
            raise RequestRefused(
                f"One request watches {MOST_WATCHED} jobs at most, each named by {MOST_TEXT} "
                "characters at most.",
                "usage",
            )
        unknown = [job for job in jobs if not _watched(core, user, job)]
        heard = _number(text(params, "cursor", ""), boot)
        deadline = core.clock.now() + number(params, "wait_s", 0.0, 0.0, MAX_WAIT_S)
        while True:
            jobs_ = [*unknown, *core.news.since(heard, jobs)]
            remaining_s = deadline - core.clock.now()
            if jobs_ or remaining_s <= 0:
                return NewsView(f"{boot}:{core.news.number}", tuple(dict.fromkeys(jobs_)))
            await core.news.more(remaining_s)

    return {"news": news}


def _watched(core: Core, user: str, job: str) -> bool:
    """Whether there is this job. Raises RequestRefused where it is not the user's."""
    run = core.runs.get(job)
    row = run.row if run is not None else core.store.get_job(job)
    if row is not None and not core.accounts.may_manage(user, row.owner):
        raise RequestRefused(
            f"Job {job} belongs to {row.owner}; only its owner or an operator can watch it."
        )
    return row is not None


def _number(cursor: str, boot: str) -> int:
    start, _, count = cursor.rpartition(":")
    valid = start == boot and count.isascii() and count.isdigit() and len(count) < 16
    return int(count) if valid else _NOTHING_HEARD
