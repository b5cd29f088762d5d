"""Fork servers, launchers and workers of trainings are killed at every point that they pass: the
job goes on, and in the end every sample was trained on once.

The points of services, and those of daemon and agent, are in test_fault_points.py.
"""

from __future__ import annotations

import sys

import pytest

from benchmarks.chaos_jobs import ChaosJob, script
from malletrain.protocol.fault_points import FaultPoint
from malletrain.protocol.messages import JobSpec
from tests.integration.faults import FaultySite
from tests.integration.test_fault_points import SERVICES

P = FaultPoint
TRAININGS = {
    "restart": (
        *(P.FORK_SERVER_WARM, P.FORK_SERVER_FORKED, P.JOB_SERVER_FORKED, P.LAUNCHER_JOINS),
        *(P.WORKER_REPORTS, P.WORKER_REPORTED, P.WORKER_WRITTEN, P.WORKER_KEPT),
        *(P.WORKER_SAVED, P.WORKER_DRAINED, P.AGENT_DRAINED),
    ),
    "live": (
        *(P.LAUNCHER_INVITES, P.WORKER_SHARES, P.WORKER_SHARED, P.WORKER_ENTERED),
        *(P.WORKER_COMMITS, P.WORKER_COMMITTED),
    ),
}


def test_every_point_is_tried():
    assert SERVICES | {p for points in TRAININGS.values() for p in points} == set(FaultPoint)


@pytest.mark.sites
@pytest.mark.parametrize("mode", TRAININGS)
def test_all_points(tmp_path, mode):
    site = FaultySite(tmp_path)
    try:
        site.start_daemon()
        path = site.script("job.py", script(mode))
        spec = JobSpec(
            *("training", "", str(path), str(site.work), sys.executable),
            max_nodes=site.nodes,
            nproc_per_node=1,
            profile=False,
            mode=mode,
        )
        with site.client() as client:
            job = client.submit(spec).id

        def trains(before):
            view = site.job(job)
            assert view.state in ("queued", "running", "suspended"), view.reason
            more = view.samples > before and len(view.nodes) == site.nodes
            return more and site.held() == site.known()

        site.until(lambda: trains(0.0), "it trains on all nodes")
        for number, point in enumerate(TRAININGS[mode]):
            site.arm(point)
            site.lose(sorted(site.job(job).nodes)[number % site.nodes])
            site.struck(point)
            before = site.job(job).samples
            site.until(lambda at=before: trains(at), f"it goes on after {point.name}")
        done = ChaosJob(job, mode, site.work)
        done.end()
        site.until_state(job, "completed")
        account = done.account()
        assert account["samples"] > 0
        assert (account["twice"], account["never"]) == (0, 0)
    finally:
        site.stop()
