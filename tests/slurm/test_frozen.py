"""A slurmctld that is frozen for a while: it is asked again within the promised time, and what was
decided meanwhile is seen.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from scavenger.batch.calls import CallLog
from scavenger.batch.commands import CommandPolicy
from scavenger.interface import LeaseRequest, SchedulerError
from tests.integration.test_main_job import STEADY
from tests.slurm.cluster import SlurmCluster
from tests.slurm.site import slurm_site
from tests.slurm.test_leases import LEAVE, scavenger

RESERVE = ("scontrol", "create", "reservation", "ReservationName=m", "Users=root", "Nodes=n1")
FROZEN_S = 33.0
"""How long slurmctld is frozen in the whole site, seconds: longer than Slurm's MessageTimeout."""
RESERVED_IN_S = 240.0
"""When the maintenance begins after its reservation, seconds: sooner than ten times FROZEN_S."""


@contextmanager
def frozen(slurm: SlurmCluster) -> Iterator[None]:
    """slurmctld is stopped meanwhile."""
    slurm.processes["slurmctld"].send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        slurm.processes["slurmctld"].send_signal(signal.SIGCONT)


def reservation(slurm: SlurmCluster, begins_in_s: float) -> subprocess.Popen[bytes]:
    """An operator's command for a maintenance of n1. It waits for slurmctld."""
    begins = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + begins_in_s))
    command = (*RESERVE, f"StartTime={begins}", "Duration=5", "Flags=MAINT,IGNORE_JOBS")
    return subprocess.Popen(command, env=slurm.environment, cwd=slurm.root)


def test_a_frozen_slurmctld_is_asked_again_soon_and_a_reservation_made_meanwhile_is_seen(
    cluster, root
):
    slurm = cluster(2, grace=3600)
    one = scavenger(slurm, spare_s=12.0)
    longest_s = one.settings.max_pause_s
    one.commands.calls = CallLog(max_backoff_s=longest_s)  # as the daemon connects
    one.poll()
    notice = root / "told"
    one.take([LeaseRequest("l1", "n1", (sys.executable, "-c", LEAVE, str(notice)))])
    slurm.until((root / "told.ready").exists, "the lease runs")
    patient = one.commands.policy
    one.commands.policy = CommandPolicy(timeout_s=0.5, tries=1)
    with frozen(slurm):
        operator = reservation(slurm, 600.0)
        pauses_s = []
        for _ in range(4):
            with pytest.raises(SchedulerError):
                one.poll()
            pauses_s.append(one.contact().busy_s)
        assert one.contact().busy
        assert all(0 < pause_s <= longest_s for pause_s in pauses_s), pauses_s
        assert not notice.exists()
    one.commands.policy = patient
    assert operator.wait() == 0
    assert one.poll().poll_again_s <= longest_s
    assert not one.contact().busy
    slurm.until(lambda: one.poll() and notice.exists(), "the lease is told of the maintenance")
    slurm.until(lambda: not slurm.leases(), "it leaves in order")


@pytest.mark.thorough  # more than half a minute of silence
def test_a_site_gets_over_a_slurmctld_that_was_frozen_for_33_s(cluster, root):
    """Ten times the 33 s of the slow answer would be the next poll after the maintenance begins."""
    slurm = cluster(3, grace=3600)
    with slurm_site(root / "site", slurm) as site:
        job = site.submit(site.script("steady.py", STEADY), nodes=(1, 3))
        site.until(lambda: len(site.job(job).nodes) == 3, "the job runs on 3 nodes")
        rounds = len(site.events("round-formed", job))
        with frozen(slurm):
            thaws_at = time.time() + FROZEN_S
            site.until(lambda: site.events("scheduler-busy"), "the daemon says so")
            with site.client() as client:
                assert "answer" in client.status().poll_error
            samples = site.job(job).samples
            site.until_samples(job, samples + 50)
            site.until(lambda: time.time() > thaws_at, "the time is over")
            assert len(site.events("round-formed", job)) == rounds, "no job notices"
            operator = reservation(slurm, RESERVED_IN_S)
        assert operator.wait() == 0
        site.until(lambda: site.events("scheduler-answers"), "polls work again")
        site.until(lambda: site.events("node-leaving"), "the maintenance is seen")
        [leaving] = site.events("node-leaving")
        assert leaving.node == "n1"
        assert leaving.time < thaws_at + RESERVED_IN_S, "before it begins"
        site.until(lambda: len(site.job(job).nodes) == 2, "the job goes on without the node")
        site.until_samples(job, site.job(job).samples + 50)
        (site.work / "stop").touch()
        done = site.until_state(job, "completed", "failed")
        assert (done.state, done.tries) == ("completed", 0)
