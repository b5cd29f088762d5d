"""Slots on a real Slurm: single GPUs of partly used nodes as leases."""

from __future__ import annotations

import json
import sys

import pytest

from scavenger.batch.slots import SlotKind
from scavenger.interface import LeaseRequest, LeaseState, kind_of
from scavenger.slurm.hosts import HOSTS, read_hosts
from scavenger.slurm.job import SlurmLeaseOptions
from tests.integration.test_main_job import COUNTING, seen_once
from tests.slurm.cluster import release
from tests.slurm.site import slurm_site
from tests.slurm.test_leases import TELL, scavenger

GPU = SlotKind("gpu", {"gpu": 1, "cpus": 2, "memory_mb": 300})
SHARED = {
    "select": "select/cons_tres",
    "extra": "GresTypes=gpu\nSelectTypeParameters=CR_Core_Memory\n",
    "node": "Gres=gpu:4",
    "cpus": 8,
    "gres": "".join(f"Name=gpu File=/dev/{d}\n" for d in ("null", "zero", "full", "random")),
}
"""Nodes with 4 GPUs, for as much of them as Slurm wants to see, and 8 processors, on which Slurm
places several jobs.
"""
ONE_GPU = ("--nodelist=n1", "--gres=gpu:1", "--cpus-per-task=2", "--mem=300", "--time=60")
"""Options of a main job. The time limit of the partition, a minute, would end it on a busy
machine.
"""


def idle(one):
    return sorted(gap.node for gap in one.poll().gaps)


def test_single_gpus_of_a_partly_used_node_are_leased_one_by_one(cluster, root):
    slurm = cluster(2, **SHARED)
    one = scavenger(slurm, slots=(GPU,))
    assert idle(one) == [f"n{host}/gpu.{number}" for host in (1, 2) for number in range(4)]
    main = slurm.submit("sleep 3600", *ONE_GPU)
    slurm.until(lambda: slurm.jobs()[main][0] == "RUNNING", "the main job runs")
    assert idle(one) == [f"n1/gpu.{n}" for n in range(3)] + [f"n2/gpu.{n}" for n in range(4)]
    [explained] = [e for e in one.poll().explanations if e.node == "n1/gpu.3"]
    assert explained.state == "mixed, with 3 of 4 gpu, 6 of 8 cpus, 1700 of 2000 MiB idle"
    assert not explained.is_gap
    host = read_hosts(slurm.run(*HOSTS))["n1"]
    assert host.free_memory_mb is not None
    [explained] = [e for e in one.poll().explanations if e.node == "n1/gpu.0"]
    assert ("memory", True, "nothing is known to use its memory") in explained.rules
    requests = [
        LeaseRequest(f"l{n}", f"n1/gpu.{n}", (sys.executable, "-c", TELL, str(root / f"l{n}")))
        for n in range(3)
    ]
    leases = one.take(requests)
    assert [lease.state for lease in leases] == [LeaseState.PENDING] * 3
    slurm.until(lambda: all((root / f"l{n}").exists() for n in range(3)), "the leases run")
    _, environment = json.loads((root / "l1").read_text())
    assert environment["MALLETRAIN_NODE"] == "n1/gpu.1"
    assert environment["MALLETRAIN_NODE_CLASS"] == "gpu"
    assert environment["MALLETRAIN_GPUS"] == "1"
    assert environment["SLURM_CPUS_ON_NODE"] == "2"
    assert environment["MALLETRAIN_SLOT_CPUS"] == "2"
    assert environment["MALLETRAIN_SLOT_MEMORY_MB"] == "300"
    poll = one.poll()
    assert {lease.id: lease.node for lease in poll.leases} == {
        f"l{n}": f"n1/gpu.{n}" for n in range(3)
    }
    assert sorted(gap.node for gap in poll.gaps) == [f"n2/gpu.{n}" for n in range(4)]
    assert {gap.node_class for gap in poll.gaps} == {"gpu"}
    assert {gap.group for gap in poll.gaps} == {"n2"}

    again = scavenger(slurm, slots=(GPU,))  # as after a restart of the daemon
    again.know({f"l{n}": "" for n in range(3)}, {f"l{n}": f"n1/gpu.{n}" for n in range(3)})
    assert {lease.id: lease.node for lease in again.poll().leases} == {
        f"l{n}": f"n1/gpu.{n}" for n in range(3)
    }

    # A main job that needs one GPU takes back one lease.
    second = slurm.submit("sleep 3600", *ONE_GPU)
    slurm.until(lambda: slurm.jobs()[second][0] == "RUNNING", "the second main job runs")
    running = [lease for lease in one.poll().leases if lease.state is LeaseState.RUNNING]
    assert len(running) == 2
    one.give_back(running)
    slurm.until(lambda: not slurm.leases(), "the leases have ended")
    assert len(idle(one)) == 6


def test_the_check_says_which_hosts_can_have_a_kind(cluster):
    slurm = cluster(2, **SHARED)
    kinds = (GPU, SlotKind("huge", {"gpu": 8, "cpus": 2, "memory_mb": 300}))
    findings = [
        (works, text)
        for works, text in scavenger(slurm, slots=kinds).check()
        if text.startswith("A slot of kind")
    ]
    assert findings == [
        (
            True,
            "A slot of kind gpu is 1 gpu, 2 cpus, 300 MiB; 2 of 2 hosts can have such slots, 8 in "
            "all.",
        ),
        (
            False,
            "A slot of kind huge is 8 gpu, 2 cpus, 300 MiB. No host has so much gpu: of each "
            "resource, hosts have at most 4 gpu, 8 cpus, 1.953 GiB. Change this kind in "
            "[scheduler.slurm].",
        ),
    ]


def test_slots_need_a_slurm_that_shares_nodes(cluster):
    slurm = cluster(1)
    one = scavenger(slurm, slots=(GPU,))
    texts = [text for works, text in one.check() if not works]
    assert [t for t in texts if "select/linear" in t], texts
    assert not idle(one)


def test_shards_of_gpus_that_are_in_use_are_not_idle(cluster, root):
    """A GPU is used as a whole or in shards. Slurm 22.05 gives jobs GPUs of which a shard is in
    use; MalleTrain takes none.
    """
    sharded = {
        **SHARED,
        "extra": "GresTypes=gpu,shard\nSelectTypeParameters=CR_Core_Memory\n",
        "node": "Gres=gpu:4,shard:8",
        "gres": f"{SHARED['gres']}Name=shard Count=8\n",
        "cpus": 16,
    }
    slurm = cluster(1, **sharded)
    shard = SlotKind("shard", {"shard": 1, "cpus": 1, "memory_mb": 50})
    one = scavenger(slurm, slots=(shard, GPU))
    assert [kind_of(name) for name in idle(one)] == ["gpu"] * 4 + ["shard"] * 8

    def main(gres):
        job = slurm.submit("sleep 3600", f"--gres={gres}", "--mem=50", "--time=60")
        slurm.until(lambda: slurm.jobs()[job][0] == "RUNNING", f"a job has {gres}")

    main("gpu:2")
    assert [kind_of(name) for name in idle(one)] == ["gpu"] * 2 + ["shard"] * 4
    main("shard:1")
    names = [kind_of(name) for name in idle(one)]
    assert names.count("gpu") == 1
    assert 2 <= names.count("shard") <= 3, "the second shard of that GPU is told by later releases"
    main("gpu:1")
    names = [name for name in idle(one) if kind_of(name) == "shard"]
    assert len(names) <= 1
    assert not [name for name in idle(one) if kind_of(name) == "gpu"]


def test_the_check_refuses_a_kind_whose_gpus_are_slices_or_not(cluster):
    types = {
        **SHARED,
        "node": "Gres=gpu:a100:2,gpu:1g.10gb:2",
        "gres": "".join(
            f"Name=gpu Type={kind} File=/dev/{device}\n"
            for kind, device in (
                ("a100", "null"),
                ("a100", "zero"),
                ("1g.10gb", "full"),
                ("1g.10gb", "random"),
            )
        ),
    }
    slurm = cluster(1, **types)
    whole = SlotKind("whole", {**GPU.amounts, "gpu:a100": 1})
    findings = scavenger(slurm, slots=(GPU, whole)).check()
    [refused] = [text for works, text in findings if works is False and "kind gpu" in text]
    assert "any type that its hosts have: 1g.10gb, a100. Some are slices of a GPU (MIG)." in refused
    assert not [text for works, text in findings if not works and "kind whole" in text]


@pytest.mark.parametrize(
    ("setting", "since_26_05"),
    [("OverSubscribe=EXCLUSIVE", "Exclusive=NODE"), ("ExclusiveUser=YES", "Exclusive=USER")],
)
def test_a_partition_whose_jobs_have_whole_nodes_has_no_slots(cluster, setting, since_26_05):
    line = f"PartitionName=whole Nodes=n1 PriorityTier=1 PreemptMode=CANCEL GraceTime=6 {setting}\n"
    slurm = cluster(2, **{**SHARED, "partitions": line})
    lease = SlurmLeaseOptions(partition="whole,preemptable")
    one = scavenger(slurm, slots=(GPU,), lease=lease)
    assert idle(one) == [f"n2/gpu.{number}" for number in range(4)]
    [explained] = [e for e in one.poll().explanations if e.node == "n1/gpu.0"]
    shown = since_26_05 if release() >= (26, 5) else setting
    why = f"jobs of partition whole have whole nodes ({shown})"
    assert explained.state == f"idle, where {why}"
    [sentence] = [text for works, text in one.check() if not works and why in text]
    assert "remove slots from [scheduler.slurm] to lease whole nodes" in sentence
    shared = scavenger(slurm, slots=(GPU,))
    assert len(idle(shared)) == 8
    assert not any("have whole nodes" in text for _, text in shared.check())


def test_nothing_is_taken_beside_jobs_of_others_where_the_site_says_so(cluster):
    slurm = cluster(2, **SHARED)
    alone = SlotKind("gpu", dict(GPU.amounts), beside="nobody")
    one = scavenger(slurm, slots=(alone,))
    main = slurm.submit(
        "sleep 3600", "--nodelist=n1", "--gres=gpu:1", "--cpus-per-task=1", "--mem=9", "--time=60"
    )
    slurm.until(lambda: slurm.jobs()[main][0] == "RUNNING", "the main job runs")
    poll = one.poll()
    assert {gap.group for gap in poll.gaps} == {"n2"}
    [explained] = [e for e in poll.explanations if e.node == "n1/gpu.0"]
    reasons = {rule: sentence for rule, passed, sentence in explained.rules if not passed}
    assert "in batch runs on its host" in reasons["beside"]
    batch = scavenger(slurm, slots=(SlotKind("gpu", dict(GPU.amounts), beside="partition:batch"),))
    assert {gap.group for gap in batch.poll().gaps} == {"n1", "n2"}


KINDS = """
[[scheduler.slurm.slots]]
name = "gpu"
gpus = 1
cpus = 2
memory = "300 MiB"
[[scheduler.slurm.slots]]
name = "cpu"
cpus = 1
memory = "50 MiB"
nodes = ["n2"]
[nodes]
bound_memory = false
"""


CRAWLING = COUNTING.replace("range(200 ", "range(50 ")
"""As COUNTING; a step takes a second until the job may go on."""
assert CRAWLING != COUNTING


def test_a_job_trains_on_the_idle_gpus_of_a_node_that_others_use(cluster, root):
    slurm = cluster(2, **SHARED)
    three = ("--nodelist=n2", "--gres=gpu:3", "--cpus-per-task=1", "--mem=1700", "--time=60")
    main = slurm.submit("sleep 3600", *ONE_GPU)
    slurm.submit("sleep 3600", *three)
    slurm.until(
        lambda: [state for state, _, _ in slurm.jobs().values()] == ["RUNNING"] * 2, "they run"
    )
    with slurm_site(root / "site", slurm, lines=KINDS) as site:
        job = site.submit(site.script("counting.py", CRAWLING), nodes=(1, 8), node_class="gpu")
        site.until(lambda: len(site.job(job).nodes) == 4, "it has the four idle GPUs")
        names = {"n1/gpu.0", "n1/gpu.1", "n1/gpu.2", "n2/gpu.0"}
        assert set(site.job(job).nodes) == names
        site.until_samples(job, 50)
        second = slurm.submit("sleep 3600", *ONE_GPU)
        slurm.until(lambda: slurm.jobs()[second][0] == "RUNNING", "the main job runs")
        site.until(lambda: len(site.job(job).nodes) == 3, "the job goes on with the others")
        site.until_samples(job, site.job(job).samples + 20)
        slurm.run("scancel", second, main)
        site.until(lambda: len(site.job(job).nodes) == 5, "it has what became idle")
        (site.work / "go").touch()
        assert site.until_state(job, "completed", "failed").state == "completed"
        assert site.job(job).tries == 0
        # The agent of a lease that Slurm ends may not get to pass the last reports on.
        seen_once(site, job)
        site.until(lambda: not slurm.leases(), "every lease is given back")
