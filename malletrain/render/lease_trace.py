"""The audit log as a trace: when which node was held, for a replay or a simulation. Pure.

Reads joins and losses of nodes only. The form of a trace is told in ``docs/traces.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import EventView

HEADER = "time_s,node,event"


def lease_trace(events: Iterable[EventView], until: float) -> Iterator[str]:
    """The lines of the trace, without line ends; time 0 is the first join.

    A node that joins twice in a row (it was adopted after a restart) is written once, and a clock
    that was set back makes no event earlier than the one before. What is still held is so until the
    end: a trace ends with its last event.

    Args:
        events: all of them, oldest first.
        until: when they were asked for, seconds since the epoch.
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
        # To the millisecond, and no node twice at one instant: a trace says which of two changes
        # came first by their times.
        now = last[e.node] = round(max(now, e.time - begin, last.get(e.node, -1.0) + 0.001), 3)
        (nodes.add if joined else nodes.discard)(e.node)
        yield f"{now:.3f},{e.node},{'idle' if joined else 'busy'}"
    for node in sorted(nodes):
        now = round(max(now, until - (begin or 0.0), last[node] + 0.001), 3)
        yield f"{now:.3f},{node},busy"
