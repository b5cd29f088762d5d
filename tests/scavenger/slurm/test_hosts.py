"""What Slurm says of hosts and the jobs on them. The lines are in the form of 22.05 to 24.05."""

from __future__ import annotations

import pytest

from scavenger.batch.rules import NodeFacts
from scavenger.batch.slots import DeviceParts, HostResources, Neighbour, SlotKind, slot_facts
from scavenger.interface import SchedulerError
from scavenger.slurm.hosts import (
    processors_of_a_core,
    read_gres,
    read_hosts,
    with_neighbours,
)
from scavenger.slurm.job import slot_options

LINE = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=8  CPUAlloc=10 CPUEfctv=62 CPUTot=64 CPULoad=15.99 "
    "AvailableFeatures=test ActiveFeatures=test Gres=gpu:a100:4(S:0-1),shard:8 GresDrain=N/A "
    "GresUsed=gpu:a100:2(IDX:0,2),shard:0 NodeAddr=127.0.0.1 NodeHostName=localhost Port=17425 "
    "Version=22.05.8 OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=2000 AllocMem=300 "
    "FreeMem=12419 Sockets=1 Boards=1 MemSpecLimit=100 State=MIXED ThreadsPerCore=1 TmpDisk=0 "
    "Weight=1 Owner={owner} MCS_label=N/A Partitions=batch,preemptable  BootTime=1 CfgTRES=cpu=8 "
    "AllocTRES=cpu=2,mem=300M CapWatts=n/a Reason=Gres=gpu:99 CPUAlloc=0 [root@1]\n"
)
N1 = HostResources(
    {"cpus": 62, "memory_mb": 1900, "gpu": 4, "gpu:a100": 4, "shard": 8},
    {"cpus": 10, "memory_mb": 300, "gpu": 2, "gpu:a100": 2, "shard": 4},
    parts={"shard": DeviceParts("gpu", (2, 2, 2, 2), (2, 2))},
    free_memory_mb=12419,
)


def test_a_host():
    assert read_hosts(LINE.format(owner="N/A")) == {"n1": N1}


@pytest.mark.parametrize("word", ["N/A", "(null)"])
def test_a_host_of_which_slurm_does_not_know_the_free_memory(word):
    text = LINE.format(owner="N/A").replace("FreeMem=12419", f"FreeMem={word}")
    [use] = read_hosts(text).values()
    assert use.free_memory_mb is None


def test_a_comment_with_a_line_break():
    """scontrol prints Comment, Extra and Reason as people wrote them."""
    text = LINE.format(owner="N/A").replace("[root@1]", "fan\nCPUAlloc=0 and\x0bmore [root@1]")
    assert read_hosts(text) == {"n1": N1}
    with pytest.raises(SchedulerError, match="scontrol show node cannot be understood"):
        read_hosts("slurm_load_node error\n" + text)


def test_a_host_that_belongs_to_a_user():
    [use] = read_hosts(LINE.format(owner="ann(1001)")).values()
    assert use.closed == "kept for jobs of ann (--exclusive=user)"


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("", {}),
        ("(null)", {}),
        ("gpu:4", {"gpu": 4}),
        ("gpu:0", {"gpu": 0}),
        ("gpu:a100:2(IDX:0,2),gpu:v100:1(IDX:3)", {"gpu": 3, "gpu:a100": 2, "gpu:v100": 1}),
        ("gpu:a100_3g.39gb:4(S:0)", {"gpu": 4, "gpu:a100_3g.39gb": 4}),
        ("gpu:2,mps:200", {"gpu": 2, "mps": 200}),
        ("bandwidth:lustre:no_consume:4G", {"bandwidth": 2**32, "bandwidth:lustre": 2**32}),
        ("license", {"license": 1}),
    ],
)
def test_generic_resources(text, counts):
    assert read_gres(text) == counts


@pytest.mark.parametrize(
    ("in_use", "gpus", "free"),
    [
        # As Slurm 22.05 prints it: GPUs with shards in use, and not how many.
        ("gpu:0,shard:(null):0(IDX:N/A)", 0, (2, 2, 2, 2)),
        ("gpu:2,shard:(null):0(IDX:N/A)", 2, (2, 2)),
        ("gpu:2,shard:(null):2(IDX:2-3)", 4, ()),
        ("gpu:a100:1(IDX:0),shard:a100:1(IDX:3)", 2, (2, 2)),
        # In numbers for each GPU.
        ("gpu:1(IDX:0),shard:(null):3(0/2,0/2,1/2,2/2)", 3, (2, 1, 0)),
        # GPUs without shards in use are not told apart.
        ("gpu:4,shard:0", 4, ()),
        # As Slurm 26.05.3 prints it: GPUs that are in use as a whole are marked.
        ("gpu:0,shard:0(0/2,0/2,0/2,0/2)", 0, (2, 2, 2, 2)),
        ("gpu:2(IDX:0-1),shard:0(-/2,-/2,0/2,0/2)", 2, (2, 2)),
        ("gpu:2(IDX:0-1),shard:1(-/2,-/2,1/2,0/2)", 3, (2, 1)),
        ("gpu:3(IDX:0-1,3),shard:2(-/2,-/2,2/2,-/2)", 4, (0,)),
    ],
)
def test_shards_and_gpus_of_one_device_exclude_each_other(in_use, gpus, free):
    old = "GresUsed=gpu:a100:2(IDX:0,2),shard:0"
    text = LINE.format(owner="N/A")
    assert old in text
    [use] = read_hosts(text.replace(old, f"GresUsed={in_use}")).values()
    assert use.parts["shard"].free == free
    assert use.used["gpu"] == gpus
    assert use.used["shard"] == 8 - sum(free)
    assert "shard" not in read_hosts(text.replace(",shard:8", ""))["n1"].parts


@pytest.mark.parametrize(
    ("shards", "in_use", "slots", "gpus", "free"),
    [
        # One GPU of four has all the shards, and Slurm does not say so.
        (4, "gpu:0,shard:(null):0(IDX:N/A)", 2, 0, None),
        (4, "gpu:0,shard:(null):1(IDX:3)", 0, 1, None),  # some of it, who knows how much
        (6, "gpu:0,shard:0", 3, 0, None),
        # It says so.
        (4, "gpu:0,shard:(null):0(0/4)", 2, 0, (4,)),
        (4, "gpu:0,shard:(null):1(1/4)", 1, 1, (3,)),
        (4, "gpu:0,shard:(null):1(0/0,1/4,0/0,0/0)", 1, 1, (3,)),
        (4, "gpu:1,shard:(null):0(0/4)", 0, 1, ()),  # that one may be in use
        (6, "gpu:1(IDX:0),shard:(null):0(0/2,0/4)", 1, 1, (2,)),
        (6, "gpu:1(IDX:0),shard:0(-/2,0/4)", 2, 1, (4,)),
        (4, "gpu:1(IDX:0),shard:0(-/4)", 0, 1, ()),
        (8, "gpu:0,shard:(null):0(0/4)", 4, 0, None),  # the others are not listed
    ],
)
def test_shards_of_some_gpus_only(shards, in_use, slots, gpus, free):
    text = LINE.format(owner="N/A").replace(",shard:8", f",shard:{shards}")
    old = "GresUsed=gpu:a100:2(IDX:0,2),shard:0"
    [use] = read_hosts(text.replace(old, f"GresUsed={in_use}")).values()
    kind = SlotKind("half", {"shard": 2, "cpus": 1, "memory_mb": 1})
    facts = slot_facts(NodeFacts("n1", "mixed", idle=False), use, [kind], {}, {}, 0.0)
    assert sum(fact.idle for fact in facts) == slots
    assert use.used["gpu"] == gpus
    assert (use.parts["shard"].free if "shard" in use.parts else None) == free


@pytest.mark.parametrize(
    "text",
    [
        "NodeName=n1 CPUTot=64 CPUAlloc=ten RealMemory=1 AllocMem=0\n",
        "NodeName=n1 CPUTot=64 RealMemory=1 AllocMem=0\n",
        "slurm_load_node error: Unable to contact slurm controller\n",
        "\n",
        LINE.format(owner="N/A")[:-30],  # cut short
    ],
)
def test_an_answer_that_is_none(text):
    with pytest.raises(SchedulerError):
        read_hosts(text)


def test_whose_jobs_are_on_a_host():
    text = (
        "m1|7|ann|batch|n[1-2]\n"
        "m1|8|bob|debug|n1\n"
        "m1|9|us|preemptable|n1\n"
        "m1|10|ann|batch|(null)\n"
        "m2|11|eve|batch|n1\n"
    )
    hosts = with_neighbours({"n1": N1, "n3": N1}, text, "m1", {"9"})
    assert hosts["n1"].neighbours == (Neighbour("ann", "batch"), Neighbour("bob", "debug"))
    assert hosts["n3"].neighbours == ()


@pytest.mark.parametrize(
    ("amounts", "options"),
    [
        ({"cpus": 4, "memory_mb": 500}, ["--cpus-per-task=4", "--mem=500M"]),
        (
            {"gpu": 1, "cpus": 4, "memory_mb": 500},
            ["--cpus-per-task=4", "--mem=500M", "--gres=gpu:1"],
        ),
        (
            {"gpu": 2, "gpu:a100": 2, "shard": 4, "cpus": 1, "memory_mb": 1},
            ["--cpus-per-task=1", "--mem=1M", "--gres=gpu:a100:2,shard:4"],
        ),
    ],
)
def test_the_options_that_request_a_slot(amounts, options):
    assert slot_options(amounts) == options


@pytest.mark.parametrize(
    ("fields", "processors"),
    [
        ({"CPUTot": "128", "Sockets": "2", "CoresPerSocket": "32", "ThreadsPerCore": "2"}, 2),
        ({"CPUTot": "64", "Sockets": "2", "CoresPerSocket": "32", "ThreadsPerCore": "2"}, 1),
        ({"CPUTot": "64", "Sockets": "1", "CoresPerSocket": "8", "ThreadsPerCore": "1"}, 1),
        ({"CPUTot": "8"}, 1),
        ({"CPUTot": "8", "Sockets": "0", "CoresPerSocket": "8"}, 1),
    ],
)
def test_how_many_processors_are_one_core(fields, processors):
    assert processors_of_a_core(fields) == processors
