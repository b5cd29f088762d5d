"""The jobs of a sweep at a daemon, which is found by its state directory. If the daemon does not
answer, raises JobsAway, and connects again at the next call.

Decides nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from malletrain.client import ClientError, Connection, operations
from malletrain.client.errors import QUOTA, TRANSIENT, UNAUTHENTICATED
from malletrain.client.operations import Operation
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.messages import JobSpec, daemon_of
from malletrain.protocol.views import EventView, JobView, NewsView, SeriesView
from malletrain.sweep.engine import LOST, JobRefused, JobsAway, TooManyJobs, TrialJob

NODE_EVENTS = (EventKind.JOB_STARTED, EventKind.JOB_RESCALED)
"""Events with the nodes that a job has from then on."""
CHANGES = (
    *NODE_EVENTS,
    EventKind.JOB_SUSPENDED,
    EventKind.JOB_COMPLETED,
    EventKind.JOB_FAILED,
    EventKind.JOB_CANCELLED,
)
WAIT_S = 10.0
"""Maximum time that the daemon is asked to wait for news, seconds."""
TRANSIENT_ERRORS = TRANSIENT | {UNAUTHENTICATED}
"""Error codes after which a later attempt may succeed."""


class DaemonJobs:
    """Implements :class:`malletrain.sweep.engine.Jobs`. Usable as a context manager."""

    def __init__(self, state_dir: Path | None) -> None:
        self._state_dir = state_dir
        self._connection: Connection | None = None
        self._daemon = ""
        self._cursor = ""
        """Position up to which the daemon's news have been read."""
        self._read: dict[str, tuple[str, int]] = {}
        """Jobs without news since their points were read → the metric that was read, and its last
        step."""

    def __enter__(self) -> DaemonJobs:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._connection is not None:
            self._connection.close()

    def daemon(self) -> str:
        """Return the daemon's name, which is requested once per connection."""
        if self._connection is None or not self._daemon:
            self._daemon = daemon_of(self._do(operations.status()).boot)
        return self._daemon

    def submit(self, spec: JobSpec) -> str:
        """Submit a job, or find the one submitted with the same key. Return its id. Raises
        JobRefused, TooManyJobs.
        """
        try:
            view: JobView = self._do(operations.submit(spec))
        except ClientError as error:
            refused = TooManyJobs if error.code == QUOTA else JobRefused
            raise refused(str(error)) from None
        return view.id

    def states(self, ids: Sequence[str]) -> Mapping[str, TrialJob]:
        """Return the state of these jobs."""
        if not ids:
            return {}
        views = {view.id: view for view in self._do(operations.jobs(ended=0))}
        trial_jobs = {
            job: _trial_job(views[job]) if job in views else self._one(job) for job in ids
        }
        for job, each in trial_jobs.items():
            if each.ended:  # it may have reported more values since the last news
                self._read.pop(job, None)
        return trial_jobs

    def _one(self, job: str) -> TrialJob:
        try:
            return _trial_job(self._do(operations.job(job)).job)
        except ClientError:
            return TrialJob(job, LOST)

    def points(self, job: str, metric: str, since: int) -> list[tuple[int, float]]:
        """Return values with a step after ``since``. If no value has a step, they are numbered. A
        value without a step among others is a final result and not a point of the curve. The daemon
        is not asked again if there is no news since.
        """
        previous_metric, until = self._read.get(job, ("", 0))
        if previous_metric == metric and since >= until:
            return []
        points = self._points(job, metric, since)
        self._read[job] = metric, max([since, *(step for step, _ in points)])
        return points

    def _points(self, job: str, metric: str, since: int) -> list[tuple[int, float]]:
        series = self._series(job, metric)
        if series is None:
            return []
        steps: Sequence[int | None] = series.steps
        if not any(step is not None for step in steps):
            steps = series.numbers or range(len(series.steps))
        pairs = zip(steps, series.values, strict=True)
        return [(step, value) for step, value in pairs if step is not None and step > since]

    def last(self, job: str, metric: str) -> float | None:
        """Return the newest value."""
        series = self._series(job, metric)
        return series.values[-1] if series is not None and series.values else None

    def names(self, job: str) -> list[str]:
        """Return the names of the metrics that it has reported."""
        return [series.name for series in self._do(operations.metrics(job))]

    def node_seconds(self, job: str) -> float:
        """Return the node-seconds that it had, including starts and rescales."""
        events: list[EventView] = []
        try:
            while page := self._do(operations.events(since=_last(events), limit=1000, job=job)):
                events += page
        except ClientError:
            pass  # the daemon does not know the job
        return used_s(events, time.time())

    def weigh(self, job: str, weight: float) -> None:
        """Set the weight of a job."""
        with contextlib.suppress(ClientError):  # it has ended
            self._do(operations.weigh(job, weight))

    def cancel(self, job: str, why: str) -> None:
        """Cancel a job."""
        with contextlib.suppress(ClientError):  # the daemon does not know it
            self._do(operations.cancel([job], why))

    def wait(self, ids: Sequence[str], within_s: float) -> None:
        """Wait for news of these jobs; if the daemon does not know this request, just wait."""
        request = operations.news(ids, cursor=self._cursor, wait_s=min(within_s, WAIT_S))
        try:
            news: NewsView = self._do(request)
        except ClientError:
            self._read.clear()
            time.sleep(within_s)
            return
        self._cursor, quiet = news.cursor, set(ids).difference(news.jobs)
        self._read = {job: read for job, read in self._read.items() if job in quiet}

    def _series(self, job: str, metric: str) -> SeriesView | None:
        series = self._do(operations.metrics(job, names=(metric,)))
        return series[0] if series else None

    def _do(self, operation: Operation[Any]) -> Any:
        """Carry out an operation. Raises JobsAway if the daemon does not answer, ClientError if it
        refuses."""
        try:
            if self._connection is None:
                self._connection = Connection.of(self._state_dir)
            return self._connection.do(operation)
        except ClientError as error:
            if error.code in TRANSIENT_ERRORS:
                if self._connection is not None:
                    self._connection.close()  # a restarted daemon has another address
                    self._connection = None
                raise JobsAway(str(error)) from None
            raise


def used_s(events: Sequence[EventView], now: float) -> float:
    """Return the node-seconds that a job has had, from its events; until ``now``, if it has not
    ended.
    """
    used, nodes, since = 0.0, 0, 0.0
    for event in events:
        if event.kind not in CHANGES:
            continue
        used += nodes * (event.time - since)
        nodes, since = (
            len(event.data.get("nodes", ())) if event.kind in NODE_EVENTS else 0,
            event.time,
        )
    return used + nodes * max(0.0, now - since)


def _last(events: Sequence[EventView]) -> int:
    return events[-1].seq if events else 0


def _trial_job(view: JobView) -> TrialJob:
    return TrialJob(view.id, view.state, view.reason, len(view.nodes))
