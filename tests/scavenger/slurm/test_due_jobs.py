"""Jobs that Slurm is about to start: the idle nodes that are left to them, and the leases they
lack.
"""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scavenger.slurm.due_jobs import claims, due_jobs, leave_by, tasks_at_once
from scavenger.slurm.parse import SlurmJobTable, read_jobs, read_nodes
from scavenger.slurm.site import read_site
from scavenger.slurm.state import node_facts
from tests.scavenger.slurm import slurm_world as world

NOW = 10_000
SITE = read_site(world.CONFIG, world.PARTITIONS)


def waiting(number=1, count=4, **fields):
    fields = {"start": NOW, "planned": "n[1-8]", "reason": "Resources", **fields}
    return read_jobs(
        world.job("PENDING", number, "main", count=count, **fields), "MARK", "malletrain-"
    ).pending


def due(*jobs):
    return due_jobs([job for some in jobs for job in some], SITE, "preemptable", NOW)


def facts(**states):
    jobs = SlurmJobTable([], [], [])
    return node_facts(read_nodes(world.nodes(states), "MARK"), jobs, [], {}, {}, NOW)


@pytest.mark.parametrize(
    ("fields", "is_due"),
    [
        ({}, True),
        ({"start": NOW - 500}, True),
        ({"reason": "Priority"}, True),
        ({"reason": "Required nodes lack available resources"}, True),  # Slurm 26.05
        ({"start": NOW + 60}, False),
        ({"start": "N/A"}, False),
        ({"planned": "(null)"}, False),
        ({"reason": "Dependency"}, False),
        ({"reason": "QOSGrpNodeLimit"}, False),
        ({"partition": "preemptable"}, False),
        ({"partition": "preemptable,batch"}, True),
        ({"partition": "unknown"}, False),
    ],
)
def test_jobs_that_could_have_started_by_now(fields, is_due):
    assert bool(due(waiting(**fields))) is is_due


HET = {"start": NOW, "reason": "Resources"}
OFF = {"start": NOW + 31, "planned": "(null)", "reason": "BeginTime"}


@pytest.mark.parametrize(
    ("one", "two", "before", "nodes"),
    [
        ({**HET, "planned": "n1"}, {**HET, "planned": "n[2-3]"}, (), 3),
        (OFF, {**HET, "planned": "n[1-2]"}, (), 3),
        ({**OFF, "start": "N/A"}, {**HET, "planned": "n[1-2]"}, (), 3),
        ({**HET, "planned": "n1"}, {**HET, "start": NOW + 60, "planned": "n[2-3]"}, (), 3),
        (OFF, OFF, ("4",), 3),
        (OFF, OFF, (), None),
        ({**OFF, "start": NOW + 7200}, {**OFF, "start": NOW + 7200}, ("4",), None),
        ({**HET, "planned": "n1"}, {**HET, "reason": "QOSGrpNodeLimit"}, (), None),
        ({**HET, "planned": "n1"}, {**HET, "reason": "Dependency"}, (), None),
    ],
)
def test_the_components_of_a_heterogeneous_job_are_one_job(one, two, before, nodes):
    """As a real Slurm 22.05 shows them while it collects nodes."""
    parts = waiting("4+0", 1, **one) + waiting("4+1", 2, **two)
    jobs = due_jobs(parts, SITE, "preemptable", NOW, before)
    assert [job.nodes for job in jobs] == ([] if nodes is None else [nodes])
    if jobs:
        assert jobs[0].id == "4"
        assert nodes_on_hold(jobs, facts(idle="n[1-3]", allocated="n[4-8]"), {}) == [
            "n1",
            "n2",
            "n3",
        ]


def test_a_job_that_was_due_and_is_put_off_keeps_its_nodes():
    put_off = waiting(7, 2, **OFF)
    assert due_jobs(put_off, SITE, "preemptable", NOW) == []
    jobs = due_jobs(put_off, SITE, "preemptable", NOW, ("7",))
    assert nodes_on_hold(jobs, facts(idle="n[1-3]", allocated="n[4-8]"), {}) == ["n1", "n2"]


@pytest.mark.parametrize(
    ("before", "now_called", "is_due"),
    [
        ("7_[0-3]", "7_0", True),  # Slurm gives the task that it collects nodes for a line
        ("7_[0-3%2]", "7_[1-3%2]", True),  # the first has started
        ("7_0", "7_0", True),
        ("7_0", "7_1", False),  # another task, which was not due
        ("7", "7_0", False),
        ("7_[0-3]", "71_0", False),
        ("7_[0-3]", "7_4", False),
        ("7_[2,5,9]", "7_5", True),
        ("7_[0,2,4,...]", "7_300", True),  # a long list is cut short
        ("7_[0-8:4]", "7_4", True),
    ],
)
def test_a_task_of_an_array_that_is_put_off_keeps_its_nodes(before, now_called, is_due):
    """Before, it was one of those that Slurm shows in one line."""
    jobs = due_jobs(waiting(now_called, 2, **OFF), SITE, "preemptable", NOW, (before,))
    assert [job.id for job in jobs] == ([now_called] if is_due else [])


def test_each_task_of_an_array_that_slurm_shows_alone_needs_nodes_of_its_own():
    tasks = waiting("7_0", 2) + waiting("7_1", 2) + waiting("7_[2-3]", 2)
    jobs = due_jobs(tasks, SITE, "preemptable", NOW)
    assert [(job.id, job.nodes) for job in jobs] == [("7_0", 2), ("7_1", 2), ("7_[2-3]", 2)]
    assert len(nodes_on_hold(jobs, facts(idle="n[1-8]"), {})) == 8  # a line stands for two


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("7", 1),
        ("7_3", 1),
        ("7+0", 1),
        ("7_[3]", 1),
        ("7_[0-3]", 4),
        ("7_[0-3%2]", 2),
        ("7_[0-3%0]", 4),
        ("7_[0-8:4,20]", 4),
        ("7_[1,3,5,...]", 3),
    ],
)
def test_how_many_tasks_a_line_stands_for(name, tasks):
    assert tasks_at_once(name) == tasks


def test_slurm_takes_nodes_back_for_several_tasks_of_an_array_at_once():
    """Seen with 22.05: four leases preempted for two tasks of two nodes, in one line of squeue."""
    array = due(waiting("5_[0-1]", 2, planned="n[3-4]"))
    assert nodes_on_hold(array, facts(idle="n[1-8]"), {}) == ["n1", "n2", "n3", "n4"]
    assert nodes_on_hold(array, facts(idle="n[1-3]", allocated="n[4-8]"), {}) == ["n1", "n3"]
    assert nodes_on_hold(array, facts(idle="n[1,3-4]", allocated="n2"), {"l2": "n2"}) == [
        "n1",
        "n3",
        "n4",
    ], "the fourth, a lease, is just being preempted"
    leases = {"l3": "n3", "l4": "n4", "l5": "n5"}
    result = claims(array, facts(idle="n1", allocated="n[2-8]"), leases, ())
    assert (sorted(result.node_holds), result.needed_leases) == (["n1"], {"5_[0-1]": ["l3"]}), (
        "leases leave for the first task only: for the others Slurm preempts them"
    )


@pytest.mark.skipif(not world.RECORDED.is_dir(), reason="no recordings of a real Slurm are at hand")
def test_the_queue_of_a_real_slurm():
    """A job for resources, one behind it, one that depends on another, a held array, a lease."""
    head, *lines = (world.RECORDED / "squeue_all.txt").read_text().splitlines()
    columns = head.split("|")
    places = [columns.index(name) for name in ("STATE", "JOBID", "USER", "PARTITION", "NODES")]
    places += [columns.index(n) for n in ("SUBMIT_TIME", "START_TIME", "END_TIME", "NODELIST")]
    places += [columns.index(n) for n in ("REQ_NODES", "SCHEDNODES", "REASON", "ACCOUNT")]
    places += [columns.index(n) for n in ("EXEC_HOST", "NAME")]
    text = "".join(
        "|".join(["MARK", *(line.split("|")[k] for k in places)]) + "\n" for line in lines
    )
    pending = read_jobs(text, "MARK", "malletrain-").pending
    at = {job.id: job.start for job in pending}
    assert {"12", "13", "14", "15_[0-3%2]"} <= at.keys()
    first = min(start for start in at.values() if start is not None)
    for now, ids in (
        (first - 5, []),
        (first, ["13"]),
        (max(filter(None, at.values())), ["12", "13"]),
    ):
        jobs = due_jobs(pending, SITE, "preemptable", now)
        assert sorted(job.id for job in jobs) == ids


def test_where_qos_decide_the_partition_does_not():
    by_qos = read_site(world.CONFIG.replace("partition_prio", "qos"), world.PARTITIONS)
    assert due_jobs(waiting(partition="preemptable"), by_qos, "preemptable", NOW)


def lacked(jobs, nodes, leases, leaving=()):
    return claims(jobs, nodes, leases, leaving).needed_leases


def nodes_on_hold(jobs, nodes, leases, leaving=()):
    return sorted(claims(jobs, nodes, leases, leaving).node_holds)


def test_a_job_lacks_what_idle_and_leaving_nodes_do_not_give():
    nodes = facts(idle="n[1-2]", allocated="n[3-8]")
    leases = {f"l{i}": f"n{i}" for i in range(3, 9)}
    assert lacked(due(waiting(count=4)), nodes, leases) == {"1": ["l3", "l4"]}
    assert lacked(due(waiting(count=4)), nodes, leases, ("l5",)) == {"1": ["l3"]}
    assert lacked(due(waiting(count=4)), nodes, leases, ("l5", "l6")) == {}, (
        "Slurm has only to start it"
    )
    assert lacked(due(waiting(count=2)), nodes, leases) == {}


def test_as_many_idle_nodes_are_left_alone_as_the_job_still_needs():
    nodes = facts(idle="n[1-6]", allocated="n[7-8]")
    leases = {"l7": "n7", "l8": "n8"}
    assert nodes_on_hold(due(waiting(count=4, planned="n[5-8]")), nodes, leases) == [
        "n1",
        "n2",
        "n5",
        "n6",
    ], "planned ones first"
    assert nodes_on_hold(due(waiting(count=4, planned="n[5-8]")), nodes, leases, ("l7", "l8")) == [
        "n5",
        "n6",
    ]
    assert nodes_on_hold(due(waiting(count=1, planned="n[1-3]")), nodes, leases) == [
        "n1",
        "n2",
        "n3",
    ], "it counts tasks, not nodes"
    [sentence, *_] = claims(due(waiting(count=4)), nodes, leases, ()).node_holds.values()
    assert sentence == "Slurm is about to start job 1, which needs 4 nodes"


def test_a_job_counts_on_nodes_of_leaving_leases_first_and_on_no_more_than_it_needs():
    nodes = facts(idle="n1", completing="n2", allocated="n[3-8]")
    leases = {f"l{i}": f"n{i}" for i in range(3, 9)}
    jobs = due(waiting(count=3, planned="n[7-8]"))
    assert claims(jobs, nodes, leases, ("l3", "l8")).nodes == {"n8", "n3", "n2"}
    assert claims(jobs, nodes, leases, ()).nodes == {"n1", "n2", "n7"}, "it lacks one lease"


def test_completing_nodes_count_as_open():
    nodes = facts(idle="n1", completing="n[2-3]", allocated="n[4-8]")
    result = claims(due(waiting(count=3)), nodes, {f"l{i}": f"n{i}" for i in range(4, 9)}, ())
    assert (sorted(result.node_holds), result.needed_leases) == (["n1"], {})


def test_leases_on_planned_nodes_go_first():
    nodes = facts(allocated="n[1-8]")
    leases = {f"l{i}": f"n{i}" for i in range(1, 9)}
    assert lacked(due(waiting(count=2, planned="n[6-7]")), nodes, leases) == {"1": ["l6", "l7"]}


def test_nothing_is_given_up_or_kept_for_a_job_that_could_not_start_even_so():
    nodes = facts(idle="n1", allocated="n[2-8]")
    assert claims(due(waiting(count=6)), nodes, {"l2": "n2", "l3": "n3"}, ()) == ({}, {}, set())
    assert claims(due(waiting(count=2, planned="n[7-8]")), nodes, {"l2": "n2"}, ()) == (
        {},
        {},
        set(),
    ), "it waits for nodes that are not ours"


def test_several_jobs_share_what_there_is():
    nodes = facts(idle="n[1-3]", allocated="n[4-8]")
    leases = {f"l{i}": f"n{i}" for i in range(4, 9)}
    needed_leases = lacked(due(waiting(1, 2), waiting(2, 3), waiting(3, 4)), nodes, leases)
    assert needed_leases == {"2": ["l4", "l5"]}, (
        "the first takes two idle nodes, the second one and two leases; for the third too few "
        "are left"
    )
    broken = facts(drained="n[1-3]", allocated="n[4-8]")
    assert lacked(due(waiting(1, 2)), broken, leases) == {"1": ["l4", "l5"]}


def test_a_job_lacks_a_lease_if_slurm_plans_it_on_a_node_that_leaves_for_another_job():
    """Seen with 22.05: Slurm preempts l6 for job 19, then plans job 20 on n5 and n6 and preempts
    l5 for it, and no other lease.
    """
    nodes = facts(allocated="n[1-8]")
    leases = {f"l{i}": f"n{i}" for i in range(5, 9)}
    first, second = waiting(19, 1, planned="n6"), waiting(20, 2, planned="n[5-6]")
    assert lacked(due(first, second), nodes, leases, ("l5", "l6")) == {"20": ["l7"]}
    assert lacked(due(second), nodes, leases, ("l5", "l6")) == {}
    completing = facts(completing="n6", allocated="n[1-5,7-8]")
    del leases["l6"]
    assert lacked(due(first, second), completing, leases, ("l5",)) == {"20": ["l7"]}


SINCE = {"1": 100.0, "2": 104.0}


@pytest.mark.parametrize(
    ("jobs", "needed", "leaving", "previous", "times"),
    [
        # Slurm preempts it for the job that it plans on its node.
        ([(1, "n[1-2]")], {}, {"l1": "n1"}, {}, {"l1": 110.0}),
        # A lease that the job lacks has what is left of the grace time of the first one.
        ([(1, "n[1-2]")], {"1": ["l3"]}, {"l1": "n1"}, {}, {"l1": 110.0, "l3": 110.0}),
        # It leaves for nobody that waits.
        ([(1, "n[1-2]")], {}, {"l5": "n5"}, {}, {}),
        # Two jobs count on its node.
        ([(2, "n[1-2]"), (1, "n[2-3]")], {}, {"l2": "n2", "l1": "n1"}, {},
            {"l2": 110.0, "l1": 114.0}),
        # The job is planned on other nodes by now, or has begun.
        ([(1, "n4")], {}, {"l1": "n1"}, {"l1": 110.0, "l9": 90.0}, {"l1": 110.0}),
        ([], {}, {"l1": "n1"}, {"l1": 110.0}, {"l1": 110.0}),
        # A slot.
        ([(1, "n1")], {}, {"l1": "n1/gpu.0", "l2": "n2/gpu.0"}, {}, {"l1": 110.0}),
    ],
)  # fmt: skip
def test_by_when_a_lease_should_have_left(jobs, needed, leaving, previous, times):
    made = [job for number, planned in jobs for job in waiting(number, 2, planned=planned)]
    assert leave_by(made, SINCE, needed, leaving, 10.0, previous) == times


@given(
    idle=st.sets(st.integers(1, 8)),
    others=st.sets(st.integers(1, 8)),
    going=st.sets(st.integers(1, 8)),
    wants=st.lists(st.integers(2, 9), max_size=4),
)
def test_claims_never_exceed_what_there_is(idle, others, going, wants):
    """Idle nodes, leases and nodes of others in any mixture, and any jobs."""
    others -= idle
    states = {
        "idle": ",".join(f"n{i}" for i in idle),
        "allocated": ",".join(f"n{i}" for i in set(range(1, 9)) - idle),
    }
    nodes = facts(**{state: names for state, names in states.items() if names})
    leases = {f"l{i}": f"n{i}" for i in set(range(1, 9)) - idle - others}
    leaving = {f"l{i}" for i in going} & leases.keys()
    result = claims(
        due(*(waiting(n, count) for n, count in enumerate(wants))), nodes, leases, leaving
    )
    given_up = [lease for some in result.needed_leases.values() for lease in some]
    assert len(set(given_up)) == len(given_up)
    assert set(given_up) <= leases.keys() - leaving
    assert result.node_holds.keys() <= {f"n{i}" for i in idle}
    assert len(given_up) + len(result.node_holds) <= sum(wants)


@given(
    kinds=st.lists(st.sampled_from(["idle", "lease", "leaving"]), min_size=8, max_size=8),
    plans=st.lists(st.sets(st.integers(1, 8), min_size=2), max_size=4),
)
@example(kinds=[*4 * ["lease"], *2 * ["leaving"], *2 * ["lease"]], plans=[{5, 6}, {5, 6}])
def test_as_many_leases_leave_as_due_jobs_lack_nodes(kinds, plans):
    """Wherever Slurm plans the jobs, while all nodes are idle or leased."""
    of_kind = {kind: [n for n in range(1, 9) if kinds[n - 1] == kind] for kind in set(kinds)}
    idle = of_kind.get("idle", [])
    leased = [*of_kind.get("lease", []), *of_kind.get("leaving", [])]
    states = {
        "idle": ",".join(f"n{n}" for n in idle),
        "allocated": ",".join(f"n{n}" for n in leased),
    }
    jobs = [
        waiting(number, len(plan), planned=",".join(f"n{n}" for n in sorted(plan)))
        for number, plan in enumerate(plans)
    ]
    leaving = {f"l{n}" for n in of_kind.get("leaving", [])}
    result = claims(
        due(*jobs),
        facts(**{state: names for state, names in states.items() if names}),
        {f"l{n}": f"n{n}" for n in leased},
        leaving,
    )
    lacking = max(0, sum(map(len, plans)) - len(idle) - len(leaving))
    needed = [lease for leases in result.needed_leases.values() for lease in leases]
    if lacking <= len(leased) - len(leaving):
        assert len(needed) == lacking
