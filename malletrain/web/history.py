"""Records throughput and scale of the jobs over time, since the page was started.

Pure. The daemon does not store throughput over time, so the history of a job starts with the first
poll after both the job and the page have started.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from malletrain.protocol.views import JobView
from malletrain.web.series import ThinnedSeries

MAX_JOBS = 2000
"""Maximum number of jobs with a history. The oldest is removed first."""


class HistoryView(msgspec.Struct, frozen=True):
    """Answer of ``/api/v1/jobs/JOB/history``. ``points``: (time, samples/s, nodes, samples)."""

    job: str
    points: list[tuple[float, ...]]


class SeenHistory:
    """The histories of all jobs that have run since this object was created."""

    def __init__(self) -> None:
        self._jobs: dict[str, _JobHistory] = {}

    def feed(self, jobs: Sequence[JobView], now: float) -> None:
        """Add the state of the jobs at ``now``, seconds."""
        for job in jobs:
            history = self._jobs.get(job.id)
            if job.ended is not None and (history is None or history.over):
                continue
            if not job.nodes and history is None:
                continue
            if history is None:
                history = self._jobs[job.id] = _JobHistory()
                if len(self._jobs) > MAX_JOBS:
                    del self._jobs[next(iter(self._jobs))]
            history.over = job.ended is not None
            history.points.add(now, job.rate, float(len(job.nodes)), job.samples)

    def view(self, job: str) -> HistoryView:
        """Return the history of one job; empty if it has none."""
        return HistoryView(job, (self._jobs.get(job) or _JobHistory()).points.points())


class _JobHistory:
    def __init__(self) -> None:
        self.points = ThinnedSeries()
        self.over = False
