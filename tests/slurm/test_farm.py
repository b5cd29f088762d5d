"""Farms on a real Slurm: its SIGTERM reaches the tasks themselves, and costs them no try."""

from __future__ import annotations

import time

from malletrain.launch.farm import JUST_BEGUN_S
from tests.integration import farms
from tests.slurm.site import slurm_site


def test_tasks_of_a_lease_that_is_cancelled_or_preempted_use_up_no_try(cluster, root):
    slurm = cluster(2, grace=3600)
    with slurm_site(root / "s", slurm) as site:
        site.script("hold", "")
        command = "while [ -e hold ]; do sleep 0.1; done; " + farms.APPEND
        job = farms.submit(site, command, farms.numbered(6), nodes="1:2", cpus=0)
        site.until(lambda: farms.tasks(site, job).counts["running"] == 2, "both nodes have tasks")
        victim = next(iter(slurm.leases()))
        slurm.run("scancel", victim)
        site.until(lambda: site.events("node-leaving"), "the notice is heard of")
        site.until(lambda: victim not in slurm.leases(), "the lease ends")
        main = slurm.submit("sleep 0.5", "--nodes=2", "--exclusive", "--time=2")
        slurm.until(lambda: slurm.jobs()[main][0] == "COMPLETED", "the main job completes")
        site.until(
            lambda: farms.tasks(site, job).counts["running"] == 2, "both nodes have tasks again"
        )
        (site.work / "hold").unlink()
        site.until_state(job, "completed", "failed")
        assert {task.tries for task in farms.tasks(site, job).tasks} == {0}
        assert site.job(job).state == "completed"
        assert farms.runs(site) == dict.fromkeys(range(6), 1)


def test_tasks_with_a_drain_time_end_on_the_node_that_a_main_job_takes(cluster, root):
    slurm = cluster(2, grace=3600)
    with slurm_site(root / "s", slurm) as site:
        site.script("hold", "")
        command = f"echo {{index}} >> begun; while [ -e hold ]; do sleep 0.1; done; {farms.APPEND}"
        job = farms.submit(site, command, farms.numbered(4), nodes="1:2", cpus=0, drain_s=3600.0)
        site.until(lambda: farms.tasks(site, job).counts["running"] == 2, "both nodes have tasks")
        seen = time.monotonic()
        site.until(lambda: time.monotonic() > seen + JUST_BEGUN_S, "none has just begun")
        main = slurm.submit("sleep 0.5", "--nodes=2", "--exclusive", "--time=2")
        site.until(lambda: len(site.events("node-leaving")) == 2, "both notices are heard")
        (site.work / "hold").unlink()
        slurm.until(lambda: slurm.jobs()[main][0] == "COMPLETED", "the main job completes")
        site.until_state(job, "completed", "failed")
        assert site.job(job).state == "completed"
        assert farms.runs(site, "begun") == farms.runs(site) == dict.fromkeys(range(4), 1)


def test_a_lease_that_is_preempted_while_it_starts_leaves_at_once(cluster, root):
    slurm = cluster(1, grace=3600)
    with slurm_site(root / "s", slurm) as site:
        farms.submit(site, "sleep 1000", farms.numbered(1), nodes="1:1", cpus=0)
        slurm.until(
            lambda: any(state == "RUNNING" for state, _, _ in slurm.leases().values()),
            "a lease begins",
        )
        main = slurm.submit("true", "--exclusive", "--time=2")
        slurm.until(lambda: slurm.jobs()[main][0] == "COMPLETED", "the main job completes")
