"""A real Slurm whose partition or account for leases takes shorter jobs than time_limit says."""

from __future__ import annotations

import pytest

from scavenger.interface import LeaseRequest, LeaseState
from scavenger.slurm.job import SlurmLeaseOptions
from tests.slurm.test_leases import gaps, scavenger, states

SHORT = "PartitionName=short Nodes=ALL MaxTime=10 State=UP PriorityTier=1 PreemptMode=CANCEL"


def starts_with_ten_minutes(slurm, by, **options):
    """A lease starts with this time limit, and check names the setting ``by``."""
    one = scavenger(slurm, lease=SlurmLeaseOptions(**options))
    slurm.until(lambda: gaps(one) == ["n1"], "the node is a gap")
    [lease] = one.take([LeaseRequest("l1", "n1", ("sleep", "600"))])
    assert lease.state is LeaseState.PENDING

    def begun():
        state = states(one)["l1"]
        assert state is not LeaseState.ENDED
        return state is LeaseState.RUNNING

    slurm.until(begun, "the lease runs")
    limit = slurm.run("squeue", "-h", "-j", lease.scheduler_id, "-o", "%l").strip()
    assert limit == "10:00"
    findings = one.check()
    assert any(f"600 s at most ({by})" in sentence for _, sentence in findings), findings
    one.give_back(one.poll().leases)
    slurm.until(lambda: not slurm.leases(), "the lease is cancelled")


def test_a_lease_is_as_long_as_its_partition_allows_and_starts(cluster):
    starts_with_ten_minutes(
        cluster(1, partitions=SHORT), "MaxTime of partition short", partition="short"
    )


@pytest.mark.parametrize(
    ("limit", "account", "by"),
    [
        ("account all", "all", "MaxWall of the association with account all"),
        ("account root", "", "MaxWall of the association with account root"),
        ("account root", "all", "MaxWall of the association with account all"),
        ("qos normal", "", "MaxWall of QOS normal"),
    ],
    ids=["its account", "the default account", "a parent account", "the QOS of who names none"],
)
def test_a_lease_is_as_long_as_its_account_allows_and_starts(accounted, limit, account, by):
    """A longer one would wait for ever: the user inherits the account's limit."""
    slurm = accounted(1, prepare=(f"modify {limit} set maxwall=10",))
    starts_with_ten_minutes(slurm, by, partition="preemptable", account=account)


def test_a_lease_has_as_much_memory_as_its_partition_gives_and_starts(cluster):
    """All memory of a node would be above MaxMemPerNode: Slurm lets such a job wait for ever."""
    slurm = cluster(
        1,
        lease_mode="PreemptMode=CANCEL MaxMemPerNode=1000",
        select="select/cons_tres\nSelectTypeParameters=CR_Core_Memory",
    )
    one = scavenger(slurm)
    slurm.until(lambda: gaps(one) == ["n1"], "the node is a gap")
    one.take([LeaseRequest("l1", "n1", ("sleep", "600"))])

    def begun():
        state = states(one)["l1"]
        assert state is not LeaseState.ENDED
        return state is LeaseState.RUNNING

    slurm.until(begun, "the lease runs")
    one.give_back(one.poll().leases)
    slurm.until(lambda: not slurm.leases(), "the lease is cancelled")
