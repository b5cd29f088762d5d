"""One job in Python: its state, its output, its metrics, and its display in a notebook.
:class:`Job` runs the coroutines of :class:`malletrain.api.aio.AsyncJob` and waits for them.

:func:`job_html` shows a job in a notebook: its state, and plots of its scale and of a metric over
time. It is pure: views in, HTML out; every text of a script or a user is escaped. The plots are
SVG, so that no plotting package is needed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from malletrain.api.aio import AsyncJob
from malletrain.api.following import ENDED
from malletrain.api.series import JobMetrics, MetricSeries
from malletrain.api.session import finish
from malletrain.protocol.views import (
    EventView,
    JobDetail,
    JobView,
    MembersView,
    RescaleView,
    TaskView,
)

WIDTH, HEIGHT, EDGE = 360, 96, 4
"""Size of a plot and width of its empty border, pixels."""
PREFERRED = ("loss", "train_loss", "val_loss", "accuracy")
"""Metrics that are shown before others."""
COLOURS = {
    "running": "#2e7d32",
    "profiling": "#1565c0",
    "queued": "#616161",
    "suspended": "#ef6c00",
    "completed": "#2e7d32",
    "failed": "#c62828",
    "cancelled": "#616161",
}
Point = tuple[float, float]


def job_html(detail: JobDetail, metrics: Mapping[str, MetricSeries], now: float) -> str:
    """Return the job as HTML.

    Args:
        detail: the details of the job.
        metrics: its metrics over time; one of them is drawn.
        now: seconds since the epoch, at which the plots of an unfinished job end.
    """
    job = detail.job
    end = job.ended or now
    facts = [
        ("State", f"{job.state}{f': {job.reason}' if job.reason else ''}"),
        ("Nodes", f"{len(job.nodes)} of {job.min_nodes}:{job.max_nodes}"),
        ("Samples", f"{job.samples:,.0f}, now {job.rate:,.1f}/s"),
        ("Submitted", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.submitted))),
    ]
    facts += [(name, f"{value:.6g}") for name, value in sorted(job.metrics.items())[:8]]
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(value)}</td></tr>'
        for name, value in facts
    )
    pictures = _picture("nodes", scale(detail.rescales, end, bool(job.nodes)), steps=True)
    if name := shown(metrics):
        series = metrics[name]
        pictures += _picture(name, list(zip(series.times, series.values, strict=True)))
    colour = COLOURS.get(job.state, "#616161")
    return (
        f"<div><b>{escape(job.name)}</b> ({escape(job.id)}) of {escape(job.owner)} "
        f'<span style="color:{colour}">&#9679; {escape(job.state)}</span>'
        f"<table>{rows}</table>{pictures}</div>"
    )


def scale(rescales: Sequence[RescaleView], end: float, holds: bool) -> list[Point]:
    """Return the number of nodes over time as (time, nodes).

    Args:
        rescales: rescales of the job, in order of time.
        end: time of the last point, seconds since the epoch.
        holds: whether the job has nodes at ``end``.
    """
    points = [(step.ended or step.began, float(step.to_nodes)) for step in rescales]
    if not points:
        return []
    return [(points[0][0], 0.0), *points, (max(end, points[-1][0]), points[-1][1] * holds)]


def shown(metrics: Mapping[str, MetricSeries]) -> str:
    """Return the name of the metric to plot: the first preferred one, else the one with most
    values."""
    plottable = [name for name in metrics if len(metrics[name]) > 1]
    preferred = [name for name in PREFERRED if name in plottable]
    return (preferred or sorted(plottable, key=lambda name: -len(metrics[name])) or [""])[0]


def _picture(title: str, points: Sequence[Point], *, steps: bool = False) -> str:
    """Return a line plot as SVG, scaled to the range of its times and values."""
    points = [point for point in points if math.isfinite(point[1])]
    if len(points) < 2:
        return ""
    (begin, end), values = (points[0][0], points[-1][0]), [value for _, value in points]
    low, high = (0.0 if steps else min(values)), max(values)
    span, height = (end - begin) or 1.0, (high - low) or 1.0

    def place(at: float, value: float) -> str:
        x = EDGE + (WIDTH - 2 * EDGE) * (at - begin) / span
        y = HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * (value - low) / height
        return f"{x:.1f},{y:.1f}"

    corners = []
    for number, (at, value) in enumerate(points):
        if steps and number:
            corners.append(place(at, values[number - 1]))
        corners.append(place(at, value))
    caption = f"{title}: {low:.4g} to {high:.4g} in {end - begin:.0f} s"
    return (
        f'<figure style="display:inline-block;margin:4px"><svg role="img" aria-label='
        f'"{escape(caption)}" width="{WIDTH}" height="{HEIGHT}" style="border:1px solid #bdbdbd">'
        f'<polyline fill="none" stroke="#1565c0" stroke-width="1.5" points="{" ".join(corners)}"/>'
        f"</svg><figcaption>{escape(caption)}</figcaption></figure>"
    )


T = TypeVar("T")


class Job:
    """One job of a daemon. Created by :class:`malletrain.Client`.

    Args:
        job: its coroutines; they wait by a :class:`malletrain.api.session.BlockingSession`.
    """

    def __init__(self, job: AsyncJob) -> None:
        self.coroutines = job
        """The same job for asyncio, whose coroutines wait by blocking their thread."""

    @property
    def view(self) -> JobView:
        """The job's state at the last request to the daemon."""
        return self.coroutines.view

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.name!r} {self.view.state}>"

    @property
    def id(self) -> str:
        """The job's id, such as ``j7``."""
        return self.view.id

    @property
    def name(self) -> str:
        """The job's name."""
        return self.view.name

    def refresh(self) -> JobView:
        """Ask the daemon for the job's state and return it."""
        return finish(self.coroutines.refresh())

    @property
    def status(self) -> str:
        """Its current state: queued, profiling, running, suspended, completed, failed or
        cancelled."""
        return finish(self.coroutines.status())

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.status in ENDED

    def detail(self) -> JobDetail:
        """Return all details of the job, as ``malletrain show``."""
        return finish(self.coroutines.detail())

    def wait(self, timeout: float | None = None) -> str:
        """Wait until it has ended; return its state. If the daemon restarts, waits for it.

        Raises:
            TimeoutError: it has not ended after ``timeout`` seconds.
        """
        return finish(self.coroutines.wait(timeout))

    @overload
    def logs(
        self,
        *,
        follow: Literal[False] = False,
        rank: int = 0,
        launcher: bool = False,
        service: bool = False,
    ) -> str: ...
    @overload
    def logs(
        self, *, follow: Literal[True], rank: int = 0, launcher: bool = False, service: bool = False
    ) -> Iterator[str]: ...
    def logs(
        self, *, follow: bool = False, rank: int = 0, launcher: bool = False, service: bool = False
    ) -> str | Iterator[str]:
        """Return its output; with ``follow`` an iterator of lines as they arrive, until it has
        ended.

        Args:
            follow: continue over every rescale until the job has ended.
            rank: global rank of the worker.
            launcher: the launcher's log instead.
            service: the logs of a service's processes instead.
        """
        lines = _items(
            self.coroutines.logs(follow=follow, rank=rank, launcher=launcher, service=service)
        )
        return lines if follow else "".join(f"{line}\n" for line in lines)

    def metrics(self, *names: str, since: float = 0.0, most: int = 0) -> JobMetrics:
        """Return the values that its script reported with :func:`malletrain.metric`, over time.

        Args:
            names: names of the metrics; none: all.
            since: only values reported later, seconds since the epoch.
            most: maximum number of points of each metric, thinned out evenly; 0: all that are
                stored.
        """
        return finish(self.coroutines.metrics(*names, since=since, most=most))

    def result(self, timeout: float | None = None) -> Any:
        """Wait for its end and return the result of its function, for a job of
        :meth:`malletrain.Client.submit_function`.

        Raises:
            TimeoutError: it has not ended after ``timeout`` seconds.
            malletrain.training.functions.FunctionLost: it ended without a result.
            BaseException: the exception that the function raised.
        """
        return finish(self.coroutines.result(timeout))

    def export(self, out: str | os.PathLike[str] | None = None, *, name: str = "") -> Path:
        """Write the weights of its newest snapshot as safetensors, as ``malletrain export``;
        returns the file.

        Args:
            out: path of the file. Default: ``NAME.safetensors`` in the current directory.
            name: name of the model in the snapshot. Default: model, or the only one.

        Raises:
            malletrain.training.snapshot_file.SnapshotError: there is no good snapshot.
        """
        return finish(self.coroutines.export(out, name=name))

    def copy(
        self, folder: str | os.PathLike[str], *, snapshot: bool = True, logs: bool = True
    ) -> list[Path]:
        """Copy its newest snapshot and its logs, as ``malletrain cp`` does. Return the files.

        Args:
            folder: where to copy to.
            snapshot: whether to copy the snapshot.
            logs: whether to copy the logs.

        Raises:
            malletrain.training.snapshot_file.SnapshotError: there is no snapshot.
            OSError: a file cannot be read or written.
        """
        return finish(self.coroutines.copy(folder, snapshot=snapshot, logs=logs))

    def tensorboard(self, folder: str | os.PathLike[str]) -> Path:
        """Write its metrics and its scale as a TensorBoard run below ``folder``, as ``malletrain
        export --tensorboard``; return the file.
        """
        return finish(self.coroutines.tensorboard(folder))

    def _repr_html_(self) -> str:
        """Return its display in notebooks: its state, and plots of its scale and of a metric."""
        detail = self.detail()
        return job_html(detail, self.metrics(most=200), time.time())

    def events(self, since: int = 0) -> list[EventView]:
        """Return its events in the audit log with a number above ``since``."""
        return finish(self.coroutines.events(since))

    def members(self, *, since: str = "", wait_s: float = 0.0) -> MembersView:
        """Return its members, if it is a service. See :meth:`malletrain.Client.members`."""
        return finish(self.coroutines.members(since=since, wait_s=wait_s))

    def worth(
        self,
        values: Mapping[int, float] | None = None,
        *,
        next_each: float | None = None,
        next_count: int = 1,
        expires_s: float | None = None,
    ) -> str:
        """Set what nodes are worth to it, if it is a service.

        Args:
            values, next_each, next_count, expires_s: see :meth:`malletrain.Client.worth`.
        """
        return finish(
            self.coroutines.worth(
                values, next_each=next_each, next_count=next_count, expires_s=expires_s
            )
        )

    def set_link(self, name: str, url: str) -> str:
        """Give it a link to a page of its own. See :meth:`malletrain.Client.set_link`."""
        return finish(self.coroutines.set_link(name, url))

    def tasks(self, state: str = "") -> Iterator[TaskView]:
        """Return its tasks in order, if it is a farm; only those in ``state`` if that is given:
        waiting, running, done, failed or cancelled.
        """
        return _items(self.coroutines.tasks(state))

    def retry(self, *numbers: int) -> int:
        """Put failed tasks of an unfinished farm back into its queue: those with these numbers, or
        all. Return how many.
        """
        return finish(self.coroutines.retry(*numbers))

    def extend(
        self, *, deadline: str | None = None, budget: str | None = None, work: str | None = None
    ) -> JobView:
        """Change its goals. An argument that is None changes nothing; ``"none"`` removes a goal.

        Args:
            deadline: time by which the job is to complete, as for ``malletrain extend``.
            budget: maximum charge, such as ``"200nh"``, or ``"+50nh"`` to add to the present one.
            work: total number of samples.
        """
        return finish(self.coroutines.extend(deadline=deadline, budget=budget, work=work))

    def scale(self, nodes: int | str | tuple[int, int]) -> str:
        """Change its minimum and maximum number of nodes; return the effect, as a sentence."""
        return finish(self.coroutines.scale(nodes))

    def cancel(self) -> bool:
        """Stop it and free its nodes; snapshots and logs are kept. Return False if it had already
        ended."""
        return finish(self.coroutines.cancel())


def _items(iterator: AsyncIterator[T]) -> Iterator[T]:
    """Yield the items of an asynchronous iterator that waits by a blocking session."""
    while True:
        try:
            yield finish(iterator.__anext__())
        except StopAsyncIteration:
            return
