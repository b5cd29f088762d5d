"""``check`` on a real Slurm in which leases cannot be preempted at once."""

from __future__ import annotations

from tests.slurm.test_leases import scavenger


def test_a_lease_that_slurm_does_not_preempt_at_once_is_refused_with_the_longest_wait(cluster):
    slurm = cluster(1, extra="PreemptExemptTime=00:01:30\n")
    findings = scavenger(slurm).check()
    (sentence,) = [sentence for works, sentence in findings if "for a lease" in sentence]
    assert (False, sentence) in findings
    assert "in its first 90 s Slurm preempts none (PreemptExemptTime)" in sentence
