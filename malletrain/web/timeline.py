"""Which node was in which state when, for the last hour: the timeline of the page on the machine.

Pure: it is fed with what the daemon says of nodes and events, and asked for spans. Where nothing is
said of a node, the main scheduler uses it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import EventView, NodeView

WINDOW_S = 3600.0
MOST_SPANS = 200
"""Of one node; the oldest go first."""
BUSY = "busy"
GAVE = (EventKind.JOB_STARTED, EventKind.JOB_RESCALED)
TOOK = (
    EventKind.JOB_SUSPENDED,
    EventKind.JOB_COMPLETED,
    EventKind.JOB_FAILED,
    EventKind.JOB_CANCELLED,
)
MARKS: dict[str, bool] = {EventKind.NODE_LEAVING: True, EventKind.NODE_VANISHED: False}
"""Events that show as a mark, and whether notice was given."""


class SpanView(msgspec.Struct, frozen=True):
    """One node in one state from ``start`` to ``end`` (seconds since the epoch; None: still)."""

    node: str
    state: str
    job: str
    start: float
    end: float | None


class MarkView(msgspec.Struct, frozen=True):
    """The main scheduler took ``node`` back at ``time``; ``notice``: it said so before."""

    node: str
    time: float
    notice: bool


class TimelineView(msgspec.Struct, frozen=True):
    """What ``/api/v1/timeline`` answers. Where no span says otherwise, a node is in use by the main
    scheduler, or nothing is known of it. ``version``: of the last change of the stream that is in
    it.
    """

    version: int
    since: float
    now: float
    spans: tuple[SpanView, ...]
    marks: tuple[MarkView, ...]


class NodeTimeline:
    """The states of all nodes over the last ``window_s`` seconds."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._open: dict[str, SpanView] = {}
        self._past: dict[str, deque[SpanView]] = {}
        self._marks: deque[MarkView] = deque(maxlen=10_000)
        self._live_from: float | None = None
        self._now = 0.0

    def feed(self, events: Iterable[EventView], nodes: Sequence[NodeView], now: float) -> None:
        """Take in one look at the daemon.

        Events before the first look tell what was held then; from the first look on the states of
        the nodes are what counts.
        """
        for event in events:
            if event.kind in MARKS:
                self._marks.append(MarkView(event.node, event.time, MARKS[event.kind]))
            if self._live_from is None:
                self._past_event(event)
        self._live_from = self._live_from or now
        self._now = now
        for node in self._open.keys() - {view.node for view in nodes}:
            self._set(node, BUSY, "", now)
        for view in nodes:
            self._set(view.node, view.state, view.job, now)
        self._forget(now - self._window_s)

    def view(self, since: float = 0.0, version: int = 0) -> TimelineView:
        """The spans that reach beyond ``since``, of each node in order, as of ``version``."""
        since = max(since, self._now - self._window_s)
        spans = []
        for node in sorted(self._past.keys() | self._open.keys()):
            spans += [s for s in self._past.get(node, ()) if s.end is None or s.end > since]
            if node in self._open:
                spans.append(self._open[node])
        marks = tuple(mark for mark in self._marks if mark.time >= since)
        return TimelineView(version, since, self._now, tuple(spans), marks)

    def _past_event(self, event: EventView) -> None:
        if event.kind == EventKind.NODE_JOINED:
            self._set(event.node, "free", "", event.time)
        elif event.kind == EventKind.NODE_LOST:
            self._set(event.node, BUSY, "", event.time)
        elif event.kind in GAVE:
            now = set(event.data.get("nodes", ()))
            self._leave(event.job, event.time, now)
            for node in now:
                self._set(node, "job", event.job, event.time)
        elif event.kind in TOOK:
            self._leave(event.job, event.time, set())

    def _leave(self, job: str, time: float, but: set[str]) -> None:
        nodes = [n for n, span in self._open.items() if span.job == job and n not in but]
        for node in nodes:
            self._set(node, "free", "", time)

    def _set(self, node: str, state: str, job: str, time: float) -> None:
        span = self._open.get(node)
        if span is not None:
            if (span.state, span.job) == (state, job):
                return
            ended = msgspec.structs.replace(span, end=max(time, span.start))
            self._past.setdefault(node, deque(maxlen=MOST_SPANS)).append(ended)
            del self._open[node]
        if state != BUSY:
            self._open[node] = SpanView(node, state, job, time, None)

    def _forget(self, before: float) -> None:
        for node in list(self._past):
            spans = self._past[node]
            while spans and (spans[0].end or 0.0) < before:
                spans.popleft()
            if not spans:
                del self._past[node]
        while self._marks and self._marks[0].time < before:
            self._marks.popleft()
