"""A service whose processes load for a while, on real processes: they join before they are ready,
the time is measured, and what nodes are worth takes them and gives them back.
"""

from __future__ import annotations

import time

from malletrain import Client
from malletrain.protocol.event_kinds import EventKind

LOADS = """
import os, time
from malletrain import membership

group = membership.join(f"{membership.host()}:{os.getpid()}", ready=False)
while not os.path.exists("loaded"):
    time.sleep(0.01)
group.report_ready()
for change in group.changes():
    if change.kind == "leaving" and change.member == group.me:
        group.report_drained()
"""


def follow(client, job, condition):
    """Wait for the members by long polls; return the first view that meets the condition."""
    view = client.members(job)
    while not condition(view):
        assert view.version, "the service has ended"
        view = client.members(job, since=view.version, wait_s=30.0)
    return view


def test_starts_are_measured_and_nodes_come_and_go_with_their_worth(shared):
    script = shared.script("loads.py", LOADS)
    value = shared.root / "value.csv"
    value.write_text("nodes,value\n1,10\n2,20\n")
    with Client(shared.state) as client:
        began = time.monotonic()
        job = client.submit(
            script,
            service=True,
            value=value,
            nodes="1:2",
            start_cost="auto",
            workdir=shared.work,
        ).id
        view = follow(client, job, lambda view: len(view.members) == 2)
        assert [m.loading for m in view.members] == [True, True]
        (shared.work / "loaded").touch()
        follow(client, job, lambda view: not any(m.loading for m in view.members))
        starts = shared.events(EventKind.MEMBER_READY, job)
        assert {event.node for event in starts} == {m.node for m in view.members}
        since_submission_s = time.monotonic() - began
        assert all(0.0 < event.data["start_s"] < since_submission_s for event in starts)

        client.worth(job, {1: 0.0})
        follow(client, job, lambda view: not view.members)
        shared.until_state(job, "suspended")
        shared.kill_daemon()
        shared.start_daemon()
        assert client.members(job).values == {1: 0.0}
        client.worth(job, next_each=10.0, expires_s=3600.0)
        view = follow(client, job, lambda view: len(view.members) == 1)
        follow(client, job, lambda view: not view.members[0].loading)
        shared.until(lambda: len(shared.events(EventKind.MEMBER_READY, job)) == 3, "a third start")
        client.cancel(job)
    shared.until_state(job, "cancelled")
