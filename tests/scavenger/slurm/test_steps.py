"""Agents that end in a block, which goes on."""

import pytest

from scavenger.interface import LeaseState
from scavenger.slurm.scavenger import QUERY_INTERVAL_S
from tests.scavenger.slurm import slurm_world as world
from tests.scavenger.slurm.slurm_world import request

RUNNING, ENDED = LeaseState.RUNNING, LeaseState.ENDED


class Block:
    """A block of three leases that runs. ``steps``: those that run; None: squeue fails."""

    def __init__(self, root):
        self.slurm = world.World(root)
        self.slurm.tools.runs("sbatch", "echo 8; exit 0")
        self.slurm.tools.runs("squeue", 'case "$*" in *" -s "*) cat "$here/steps"; exit;; esac')
        self.slurm.tools.runs(
            "scontrol",
            'case "$*" in *config*) cat "$here/config";; *partition*) cat "$here/partitions";; '
            '*update*) ;; *) cat "$here/reservations";; esac; exit 0',
        )
        self.one = self.slurm.ready(shape="block")
        self.one.take([request(i) for i in (1, 2, 3)])
        self.slurm.nodes(idle="n[4-8]", allocated="n[1-3]")
        self.slurm.queue(
            world.job(
                "RUNNING", "8", f"{world.PREFIX}l1-3", nodes="n[1-3]", end=200_000, batch="n1",
                partition="preemptable", submitted=100_060,
            ),
        )  # fmt: skip

    def poll(self, *steps, after=QUERY_INTERVAL_S):
        self.slurm.now += after
        self.slurm.file("steps", "".join(f"8.{n[1:]}|{n}\n" for n in steps) + "8.batch|n1\n")
        return {lease.id: lease.state for lease in self.one.poll().leases}

    @property
    def updates(self):
        return [line for line in self.slurm.tools.calls("scontrol") if "update" in line]


@pytest.fixture
def block(tmp_path):
    return Block(tmp_path)


def test_the_node_of_an_agent_that_ended_is_given_back_and_the_others_stay(block):
    assert block.poll("n1", "n2", "n3") == {"l1": RUNNING, "l2": RUNNING, "l3": RUNNING}
    assert block.poll("n1", "n3")["l2"] is RUNNING, "once may be a controller that just started"
    assert block.poll("n1", "n3", after=5) == {"l1": RUNNING, "l2": ENDED, "l3": RUNNING}
    assert block.updates == ["scontrol update JobId=8 NodeList=n[1,3]"]
    [ended] = [lease for lease in block.one.poll().leases if lease.id == "l2"]
    assert "its agent has ended" in ended.reason
    count = len(block.slurm.tools.calls("squeue"))
    block.poll("n1", "n3", after=5)
    assert len(block.slurm.tools.calls("squeue")) == count + 1, "steps are asked for now and then"


def test_an_agent_that_has_not_begun_or_is_not_told_of_has_not_ended(block):
    assert set(block.poll("n1", "n2").values()) == {RUNNING}
    assert set(block.poll("n1", "n2").values()) == {RUNNING}, "that of n3 is about to start"
    assert set(block.poll("n1", "n2", "n3").values()) == {RUNNING}
    block.poll("n1")
    assert set(block.poll("n1", "n2", "n3").values()) == {RUNNING}, "it was there after all"
    block.slurm.tools.runs("squeue", 'case "$*" in *" -s "*) exit 1;; esac')
    for _ in range(3):
        assert set(block.poll().values()) == {RUNNING}
    assert block.updates == []
