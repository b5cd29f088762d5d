"""Records the states of the nodes over the last hour, for the timeline of the page on the machine.

Pure: computes spans from the daemon's nodes and events. A node without a span is in use by the main
scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import EventView, NodeView

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
