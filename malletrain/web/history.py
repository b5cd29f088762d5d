"""Records what the daemon does not store over time, since the page was started. Pure.

:class:`SeenHistory`: throughput, scale and the parts of a step of jobs. The history of a job starts
with the first poll after both the job and the page have started.

:class:`ThinnedSeries` stores a series of numbers over time in bounded memory. The longer the
series, the coarser it is.

:class:`NodeTimeline`: the states of the nodes over the last hour, as spans computed from the
daemon's nodes and events. A node without a span is in use by the main scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from malletrain.core.step_times import COMPUTING, SHARES
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import EventView, JobView, NodeView

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


WINDOW_S = 3600.0
"""Length of the timeline, seconds."""
MAX_SPANS = 200
"""Maximum number of spans of one node. The oldest are removed first."""
BUSY = "busy"
NODES_CHANGED = (EventKind.JOB_STARTED, EventKind.JOB_RESCALED)
NODES_LOST = (
    EventKind.JOB_SUSPENDED,
    EventKind.JOB_COMPLETED,
    EventKind.JOB_FAILED,
    EventKind.JOB_CANCELLED,
)
MARKS: dict[str, bool] = {EventKind.NODE_LEAVING: True, EventKind.NODE_VANISHED: False}
"""Kind of the events that are shown as marks → whether notice was given."""


class SpanView(msgspec.Struct, frozen=True):
    """One node in one state from ``start`` to ``end`` (seconds since the epoch; None if it has not
    ended).
    """

    node: str
    state: str
    job: str
    """Id of the job on the node; empty if there is none."""
    start: float
    end: float | None


class MarkView(msgspec.Struct, frozen=True):
    """Preemption of ``node`` at ``time``. ``notice``: whether the main scheduler gave notice."""

    node: str
    time: float
    notice: bool


class TimelineView(msgspec.Struct, frozen=True):
    """Answer of ``/api/v1/timeline``. Outside of its spans a node is in use by the main scheduler,
    or its state is unknown. ``version``: version of the last change of the stream that it includes.
    """

    version: int
    since: float
    """Start of the timeline, seconds since the epoch."""
    now: float
    spans: tuple[SpanView, ...]
    marks: tuple[MarkView, ...]
    """Preemptions."""


class NodeTimeline:
    """The states of all nodes over the last ``window_s`` seconds."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._open: dict[str, SpanView] = {}
        self._past: dict[str, deque[SpanView]] = {}
        self._marks: deque[MarkView] = deque(maxlen=10_000)
        self._first_poll_at: float | None = None
        self._now = 0.0

    def feed(self, events: Iterable[EventView], nodes: Sequence[NodeView], now: float) -> None:
        """Add the answers of one poll.

        Before the first poll, states follow from events; from then on, from the states of the
        nodes.

        Args:
            events: new events, the oldest first.
            nodes: idle and leased nodes.
            now: time of the poll, seconds since the epoch.

        """
        for event in events:
            if event.kind in MARKS:
                self._marks.append(MarkView(event.node, event.time, MARKS[event.kind]))
            if self._first_poll_at is None:
                self._apply_event(event)
        self._first_poll_at = self._first_poll_at or now
        self._now = now
        for node in self._open.keys() - {view.node for view in nodes}:
            self._set(node, BUSY, "", now)
        for view in nodes:
            self._set(view.node, view.state, view.job, now)
        self._prune(now - self._window_s)

    def view(self, since: float = 0.0, version: int = 0) -> TimelineView:
        """Return the spans that end after ``since``, in order for each node. ``version``: version
        of the board.
        """
        since = max(since, self._now - self._window_s)
        spans = []
        for node in sorted(self._past.keys() | self._open.keys()):
            spans += [s for s in self._past.get(node, ()) if s.end is None or s.end > since]
            if node in self._open:
                spans.append(self._open[node])
        marks = tuple(mark for mark in self._marks if mark.time >= since)
        return TimelineView(version, since, self._now, tuple(spans), marks)

    def _apply_event(self, event: EventView) -> None:
        if event.kind == EventKind.NODE_JOINED:
            self._set(event.node, "free", "", event.time)
        elif event.kind == EventKind.NODE_LOST:
            self._set(event.node, BUSY, "", event.time)
        elif event.kind in NODES_CHANGED:
            now = set(event.data.get("nodes", ()))
            self._free_nodes(event.job, event.time, now)
            for node in now:
                self._set(node, "job", event.job, event.time)
        elif event.kind in NODES_LOST:
            self._free_nodes(event.job, event.time, set())

    def _free_nodes(self, job: str, time: float, remaining: set[str]) -> None:
        nodes = [n for n, span in self._open.items() if span.job == job and n not in remaining]
        for node in nodes:
            self._set(node, "free", "", time)

    def _set(self, node: str, state: str, job: str, time: float) -> None:
        span = self._open.get(node)
        if span is not None:
            if (span.state, span.job) == (state, job):
                return
            ended = msgspec.structs.replace(span, end=max(time, span.start))
            self._past.setdefault(node, deque(maxlen=MAX_SPANS)).append(ended)
            del self._open[node]
        if state != BUSY:
            self._open[node] = SpanView(node, state, job, time, None)

    def _prune(self, before: float) -> None:
        for node in list(self._past):
            spans = self._past[node]
            while spans and (spans[0].end or 0.0) < before:
                spans.popleft()
            if not spans:
                del self._past[node]
        while self._marks and self._marks[0].time < before:
            self._marks.popleft()
