"""Leases by QOS in the main jobs' own partition, on a real Slurm with accounting: preempted,
limited by the site, and checked.
"""

from __future__ import annotations

import sys

import pytest

from scavenger.interface import LeaseRequest, LeaseState
from scavenger.slurm.job import SlurmLeaseOptions
from tests.slurm.test_leases import LEAVE, gaps, scavenger, states

QOS = (
    "add qos scavenger preemptmode=cancel gracetime=3600 maxsubmitjobsperuser=3",
    "modify qos normal set preempt+=scavenger",
    "modify account root set qos=normal,scavenger",
)


@pytest.fixture
def slurm(accounted):
    return accounted(4, prepare=QOS, preempt="preempt/qos", lease_mode="")


def test_leases_of_a_qos_that_others_preempt(slurm, root):
    careless = scavenger(slurm, lease=SlurmLeaseOptions(partition="batch"))
    assert any(
        "set qos in [scheduler.slurm]" in sentence
        for works, sentence in careless.check()
        if not works
    )
    options = SlurmLeaseOptions(partition="batch", qos="scavenger")
    one = scavenger(slurm, lease=options, grace_s=3600.0)
    findings = one.check()
    assert all(works for works, _ in findings), findings
    assert any(
        "Jobs of QOS normal preempt those of scavenger" in sentence for _, sentence in findings
    )
    assert gaps(one) == slurm.nodes
    marks = [root / f"told-{node}" for node in slurm.nodes]
    requests = [
        LeaseRequest(f"l{i}", node, (sys.executable, "-c", LEAVE, str(path)))
        for i, (node, path) in enumerate(zip(slurm.nodes, marks, strict=True), 1)
    ]
    leases = one.take(requests)
    # The site allows three: the fourth is refused, and nothing more is asked for.
    polled = one.poll()
    assert sorted(lease.state for lease in leases) == [LeaseState.ENDED] + 3 * [
        LeaseState.PENDING
    ], leases
    [refused] = [lease for lease in leases if lease.state is LeaseState.ENDED]
    assert "limit" in refused.reason
    slurm.until(
        lambda: sum(path.with_name(path.name + ".ready").exists() for path in marks) == 3,
        "three leases run",
    )
    assert polled.gaps == ()
    sentences = [words for e in polled.explanations for _, passed, words in e.rules if not passed]
    assert any("refuses more jobs" in words for words in sentences), sentences
    # A job of the normal QOS in the same partition takes two of them, and no other.
    main = slurm.submit("sleep 1", "--nodes=3", "--exclusive", "--time=1")
    slurm.until(lambda: slurm.jobs()[main][0] in ("RUNNING", "COMPLETED"), "the main job runs")
    assert sum(path.exists() for path in marks) == 2, "two leases were told to leave"
    assert sorted(state for state in states(one).values() if state is not LeaseState.ENDED) == [
        LeaseState.RUNNING
    ]
    one.give_back(one.poll().leases)
    slurm.until(lambda: not slurm.leases(), "the leases are cancelled")
