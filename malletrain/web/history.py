"""What was seen of the jobs since the page is served: throughput and scale over time.

Pure: it is fed with what the daemon says and asked for series. The daemon keeps no throughput over
time; who looks later than the job began sees it from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from malletrain.protocol.views import JobView
from malletrain.web.series import ThinnedSeries

MOST_JOBS = 2000
"""Jobs whose history is kept; the one that ran the longest time ago is forgotten first."""


class HistoryView(msgspec.Struct, frozen=True):
    """What ``/api/v1/jobs/JOB/history`` answers. ``points``: (time, samples/s, nodes, samples)."""

    job: str
    points: list[tuple[float, ...]]


class SeenHistory:
    """The series of all jobs that ran since this was made."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Seen] = {}

    def feed(self, jobs: Sequence[JobView], now: float) -> None:
        """Take in one look at the jobs at ``now``."""
        for job in jobs:
            seen = self._jobs.get(job.id)
            if job.ended is not None and (seen is None or seen.over):
                continue
            if not job.nodes and seen is None:
                continue
            if seen is None:
                seen = self._jobs[job.id] = _Seen()
                if len(self._jobs) > MOST_JOBS:
                    del self._jobs[next(iter(self._jobs))]
            seen.over = job.ended is not None
            seen.points.add(now, job.rate, float(len(job.nodes)), job.samples)

    def view(self, job: str) -> HistoryView:
        """The series of one job; empty where nothing was seen of it."""
        return HistoryView(job, (self._jobs.get(job) or _Seen()).points.points())


class _Seen:
    def __init__(self) -> None:
        self.points = ThinnedSeries()
        self.over = False
