"""Which slots of hosts a poll of an imitated Slurm finds idle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scavenger.batch.slots import SlotKind
from scavenger.slurm.job import SlurmLeaseOptions
from tests.scavenger.slurm.slurm_world import CONFIG, World, names, why

GPU = SlotKind("gpu", {"gpu": 1, "cpus": 2, "memory_mb": 1000})
CONS_TRES = "SelectType = select/cons_tres\nSelectTypeParameters = CR_CORE_MEMORY\n"
ALL = [f"{host}/gpu.{number}" for host in ("n1", "n2") for number in range(2)]
ON_N2 = ALL[2:]


def host(name, owner="N/A"):
    return (
        f"NodeName={name} CPUAlloc=2 CPUEfctv=8 CPUTot=8 Gres=gpu:4 GresUsed=gpu:2 RealMemory=9000 "
        f"AllocMem=1000 FreeMem=100 State=MIXED Owner={owner} Reason=none\n"
    )


@pytest.fixture
def world(tmp_path):
    """Two hosts of four GPUs, of each of which a job of bob has two. Their memory is full of cached
    files. Nothing limits the memory of jobs.
    """
    made = World(tmp_path)
    made.file("config", CONFIG + CONS_TRES)
    made.file("hosts", host("n1") + host("n2"))
    made.nodes(mixed="n[1-2]")
    made.tools.runs("scontrol", 'case "$*" in *"show node"*) cat "$here/hosts"; exit;; '
                    '*config*) cat "$here/config"; exit;; *partition*) cat "$here/partitions"; '
                    'exit;; *) cat "$here/reservations"; exit;; esac')  # fmt: skip
    neighbours(made, "MARK|7|bob|batch|n1", "MARK|8|bob|batch|n2")
    return made


def neighbours(world, *lines):
    """Set the jobs on hosts, for which squeue is asked with few fields."""
    world.file("jobs_on_hosts", "".join(f"{line}\n" for line in lines))
    world.tools.runs("squeue", 'case "$*" in *"|%i|%u|%P|%N") mark=${*##* }; sed '
                     '"s/MARK/${mark%%|*}/" "$here/jobs_on_hosts"; exit;; esac')  # fmt: skip


def test_memory_that_is_full_of_cached_files_matters_only_if_the_site_says_so(world):
    assert names(world.ready(slots=(GPU,)).poll()) == ALL
    strict = replace(GPU, free_memory=0.25)
    polled = world.ready(slots=(strict,)).poll()
    assert names(polled) == []
    assert "its host has 100 MiB of free memory" in why(polled, "n1/gpu.0")["memory"]
    # Nobody but our leases is on n2.
    neighbours(world, "MARK|7|bob|batch|n1")
    assert names(world.ready(slots=(strict,)).poll()) == ON_N2


def lease_partitions(world, *parts):
    world.file("partitions", "".join(
        f"PartitionName={name} GraceTime=10 MaxTime=1-00:00:00 Nodes={hosts} PriorityTier=1 "
        f"PreemptMode=CANCEL State=UP {setting}\n" for name, hosts, setting in parts
    ))  # fmt: skip
    world.tools.answers("sinfo", "".join(
        f"MARK|{name}|up|mixed|(null)|(null)|{hosts}|none\n" for name, hosts, _ in parts
    ))  # fmt: skip
    return SlurmLeaseOptions(partition=",".join(name for name, *_ in parts))


EXCLUSIVE = "OverSubscribe=EXCLUSIVE"


@pytest.mark.parametrize(
    "setting",
    [
        EXCLUSIVE,
        "ExclusiveUser=YES",
        "ExclusiveTopo=YES",
        "Exclusive=NODE",
        "Exclusive=USER",
        "Exclusive=TOPO",
    ],
)
@pytest.mark.parametrize(
    ("whole", "shared", "idle"),
    [
        ("n1", "n2", ON_N2),
        ("n1", "n[1-2]", ON_N2),  # Slurm chooses the partition, so n1 is closed
        ("n[1-2]", "n2", []),
    ],
)
def test_hosts_of_an_exclusive_partition_among_several_of_the_leases(
    world, setting, whole, shared, idle
):
    lease = lease_partitions(world, ("whole", whole, setting), ("shared", shared, ""))
    assert names(world.ready(slots=(GPU,), lease=lease).poll()) == idle
    alone = SlurmLeaseOptions(partition="shared")
    polled = world.ready(slots=(GPU,), lease=alone).poll()
    assert names(polled) == (ALL if shared == "n[1-2]" else ON_N2), "leases are in shared only"


@pytest.mark.parametrize("default", ["whole", "shared"])
def test_leases_that_name_no_partition_run_in_the_default_one(world, default):
    parts = [("whole", "n[1-2]", EXCLUSIVE), ("shared", "n[1-2]", "")]
    lease_partitions(
        world,
        *((name, hosts, f"{setting} Default={'YES' if name == default else 'NO'}")
          for name, hosts, setting in parts),
    )  # fmt: skip
    polled = world.ready(slots=(GPU,), lease=SlurmLeaseOptions()).poll()
    assert names(polled) == ([] if default == "whole" else ALL)


@pytest.mark.parametrize(
    ("select", "parameters", "idle"),
    [
        ("select/cons_res", "CR_CORE_MEMORY", ALL),
        ("select/linear", "CR_MEMORY", []),
        ("select/cray_aries", "CR_CORE_MEMORY", []),  # layered on linear
        ("select/cray_aries", "CR_CORE_MEMORY,OTHER_CONS_RES", ALL),
        ("select/cray_aries", "CR_CORE_MEMORY,OTHER_CONS_TRES", ALL),
    ],
)
def test_a_slurm_that_allocates_whole_nodes_has_no_slots(world, select, parameters, idle):
    settings = f"SelectType = {select}\nSelectTypeParameters = {parameters}\n"
    world.file("config", CONFIG + settings)
    assert names(world.ready(slots=(GPU,)).poll()) == idle


def of_slots(findings):
    """What check says about exclusive partitions and about kinds of slots."""
    return [
        (works, sentence)
        for works, sentence in findings
        if "Leases are of slots" in sentence or sentence.startswith("A slot of kind")
    ]


def test_an_exclusive_partition_is_a_notice_while_each_kind_has_other_hosts(world):
    lease = lease_partitions(world, ("whole", "n1", EXCLUSIVE), ("shared", "n2", ""))
    (works, sentence), kind = of_slots(world.scavenger(slots=(GPU,), lease=lease).check())
    assert works is None
    assert f"jobs of partition whole have whole nodes ({EXCLUSIVE})" in sentence
    assert "MalleTrain leases no slot there (1 of 2 hosts)" in sentence
    assert kind[0] is True
    assert kind[1].endswith("1 of 1 hosts can have such slots, 4 in all.")


@pytest.mark.parametrize("on_n2", ["gpu:0", "gpu:4"])
def test_an_exclusive_partition_is_an_error_if_it_has_all_hosts_of_a_kind(world, on_n2):
    """Hosts on which no slot of the kind fits, or no lease runs (n3), do not count as left."""
    other = host("n2").replace("Gres=gpu:4", f"Gres={on_n2}")
    world.file("hosts", host("n1") + other + host("n3"))
    cpu = SlotKind("cpu", {"cpus": 1, "memory_mb": 1})
    nodes = frozenset({"n1", "n3"} if on_n2 == "gpu:4" else ())
    lease = lease_partitions(world, ("whole", "n1", EXCLUSIVE), ("shared", "n2", ""))
    scavenger = world.scavenger(slots=(replace(GPU, nodes=nodes), cpu), lease=lease)
    (works, sentence), *kinds = of_slots(scavenger.check())
    assert works is False
    assert "There is no other host for slots of kind gpu" in sentence
    assert [(works, text[:18]) for works, text in kinds] == [(True, "A slot of kind cpu")]
