"""Collects progress reports of jobs for one transaction, because a transaction looks at every job
and a thousand jobs report every second.

Decides how long reports wait. The core decides what they mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from malletrain.core.events import Progressed
from malletrain.daemon.job_repository import ActiveJob

GATHER_S = 0.1
"""How long the first of them waits."""


@dataclass
class GatheredReports:
    """What came in, the newest of each job."""

    progress: dict[str, Progressed] = field(default_factory=dict)
    """For the controller, by job."""
    to_save: dict[str, ActiveJob] = field(default_factory=dict)
    """The jobs of which it is to be written how far they have come, by id."""


class Gathering:
    """Of one core. ``take``: hears of what was gathered, from the loop."""

    def __init__(self, take: Callable[[GatheredReports], None]) -> None:
        self._take = take
        self._reports = GatheredReports()
        self._timer: asyncio.TimerHandle | None = None

    def progressed(self, event: Progressed) -> None:
        """The controller is to hear of it."""
        self._reports.progress[event.job] = event
        self._begin()

    def save(self, run: ActiveJob) -> None:
        """It is to be written how far the job has come."""
        self._reports.to_save[run.row.id] = run
        self._begin()

    def close(self) -> None:
        """Nothing is told any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self._over)

    def _over(self) -> None:
        reports, self._reports, self._timer = self._reports, GatheredReports(), None
        self._take(reports)
