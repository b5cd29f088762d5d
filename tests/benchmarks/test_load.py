"""The small form of ``python -m benchmarks.load``: one real daemon, its agents simulated. What is
told and kept is counted; how long it took is the benchmark's.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.load import CAUSES, latencies, running
from benchmarks.load_fleet import Seen
from benchmarks.load_past import fill
from benchmarks.load_site import Site, add_jobs
from malletrain.client import Connection
from malletrain.store.store import Store
from tests.waiting import PATIENCE_S

AGENTS, JOBS, SPARE = 40, 4, 10


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(
        tmp_path / "site",
        AGENTS + SPARE,
        AGENTS,
        fleets=1,
        heartbeat_s=1.0,
        agent_timeout_s=600.0,
        patience_s=PATIENCE_S,
        running=JOBS,
    )


@pytest.mark.thorough
def test_forty_agents_and_their_jobs_are_served_and_a_wave_of_nodes_too(site: Site) -> None:
    try:
        jobs = add_jobs(site.state, JOBS, (1, AGENTS // JOBS))
        site.start_daemon()
        site.until(lambda: len(running(site)) == JOBS, "all jobs run")
        site.until(lambda: sum(map(len, site.at_work().values())) == AGENTS, "all nodes are used")
        assert sorted(site.at_work()) == sorted(jobs)

        # The reports of every job arrive and are counted.
        def samples() -> dict[str, float]:
            with Connection.of(site.state) as client:
                return {job.id: job.samples for job in client.jobs()}

        site.until(lambda: all(samples()[job] > 0 for job in jobs), "all jobs have samples")
        beats = site.sent[0]["beats"]
        site.until(lambda: site.sent[0]["beats"] >= beats + AGENTS, "every agent has beaten")
        site.until(lambda: sum(site.welcome) == AGENTS, "the daemon has all agents")

        # As many nodes go as come, at one moment: every job goes on, on other nodes.
        gone = [name for name, node in site.cluster.nodes.items() if node.lease][:SPARE]
        new = [name for name, node in site.cluster.nodes.items() if node.idle_since is None]
        site.offer(gone, idle=False)
        site.offer(new)
        site.tell("vanish", gone)

        def moved() -> bool:
            work = site.at_work()
            nodes_at_work = {node for nodes in work.values() for node in nodes}
            all_used = len(nodes_at_work) == AGENTS and sorted(work) == sorted(jobs)
            return all_used and nodes_at_work.isdisjoint(gone) and nodes_at_work.issuperset(new)

        site.until(moved, "the jobs are on the nodes that there are")  # as many as they can use

        # Killed and started again, it has the same jobs on the same nodes.
        def placed() -> dict[str, list[str]]:
            return {job: sorted(nodes) for job, nodes in site.at_work().items()}

        before, samples_before = placed(), samples()
        with Connection.of(site.state) as client:
            last = client.events(since=-1)[-1].seq
        site.end_daemon(9)
        site.until(lambda: sum(site.welcome) == 0, "the agents notice")
        site.start_daemon()
        site.until(lambda: sum(site.welcome) == AGENTS, "it has all agents again")
        site.until(lambda: adopted(site, last) == JOBS, "it has all jobs in hand")
        site.until(lambda: placed() == before, "they are where they were")
        # Counts that were not yet written come back with the next reports.
        site.until(
            lambda: all(samples()[job] >= samples_before[job] for job in jobs), "no count is lost"
        )
    finally:
        site.close()


def adopted(site: Site, since: int) -> int:
    """Jobs that the daemon took over after the event of this number."""
    with Connection.of(site.state) as client:
        return sum(e.kind == "job-adopted" for e in client.events(since=since, limit=1000))


def test_a_long_past_is_filled_in_as_told(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    fill(state, 50, 500)
    with Store.open(f"sqlite:///{state / 'malletrain.db'}") as store:
        assert store.totals().jobs == {"completed": 50, "cancelled": 1}
        assert sum(store.totals().events.values()) == 500
        assert store.new_job_id() == "j52"


def test_a_command_is_counted_for_the_event_of_its_job_before_it() -> None:
    seen = [
        Seen(1.0, "leaving", "n1", "j1"),
        Seen(1.1, "Round", "n5", "j2"),
        Seen(1.25, "Drain", "n2", "j1"),
        Seen(1.3, "drained", "n2", "j1"),
        Seen(1.35, "Release", "n1", "j1"),
        Seen(1.5, "Round", "n2", "j1", 2),
        Seen(2.0, "leaving", "n9", ""),
    ]
    by_cause = latencies(seen, 0.0)
    assert by_cause["leaving"] == [pytest.approx(0.25)]
    assert by_cause["drained"] == [pytest.approx(0.2)]
    assert set(by_cause) == set(CAUSES)
