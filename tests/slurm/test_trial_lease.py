"""A lease on trial at a real Slurm, beside a lease of a daemon."""

from scavenger.batch.check import try_lease, use_trial_prefix
from scavenger.interface import LeaseRequest, LeaseState
from tests.slurm.test_leases import gaps, scavenger, states


def test_a_lease_is_taken_to_its_end_and_those_of_a_daemon_stay(cluster):
    slurm = cluster(2)
    daemons = scavenger(slurm)
    slurm.until(lambda: len(gaps(daemons)) == 2, "the nodes are gaps")
    daemons.take([LeaseRequest("l1", "n1", ("sleep", "600"))])
    slurm.until(lambda: states(daemons)["l1"] is LeaseState.RUNNING, "the daemon's lease runs")
    trial = scavenger(slurm)
    use_trial_prefix(trial)
    steps = list(try_lease(trial))
    assert [works for works, _ in steps] == [True] * 4, steps
    assert steps[1][1].startswith("The lease on n2 was taken as job ")
    assert states(daemons) == {"l1": LeaseState.RUNNING}
    daemons.give_back(daemons.poll().leases)
    slurm.until(lambda: not slurm.leases(), "no lease is left")
