"""Nodes that a real Slurm has powered down are never powered up for a lease."""

from scavenger.interface import LeaseRequest, LeaseState
from tests.slurm.test_leases import gaps, scavenger

RESUMES = """
SuspendProgram=/bin/true
ResumeProgram={resume}
SuspendTime=3600
SuspendTimeout=1
ResumeTimeout=60
"""


def test_no_lease_resumes_a_node_that_is_powered_down_or_on_its_way(cluster, root):
    resumed, program = root / "resumed", root / "resume.sh"
    program.write_text(f"#!/bin/sh\necho $1 >>{resumed}\n")
    program.chmod(0o755)
    slurm = cluster(2, extra=RESUMES.format(resume=program))
    one = scavenger(slurm)
    assert gaps(one) == ["n1", "n2"]
    seen = set()
    slurm.run("scontrol", "update", "nodename=n1", "state=power_down")

    def down():
        """No lease is taken in any state on the way."""
        [state] = slurm.run("sinfo", "-h", "-N", "-n", "n1", "-p", "batch", "-o", "%T").split()
        assert gaps(one) == ["n2"], state
        seen.add(state)
        return state == "idle~"

    slurm.until(down, "n1 is powered down")
    [lease] = one.take([LeaseRequest("l1", "n1", ("true",))])
    assert (lease.state, "is no longer a gap" in lease.reason) == (LeaseState.ENDED, True)
    [explanation] = [e for e in one.poll().explanations if e.node == "n1"]
    assert any(
        "powered down" in sentence for _, passed, sentence in explanation.rules if not passed
    )
    assert not resumed.exists(), seen
