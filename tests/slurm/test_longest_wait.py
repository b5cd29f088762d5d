"""``check`` on a real Slurm in which leases cannot be preempted at once."""

from __future__ import annotations

from tests.slurm.test_leases import scavenger


def test_a_lease_that_slurm_does_not_preempt_at_once_is_refused_with_the_longest_wait(cluster):
    slurm = cluster(1, extra="PreemptExemptTime=00:01:30\n")
    found = scavenger(slurm).check()
    (sentence,) = [said for works, said in found if "for a lease" in said]
    assert (False, sentence) in found
    assert "in its first 90 s Slurm preempts none (PreemptExemptTime)" in sentence
