"""Converts the audit log to a trace of which node was held when, for a replay or a simulation.
Pure.

Reads joins and losses of nodes only. ``docs/traces.md`` describes the form of a trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import EventView

HEADER = "time_s,node,event"


def lease_trace(events: Iterable[EventView], until: float) -> Iterator[str]:
    """Yield the lines of the trace, without line ends; time 0 is the first join.

    A node that joins twice in a row (it was adopted after a restart) is written once. If the clock
    was set back, no event becomes earlier than the previous one. Nodes that are still held stay so
    until the end of the trace.

    Args:
        events: all events, oldest first.
        until: time at which the events were read, seconds since the epoch.
    """
    nodes: set[str] = set()
    last: dict[str, float] = {}
    begin: float | None = None
    now = 0.0
    yield HEADER
    for e in events:
        joined = e.kind == EventKind.NODE_JOINED
        if (not joined and e.kind != EventKind.NODE_LOST) or joined == (e.node in nodes):
            continue
        begin = e.time if begin is None else begin
        # To the millisecond, and no node twice at one instant, because a trace orders changes by
        # their times.
        now = last[e.node] = round(max(now, e.time - begin, last.get(e.node, -1.0) + 0.001), 3)
        (nodes.add if joined else nodes.discard)(e.node)
        yield f"{now:.3f},{e.node},{'idle' if joined else 'busy'}"
    for node in sorted(nodes):
        now = round(max(now, until - (begin or 0.0), last[node] + 0.001), 3)
        yield f"{now:.3f},{node},busy"
