"""The recordings of a real PBS, and small texts in their form."""

from datetime import datetime, timezone
from pathlib import Path

import pytest

from scavenger.interface import LeaseState, SchedulerError
from scavenger.pbs.parse import (
    PbsJob,
    RawNode,
    read_duration,
    read_jobs,
    read_nodes,
    read_reservations,
    read_time,
    vnodes_of,
)
from scavenger.pbs.site import read_site
from scavenger.pbs.state import (
    PbsSnapshot,
    by_host,
    end_reason,
    is_preempted,
    lease_of,
    loss_reason,
    node_facts,
    terminated_by,
)

RECORDED = Path(__file__).parents[4] / "shared" / "pbs" / "outputs"
recorded = pytest.mark.skipif(not RECORDED.is_dir(), reason="needs the recordings of a real PBS")


def text(name):
    return (RECORDED / name).read_text()


@recorded
def test_recorded_vnodes():
    nodes = read_nodes(text("pbsnodes_a.json"))
    hosts = by_host(nodes)
    assert sorted(hosts) == [f"n{i}" for i in range(1, 9)], "the natural vnode has no CPUs"
    site = read_site(text("qstat_Bf.json"), text("qstat_Qf.json"), text("qmgr_print_sched.txt"))
    jobs = read_jobs(text("qstat_f.json"), "malletrain-")
    reservations = read_reservations(text("pbs_rstat_F.txt"))
    facts = node_facts(
        PbsSnapshot(hosts, jobs.pending, {}, reservations), site.queues_of(), {}, 1795197801.0
    )
    assert [facts[f"n{i}"].idle for i in range(1, 9)] == [False] * 8
    assert facts["n1"].reserved_from == 1795208520.0
    assert facts["n3"].reserved_from is None
    assert facts["n8"].trouble == "it is offline (bad dimm)"
    assert facts["n1"].state == "job-exclusive"
    assert "preemptable" in facts["n1"].partitions
    assert "arch=linux" in facts["n1"].features


@recorded
def test_recorded_jobs():
    table = read_jobs(text("qstat_f.json"), "mt_")
    assert [job.id for job in table.pending] == ["17.pbs0", "22[].pbs0"]
    big = table.pending[0]
    assert big.start == 1795198073.0
    assert big.planned_on == tuple(f"pbs0[{i}]" for i in range(3, 9))
    assert [(job.id, job.name, job.state) for job in table.ours] == [
        ("20.pbs0", "mt_long", "Q"),
        ("21.pbs0", "mt_short", "R"),
    ]
    assert table.ours[1].vnodes == ("pbs0[5]",)
    assert table.ours[1].user == "pbsuser"
    assert [job.name for job in read_jobs(text("qstat_f.json"), "job_a").ours] == ["job_a"]
    [released] = read_jobs(text("qstat_f_after_release_nodes.json"), "rel").ours
    assert released.host == "pbs1"
    assert len(read_jobs(text("qstat_tf.json"), "arr").ours) >= 4, "subjobs of an array"


@recorded
def test_a_running_lease_ends_by_the_end_of_its_walltime():
    """15.pbs0 began at 18:02:53 UTC on 20 November 2026, with a walltime of 20 minutes."""
    first = read_jobs(text("qstat_f.json"), "job_a").ours[0]
    ends_by = datetime(2026, 11, 20, 18, 22, 53, tzinfo=timezone.utc).timestamp()
    assert lease_of("l1", first, ends_by - 60.0, 10.0).ends_by == ends_by


@recorded
def test_recorded_preemptions():
    one, two = read_jobs(text("qstat_xf_after_preempt_D.json"), "mt").ours
    assert terminated_by(one) == terminated_by(two) == "Scheduler"
    lease = lease_of("l1", one, 1000.0, 10.0)
    assert (lease.state, lease.reason, lease.gone_at) == (
        LeaseState.RUNNING,
        "preempted",
        1010.0,
    )
    ended = {job.id: job for job in read_jobs(text("qstat_xf.json"), "mt").ours}
    assert end_reason(ended["0.pbs0"]) == "preempted"
    assert end_reason(ended["3.pbs0"]) == "it was deleted by root"
    assert ended["0.pbs0"].exit == 271
    assert loss_reason(ended["3.pbs0"]) == "the main scheduler requeued it"


def job(state="R", substate=42, comment="", runs=1):
    return PbsJob(
        "1.s",
        "malletrain-t-l1",
        "me",
        state,
        substate,
        "q",
        0.0,
        None,
        (),
        ("a",),
        "a",
        comment,
        runs,
        None,
    )


@pytest.mark.parametrize(
    ("raw", "lease_state", "leaving", "reason", "taken", "lost"),
    [
        (job(), "running", False, "", False, ""),
        (job("Q", 10, runs=0), "pending", False, "", False, ""),
        (job("H", 20, runs=0), "pending", False, "", False, "it is held"),
        (job("E", 51), "running", True, "it is ending", False, ""),
        (
            job(comment="Job run at x and terminated by Scheduler@s"),
            "running",
            True,
            "preempted",
            True,
            "",
        ),
        (
            job(comment="Job run at x and terminated by root@s"),
            "running",
            True,
            "it was deleted by root",
            False,
            "",
        ),
        (job(substate=60), "running", True, "preempted", True, ""),
        (job("S", 45), "running", False, "", True, "the main scheduler suspended it"),
        (job("R", 43), "running", False, "", True, "the main scheduler suspended it"),
        (job("Q", 10, runs=1), "pending", False, "", True, "the main scheduler requeued it"),
        (job(runs=2), "running", False, "", True, "the main scheduler requeued it"),
        (job("F", 92), "ended", False, "it ended", False, ""),
    ],
)
def test_states_of_leases(raw, lease_state, leaving, reason, taken, lost):
    lease = lease_of("l1", raw, 100.0, 8.0)
    assert (lease.state.value, lease.gone_at, lease.reason) == (
        lease_state,
        108.0 if leaving else None,
        reason,
    )
    assert is_preempted(raw) is taken
    assert loss_reason(raw) == lost or lease_state == "ended"


@pytest.mark.parametrize(
    ("exit_status", "words"),
    [
        (0, "its command ended"),
        (3, "exit status 3"),
        (-29, "time limit"),
        (-3, "PBS could not run it"),
        (None, "it ended"),
    ],
)
def test_ends_of_leases(exit_status, words):
    assert words in end_reason(job("F", 92)._replace(exit=exit_status))


@recorded
def test_recorded_site():
    site = read_site(text("qstat_Bf.json"), text("qstat_Qf.json"), text("qmgr_print_sched.txt"))
    assert (site.version, site.server, site.scheduling, site.sees_others) == (
        (23, 6),
        "pbs0",
        True,
        True,
    )
    assert (site.preempt_queue_prio, site.preempt_order, site.preempt_known, site.iteration_s) == (
        150,
        "D",
        True,
        5.0,
    )
    assert site.above("preemptable") == ["expressq"]
    assert not site.requeues
    assert not site.queues["R14"].started
    assert site.queues["R14"].acl == ("pbsuser@pbs0",)


def test_vnodes_of_a_job():
    assert vnodes_of("(a[1]:ncpus=2+a[2]:ncpus=1:mem=3kb)+(b:ncpus=2)+(a[1]:ncpus=1)") == (
        "a[1]",
        "a[2]",
        "b",
    )
    assert vnodes_of("") == ()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("Fri Nov 20 18:07:53 2026", 1795198073.0),
        ("Sun Nov  1 00:00:00 2026", 1793491200.0),
        (1795198073, 1795198073.0),
        ("1795198073", 1795198073.0),
        (float("inf"), None),
        ("Fri Foo 20 18:07:53 2026", None),
        ("Fri Nov 99 18:07:53 2026", None),
        (None, None),
        ("--", None),
        (True, None),
    ],
)
def test_times(value, seconds):
    assert read_time(value) == seconds


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("01:00:00", 3600.0), ("10:30", 630.0), ("90", 90.0), (90, 90.0), ("x", None), ("", None)],
)
def test_durations(value, seconds):
    assert read_duration(value) == seconds


def test_reservations_with_wrapped_lines():
    reservations = read_reservations(
        "Resv ID: M5.s\nReserve_Name = m\nreserve_start = Fri Nov 20 21:02:00 2026\nreserve_end "
        "= Fri Nov 20 21:3\n\t2:00 2026\n"
        "resv_nodes = (a[1]:ncpus=2)+(a[2]:ncpu\n\ts=2)\n\nResv ID: S7.s\nreserve_start = "
        "10\nreserve_end = 20\n"
    )
    assert reservations["M5.s"].end - reservations["M5.s"].start == 1800.0
    assert (reservations["S7.s"].start, reservations["S7.s"].end) == (10.0, 20.0)
    assert read_reservations("") == {}
    for damaged in ("pbs_rstat: illegal option", "Resv ID: R1.s\nreserve_start = soon\n"):
        with pytest.raises(SchedulerError, match="pbs_rstat cannot be understood"):
            read_reservations(damaged)


def facts_of(reservations=None, pending=(), now=100.0, suspended=(), **vnodes):
    nodes = {
        name: RawNode(resources_available={"host": name.partition("[")[0], "ncpus": 2}, **fields)
        for name, fields in vnodes.items()
    }
    reading = PbsSnapshot(by_host(nodes), pending, {}, reservations or {}, suspended)
    return node_facts(reading, lambda node: ("q",), {}, now)


@pytest.mark.parametrize(
    ("state", "jobs", "idle", "trouble"),
    [
        ("free", [], True, ""),
        ("free", ["1.s"], False, ""),
        ("free", "1.s/0, 1.s/1", False, ""),
        ("job-exclusive", ["1.s"], False, ""),
        ("job-busy", [], False, ""),
        ("resv-exclusive", [], True, ""),
        ("job-exclusive,resv-exclusive", ["1.s"], False, ""),
        ("offline", [], True, "offline"),
        ("state-unknown,down", [], True, "not known"),
        ("down,job-busy", [], False, "down"),
        ("Stale", [], True, "no longer reports it"),
        ("sleep", [], True, "asleep"),
        ("provisioning", [], True, "provisioned"),
        ("wait-provisioning", [], True, "waits"),
        ("maintenance", ["1.s"], False, "maintenance"),
        ("unresolvable", [], True, "resolved"),
        ("on-fire", [], True, "MalleTrain does not know"),
        (7, [], True, "MalleTrain does not know"),
        ("<various>", [], True, "MalleTrain does not know"),
    ],
)
def test_states_of_vnodes(state, jobs, idle, trouble):
    [fact] = facts_of(a={"state": state, "jobs": jobs}).values()
    assert fact.idle is idle
    assert (trouble in fact.trouble) if trouble else not fact.trouble


@pytest.mark.parametrize("state", ['"S"', '"U"', '"R", "substate": 43', '"R", "substate": 45'])
def test_the_vnodes_of_a_suspended_job_are_in_use_although_pbs_calls_them_free(state):
    """The server takes the job off its vnodes (openpbs, req_signal.c, rel_resc; node_manager.c,
    free_nodes); it keeps its memory there.
    """
    jobs = read_jobs(
        f'{{"timestamp": 1, "Jobs": {{"7.s": {{"Job_Name": "main", "job_state": {state}, '
        '"exec_vnode": "(a[0]:ncpus=2)+(b:ncpus=2)"}}}',
        "malletrain-",
    )
    vnodes = {"a[0]": {"state": "free"}, "a[1]": {"state": "free"}, "c": {"state": "free"}}
    facts = facts_of(suspended=jobs.suspended, **vnodes)
    assert {host: fact.trouble for host, fact in facts.items()} == {
        "a": "job 7.s is suspended on it",
        "c": "",
    }


def test_a_reservation_that_nobody_knows_counts_while_it_has_the_vnode():
    [fact] = facts_of(a={"state": "resv-exclusive", "resv": "R9.s"}).values()
    assert fact.reserved == "reservation R9.s has it"
    [fact] = facts_of(a={"state": "free", "resv": ["R9.s"]}).values()
    assert (fact.reserved, fact.reserved_from) == ("", None)


def test_a_host_whose_name_looks_like_a_number():
    """qstat prints it without quotes (openpbs issue 1255): 1e3 arrives as 1000.0."""
    nodes = read_nodes(
        '{"nodes": {"1e3": {"resources_available": {"host":1e3, "ncpus": 2}}, '
        '"12[0]": {"resources_available": {"host":12, "ncpus": 2}}}}'
    )
    assert sorted(by_host(nodes)) == ["12", "1e3"]


def test_versions():
    server = '{{"timestamp": 1, "Server": {{"s": {{"pbs_version": "{}"}}}}}}'
    for shown, version in (
        ("2022.1.1.20220926110806", (2022, 1)),
        ("19.1.3", (19, 1)),
        ("23.06.06", (23, 6)),
    ):
        assert read_site(server.format(shown), '{"timestamp": 1}').version == version
    with pytest.raises(SchedulerError, match="no version of PBS"):
        read_site(server.format("new"), '{"timestamp": 1}')


@pytest.mark.parametrize(
    ("order", "letters", "requeues", "suspends"),
    [
        ("D", "D", False, False),
        ("SCR", "SCR", False, True),
        ("R", "R", True, False),
        ("CR", "CR", True, False),
        ('"SR 80 D"', "SRD", False, True),
        ('"R 50 D"', "RD", True, False),
        ('"D 50 CR"', "DCR", True, False),
        ('"D 50 SR"', "DSR", False, True),
        ("CS", "CS", False, True),
        ("RSC", "RSC", False, True),
        ('"D 50 S"', "DS", False, True),
        ("DS", "DS", False, False),
    ],
)
def test_ways_of_preempting(order, letters, requeues, suspends):
    site = read_site(
        '{"timestamp": 1, "Server": {"s": {"pbs_version": "23.6"}}}',
        '{"timestamp": 1}',
        f"set sched preempt_order = {order}\n",
    )
    assert (site.preempt_methods, site.requeues) == (letters, requeues)
    assert ("S" in site.lease_methods("auto")) == suspends
    assert site.preempt_order == order.strip('"')
