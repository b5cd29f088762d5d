"""Views as a daemon would send them, for tests of the page."""

from __future__ import annotations

from malletrain.protocol.views import EventView, JobView, NodeView, StatusView
from malletrain.render.live import PollAnswers


def job(number=1, state="running", owner="ann", **more):
    fields = {
        "id": f"j{number}",
        "name": f"job{number}",
        "owner": owner,
        "state": state,
        "reason": "",
        "nodes": ("n1",),
        "min_nodes": 1,
        "max_nodes": 4,
        "rate": 10.0,
        "samples": 100.0,
        "rescales": 0,
        "tries": 0,
        "submitted": 1.0,
        "started": 2.0,
        "ended": None,
        "metrics": {"loss": 0.5},
    }
    return JobView(**{**fields, **more})


def node(name, state="job", on="j1", **more):
    return NodeView(name, state, "l1", on if state == "job" else "", 1.0, **more)


def event(seq, kind, time=0.0, on="", at="", **data):
    return EventView(seq, time, kind, on, at, "", f"sentence {seq}", data)


def look(now, jobs=(), nodes=(), events=()):
    status = StatusView(
        "1", 1, "boot", 0.0, now, "local", 0, len(nodes), 0, {}, 0.0, 0.0, 0, 0, now, ""
    )
    return PollAnswers(status, list(jobs), list(nodes), list(events))
