"""The state of an imitated PBS: one JSON file that its server and its commands read and write."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path

SERVER, USER = "pbs0", "pbsuser"
KILL_DELAY_S = 10
SAMPLE_S = 10.0
"""How often MoM looks whether a job whose top shell has ended has processes left."""


@contextlib.contextmanager
def state_of(root: Path):
    """The state, read and written under a lock."""
    with (root / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = root / "state.json"
        state = json.loads(path.read_text())
        before = json.dumps(state)
        yield state
        if (after := json.dumps(state)) != before:
            (root / "state.new").write_text(after)
            os.replace(root / "state.new", path)


def new_state(hosts, queues, preempt_order="D", version="23.06.06"):
    """``hosts``: host → its vnodes (name → resources). ``queues``: name → attributes."""
    nodes = {
        vnode: {
            "host": host,
            "resources": {"arch": "linux", "host": host, "vnode": vnode, **resources},
            "state": "free",
            "resv": [],
        }
        for host, vnodes in hosts.items()
        for vnode, resources in vnodes.items()
    }
    return {
        "nodes": nodes,
        "queues": queues,
        "jobs": {},
        "next": 1,
        "resv": {},
        "version": version,
        "strict_ordering": False,
        "sample_s": SAMPLE_S,
        "sched": {
            "preempt_queue_prio": 150,
            "preempt_order": preempt_order,
            "scheduler_iteration": 5,
        },
        "server": {"scheduling": "True", "query_other_jobs": "True", "backfill_depth": 5},
    }
