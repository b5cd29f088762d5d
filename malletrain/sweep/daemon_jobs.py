"""The jobs of a sweep at a daemon, found by its state directory. A daemon that is away is told as
such, and asked anew at the next call.

Decides nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from malletrain.client import ClientError, Connection, operations
from malletrain.client.operations import Operation
from malletrain.protocol.messages import JobSpec
from malletrain.protocol.views import JobDetail, JobView, SeriesView
from malletrain.sweep.jobs import LOST, JobRefused, JobsAway, TrialJob

LOOKED_AT = 500
"""Ended jobs in one answer of the daemon; others are asked for one by one."""
PASSING = ("unreachable", "internal", "stranger")
"""What a daemon answers, or does not, that may be otherwise a moment later."""


class DaemonJobs:
    """As :class:`malletrain.sweep.jobs.Jobs`. Usable as a context manager."""

    def __init__(self, state_dir: Path | None) -> None:
        self._state_dir = state_dir
        self._connection: Connection | None = None

    def __enter__(self) -> DaemonJobs:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._connection is not None:
            self._connection.close()

    def submit(self, spec: JobSpec) -> str:
        """Submit, or find what was submitted under its key."""
        try:
            view: JobView = self._do(operations.submit(spec))
        except ClientError as error:
            raise JobRefused(str(error)) from None
        return view.id

    def look(self, ids: Sequence[str]) -> Mapping[str, TrialJob]:
        """How these jobs are."""
        if not ids:
            return {}
        views = {view.id: view for view in self._do(operations.jobs(ended=LOOKED_AT))}
        return {job: _seen(views[job]) if job in views else self._one(job) for job in ids}

    def _one(self, job: str) -> TrialJob:
        try:
            return _seen(self._do(operations.job(job)).job)
        except ClientError:
            return TrialJob(job, LOST)

    def points(self, job: str, metric: str, since: int) -> list[tuple[int, float]]:
        """Values with a step after ``since``; values without a step are numbered."""
        series = self._series(job, metric)
        if series is None:
            return []
        steps = [n if s is None else s for n, s in enumerate(series.steps)]
        found = zip(steps, series.values, strict=True)
        return [(step, value) for step, value in found if step > since]

    def last(self, job: str, metric: str) -> float | None:
        """The newest value."""
        series = self._series(job, metric)
        return series.values[-1] if series is not None and series.values else None

    def node_seconds(self, job: str) -> float:
        """Nodes times the seconds in which it trained on them, as far as was observed."""
        try:
            detail: JobDetail = self._do(operations.job(job))
        except ClientError:
            return 0.0
        return sum(r.nodes * r.seconds for r in detail.rates)

    def weigh(self, job: str, weight: float) -> None:
        """It counts so much from now on."""
        with contextlib.suppress(ClientError):  # it has ended
            self._do(operations.weigh(job, weight))

    def cancel(self, job: str) -> None:
        """End it."""
        with contextlib.suppress(ClientError):  # the daemon knows it no more
            self._do(operations.cancel([job]))

    def _series(self, job: str, metric: str) -> SeriesView | None:
        found = self._do(operations.metrics(job, names=(metric,)))
        return found[0] if found else None

    def _do(self, operation: Operation[Any]) -> Any:
        """Ask. Raises JobsAway where nobody answers, ClientError where it is refused."""
        try:
            if self._connection is None:
                self._connection = Connection.of(self._state_dir)
            return self._connection.do(operation)
        except ClientError as error:
            if error.code in PASSING:
                if self._connection is not None:
                    self._connection.close()  # a daemon that was started again has another address
                    self._connection = None
                raise JobsAway(str(error)) from None
            raise


def _seen(view: JobView) -> TrialJob:
    return TrialJob(view.id, view.state, view.reason, len(view.nodes))
