"""A main job of several parts gets the nodes that a real Slurm collects for it."""

from __future__ import annotations

import pytest

from scavenger.interface import LeaseRequest, LeaseState
from tests.slurm.test_leases import scavenger


@pytest.mark.sites  # Slurm's half a minute
def test_the_nodes_of_all_components_are_left_alone_while_slurm_puts_one_off(cluster):
    """Slurm preempts all three leases and puts off one component for half a minute; its node is no
    gap meanwhile.
    """
    slurm = cluster(3)
    one = scavenger(slurm)
    asked: list[LeaseRequest] = []

    def take_gaps():
        poll = one.poll()
        new = [
            LeaseRequest(f"l{len(asked) + k}", gap.node, ("sleep", "600"))
            for k, gap in enumerate(poll.gaps)
        ]
        asked.extend(new)
        one.take(new)
        return poll.leases

    def all_leased():
        return sum(lease.state is LeaseState.RUNNING for lease in take_gaps()) == 3

    slurm.until(all_leased, "each node is leased")
    words = ("--partition=batch", "--exclusive", "--output=/dev/null")
    parts = ("--nodes=1", *words, ":", "--nodes=2", *words)
    main = slurm.run("sbatch", "--parsable", *parts, "--wrap=sleep 600").strip()

    def runs():
        take_gaps()
        assert len(asked) == 3, "a node that Slurm collects was leased again"
        return "RUNNING" in slurm.run("squeue", "-h", "-j", main, "-o", "%T")

    slurm.until(runs, "the job runs")
    slurm.run("scancel", main)
    one.give_back(one.poll().leases)
    slurm.until(lambda: not slurm.leases(), "no lease is left")
