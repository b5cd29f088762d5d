"""Slots on an imitated PBS whose jobs share hosts, and from the recordings of a real one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from scavenger.batch.slots import HostResources, Neighbour, SlotKind
from scavenger.interface import LeaseState
from scavenger.pbs.hosts import read_hosts, slot_chunk
from scavenger.pbs.parse import RawNode, read_jobs, read_nodes
from scavenger.pbs.state import by_host
from tests.scavenger.pbs.pbs_world import TEMPLATE, names, request, running, states, why, worlds

pytestmark = pytest.mark.slow

LIVE = Path(__file__).parents[4] / "shared" / "pbs" / "live"
recorded = pytest.mark.skipif(not LIVE.is_dir(), reason="the recordings are not here")
GPU = SlotKind("gpu", {"gpu": 1, "cpus": 2, "memory_mb": 300})
HOSTS = {f"n{k}": {f"n{k}": {"ncpus": 8, "ngpus": 4, "mem": "2gb"}} for k in (1, 2)}
ONE = {"MALLETRAIN_SLOT": "gpu.0", "MALLETRAIN_GPUS": "1"}
PART = "select=1:host=n1:ncpus=2:ngpus=1:mem=300mb"


@pytest.fixture
def world(tmp_path):
    with worlds(tmp_path) as make:

        def made(**options):
            one = make(**{"hosts": HOSTS, **options})
            one.pbs.edit(lambda state: state.update(sharing="default_shared"))
            return one

        yield made


def slots(host, *numbers):
    return [f"{host}/gpu.{number}" for number in numbers]


def main_job(made, chunk=PART, place="free"):
    """A running job of somebody else on part of a host."""
    number = made.pbs.submit("sleep 600", "-l", chunk, "-l", f"place={place}")
    made.pbs.until(lambda: made.pbs.jobs()[number]["state"] == "R", "the main job runs")
    return number


def test_single_gpus_of_a_partly_used_host_are_leased_one_by_one(world):
    made = world()
    one = made.scavenger(slots=(GPU,))
    assert names(one.poll()) == slots("n1", 0, 1, 2, 3) + slots("n2", 0, 1, 2, 3)
    main_job(made)
    poll = one.poll()
    assert names(poll) == slots("n1", 0, 1, 2) + slots("n2", 0, 1, 2, 3)
    [explained] = [e for e in poll.explanations if e.node == "n1/gpu.3"]
    assert explained.state == "partly used, with 3 of 4 gpu, 6 of 8 cpus, 1748 of 2048 MiB idle"
    one.take([request(n, node=f"n1/gpu.{n}") for n in range(3)])
    running(made, one, "l0", "l1", "l2")
    [words] = [" ".join(job["args"]) for job in made.pbs.leases().values() if "l1" in job["name"]]
    assert "-l select=1:host=n1:ncpus=2:ngpus=1:mem=300mb -l place=free:shared " in words
    poll = one.poll()
    assert {lease.id: lease.node for lease in poll.leases} == {
        f"l{n}": f"n1/gpu.{n}" for n in range(3)
    }
    assert {(gap.node_class, gap.group) for gap in poll.gaps} == {("gpu", "n2")}

    again = made.scavenger(slots=(GPU,))  # as after a restart of the daemon
    again.know({f"l{n}": "" for n in range(3)}, {f"l{n}": f"n1/gpu.{n}" for n in range(3)})
    assert {lease.id: lease.node for lease in again.poll().leases} == {
        f"l{n}": f"n1/gpu.{n}" for n in range(3)
    }

    second = main_job(made)  # it takes back one lease
    assert made.pbs.jobs()[second]["state"] == "R"
    made.pbs.until(
        lambda: sorted(states(one).values()).count(LeaseState.RUNNING) == 2, "one lease has ended"
    )
    one.give_back(one.poll().leases)
    made.pbs.until(lambda: not made.pbs.leases(), "the leases are deleted")
    made.pbs.until(lambda: names(one.poll()) == slots("n1", 0, 1) + slots("n2", 0, 1, 2, 3), "idle")


def test_a_host_of_which_a_job_has_all_has_no_idle_slots(world):
    made = world()
    one = made.scavenger(slots=(GPU,))
    main_job(made, place="excl")
    poll = one.poll()
    assert names(poll) == slots("n2", 0, 1, 2, 3)
    [explained] = [e for e in poll.explanations if e.node == "n1/gpu.0"]
    assert "a job has exclusive use of it" in explained.state


def test_nothing_is_taken_beside_jobs_of_others_where_the_site_says_so(world):
    made = world()
    main_job(made)
    kinds = {
        beside: SlotKind("gpu", dict(GPU.amounts), beside)
        for beside in ("nobody", "partition:expressq", "partition:workq")
    }
    alone = made.scavenger(slots=(kinds["nobody"],)).poll()
    assert {gap.group for gap in alone.gaps} == {"n2"}
    assert "in expressq runs on its host" in why(alone, "n1/gpu.0")["beside"]
    beside = made.scavenger(slots=(kinds["partition:expressq"],)).poll()
    assert {gap.group for gap in beside.gaps} == {"n1", "n2"}
    other = made.scavenger(slots=(kinds["partition:workq"],)).poll()
    assert {gap.group for gap in other.gaps} == {"n2"}


def test_the_slots_of_a_host_are_left_to_a_job_that_pbs_plans_there(world):
    made = world()
    main_job(made)
    made.pbs.edit(lambda state: state.update(strict_ordering=True))
    waiting = made.pbs.submit("true", "-l", "select=1:host=n1:ncpus=8", queue="workq")
    made.pbs.until(lambda: "estimated" in made.pbs.jobs()[waiting], "PBS plans it")
    poll = made.scavenger(slots=(GPU,)).poll()
    assert {gap.group for gap in poll.gaps} == {"n2"}
    assert "planned" in why(poll, "n1/gpu.0")


def test_hosts_that_no_kind_covers_are_leased_as_a_whole(world):
    made = world()
    kind = SlotKind("gpu", dict(GPU.amounts), nodes=frozenset({"n1"}))
    one = made.scavenger(slots=(kind,))
    assert names(one.poll()) == [*slots("n1", 0, 1, 2, 3), "n2"]
    one.take([request(2), request(1, node="n1/gpu.1")])
    running(made, one, "l1", "l2")
    assert {lease.node for lease in one.poll().leases} == {"n1/gpu.1", "n2"}


def test_the_check_says_which_hosts_can_have_a_kind(world):
    made = world()
    kinds = (GPU, SlotKind("huge", {"gpu": 8, "cpus": 2, "memory_mb": 300}))
    findings = [
        (works, text) for works, text in made.scavenger(slots=kinds).check() if "kind" in text
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
            "resource, hosts have at most 4 gpu, 8 cpus, 2 GiB. Change this kind in "
            "[scheduler.pbs].",
        ),
    ]
    made.pbs.edit(lambda state: state.update(sharing="force_exclhost"))
    texts = [text for works, text in made.scavenger(slots=(GPU,)).check() if works is False]
    assert any("PBS lets no two jobs share 2 of 2 hosts" in text for text in texts), texts


def use_of(nodes):
    """The resources of the hosts of these vnodes (name → RawNode)."""
    return read_hosts(by_host(nodes), nodes)


def vnode(available, assigned=None, state="free", host="h", **values):
    """A vnode as pbsnodes shows it."""
    return RawNode(
        state=state,
        resources_available={"host": host, **available},
        resources_assigned=assigned or {},
        **values,
    )


def test_amounts_are_sums_over_vnodes_in_whole_megabytes():
    nodes = {
        "h[0]": vnode(
            {"ncpus": 4, "ngpus": "1", "mem": "2097852kb"}, {"ncpus": "3", "mem": "1500kb"}
        ),
        "h[1]": vnode({"ncpus": 4, "mem": "1gb"}, {"ngpus": 0}),
    }
    assert use_of(nodes) == {
        "h": HostResources(
            {"gpu": 1, "cpus": 8, "memory_mb": 2048 + 1024},
            {"gpu": 0, "cpus": 3, "memory_mb": 2},
        )
    }
    assert slot_chunk({"cpus": 4, "memory_mb": 100}) == ["ncpus=4", "mem=100mb"]


@pytest.mark.parametrize(
    ("state", "assigned"),
    [
        ("job-busy", {"ncpus": 4, "ngpus": 1, "mem": "51200kb"}),
        ("job-exclusive", {"ncpus": 1, "ngpus": 1, "mem": "51200kb"}),
    ],
)
def test_a_vnode_that_is_not_free_gives_nothing_to_further_jobs(state, assigned):
    """As OpenPBS 23.06 shows it: of three jobs of one GPU two start beside it, and one waits with
    "Insufficient amount of resource: host".
    """
    nodes = {
        "pbs0[0]": vnode({"mem": "8gb", "ncpus": 4, "ngpus": 2}, assigned, state),
        "pbs0[1]": vnode({"mem": "8389300kb", "ncpus": 4, "ngpus": 2}),
    }
    [use] = use_of(nodes).values()
    assert use.total == {"gpu": 4, "cpus": 8, "memory_mb": 2 * 8192}
    assert use.used == {"gpu": 2, "cpus": 4, "memory_mb": 8192}
    assert use.closed == ""


def test_gpus_of_a_vnode_without_cpus_are_gpus_of_its_host():
    """``qmgr -c "set node c1 resources_available.ngpus = 4"`` sets them on the natural vnode where
    a host has vnodes for its sockets. A job then has ``(pbs0[6]:ngpus=1+pbs0[7]:ncpus=1:…)``
    (OpenPBS 23.06).
    """
    nodes = {
        "pbs0[6]": vnode({"mem": "0b", "ncpus": 0, "ngpus": 4}, {"ngpus": 1}),
        "pbs0[7]": vnode({"mem": "8gb", "ncpus": 8}, {"mem": "51200kb", "ncpus": 1}),
    }
    [use] = use_of(nodes).values()
    assert use.total == {"gpu": 4, "cpus": 8, "memory_mb": 8192}
    assert use.used == {"gpu": 1, "cpus": 1, "memory_mb": 50}


@pytest.mark.parametrize(
    ("at_owner", "at_sharers"),
    [(3, ("@pbs0[3]", "@pbs0[3]")), (0, (1, 2))],
    ids=["qmgr", "vnodedef"],
)
def test_a_resource_that_vnodes_have_in_common_counts_once(at_owner, at_sharers):
    """As OpenPBS 23.06 shows it, by how the resource has been set."""
    common = {"mem": "8gb", "ncpus": 4, "ngpus": "@pbs0[3]"}
    busy, free = (
        {"mem": "51200kb", "ncpus": cpus, "ngpus": gpus}
        for cpus, gpus in zip((4, 2), at_sharers, strict=True)
    )
    nodes = {
        "pbs0[3]": vnode({"mem": "0b", "ncpus": 0, "ngpus": 4}, {"ngpus": at_owner}),
        "pbs0[4]": vnode(common, busy, "job-busy"),
        "pbs0[5]": vnode(common, free),
    }
    [use] = use_of(nodes).values()
    assert use.total == {"gpu": 4, "cpus": 8, "memory_mb": 2 * 8192}
    assert use.used == {"gpu": 3, "cpus": 6, "memory_mb": 8192 + 50}, "a free vnode reaches all"


@recorded
def test_a_real_pbs_says_what_jobs_have_of_each_host():
    nodes = read_nodes((LIVE / "pbsnodes_leases.json").read_text())
    jobs = read_jobs((LIVE / "qstat_f_leases.json").read_text(), "other-", with_running=True)
    use = read_hosts(by_host(nodes), nodes, jobs.running)
    assert use["n1"].total == {"gpu": 0, "cpus": 1, "memory_mb": 2048}
    assert use["n1"].used == {"gpu": 0, "cpus": 1, "memory_mb": 2048}
    assert use["n1"].closed == "a job has exclusive use of it"
    [neighbour] = use["n1"].neighbours
    assert neighbour == Neighbour(jobs.running[0].user, jobs.running[0].queue)


@pytest.mark.parametrize(
    ("environment", "visible", "starts"),
    [
        (ONE, 4, False),
        (
            {"MALLETRAIN_SLOT": "gpu.0", "MALLETRAIN_GPUS": "1", "CUDA_VISIBLE_DEVICES": "2"},
            4,
            True,
        ),
        (ONE, 1, True),
        ({"MALLETRAIN_SLOT": "cpu.0", "MALLETRAIN_GPUS": "0", "CUDA_VISIBLE_DEVICES": ""}, 4, True),
        ({}, 4, True),
    ],
    ids=["not named", "named", "confined", "without GPUs", "a whole host"],
)
def test_a_lease_does_not_start_where_it_could_use_the_gpus_of_others(
    tmp_path, environment, visible, starts
):
    for number in range(visible):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    script = TEMPLATE.replace("/dev/nvidia", f"{tmp_path}/nvidia")
    script = script.replace("#MALLETRAIN-LEASE\n", 'set -- touch "$STARTED"\n')
    output = tmp_path / "output"
    own = {"PBS_JOBID": "1.pbs0", "MALLETRAIN_OUTPUT": str(output), **environment}
    subprocess.run(
        ["/bin/sh", "-c", script],
        env={"PATH": os.environ["PATH"], "STARTED": str(tmp_path / "started"), **own},
        check=starts,
    )
    assert (tmp_path / "started").exists() == starts
    assert ("enable the hook pbs_cgroups" in output.read_text()) != starts


def test_the_subjobs_of_an_array_are_neighbours_although_pbs_lists_only_the_array():
    """``qstat -f`` lists no subjobs; ``pbsnodes`` names them."""
    jobs = read_jobs(
        '{"timestamp": 1, "Jobs": {'
        '"7[].s": {"Job_Name": "many", "Job_Owner": "ann@h", "job_state": "B", "queue": "workq"},'
        '"8[].s": {"Job_Name": "none", "Job_Owner": "bob@h", "job_state": "Q", "queue": "workq"}}}',
        "malletrain-",
        with_running=True,
    )
    shared = RawNode(
        state="free",
        jobs=["7[3].s/0", "7[4].s/1"],
        resources_available={"host": "n1", "ncpus": 8, "mem": "2gb"},
    )
    use = read_hosts(by_host({"n1": shared}), {"n1": shared}, jobs.running)
    assert use["n1"].neighbours == (Neighbour("ann", "workq"),)
