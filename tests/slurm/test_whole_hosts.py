"""Slots of hosts that jobs have as a whole, on a real Slurm: one job for the leases of a host."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from scavenger.batch.slots import SlotKind
from scavenger.interface import LeaseRequest, LeaseState
from scavenger.slurm.job import SlurmLeaseOptions
from tests.integration.embedded import gone
from tests.integration.test_main_job import COUNTING, seen_once
from tests.slurm.site import slurm_site
from tests.slurm.test_leases import LEAVE, TELL, gaps, scavenger
from tests.slurm.test_slots import SHARED

RUNNING, ENDED = LeaseState.RUNNING, LeaseState.ENDED
PAIR = SlotKind("pair", {"gpu": 2, "cpus": 4, "memory_mb": 600}, whole_host=True)
WHOLE = {
    **SHARED,
    "lease_mode": "PreemptMode=CANCEL OverSubscribe=EXCLUSIVE",
    "grace": 20,
}
LINEAR = {
    **WHOLE,
    "select": "select/linear",
    "extra": SHARED["extra"].replace("CR_Core_Memory", "CR_Memory"),
}
ALL = [f"n{host}/pair.{number}" for host in (1, 2) for number in (0, 1)]


def states(one):
    return {lease.id: (lease.node, lease.state) for lease in one.poll().leases}


def environment_in(path):
    return json.loads(path.read_text())[1]


@pytest.mark.parametrize("select", ["select/cons_tres", "select/linear"])
def test_the_slots_of_a_host_are_steps_of_one_job(cluster, root, select):
    """Steps of select/linear have no GPUs of their own."""
    linear = "linear" in select
    slurm = cluster(2, **(LINEAR if linear else WHOLE))
    kind = replace(PAIR, amounts={"cpus": 4, "memory_mb": 600}) if linear else PAIR
    one = scavenger(slurm, slots=(kind,))
    assert gaps(one) == ALL
    [sentence] = [text for works, text in one.check() if "A slot of kind" in text]
    assert sentence.endswith("2 of 2 hosts can have such slots, 4 in all.")
    requests = [
        LeaseRequest(f"l{n}", node, (sys.executable, "-c", TELL, str(root / f"l{n}")))
        for n, node in enumerate(ALL[:2], 1)
    ]
    leases = one.take(requests)
    assert [lease.state for lease in leases] == [LeaseState.PENDING] * 2
    slurm.until(lambda: all((root / f"l{n}").exists() for n in (1, 2)), "the leases run")
    [(job, (_, node, _))] = slurm.leases().items()
    assert node == "n1"
    assert states(one) == {"l1": (ALL[0], RUNNING), "l2": (ALL[1], RUNNING)}
    assert gaps(one) == ALL[2:], "the other host"
    environments = [environment_in(root / f"l{n}") for n in (1, 2)]
    assert [e["MALLETRAIN_NODE"] for e in environments] == ALL[:2]
    assert [e["MALLETRAIN_SLOT_CPUS"] for e in environments] == ["4", "4"]
    assert [e["MALLETRAIN_GPUS"] for e in environments] == ["0" if linear else "2"] * 2
    devices = [set(e.get("CUDA_VISIBLE_DEVICES", "").split(",")) - {""} for e in environments]
    assert [len(each) for each in devices] == [0 if linear else 2] * 2
    assert not devices[0] & devices[1], "each step has GPUs of its own"

    again = scavenger(slurm, slots=(kind,))
    again.know({"l1": "", "l2": ""}, {"l1": ALL[0], "l2": ALL[1]}, {"l1": job, "l2": job})
    first = next(lease for lease in again.poll().leases if lease.id == "l1")
    assert states(again) == states(one), "after a restart of the daemon"

    # A slot that is given back alone ends, and stays held until the job ends.
    process = next(p for p in slurm.jobs_processes() if p.cmdline()[-1:] == [str(root / "l1")])
    again.give_back([first])
    slurm.until(lambda: gone(process), "its agent ends")
    assert states(again) == {"l1": (ALL[0], ENDED), "l2": (ALL[1], RUNNING)}
    assert list(slurm.leases()) == [job]
    assert gaps(again) == ALL[2:]
    again.give_back([lease for lease in again.poll().leases if lease.id == "l2"])
    slurm.until(lambda: not slurm.leases(), "the job has ended")
    slurm.until(lambda: gaps(again) == ALL, "the host is idle")


@pytest.mark.parametrize("count", [1, 2])
def test_the_slots_of_a_host_that_is_drained_are_asked_to_leave(cluster, root, count):
    """Where leases of whole nodes are batch scripts, which are signalled otherwise than steps."""
    slurm = cluster(2, **WHOLE)
    lease = SlurmLeaseOptions(partition="preemptable", launch="batch")
    one = scavenger(slurm, slots=(PAIR,), lease=lease)
    one.poll()
    go = root / "go"
    argv = [(sys.executable, "-c", LEAVE, str(root / f"left{n}"), str(go)) for n in range(count)]
    one.take([LeaseRequest(f"l{n}", ALL[n], argv[n]) for n in range(count)])
    ready = [root / f"left{n}.ready" for n in range(count)]
    slurm.until(lambda: all(path.exists() for path in ready), "the leases run")
    slurm.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
    marks = [root / f"left{n}" for n in range(count)]
    slurm.until(
        lambda: one.poll() and all(path.exists() for path in marks), "all have been signalled"
    )
    assert [state for state, _, _ in slurm.leases().values()] == ["RUNNING"], "they have time"
    go.touch()
    slurm.until(lambda: not slurm.leases(), "the job has ended")


def test_a_job_whose_agents_have_all_ended_ends(cluster):
    slurm = cluster(2, **WHOLE)
    one = scavenger(slurm, slots=(PAIR,))
    one.poll()
    one.take([LeaseRequest(f"l{n}", node, ("true",)) for n, node in enumerate(ALL[:2], 1)])
    slurm.until(lambda: not slurm.leases(), "the job has ended")
    assert {state for _, state in states(one).values()} <= {ENDED}


def test_gpus_of_whole_hosts_are_refused_where_steps_have_none(cluster):
    slurm = cluster(2, **LINEAR)
    one = scavenger(slurm, slots=(PAIR,))
    assert gaps(one) == []
    [sentence] = [text for works, text in one.check() if works is False and "slot" in text.lower()]
    assert "steps have no generic resources of their own there" in sentence


def test_kinds_that_share_hosts_are_refused_where_jobs_have_whole_nodes(cluster):
    slurm = cluster(2, **WHOLE)
    shared = replace(PAIR, whole_host=False)
    one = scavenger(slurm, slots=(shared,))
    assert gaps(one) == []
    [sentence] = [text for works, text in one.check() if works is False and "slot" in text]
    assert "set whole_host = true for the kinds" in sentence


KIND = """
[[scheduler.slurm.slots]]
name = "pair"
gpus = 2
cpus = 4
memory = "600 MiB"
whole_host = true
[nodes]
bound_memory = false
"""


def test_a_main_job_takes_all_slots_of_a_host_and_the_training_goes_on(cluster, root):
    slurm = cluster(2, **WHOLE)
    with slurm_site(root / "site", slurm, lines=KIND) as site:
        job = site.submit(site.script("counting.py", COUNTING), nodes=(1, 3), node_class="pair")
        site.until(lambda: len(site.job(job).nodes) == 3, "it has as many as it can use")
        assert len(slurm.leases()) == 2, "the fourth slot is leased too"
        site.until(lambda: len(site.agents()) == 4, "its agent begins")
        site.until_samples(job, 50)
        main = slurm.submit("sleep 3600", "--nodelist=n1", "--exclusive", "--time=60")
        slurm.until(lambda: slurm.jobs()[main][0] == "RUNNING", "the main job runs")
        site.until(lambda: set(site.job(job).nodes) == set(ALL[2:]), "it has the other host")
        slurm.run("scancel", main)
        site.until(lambda: len(site.job(job).nodes) == 3, "it has what became idle")
        (site.work / "go").touch()
        assert site.until_state(job, "completed", "failed").state == "completed"
        assert site.job(job).tries == 0
        seen_once(site, job)
        site.until(lambda: not slurm.leases(), "every lease is given back")
