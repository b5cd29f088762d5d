"""Collects progress reports of jobs for one transaction, because a transaction looks at every job
and a thousand jobs report every second.

Decides how long reports wait. The core handles them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from malletrain.core.events import Progressed
from malletrain.daemon.job_repository import ActiveJob

GATHER_S = 0.1
"""Time for which the first report waits, seconds."""


@dataclass
class GatheredReports:
    """The newest reports of each job since the last transaction."""

    progress: dict[str, Progressed] = field(default_factory=dict)
    """Events for the controller, by job id."""
    to_save: dict[str, ActiveJob] = field(default_factory=dict)
    """Jobs whose progress is to be saved, by id."""


class Gathering:
    """Collects the reports of one core. ``take``: called with them, from the loop."""

    def __init__(self, take: Callable[[GatheredReports], None]) -> None:
        self._take = take
        self._reports = GatheredReports()
        self._timer: asyncio.TimerHandle | None = None

    def progressed(self, event: Progressed) -> None:
        """Add a progress event for the controller."""
        self._reports.progress[event.job] = event
        self._start_timer()

    def save(self, run: ActiveJob) -> None:
        """Add a job whose progress is to be saved."""
        self._reports.to_save[run.row.id] = run
        self._start_timer()

    def close(self) -> None:
        """Cancel the timer. Waiting reports are dropped."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self._hand_over)

    def _hand_over(self) -> None:
        reports, self._reports, self._timer = self._reports, GatheredReports(), None
        self._take(reports)
