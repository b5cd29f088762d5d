"""Records throughput, scale and the parts of a step of jobs over time, since the page was started.
Pure.

:class:`SeenHistory`: the daemon does not store throughput over time, so the history of a job starts
with the first poll after both the job and the page have started.

:class:`ThinnedSeries` stores a series of numbers over time in bounded memory. The longer the
series, the coarser it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from malletrain.core.step_times import COMPUTING, SHARES
from malletrain.protocol.views import JobView

MAX_POINTS = 600
"""Default maximum number of points."""


class ThinnedSeries:
    """Points (time, values), at most ``most`` of them, spread over the whole time.

    When there are too many, every second one is removed, and the minimum distance of further points
    is doubled. The newest point is always kept.
    """

    def __init__(self, most: int = MAX_POINTS) -> None:
        if most < 4:
            raise ValueError(f"A series of {most} points shows nothing; keep 4 at least.")
        self._most = most
        self._points: list[tuple[float, ...]] = []
        self._newest: tuple[float, ...] | None = None
        self._step_s = 0.0

    def add(self, time: float, *values: float) -> None:
        """Add a point. A point before the newest one is ignored."""
        if self._newest is not None and time < self._newest[0]:
            return
        self._newest = (time, *values)
        if self._points and time - self._points[-1][0] < self._step_s:
            return
        self._points.append(self._newest)
        if len(self._points) > self._most:
            length = self._points[-1][0] - self._points[0][0]
            self._points = self._points[::2]
            self._step_s = max(2 * self._step_s, 2 * length / self._most)

    def points(self) -> list[tuple[float, ...]]:
        """Return the points, the oldest first."""
        if self._newest is not None and self._points and self._newest != self._points[-1]:
            return [*self._points, self._newest]
        return list(self._points)


MAX_JOBS = 2000
"""Maximum number of jobs with a history. The oldest is removed first."""


STACKED = (*(part for part in SHARES if part != COMPUTING), COMPUTING)
"""Parts of a step in the order in which the page stacks them: computing is above the others."""


class HistoryView(msgspec.Struct, frozen=True):
    """Answer of ``/api/v1/jobs/JOB/history``. ``points``: (time, samples/s, nodes, samples).
    ``steps``: (time, share of a step of each part in the order of ``parts``); empty if not
    measured.
    """

    job: str
    points: list[tuple[float, ...]]
    parts: tuple[str, ...] = STACKED
    steps: list[tuple[float, ...]] = []


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
            if job.step_shares:
                shares = (job.step_shares.get(part, 0.0) for part in STACKED)
                history.steps.add(now, *shares)

    def view(self, job: str) -> HistoryView:
        """Return the history of one job; empty if it has none."""
        history = self._jobs.get(job) or _JobHistory()
        return HistoryView(job, history.points.points(), steps=history.steps.points())


class _JobHistory:
    def __init__(self) -> None:
        self.points = ThinnedSeries()
        self.steps = ThinnedSeries()
        self.over = False
