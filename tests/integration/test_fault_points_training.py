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
from tests.integration.test_fault_points_farm import FARM_POINTS
from tests.torch_versions import trains_shards

P = FaultPoint
TRAININGS = {
    "restart": {
        "lose": (
            *(P.FORK_SERVER_WARM, P.FORK_SERVER_FORKED, P.JOB_SERVER_FORKED, P.LAUNCHER_JOINS),
            *(P.WORKER_REPORTS, P.WORKER_REPORTED, P.WORKER_WRITTEN, P.WORKER_KEPT),
            *(P.WORKER_SAVED, P.WORKER_DRAINED, P.AGENT_DRAINED),
        )
    },
    "live": {
        "lose": (
            *(P.LAUNCHER_INVITES, P.WORKER_SHARES, P.WORKER_SHARED, P.WORKER_ENTERED),
            *(P.WORKER_COMMITS, P.WORKER_COMMITTED),
        )
    },
    "sharded": {
        "want": (P.SHARDS_LEAVE, P.SHARDS_LEFT, P.SHARDS_ARRIVED, P.WORKER_SHARES),
        "lose": (P.SHARDS_ARRIVED, P.SHARDS_FILLED, P.SHARDS_DROPPED, P.WORKER_ENTERED),
        "": (P.SHARDS_COPY, P.SHARDS_KEPT, P.WORKER_COMMITS, P.WORKER_COMMITTED),
    },
    "memory": {
        "want": (
            *(P.MEMORY_WRITTEN, P.MEMORY_KEPT, P.MEMORY_GIVES, P.MEMORY_GAVE, P.MEMORY_SETTLES),
            *(P.KEEPER_TAKES, P.WORKER_SAVED, P.WORKER_DRAINED),
        )
    },
    "memory, replicas": {
        "": (
            *(P.MEMORY_WRITTEN, P.MEMORY_KEPT, P.MEMORY_GIVES, P.MEMORY_GAVE, P.MEMORY_SETTLES),
            P.KEEPER_TAKES,
        ),
        "lose": (P.MEMORY_GIVES, P.KEEPER_TAKES, P.MEMORY_SETTLES),
    },
}
"""By kind of training: what is done to a node (it is lost, wanted with notice, or nothing), and the
points that its processes come to then.
"""
SHARDED = ("sharded", "memory", "memory, replicas")
CASES = [
    pytest.param(kind, nodes, marks=trains_shards if kind in SHARDED else ())
    for kind, nodes in [*((kind, 2) for kind in TRAININGS), ("sharded", 3)]
]
SAMPLES_OF_A_ROUND = 60.0
"""Six steps: with replicas each second one is copied to another node."""


def test_every_point_is_tried():
    tried = {p for rows in TRAININGS.values() for points in rows.values() for p in points}
    assert SERVICES | tried | set(FARM_POINTS) == set(FaultPoint)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "nodes"), CASES)
def test_all_points(tmp_path, kind, nodes):
    """With three nodes a rescale can overtake one that is under way."""
    site = FaultySite(tmp_path, nodes)
    try:
        site.start_daemon()
        path = site.script("job.py", script(kind))
        spec = JobSpec(
            *("training", "", str(path), str(site.work), sys.executable),
            max_nodes=site.nodes,
            nproc_per_node=1,
            profile=False,
            mode="live" if kind in ("live", "sharded") else "restart",
        )
        with site.client() as client:
            job = client.submit(spec).id

        def trains(before):
            view = site.job(job)
            assert view.state in ("queued", "running", "suspended"), view.reason
            more = view.samples > before and len(view.nodes) == site.nodes
            return more and site.scheduler_leases() == site.daemon_leases()

        def rounds_formed():
            return len(site.events("round-formed", job))

        def on_all_nodes():
            newest = site.events("round-formed", job)[-1]
            return f"has {site.nodes} members" in newest.sentence

        def is_over(rounds, victim, lease):
            """Whether the job is on all nodes in a round after the first ``rounds``, and a node
            that was taken is back.
            """
            new = rounds_formed() > rounds and on_all_nodes()
            return new and trains(0.0) and site.scheduler_leases().get(victim) != lease

        site.until(lambda: trains(0.0), "it trains on all nodes")
        rows = [(do, point) for do, points in TRAININGS[kind].items() for point in points]
        for number, (provocation, point) in enumerate(rows):
            rounds = rounds_formed()  # none of them is one that follows from the point
            site.arm(point)
            came, in_steps = False, False
            while not came:  # a change that another overtakes may pass none of the points
                leases = site.scheduler_leases()
                victim = sorted(leases)[number % site.nodes] if provocation else "none"
                if provocation:
                    {"lose": site.lose, "want": site.want}[provocation](victim)
                before = rounds, victim, leases.get(victim, "")
                site.until(
                    lambda at=before, point=point: site.came_to(point) or is_over(*at),
                    f"a process comes to {point.name}, or all nodes are back",
                )
                rounds = rounds_formed()  # counted before the look: they precede a later strike
                came = site.came_to(point)
                if not came:  # the round has formed; its first steps may pass the point
                    before = rounds, *before[1:]
                    steps = site.job(job).samples + SAMPLES_OF_A_ROUND
                    site.until(
                        lambda at=steps, point=point: site.came_to(point) or trains(at),
                        f"a process comes to {point.name}, or the new round trains",
                    )
                    came = in_steps = site.came_to(point)
            site.struck(point)
            what = f"{point.name} ({provocation})"
            steps = site.job(job).samples + SAMPLES_OF_A_ROUND
            site.until(
                # No round follows if the process was none of the newest round: a fork server that
                # no job used, or a worker that was being stopped.
                lambda at=before, late=in_steps, steps=steps: (
                    is_over(*at) or (late and trains(steps) and on_all_nodes())
                ),
                f"all nodes are back after {what}",
            )
            samples = site.job(job).samples
            site.until(lambda at=samples: trains(at), f"it goes on after {what}")
        done = ChaosJob(job, kind, site.work)
        done.end()
        site.until_state(job, "completed")
        account = done.account()
        assert account["samples"] > 0
        assert (account["twice"], account["never"]) == (0, 0)
    finally:
        site.stop()
