"""A main job of several parts gets the nodes that a real Slurm collects for it."""

from __future__ import annotations

import pytest

from scavenger.interface import LeaseRequest, LeaseState
from tests.slurm.test_leases import scavenger


@pytest.mark.thorough  # Slurm's half a minute
def test_the_nodes_of_all_components_are_left_alone_while_slurm_puts_one_off(cluster):
    """Slurm preempts all three leases and puts off one component for half a minute; its node is no
    gap meanwhile.
    """
    slurm = cluster(3)
    one = scavenger(slurm)
    requests: list[LeaseRequest] = []

    def take_gaps():
        poll = one.poll()
        new = [
            LeaseRequest(f"l{len(requests) + k}", gap.node, ("sleep", "600"))
            for k, gap in enumerate(poll.gaps)
        ]
        requests.extend(new)
        one.take(new)
        return poll.leases

    def all_leased():
        return sum(lease.state is LeaseState.RUNNING for lease in take_gaps()) == 3

    slurm.until(all_leased, "each node is leased")
    words = ("--partition=batch", "--exclusive", "--output=/dev/null")
    parts = ("--nodes=1", *words, ":", "--nodes=2", *words)
    main = slurm.run("sbatch", "--parsable", *parts, "--wrap=exec sleep 600").strip()

    def runs():
        take_gaps()
        assert len(requests) == 3, "a node that Slurm collects was leased again"
        return "RUNNING" in slurm.run("squeue", "-h", "-j", main, "-o", "%T")

    slurm.until(runs, "the job runs")
    slurm.run("scancel", main)
    one.give_back(one.poll().leases)
    slurm.until(lambda: not slurm.leases(), "no lease is left")


@pytest.mark.thorough  # Slurm's cycles
@pytest.mark.parametrize("kind", ["array", "dependency"])
def test_the_nodes_of_tasks_and_of_jobs_that_follow_are_left_alone(cluster, kind):
    """Four leases; an array of two tasks with two nodes each, or a job of two nodes that another
    one of two waits for.
    """
    slurm = cluster(4)
    one = scavenger(slurm, hold_s=None)  # as long as a site that says nothing
    requests: list[LeaseRequest] = []

    def take_gaps():
        poll = one.poll()
        new = [
            LeaseRequest(f"l{len(requests) + k}", gap.node, ("sleep", "600"))
            for k, gap in enumerate(poll.gaps)
        ]
        requests.extend(new)
        one.take(new)
        return poll.leases

    def leased(number):
        return lambda: sum(lease.state is LeaseState.RUNNING for lease in take_gaps()) == number

    slurm.until(leased(4), "each node is leased")
    words = ("--partition=batch", "--exclusive", "--output=/dev/null", "--nodes=2", "--parsable")
    if kind == "array":
        main = [slurm.run("sbatch", *words, "--array=0-1", "--wrap=exec sleep 600").strip()]
    else:
        first = slurm.run("sbatch", *words, "--wrap=exec sleep 600").strip()
        after = (f"--dependency=after:{first}",)
        main = [first, slurm.run("sbatch", *words, *after, "--wrap=exec sleep 600").strip()]

    def run():
        take_gaps()
        states = slurm.run("squeue", "-h", "-r", "-j", ",".join(main), "-o", "%T").split()
        assert len(requests) == 4, "a node that Slurm collects was leased again"
        return states == ["RUNNING"] * 2

    slurm.until(run, "both run")
    slurm.run("scancel", *main)
    one.give_back(one.poll().leases)
    slurm.until(lambda: not slurm.leases(), "no lease is left")
