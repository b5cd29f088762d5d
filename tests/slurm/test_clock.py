"""A real Slurm whose controller's clock is a minute ahead of that of the daemon's host."""

from __future__ import annotations

import time

from scavenger.interface import LeaseRequest, LeaseState
from tests.slurm.test_leases import scavenger, states


def test_a_lease_leaves_in_time_for_a_reservation(cluster):
    slurm = cluster(1)
    one = scavenger(slurm)
    one.clock = lambda: time.time() - 60.0
    one.poll()
    one.take([LeaseRequest("l1", "n1", ("sleep", "600"))])
    slurm.until(lambda: states(one)["l1"] is LeaseState.RUNNING, "the lease runs")
    assert not one.ender.leave_requests
    words = ("StartTime=now+15", "Duration=10", "Nodes=n1", "Flags=MAINT,IGNORE_JOBS", "Users=root")
    slurm.run("scontrol", "create", "reservation", "ReservationName=m", *words)
    one.poll()
    assert "l1" in one.ender.leave_requests
    sentences = [sentence for _, sentence in one.check() if "clock" in sentence]
    assert len(sentences) == 1
    assert "s ahead of that of this host" in sentences[0]
