"""MalleTrain on a real Slurm, end to end: malleable jobs on the nodes that a main workload leaves,
and what goes wrong meanwhile.
"""

from __future__ import annotations

import json

import pytest

from tests.integration.test_main_job import STEADY
from tests.selection import every_change
from tests.slurm.site import slurm_site
from tests.slurm.test_leases import GPUS

MAIN = {4: ((1, 2), (1, 1), (4,)), 8: ((1, 2), (4,), (1, 1, 3), (6,), (8,))}
"""Size of a cluster → nodes of main jobs that come together and would all start at once if they had
the nodes for themselves.
"""

TELLING = (
    """
import json, os, sys
name = f"{os.environ['RANK']}-{os.getpid()}"
with open(f"new-{name}", "w") as f:
    json.dump([sys.argv[1:], os.environ.get("NASTY"), os.getcwd()], f)
os.rename(f"new-{name}", f"told-{name}")  # whole, or not at all: it may be killed here
"""
    + STEADY
)


@pytest.mark.parametrize("size", every_change(MAIN, 4))
def test_main_jobs_do_not_wait_and_no_malleable_job_is_lost(cluster, root, size):
    # A lease that ignored its signal would keep its node for an hour.
    slurm = cluster(size, grace=3600)
    with slurm_site(root / "site", slurm) as site:
        script = site.script('it\'s a $(script) "of"\nmine.py', TELLING)
        words = ["a b", "$(id)", "it's", 'a "word"', "new\nline", ""]
        largest = {"one": size // 4, "two": size // 2, 'it\'s "$(three)" `3`': size}
        jobs = [
            site.submit(script, *words, nodes=(1, most), name=name, env={"NASTY": "\n".join(words)})
            for name, most in largest.items()
        ]

        def welcomed():
            """A lease that is taken before its agent has reported is no node that leaves."""
            with site.client() as client:
                return sum(node.state in ("free", "job") for node in client.nodes())

        for group in MAIN[size]:
            site.until(lambda: welcomed() == size, "MalleTrain holds all nodes")
            for job in jobs:
                site.until_samples(job, site.job(job).samples + 10)
            main = [
                slurm.submit("sleep 0.5", f"--nodes={count}", "--exclusive", "--time=2")
                for count in group
            ]
            slurm.until(
                lambda main=main: all(slurm.jobs()[i][0] == "COMPLETED" for i in main),
                "the main jobs run and complete",
            )
        preempted = site.events("node-leaving")
        (site.work / "stop").touch()
        for job in jobs:
            done = site.until_state(job, "completed", "failed")
            assert done.state == "completed", site.show(job).failure
            assert done.tries == 0
        assert done.name == 'it\'s "$(three)" `3`'
        records = [json.loads(path.read_text()) for path in site.work.glob("told-*")]
        assert all(record == [words, "\n".join(words), str(site.work)] for record in records)
        assert len(records) > 3
        assert len(preempted) >= sum(map(max, MAIN[size])), "they ran on nodes that were leased"
        site.until(lambda: not slurm.leases(), "every lease is given back")
    assert not slurm.jobs_processes()


def test_a_job_has_as_many_processes_on_a_node_as_its_lease_has_gpus(cluster, root):
    slurm = cluster(1, controller="enable_configless", **GPUS)
    with slurm_site(root / "site", slurm, lines='gres = "gpu:2"') as site:
        jobs = [
            site.submit(
                site.script("steady.py", STEADY),
                name=name,
                nproc_per_node=count,
                env={"SECONDS": "1"},
            )
            for name, count in (("as the lease", 0), ("as it says", 3))
        ]
        for job, processes in zip(jobs, (2, 3), strict=True):
            done = site.until_state(job, "completed", "failed")
            assert done.state == "completed", site.show(job).failure

            def printed(job=job, words=f"rank 0 of {processes}"):
                with site.client() as client:
                    return words in client.logs(job, stream="rank0").text

            # What a worker printed may come after its end.
            site.until(printed, f"its log is of {processes} processes")


@pytest.mark.thorough
def test_troubles_of_the_machine_lose_no_job(cluster, root):
    slurm = cluster(5, grace=3600)
    with slurm_site(root / "site", slurm) as site:
        script = site.script("steady.py", STEADY)
        job = site.submit(script, nodes=(1, 3))
        site.until(lambda: len(site.job(job).nodes) == 3, "the job runs on 3 nodes")
        site.until_samples(job, 50)

        def trains_on(what, nodes=3):
            site.until(
                lambda: len(site.job(job).nodes) == nodes, f"the job has {nodes} nodes {what}"
            )
            site.until_samples(job, site.job(job).samples + 50)

        # slurmctld away for a while, and back: the job does not notice.
        rounds = len(site.events("round-formed", job))
        slurm.end("slurmctld")
        site.until(lambda: site.has_logged("poll failed"), "the daemon notices")
        site.until_samples(job, site.job(job).samples + 200)
        slurm.start_controller()
        slurm.until(lambda: len(slurm.leases()) == 3, "Slurm knows the leases again")
        site.until(
            lambda: site.malletrain("status", "--json").returncode == 0, "the daemon answers"
        )
        assert len(site.events("round-formed", job)) == rounds
        # The daemon restarted with leases running: everything is adopted.
        leases = set(slurm.leases())
        site.kill_daemon(9)
        site.start_daemon()
        site.until(lambda: site.events("job-adopted", job), "the job is adopted")
        trains_on("after the restart")
        assert set(slurm.leases()) == leases
        assert len(site.events("round-formed", job)) == rounds
        # A lease cancelled by an operator.
        victim, (_, node, _) = next(iter(slurm.leases().items()))
        slurm.run("scancel", victim)
        site.until(lambda: victim not in slurm.leases(), "the lease is over")
        site.until(lambda: len(site.events("round-formed", job)) > rounds, "the job goes on")
        trains_on("after scancel")
        # A node drained while it is leased: it is used until the lease ends, and no gap afterwards.
        node = site.job(job).nodes[0]
        slurm.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=fan")
        slurm.run(
            "scancel", next(i for i, (_, where, _) in slurm.leases().items() if where == node)
        )
        site.until(
            lambda: len(site.job(job).nodes) == 3 and node not in site.job(job).nodes,
            "the job has another node instead",
        )
        assert "drain" in slurm.states()[slurm.nodes.index(node)]
        slurm.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        # slurmd of a leased node killed and the node given up: its lease ends, and no process of it
        # stays.
        node = site.job(job).nodes[0]
        slurm.end(node, 9)
        slurm.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=dead")
        site.until(
            lambda: node not in site.job(job).nodes and len(site.job(job).nodes) == 3,
            "the job does without the node",
        )
        site.until(lambda: node not in site.agents(), "the agent there is gone")
        slurm.start_node(node)
        slurm.until(lambda: "idle" in slurm.states()[slurm.nodes.index(node)], "the node is back")
        # A lease asked for on a node that is taken at the same moment.
        trains_on("before it grows")
        main = slurm.submit("sleep 1", "--nodes=5", "--exclusive", "--time=1")
        site.until(
            lambda: slurm.jobs()[main][0] == "COMPLETED",
            "the main job runs on all nodes and completes",
        )
        trains_on("after all nodes were taken")
        (site.work / "stop").touch()
        done = site.until_state(job, "completed", "failed")
        assert done.state == "completed"
        assert done.tries == 0
