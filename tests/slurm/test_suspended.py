"""A node whose only job an operator suspended is idle for Slurm, and no gap."""

from __future__ import annotations

from tests.slurm.test_leases import scavenger


def test_the_node_of_a_suspended_job_is_no_gap(cluster):
    """The job keeps its memory there, and is to go on with the whole node when it is resumed."""
    slurm = cluster(2)
    one = scavenger(slurm)
    words = ("--partition=batch", "--exclusive", "--output=/dev/null", "--nodelist=n1")
    job = slurm.run("sbatch", "--parsable", *words, "--wrap=exec sleep 600").strip()

    def state():
        return slurm.run("squeue", "-h", "-j", job, "-o", "%T").strip()

    slurm.until(lambda: state() == "RUNNING", "the job runs")
    slurm.run("scontrol", "suspend", job)
    slurm.until(
        lambda: "idle" in slurm.run("sinfo", "-h", "-n", "n1", "-p", "batch", "-o", "%T"),
        "Slurm calls its node idle",
    )

    def gaps():
        return {gap.node for gap in one.poll().gaps}

    slurm.until(lambda: "n2" in gaps(), "the other node is a gap")
    assert gaps() == {"n2"}
    n1 = next(each for each in one.poll().explanations if each.node == "n1")
    assert any(f"job {job} is suspended on it" in sentence for _, _, sentence in n1.rules)
    slurm.run("scontrol", "resume", job)
    slurm.until(lambda: state() == "RUNNING", "the job goes on")
    slurm.run("scancel", job)
