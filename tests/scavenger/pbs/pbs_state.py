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


RESOURCES = ("ncpus", "ngpus", "mem")


def size_kb(text: str) -> int:
    """The kilobytes of ``2gb``."""
    number, unit = int(text.rstrip("kmgb")), text.lstrip("0123456789")
    return number * 1024 ** ("b", "kb", "mb", "gb").index(unit) // 1024


def amounts(resources) -> dict[str, int]:
    """Numbers, and sizes in kilobytes, of what is said of a vnode or a chunk."""
    return {
        **{name: int(resources.get(name, 0)) for name in ("ncpus", "ngpus")},
        "mem": size_kb(str(resources.get("mem", "0kb"))),
    }


def chunk(job) -> dict[str, int]:
    """Return the resources that the job requests on each host."""
    return amounts(dict(w.split("=", 1) for w in job["select"].split(":")[1:] if "=" in w))


def shares(state, job) -> bool:
    """Whether other jobs may run beside it."""
    place = job["place"]
    return "excl" not in place and ("shared" in place or state["sharing"] == "default_shared")


def assigned(state, vnode) -> dict[str, int]:
    """Return the resources of a vnode that jobs have. A host whose parts are shared by jobs has one
    vnode.
    """
    jobs = [j for j in state["jobs"].values() if j["state"] in "RE" and vnode in j["vnodes"]]
    return {name: sum(chunk(job)[name] for job in jobs) for name in RESOURCES}


def has_room(state, job, host) -> bool:
    """Whether the job fits beside those on the host."""
    there = [j for j in state["jobs"].values() if j["state"] in "RE" and host in j["hosts"]]
    if not there:
        return True
    if not shares(state, job) or not all(shares(state, other) for other in there):
        return False
    [vnode] = [v for v, node in state["nodes"].items() if node["host"] == host]
    total, needed = amounts(state["nodes"][vnode]["resources"]), chunk(job)
    return all(u + needed[name] <= total[name] for name, u in assigned(state, vnode).items())


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
        "sharing": "default_excl",
        "sched": {
            "preempt_queue_prio": 150,
            "preempt_order": preempt_order,
            "scheduler_iteration": 5,
        },
        "server": {"scheduling": "True", "query_other_jobs": "True", "backfill_depth": 5},
    }
