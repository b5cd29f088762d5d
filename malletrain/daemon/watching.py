"""Handles clients that wait until one of their jobs has reported a metric or has ended.

Decides which clients are informed, and when an answer is due.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from malletrain.daemon.admission import MAX_TEXT_LENGTH, RequestRefused, number, text
from malletrain.daemon.core import Core
from malletrain.daemon.waiting import MAX_WAIT_S
from malletrain.protocol.views import NewsView

MAX_WATCHED_JOBS = 10_000
"""Maximum number of jobs in one request."""
_NOTHING_HEARD = -1


def operations(
    core: Core, boot: str
) -> dict[str, Callable[[str, Mapping[str, Any]], Awaitable[Any]]]:
    """Return name → operation of clients. ``boot``: id of this start of the daemon."""

    async def news(user: str, params: Mapping[str, Any]) -> NewsView:
        """Return those of ``jobs`` with news since ``cursor``: at once if there are any, else at
        the first news within ``wait_s``. With a cursor of another start of the daemon, all of them
        may have news.
        """
        jobs = msgspec.convert(params["jobs"], list[str])
        if len(jobs) > MAX_WATCHED_JOBS or any(len(job) > MAX_TEXT_LENGTH for job in jobs):
            raise RequestRefused(
                f"One request watches {MAX_WATCHED_JOBS} jobs at most, each named by "
                f"{MAX_TEXT_LENGTH} characters at most.",
                "usage",
            )
        unknown = [job for job in jobs if not _exists(core, user, job)]
        last_number = _number(text(params, "cursor", ""), boot)
        deadline = core.clock.now() + number(params, "wait_s", 0.0, 0.0, MAX_WAIT_S)
        while True:
            jobs_ = [*unknown, *core.news.since(last_number, jobs)]
            remaining_s = deadline - core.clock.now()
            if jobs_ or remaining_s <= 0:
                return NewsView(f"{boot}:{core.news.number}", tuple(dict.fromkeys(jobs_)))
            await core.news.more(remaining_s)

    return {"news": news}


def _exists(core: Core, user: str, job: str) -> bool:
    """Whether the job exists. Raises RequestRefused if the user may not manage it."""
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
