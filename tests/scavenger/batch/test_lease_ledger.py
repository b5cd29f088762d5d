"""What becomes of a lease by its job and by what was decided about it before."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scavenger.batch.lease_ledger import (
    LIMIT_BACKOFF_S,
    RECORD_LIFETIME_S,
    LeaseJob,
    LeaseLedger,
    own_jobs,
)
from scavenger.batch.submission import BusyError, RefusedError, UnsureError
from scavenger.interface import Lease, LeaseState

NOW = 10_000.0
PENDING, RUNNING, ENDED = LeaseState.PENDING, LeaseState.RUNNING, LeaseState.ENDED


def books(max_leases=0):
    return LeaseLedger("Slurm", 60.0, max_leases, "me")


def job(state, lease_id="l1", reason="", **options):
    return LeaseJob(
        Lease(lease_id, "7", state, "n1", reason, NOW + 9 if state is RUNNING and reason else None),
        "me",
        "n1",
        **options,
    )


@pytest.mark.parametrize(
    ("one", "hold", "node_holds", "state", "reason", "cancelled"),
    [
        (job(RUNNING), "", {}, RUNNING, "", False),
        (job(RUNNING, reason="preempted"), "", {}, RUNNING, "preempted", False),
        (job(RUNNING), "taken back", {"n1": "wanted"}, RUNNING, "", False),
        (job(RUNNING, lost="suspended"), "", {}, ENDED, "suspended", True),
        (job(RUNNING, lost="suspended", ending=True), "", {}, ENDED, "suspended", False),
        (job(PENDING, reason="Priority", submitted=NOW - 59), "", {}, PENDING, "Priority", False),
        (
            job(PENDING, reason="Priority", submitted=NOW - 61),
            "",
            {},
            ENDED,
            "it did not start within 60 s (Priority)",
            True,
        ),
        (
            job(PENDING, submitted=NOW - 61),
            "",
            {},
            ENDED,
            "it did not start within 60 s (no reason given)",
            True,
        ),
        (job(PENDING, reason="Priority"), "", {}, PENDING, "Priority", False),
        (job(PENDING), "taken back", {}, ENDED, "taken back", True),
        (job(PENDING), "", {"n1": "a job needs it"}, ENDED, "a job needs it", True),
        (job(PENDING), "", {"n2": "a job needs it"}, PENDING, "", False),
        (job(PENDING, lost="it is held"), "taken back", {}, ENDED, "it is held", True),
        (
            job(ENDED, reason="its command ended", lost="x"),
            "taken back",
            {},
            ENDED,
            "its command ended",
            False,
        ),
    ],
)
def test_what_becomes_of_a_lease(one, hold, node_holds, state, reason, cancelled):
    made = books()
    [lease], unwanted = made.update({"l1": one}, hold, node_holds, NOW)
    assert (lease.state, lease.reason) == (state, reason)
    assert unwanted == ([one] if cancelled else [])
    assert lease.gone_at is None or lease.state is RUNNING
    if state is ENDED and one.alive:
        [again], unwanted = made.update({"l1": job(RUNNING)}, "", {}, NOW + 5)
        assert (again.state, again.reason) == (ENDED, reason), (
            "what was given up stays given up, should its job start all the same"
        )
        assert [j.id for j in unwanted] == ["7"]


def test_what_was_given_up_is_cancelled_should_it_turn_up_and_forgotten_at_last():
    made = books()
    made.give_up("l1", "no answer", NOW)
    made.give_up("l1", "given back", NOW + 1)
    [lease], unwanted = made.update({"l1": job(RUNNING)}, "", {}, NOW + 2)
    assert (lease.state, lease.reason, len(unwanted)) == (ENDED, "no answer", 1)
    made.update({}, "", {}, NOW + RECORD_LIFETIME_S)
    assert made.given_up == {}


def test_how_many_more_there_may_be():
    made = books(max_leases=3)
    assert made.room(1, NOW) == (2, "the configuration allows 3 leases")
    assert books().room(1000, NOW) is None
    made.update({"l1": job(RUNNING), "l2": job(ENDED, "l2")}, "", {}, NOW)
    made.limit_reached("me", "QOSMaxSubmitJobPerUserLimit", NOW)
    assert (
        made.refusal("me", NOW)
        == "Slurm refuses more jobs of ours for now: QOSMaxSubmitJobPerUserLimit"
    )
    count, words = made.room(1, NOW, "me")
    assert count == 0, "one job is there, and one is as many as the scheduler takes"
    assert "refuses more jobs of ours than 1 for now" in words
    assert made.room(0, NOW, "me")[0] == 1
    after = NOW + LIMIT_BACKOFF_S[0]
    assert (made.refusal("me", after), made.room(1, after, "me")) == (
        "",
        (2, "the configuration allows 3 leases"),
    )


def test_a_limit_that_lets_no_lease_in_is_told_as_such():
    """As DenyOnLimit refuses a job that asks for too much by itself."""
    made = books()
    made.limit_reached("me", "QOSMaxMemoryPerUser", NOW)
    assert made.refusal("me", NOW) == "Slurm takes no job of ours for now: QOSMaxMemoryPerUser"
    assert made.room(0, NOW, "me") == (
        0,
        "Slurm takes no job of ours for now: QOSMaxMemoryPerUser",
    )


def test_leases_that_are_accepted_beside_a_refusal_count_for_the_limit():
    """Submissions run in parallel, and the refused one may be the first to return."""
    made = books()
    made.limit_reached("me", "QOSMaxSubmitJobPerUserLimit", NOW)
    made.jobs.update({name: job(RUNNING, name) for name in ("l1", "l2", "l3")})
    made.submissions_ended()
    assert made.refusal("me", NOW).startswith("Slurm refuses more jobs of ours for now")
    assert made.room(3, NOW, "me")[0] == 0
    made.update({"l1": job(RUNNING), "l2": job(RUNNING, "l2")}, "", {}, NOW + 1)
    assert made.refusal("me", NOW + 1) == "", "one has ended, and another can take its place"


def test_a_limit_of_one_user_stops_no_other():
    made = books(max_leases=3)
    made.update({"l1": job(RUNNING), "l2": job(RUNNING, "l2")._replace(user="ann")}, "", {}, NOW)
    made.limit_reached("ann", "AssocMaxSubmitJobLimit", NOW)
    assert (
        made.refusal("ann", NOW + 59)
        == "Slurm refuses more jobs of ann for now: AssocMaxSubmitJobLimit"
    )
    assert [made.refusal(user, NOW) for user in ("bob", "me", "")] == ["", "", ""]
    assert made.room(2, NOW) == (1, "the configuration allows 3 leases"), "only that is common"
    assert made.room(0, NOW, "ann")[0] == 1, "one of the jobs is ann's"
    assert made.room(0, NOW, "bob")[0] == 3


@pytest.mark.parametrize(
    ("meanwhile", "then"),
    [({"l1": job(ENDED)}, job(RUNNING)), ({}, job(RUNNING, handle="7_2"))],
    ids=["said to have ended", "another task of the array"],
)
def test_what_ended_once_stays_ended(meanwhile, then):
    made = books()
    made.update({"l1": job(RUNNING, handle="7_1")}, "", {}, NOW)
    made.update(meanwhile, "", {}, NOW + 5)
    [lease], unwanted = made.update({"l1": then}, "", {}, NOW + 10)
    assert (lease.state, len(unwanted)) == (ENDED, 1)


class Named(NamedTuple):
    """A job of a scheduler."""

    name: str
    user: str
    state: str


def own(made, *jobs):
    by_lease = own_jobs(
        [Named(f"x-{name}", user, state) for name, user, state in jobs],
        "x-",
        made.user_of,
        ("PD",),
        ("CD",),
    )
    return {lease: (job.user, job.state) for lease, job in by_lease.items()}


def test_a_job_is_ours_only_if_it_is_of_the_user_whom_the_lease_was_taken_for():
    made = books()
    made.know("l1", "ann", NOW)
    made.know("l1", "bob", NOW)  # an id is one user's
    theirs = ("l1", "ann", "PD")
    for fake in (("l1", "bob", "R"), ("l1", "me", "R"), ("l1", "root", "S"), ("l2", "bob", "R")):
        assert own(made, theirs, fake) == own(made, fake, theirs) == {"l1": ("ann", "PD")}
        assert own(made, fake) == {}
    assert own(made, theirs, ("l1", "ann", "R"), ("l1", "ann", "CD")) == {"l1": ("ann", "R")}
    assert own(made, ("l7", "me", "R"), ("l7", "bob", "R")) == {"l7": ("me", "R")}, (
        "of unknown leases our own user's jobs are ours"
    )


def test_whose_a_lease_is_stays_known_while_its_job_is_there():
    made = books()
    made.know("l1", "ann", NOW)
    made.know("l2", "ann", NOW)
    for later in range(0, 3 * int(RECORD_LIFETIME_S), 600):
        made.update({"l1": job(PENDING)}, "", {}, NOW + later)
    assert (made.user_of("l1"), made.user_of("l2")) == ("ann", "me")
    made.update({}, "", {}, NOW + later + RECORD_LIFETIME_S)
    assert made.user_of("l1") == "me"


STATES = st.sampled_from([PENDING, RUNNING, ENDED])
JOBS = st.lists(st.tuples(STATES, st.floats(0.0, 200.0), st.booleans(), st.booleans()), max_size=6)


@given(st.lists(st.tuples(JOBS, st.booleans()), max_size=5))
def test_no_lease_comes_back_and_every_one_that_ended_for_us_is_cancelled(looks):
    made, over = books(), set()
    for step, (rows, hold) in enumerate(looks):
        now = NOW + 10 * step
        jobs = {
            f"l{i}": job(
                state, f"l{i}", submitted=now - waited, lost="lost" if lost else "", ending=ending
            )
            for i, (state, waited, lost, ending) in enumerate(rows)
        }
        leases, unwanted = made.update(jobs, "held" if hold else "", {}, now)
        assert [lease.id for lease in leases] == list(jobs)
        ended = {lease.id for lease in leases if lease.state is ENDED}
        assert over & jobs.keys() <= ended
        wrong = {i for i in ended if jobs[i].alive}
        assert {one.lease.id for one in unwanted} == {i for i in wrong if not jobs[i].ending}
        over |= wrong


def test_a_user_who_stays_at_a_limit_is_asked_for_more_and_more_rarely():
    made, now = books(), NOW
    waits = []
    for _ in range(6):
        made.limit_reached("me", "full", now)
        made.limit_reached(
            "me", "full", now + 1
        )  # a second one of the same time counts for nothing
        waits.append(made.backing_off_s(now))
        now += waits[-1]
        assert made.refusal("me", now) == ""
    assert waits == [60, 120, 240, 480, 900, 900]
    made.accepted("me", now)
    made.limit_reached("me", "full", now)
    assert made.backing_off_s(now) == 60


def test_a_limit_counts_only_while_there_are_as_many_leases_as_it_allows():
    made = books()
    two = {f"l{i}": job(RUNNING, f"l{i}") for i in (1, 2)}
    made.update(two, "", {}, NOW)
    made.limit_reached("me", "full", NOW)
    made.update({**two, "l2": job(RUNNING, "l2")}, "", {}, NOW + 5)
    assert made.refusal("me", NOW + 5)
    made.update({**two, "l2": job(ENDED, "l2")}, "", {}, NOW + 10)
    assert (made.refusal("me", NOW + 10), made.backing_off_s(NOW + 10)) == ("", 0)
    assert made.room(1, NOW + 10, "me") is None


def test_refused_submissions_have_a_back_off_of_their_own_and_one_refusal_may_be_the_nodes_fault():
    made = books()
    made.not_taken("l1", RefusedError("no such node"), NOW)
    assert made.refusal("me", NOW) == ""
    made.not_taken("l2", RefusedError("invalid account"), NOW + 1)
    assert made.refusal("me", NOW + 2) == "Slurm refuses the jobs of ours for now: invalid account"
    assert made.room(0, NOW + 2, "me") == (0, made.refusal("me", NOW + 2))
    assert made.refusal("ann", NOW + 2) == ""
    assert (made.refusal("me", NOW + 11), made.backing_off_s(NOW + 11)) == ("", 0)
    made.not_taken("l3", RefusedError("invalid account"), NOW + 11)
    assert made.backing_off_s(NOW + 11) == 20
    made.not_taken("l4", BusyError("come back later"), NOW + 40)
    made.not_taken("l5", UnsureError("timed out"), NOW + 40)
    assert made.backing_off_s(NOW + 40) == 0, "neither is a refusal"
    assert list(made.given_up) == ["l5"]


def test_a_job_that_one_answer_lacked_is_a_lease_still():
    ledger = books()
    ledger.update({"l1": job(RUNNING)}, "", {}, NOW)
    assert ledger.update({}, "", {}, NOW + 1)[0] == ()
    leases, cancelled = ledger.update({"l1": job(RUNNING)}, "", {}, NOW + 2)
    assert [lease.state for lease in leases] == [RUNNING]
    assert cancelled == []


def test_another_job_in_its_place_is_none_and_neither_is_one_that_was_given_up():
    ledger = books()
    ledger.update({"l1": job(RUNNING)}, "", {}, NOW)
    ledger.update({}, "", {}, NOW + 1)
    other = job(RUNNING)._replace(handle="8")
    leases, cancelled = ledger.update({"l1": other}, "", {}, NOW + 2)
    assert [lease.state for lease in leases] == [ENDED]
    assert cancelled == [other]
    ledger = books()
    ledger.update({"l1": job(RUNNING)}, "", {}, NOW)
    ledger.give_up("l1", "it was given back", NOW)
    ledger.update({}, "", {}, NOW + 1)
    [lease] = ledger.update({"l1": job(RUNNING)}, "", {}, NOW + 2)[0]
    assert (lease.state, lease.reason) == (ENDED, "it was given back")
