"""Jobs that Slurm lets wait although leases could make room, and the leases they lack."""

import pytest

from scavenger.slurm_parse import read_jobs, read_nodes
from scavenger.slurm_site import read_site
from scavenger.slurm_state import describe
from scavenger.slurm_yield import due_jobs, lacking
from tests.scavenger import slurm_world as world

NOW = 10_000
SITE = read_site(world.CONFIG, world.PARTITIONS)


def waiting(number=1, count=4, **fields):
    fields = {"start": NOW, "planned": "n[1-8]", "reason": "Resources", **fields}
    return read_jobs(world.job("PENDING", number, "main", count=count, **fields), "MARK", "malletrain-").pending


def due(*jobs):
    return due_jobs([job for some in jobs for job in some], SITE, "preemptable", NOW)


def facts(**states):
    return describe(read_nodes(world.nodes(states), "MARK"), [], [], {}, {}, NOW)


@pytest.mark.parametrize(
    ("fields", "is_due"),
    [
        ({}, True),
        ({"start": NOW - 500}, True),
        ({"reason": "Priority"}, True),
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


def test_a_job_lacks_what_idle_and_leaving_nodes_do_not_give():
    nodes = facts(idle="n[1-2]", allocated="n[3-8]")
    leases = {f"l{i}": f"n{i}" for i in range(3, 9)}
    assert lacking(due(waiting(count=4)), nodes, leases, ()) == {"1": ["l3", "l4"]}
    assert lacking(due(waiting(count=4)), nodes, leases, ("l5",)) == {"1": ["l3"]}
    assert lacking(due(waiting(count=4)), nodes, leases, ("l5", "l6")) == {}, "Slurm has only to start it"
    assert lacking(due(waiting(count=2)), nodes, leases, ()) == {}


def test_leases_on_planned_nodes_go_first():
    nodes = facts(allocated="n[1-8]")
    leases = {f"l{i}": f"n{i}" for i in range(1, 9)}
    assert lacking(due(waiting(count=2, planned="n[6-7]")), nodes, leases, ()) == {"1": ["l6", "l7"]}


def test_nothing_is_given_up_for_a_job_that_could_not_start_even_so():
    nodes = facts(idle="n1", allocated="n[2-8]")
    assert lacking(due(waiting(count=6)), nodes, {"l2": "n2", "l3": "n3"}, ()) == {}


def test_several_jobs_share_what_there_is():
    nodes = facts(idle="n[1-3]", allocated="n[4-8]")
    leases = {f"l{i}": f"n{i}" for i in range(4, 9)}
    found = lacking(due(waiting(1, 2), waiting(2, 3), waiting(3, 4)), nodes, leases, ())
    assert found == {"2": ["l4", "l5"]}, "the first takes two idle nodes, the second one and two leases; for the third too few are left"
    broken = facts(drained="n[1-3]", allocated="n[4-8]")
    assert lacking(due(waiting(1, 2)), broken, leases, ()) == {"1": ["l4", "l5"]}
