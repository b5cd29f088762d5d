"""What becomes of a lease by its job and by what was decided about it before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scavenger.interface import Lease, LeaseState
from scavenger.lease_books import NO_MORE_FOR_S, REMEMBERED_S, LeaseBooks, LeaseJob

NOW = 10_000.0
PENDING, RUNNING, ENDED = LeaseState.PENDING, LeaseState.RUNNING, LeaseState.ENDED


def books(max_leases=0):
    return LeaseBooks("Slurm", 60.0, max_leases)


def job(state, lease_id="l1", reason="", **options):
    return LeaseJob(Lease(lease_id, "7", state, "n1", reason, NOW + 9 if state is RUNNING and reason else None), "me", "n1", **options)


@pytest.mark.parametrize(
    ("one", "hold", "kept", "state", "reason", "cancelled"),
    [
        (job(RUNNING), "", {}, RUNNING, "", False),
        (job(RUNNING, reason="preempted"), "", {}, RUNNING, "preempted", False),
        (job(RUNNING), "taken back", {"n1": "wanted"}, RUNNING, "", False),
        (job(RUNNING, lost="suspended"), "", {}, ENDED, "suspended", True),
        (job(RUNNING, lost="suspended", ending=True), "", {}, ENDED, "suspended", False),
        (job(PENDING, reason="Priority", submitted=NOW - 59), "", {}, PENDING, "Priority", False),
        (job(PENDING, reason="Priority", submitted=NOW - 61), "", {}, ENDED, "it did not start within 60 s (Priority)", True),
        (job(PENDING, submitted=NOW - 61), "", {}, ENDED, "it did not start within 60 s (no reason given)", True),
        (job(PENDING, reason="Priority"), "", {}, PENDING, "Priority", False),
        (job(PENDING), "taken back", {}, ENDED, "taken back", True),
        (job(PENDING), "", {"n1": "a job needs it"}, ENDED, "a job needs it", True),
        (job(PENDING), "", {"n2": "a job needs it"}, PENDING, "", False),
        (job(PENDING, lost="it is held"), "taken back", {}, ENDED, "it is held", True),
        (job(ENDED, reason="its command ended", lost="x"), "taken back", {}, ENDED, "its command ended", False),
    ],
)
def test_what_becomes_of_a_lease(one, hold, kept, state, reason, cancelled):
    made = books()
    [lease], unwanted = made.look({"l1": one}, hold, kept, NOW)
    assert (lease.state, lease.reason) == (state, reason)
    assert unwanted == ([one] if cancelled else [])
    assert lease.leaving_by is None or lease.state is RUNNING
    if state is ENDED and one.alive:
        [again], unwanted = made.look({"l1": job(RUNNING)}, "", {}, NOW + 5)
        assert (again.state, again.reason) == (ENDED, reason), "what was given up stays given up, should its job start all the same"
        assert [j.id for j in unwanted] == ["7"]


def test_what_was_given_up_is_cancelled_should_it_turn_up_and_forgotten_at_last():
    made = books()
    made.give_up("l1", "no answer", NOW)
    made.give_up("l1", "given back", NOW + 1)
    [lease], unwanted = made.look({"l1": job(RUNNING)}, "", {}, NOW + 2)
    assert (lease.state, lease.reason, len(unwanted)) == (ENDED, "no answer", 1)
    made.look({}, "", {}, NOW + REMEMBERED_S)
    assert made.given_up == {}


def test_how_many_more_there_may_be():
    made = books(max_leases=3)
    assert made.room(1, NOW) == (2, "the configuration allows 3 leases")
    assert books().room(1000, NOW) is None
    made.look({"l1": job(RUNNING), "l2": job(ENDED, "l2")}, "", {}, NOW)
    made.limit_reached("QOSMaxSubmitJobPerUserLimit", NOW)
    assert made.refusal(NOW) == "Slurm refuses more jobs of ours for now: QOSMaxSubmitJobPerUserLimit"
    count, words = made.room(1, NOW)
    assert count == 0, "one job is there, and one is as many as the scheduler takes"
    assert "refuses more jobs of ours than 1 for now" in words
    assert made.room(0, NOW)[0] == 1
    after = NOW + NO_MORE_FOR_S
    assert (made.refusal(after), made.room(1, after)) == ("", (2, "the configuration allows 3 leases"))


STATES = st.sampled_from([PENDING, RUNNING, ENDED])
JOBS = st.lists(st.tuples(STATES, st.floats(0.0, 200.0), st.booleans(), st.booleans()), max_size=6)


@given(st.lists(st.tuples(JOBS, st.booleans()), max_size=5))
def test_no_lease_comes_back_and_every_one_that_ended_for_us_is_cancelled(looks):
    made, over = books(), set()
    for step, (found, held) in enumerate(looks):
        now = NOW + 10 * step
        jobs = {
            f"l{i}": job(state, f"l{i}", submitted=now - waited, lost="lost" if lost else "", ending=ending)
            for i, (state, waited, lost, ending) in enumerate(found)
        }
        leases, unwanted = made.look(jobs, "held" if held else "", {}, now)
        assert [lease.id for lease in leases] == list(jobs)
        ended = {lease.id for lease in leases if lease.state is ENDED}
        assert over & jobs.keys() <= ended
        wrong = {i for i in ended if jobs[i].alive}
        assert {one.lease.id for one in unwanted} == {i for i in wrong if not jobs[i].ending}
        over |= wrong
