"""Leases of slots whose job has a whole host, on imitated commands of Slurm."""

from __future__ import annotations

import pytest

from scavenger.batch.slots import SlotKind
from scavenger.interface import LeaseState, SchedulerError
from tests.scavenger.slurm import slurm_world as world
from tests.scavenger.slurm.slurm_world import request

RUNNING, ENDED, NOT_YET = LeaseState.RUNNING, LeaseState.ENDED, LeaseState.NOT_YET
KIND = SlotKind(
    "pair",
    {"gpu": 2, "cpus": 4, "memory_mb": 1000},
    nodes=frozenset({"n1", "n2"}),
    whole_host=True,
)
SLOTS = [f"n{host}/pair.{number}" for host in (1, 2) for number in (0, 1)]
TERM = "scancel --signal=TERM"


class Hosts:
    """Two hosts of two slots each. Slurm's job of the first one is 70."""

    def __init__(self, root, **settings):
        self.slurm = slurm = world.World(root)
        slurm.file("config", world.CONFIG + "SelectType = select/cons_tres\n")
        slurm.file(
            "hosts",
            "".join(
                f"NodeName={name} CPUAlloc=0 CPUTot=8 Gres=gpu:4 GresUsed=gpu:0 RealMemory=9000 "
                f"AllocMem=0 ThreadsPerCore=1 State=IDLE Owner=N/A\n"
                for name in ("n1", "n2")
            ),
        )
        slurm.tools.runs(
            "scontrol",
            'case "$*" in *"show node"*) cat "$here/hosts"; exit;; *config*) cat "$here/config"; '
            'exit;; *partition*) cat "$here/partitions"; exit;; *) cat "$here/reservations"; '
            "exit;; esac",
        )
        slurm.tools.runs("squeue", 'case "$*" in *" -s "*) cat "$here/steps"; exit;; esac')
        slurm.tools.runs("sbatch", '[ -f "$here/sbatch.mode" ] || { echo 70; exit 0; }')
        slurm.nodes(idle="n[1-2]")
        self.one = slurm.ready(slots=(KIND,), **settings)

    def take(self):
        return self.one.take([request(n, slot) for n, slot in enumerate(SLOTS[:2], 1)])

    def poll(self, *pending, steps=(0, 1), after=1.0):
        """Slurm runs job 70; ``steps``: those of its slots that run; ``pending``: other jobs."""
        self.slurm.now += after
        self.slurm.nodes(allocated="n1", idle="n2")
        self.slurm.file(
            "steps",
            "".join(f"70.{number}|n1|n1/pair.{number}\n" for number in steps)
            + "70.batch|n1|batch\n",
        )
        ours = world.job(
            "RUNNING", "70", f"{world.PREFIX}l1-2", nodes="n1", end=200_000, batch="n1",
            partition="preemptable", submitted=100_060,
        )  # fmt: skip
        self.slurm.queue(ours, *pending)
        return {lease.id: lease.state for lease in self.one.poll().leases}

    @property
    def cancels(self):
        return self.slurm.tools.calls("scancel")


@pytest.fixture
def hosts(tmp_path):
    return Hosts(tmp_path)


def test_one_job_for_the_slots_of_a_host(hosts):
    assert world.names(hosts.one.poll()) == SLOTS
    assert [lease.scheduler_id for lease in hosts.take()] == ["70/n1/pair.0", "70/n1/pair.1"]
    [line] = hosts.slurm.tools.calls("sbatch")
    for word in ("--nodelist=n1", "--exclusive", "--gres=gpu:4", f"{world.PREFIX}l1-2"):
        assert word in line
    assert hosts.poll() == {"l1": RUNNING, "l2": RUNNING}


def due(hosts, nodes="n1"):
    """A main job that Slurm is about to start there."""
    return world.job(
        "PENDING", 99, "big", reason="Resources", planned=nodes, start=hosts.slurm.now,
        submitted=hosts.slurm.now - 100,
    )  # fmt: skip


@pytest.mark.parametrize("failed", [False, True])
def test_a_main_job_that_slurm_is_about_to_start_on_a_host_gets_all_of_it(hosts, failed):
    """Also if the agent of a slot has failed, so that the lease is given up."""
    hosts.take()
    hosts.poll()
    if failed:
        hosts.one.give_back([lease for lease in hosts.one.poll().leases if lease.id == "l1"])
        assert hosts.cancels == [f"{TERM} 70.0"]
    steps = (1,) if failed else (0, 1)
    for _ in range(5):
        hosts.poll(due(hosts), steps=steps)
    signalled_steps = " ".join(f"70.{number}" for number in steps)
    assert hosts.cancels[failed:] == [f"{TERM} {signalled_steps}"]


@pytest.mark.parametrize(
    ("limit", "count"), [("UNLIMITED", 4), ("2000", 4), ("1999", 2), ("999", 0)]
)
def test_slots_fit_into_the_memory_that_one_job_may_have(tmp_path, limit, count):
    hosts = Hosts(tmp_path)
    partitions = world.PARTITIONS.replace("State=UP", f"MaxMemPerNode={limit} State=UP")
    hosts.slurm.file("partitions", partitions)
    one = hosts.slurm.ready(slots=(KIND,))
    assert len(world.names(one.poll())) == count
    [(works, sentence)] = [(ok, text) for ok, text in one.check() if "A slot of kind" in text]
    assert works is (count > 0)
    assert not count or sentence.endswith(f"2 of 2 hosts can have such slots, {count} in all.")


def test_a_job_that_is_where_its_slots_are_not_makes_no_poll_fail(hosts):
    """It is ended as one that nobody needs."""
    hosts.take()
    hosts.poll()
    hosts.slurm.queue(
        world.job("RUNNING", "70", f"{world.PREFIX}l1-2", nodes="n2", end=200_000, batch="n2")
    )
    hosts.one.poll()
    assert "scancel 70" in hosts.cancels


@pytest.mark.parametrize("message", ["Job violates accounting/QOS policy (job submit limit)"])
def test_a_job_of_a_host_is_not_halved_at_a_limit(hosts, message):
    hosts.slurm.tools.runs("sbatch", f"echo 'sbatch: error: {message}' >&2; exit 1")
    assert {lease.state for lease in hosts.take()} == {ENDED}
    assert len(hosts.slurm.tools.calls("sbatch")) == 1


def test_an_answer_that_lacks_the_job_of_a_host_is_not_used(hosts):
    hosts.take()
    hosts.poll()
    listed = world.job("RUNNING", "70", f"{world.PREFIX}l1-2", nodes="n1", end=200_000)
    hosts.slurm.file("named", listed)
    hosts.slurm.tools.runs("squeue", 'case "$*" in *" -j 70 "*) mark=${*##* }; sed '
                           '"s/MARK/${mark%%|*}/" "$here/named"; exit;; esac')  # fmt: skip
    hosts.slurm.queue("")
    with pytest.raises(SchedulerError, match="cut short"):
        hosts.one.poll()
