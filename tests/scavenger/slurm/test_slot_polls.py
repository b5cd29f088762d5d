"""Which slots of hosts a poll of an imitated Slurm finds idle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scavenger.batch.slots import SlotKind
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
