"""What a real OpenPBS 23.06 showed: on the imitation that follows it, and in its own answers."""

import json
from pathlib import Path

import pytest

from scavenger.interface import LeaseState
from scavenger.pbs.job import PbsLeaseOptions
from scavenger.pbs.parse import read_ended, read_jobs, read_nodes, read_reservations
from scavenger.pbs.state import PbsSnapshot, by_host, node_facts
from tests.scavenger.pbs.pbs_world import names, request, running, worlds

pytestmark = pytest.mark.slow

LIVE = Path(__file__).parents[4] / "shared" / "pbs" / "live"
STUBBORN = ("sh", "-c", "trap '' TERM; while :; do sleep 0.1; done")
recorded = pytest.mark.skipif(not LIVE.is_dir(), reason="the recordings are not here")


@pytest.fixture
def world(tmp_path):
    with worlds(tmp_path) as make:
        yield make


def ended(one, *ids):
    """Poll until these leases have ended; their reasons."""
    seen = {}

    def look():
        seen.update({x.id: x for x in one.poll().leases if x.state is LeaseState.ENDED})
        return set(ids) <= seen.keys()

    return look, seen


def test_the_agent_leads_its_job_so_pbs_sees_at_once_that_it_left(world):
    made = world(hosts=1)
    made.pbs.edit(lambda state: state.update(sample_s=3600.0))
    one = made.scavenger()
    one.take([request(1)])
    running(made, one, "l1")
    main = made.pbs.submit("exit 0")
    made.pbs.until(lambda: made.pbs.jobs()[main]["state"] == "F", "the main job has run")


def test_under_a_shell_that_stays_above_it_pbs_looks_again_first(world):
    made = world(hosts=1)
    made.pbs.edit(lambda state: state.update(sample_s=3600.0))
    one = made.scavenger(lease=PbsLeaseOptions(queue="preemptable"))
    one.take([request(1, "sh", "-c", "trap 'sleep 1; exit' TERM; while :; do sleep 0.1; done")])
    running(made, one, "l1")
    made.pbs.submit("exit 0")

    def left_behind():
        [job] = made.pbs.leases().values()
        return job.get("kill_at") and not made.pbs.processes(job["id"])

    made.pbs.until(left_behind, "nothing of the lease runs any more")
    assert made.pbs.leases("R"), "and its job is there still"


def test_a_lease_that_ignores_its_signal_is_killed_although_it_is_polled(world):
    made = world(hosts=1)
    one = made.scavenger()
    [lease] = one.take([request(1, *STUBBORN)])
    running(made, one, "l1")
    one.give_back([lease])

    def look():
        one.poll()
        return not made.pbs.leases()

    made.pbs.until(look, "PBS kills it when its kill_delay is over")
    assert len(made.tools.calls("qdel")) == 1


def test_pbs_outlives_the_end_of_several_leases_of_which_one_has_just_ended(world):
    made = world(hosts=3)
    one = made.scavenger()
    leases = one.take([request(k) for k in (1, 2, 3)])
    running(made, one, "l1", "l2", "l3")
    last = leases[-1].scheduler_id
    made.pbs.edit(lambda state: state["jobs"][last].update(delete=True))
    made.pbs.until(lambda: last not in made.pbs.leases(), "one ends unseen")
    one.give_back(leases)
    made.pbs.until(lambda: not made.pbs.leases(), "the others end as well")
    assert all(lease.state is LeaseState.ENDED for lease in one.poll().leases)


def test_of_several_leases_gone_at_one_poll_each_is_understood(world, tmp_path):
    made, enough = world(hosts=3), tmp_path / "enough"
    one = made.scavenger(hold_s=20.0)
    wait = f"until [ -e {enough} ]; do sleep 0.1; done"
    one.take([request(k, "sh", "-c", f"{wait}; exit {k}") for k in (1, 2, 3)])
    running(made, one, "l1", "l2", "l3")
    enough.touch()
    made.pbs.until(lambda: not made.pbs.leases(), "they end")
    look, seen = ended(one, "l1", "l2", "l3")
    assert look()
    assert [seen[f"l{k}"].reason for k in (1, 2, 3)] == [
        f"its command failed with exit status {k}" for k in (1, 2, 3)
    ]
    assert names(one.poll()) == ["n1", "n2", "n3"], "nothing was taken back, so nothing holds"


@pytest.mark.parametrize("what", ["offline", "reservation", "preempt_order"])
def test_leases_leave_where_the_site_needs_it(world, what):
    made = world(hosts=2)
    one = made.scavenger(spare_s=900.0)
    one.take([request(1), request(2)])
    running(made, one, "l1", "l2")

    def change(state):
        if what == "offline":
            state["nodes"]["pbs0[1]"].update(state="offline", comment="bad\ndimm")
        elif what == "reservation":
            start = state["jobs"][min(state["jobs"])]["began"] + 900
            state["resv"] = {"M1.pbs0": {"start": start, "end": start + 900}}
            state["nodes"]["pbs0[1]"]["resv"].append("M1.pbs0")
        else:
            state["sched"]["preempt_order"] = "R"

    made.pbs.edit(change)
    if what == "preempt_order":
        made.later += 121  # what is configured is asked for every two minutes
    look, seen = ended(one, "l1")
    made.pbs.until(look, "the lease leaves")
    why = {
        "offline": "its node is wanted: it is offline (bad dimm)",
        "reservation": "reservation of its node begins in",
        "preempt_order": "this lease is not rerunnable",
    }
    assert why[what] in seen["l1"].reason
    assert bool(made.pbs.leases()) == (what != "preempt_order"), "the other one stays"


@recorded
def test_recorded_json_of_three_jobs_shows_one_and_dsv_all():
    shown = json.loads((LIVE / "qstat_xf_three_ids.json").read_text())["Jobs"]
    assert list(shown) == ["5.pbs0"]
    jobs = read_ended((LIVE / "qstat_xf_three_ids.dsv").read_text(), "malletrain-", "|").ours
    assert [(job.id, job.state, job.exit, job.host, job.user) for job in jobs] == [
        ("5.pbs0", "F", 271, "n1", "malletrain"),
        ("6.pbs0", "F", 271, "n2", "malletrain"),
        ("32.pbs0", "F", 271, "n2", "malletrain"),
    ]
    [same] = read_jobs((LIVE / "qstat_xf_three_ids.json").read_text(), "malletrain-").ours
    assert same == jobs[0]


@recorded
@pytest.mark.parametrize(
    ("nodes", "drained", "reserved"),
    [
        ("pbsnodes_maintenance_resv_running", set(), {"n1", "n2"}),
        ("pbsnodes_mom_dead", set(), set()),
        ("pbsnodes_leases", set(), set()),
    ],
)
def test_recorded_nodes_tell_who_has_to_leave(nodes, drained, reserved):
    hosts = by_host(read_nodes((LIVE / f"{nodes}.json").read_text()))
    reservations = read_reservations((LIVE / "pbs_rstat_f_maintenance.txt").read_text())
    now = 1795305692.0
    facts = node_facts(PbsSnapshot(hosts, [], {}, reservations), lambda node: (), {}, now)
    assert {name for name, node in facts.items() if node.drained} == drained
    assert {name for name, node in facts.items() if node.reserved} == reserved
