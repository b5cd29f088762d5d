"""What releases of Slurm after 22.05 can do; skipped on those that cannot."""

from __future__ import annotations

import pytest

from scavenger.slurm.job import SlurmLeaseOptions
from tests.slurm.cluster import missing, release
from tests.slurm.test_leases import scavenger


@pytest.fixture
def needs():
    """Call it with the release that a test needs."""

    def check(*oldest: int) -> None:
        if not missing() and release() < oldest:
            pytest.skip(f"Slurm {'.'.join(f'{part:02d}' for part in oldest)} or later is needed")

    return check


def test_preemption_by_priority_is_found(cluster, needs):
    needs(25, 5)
    slurm = cluster(1, preempt_mode="PRIORITY,REQUEUE")
    troubles = [sentence for works, sentence in scavenger(slurm).check() if not works]
    assert len(troubles) == 1, troubles
    assert troubles[0].startswith(
        "Jobs of batch preempt a lease only if its priority is not higher"
    )
    lease = SlurmLeaseOptions(partition="preemptable", nice=1_000_000)
    assert all(works for works, _ in scavenger(slurm, lease=lease).check())


def test_a_job_that_is_requeued_with_expedite_waits(cluster, needs):
    needs(25, 11)
    slurm = cluster(2, controller="preempt_send_user_signal,enable_expedited_requeue")
    one = scavenger(slurm)
    main = slurm.submit("sleep 3600", "--nodelist=n1", "--requeue=expedite", "--time=60")
    slurm.until(lambda: slurm.jobs()[main][0] == "RUNNING", "the main job runs")
    slurm.run("scontrol", "update", "NodeName=n1", "State=DOWN", "Reason=dead")
    slurm.until(lambda: slurm.jobs()[main][0] == "EXPEDITING", "it waits for its node")
    _, jobs, _ = one.source.read(one.settings.prefix)
    assert [(job.id, job.state) for job in jobs.pending] == [(main, "EXPEDITING")]
