"""Daemon, agent, launcher, supervisor and process are killed at every point that a service passes:
no job is lost, none runs twice, no lease leaks, and processes that were not struck do not notice.

Each test is one site, on which the points of its row are tried one after another. The other points,
of trainings, are in test_fault_points_training.py.
"""

from __future__ import annotations

import os
import signal
import uuid
from contextlib import suppress

import pytest

from malletrain.protocol.fault_points import FaultPoint
from tests.integration.faults import SERVICE, FaultySite

P = FaultPoint
LOSS = (
    # What follows on the loss of a node: a lease is asked for, an agent starts, a job is given.
    *(P.DAEMON_DECIDED, P.DAEMON_SAVED, P.DAEMON_SENDING, P.DAEMON_SENT),
    *(P.DAEMON_KEYED, P.DAEMON_TAKES, P.DAEMON_TOOK, P.DAEMON_POLLED),
)
AGENTS_LOSS = (
    *(P.AGENT_STARTED, P.AGENT_GREETS, P.AGENT_WELCOMED, P.AGENT_LAUNCHES, P.AGENT_LAUNCHED),
    *(P.AGENT_TELLS, P.AGENT_TOLD, P.AGENT_SAYS, P.AGENT_SAID),
)
LAUNCHERS_LOSS = (
    *(P.SUPERVISOR_FORKED, P.LAUNCHER_STARTED, P.LAUNCHER_FORKED, P.LAUNCHER_SAYS),
    *(P.LAUNCHER_SAID, P.SERVICE_JOINS, P.SERVICE_JOINED),
)
NOTICE = (
    *(P.AGENT_NOTICED, P.SERVICE_DRAINS, P.LAUNCHER_STOPS, P.LAUNCHER_STOPPED),
    *(P.SUPERVISOR_SWEEPS, P.AGENT_LEAVES, P.DAEMON_LOGGED),
)
START = (P.DAEMON_BOUND, P.DAEMON_RESTORED, P.DAEMON_ADOPTS, P.DAEMON_ADOPTED)
END = (P.DAEMON_RELEASES, P.DAEMON_RELEASED, P.LAUNCHER_STOPS, P.AGENT_SAYS, P.AGENT_LEAVES)

LATE = (P.DAEMON_RELEASES, P.DAEMON_RELEASED)
"""No process comes there unless an agent stays that was told to go."""

ALL = {
    "daemon": LOSS,
    "agent": AGENTS_LOSS,
    "launcher": LAUNCHERS_LOSS,
    "notice": NOTICE,
    "start": START,
    "end": END,
}
FEW = {
    "loss": (P.DAEMON_SAVED, P.DAEMON_TOOK, P.AGENT_LAUNCHED, P.LAUNCHER_SAYS),
    "notice": (P.SERVICE_DRAINS,),
    "start": (P.DAEMON_RESTORED,),
    "end": (P.DAEMON_RELEASES,),
}
"""In every check, on one site; all of them with the marker ``sites``."""
SERVICES = {point for points in ALL.values() for point in points} | {P.DAEMON_SUBMITTED}


class PatientSite(FaultySite):
    """On which no agent is killed before it reports."""

    lease_wait = "120 s"


@pytest.fixture
def faulty(tmp_path, request):
    """A site with a service on all its nodes."""
    made = (FaultySite if request.node.get_closest_marker("sites") else PatientSite)(tmp_path)
    try:
        made.start_daemon()
        made.service = made.script("service.py", SERVICE)
        yield made
    finally:
        made.stop()


def submit(site):
    fields = {"nodes": (1, site.nodes), "mode": "service", "profile": False, "curve": {"1": 1.0}}
    fields["curve"] = {"1": 10.0, str(site.nodes): 10.0 * site.nodes}
    return site.submit(site.service, **fields)


def spared(site, point, before, agents, victim):
    """The nodes of ``before`` on which nothing was struck, nor anything done: node → process."""
    if not point.name.startswith(("DAEMON", "AGENT")):
        return {}  # it may be another node's launcher that told of the change
    now = {node: agent.pid for node, agent in site.agents().items()}
    same = {node for node, pid in agents.items() if now.get(node) == pid}
    return {node: pid for node, pid in before.items() if node in same and node != victim}


def tries(site, job, points, provoke):
    """Each point in turn: armed, come to by what ``provoke`` does to a node, and survived."""
    before = site.until_whole(job, site.service)
    for number, point in enumerate(points):
        victim = sorted(before)[number % len(before)]
        agents = {node: agent.pid for node, agent in site.agents().items()}
        site.arm(point)
        provoke(victim)
        site.struck(point)
        after = site.until_whole(job, site.service)
        expected = spared(site, point, before, agents, victim)
        assert expected.items() <= after.items(), (
            f"{point.name}: a process that was not struck was restarted"
        )
        before = after


def starts(site, job, points):
    """The same while a daemon starts: nobody notices."""
    before = site.until_whole(job, site.service)
    lost = len(site.events("node-lost"))
    for point in points:
        site.kill_daemon()
        site.arm(point)
        site.launch_daemon()
        site.struck(point)
        assert site.until_whole(job, site.service) == before, point.name
    assert len(site.events("node-lost")) == lost


def ends(site, job, points):
    """The same while a job ends, and one job after another: nothing is left of it."""
    for number, point in enumerate(points):
        job = job if number == 0 else submit(site)
        site.until_whole(job, site.service)
        site.arm(point)
        if point in LATE:
            site.arm(P.AGENT_LEAVES, "stop")
        with site.client() as client:
            client.cancel([job])
        stays = site.struck(P.AGENT_LEAVES) if point in LATE else None
        site.struck(point)
        if stays is not None:
            with suppress(ProcessLookupError):
                os.kill(stays, signal.SIGCONT)
        site.until_state(job, "cancelled")
        site.until_nothing_is_held()
        assert not site.pids(site.service)


def test_some_points_in_every_check(faulty):
    job = submit(faulty)
    tries(faulty, job, FEW["loss"], faulty.lose)
    tries(faulty, job, FEW["notice"], faulty.want)
    starts(faulty, job, FEW["start"])
    ends(faulty, job, FEW["end"])


@pytest.mark.thorough
@pytest.mark.parametrize("what", ALL)
def test_all_points(faulty, what):
    job = submit(faulty)
    if what in ("start", "end"):
        {"start": starts, "end": ends}[what](faulty, job, ALL[what])
        return
    tries(faulty, job, ALL[what], faulty.want if what == "notice" else faulty.lose)


@pytest.mark.thorough
def test_a_submission_whose_answer_is_lost_is_one_job(faulty):
    key = uuid.uuid4().hex
    faulty.arm(P.DAEMON_SUBMITTED)
    fields = {"nodes": (1, 1), "mode": "service", "profile": False, "curve": {"1": 1.0}}
    waits = faulty.keep_submitting(lambda: faulty.submit(faulty.service, key=key, **fields))
    faulty.struck(P.DAEMON_SUBMITTED)
    job = waits()
    with faulty.client() as client:
        assert [view.id for view in client.jobs()] == [job]
