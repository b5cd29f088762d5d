"""How leases are ended: when a scheduler is asked once more, and who is asked to leave."""

import pytest

from scavenger.batch.commands import CommandError
from scavenger.batch.ending import CANCEL_AGAIN_S, LeaseEnder
from scavenger.batch.lease_ledger import LeaseJob, LeaseLedger
from scavenger.batch.submission import Cancelled
from scavenger.interface import Lease, LeaseState

GRACE_S = 30.0


class Scheduler:
    """A submitter that accepts all but ``refuses``."""

    def __init__(self):
        self.refuses = set()
        self.asked = []
        self.killed = []

    def kill(self, jobs):
        self.killed += [job.id for job in jobs]

    def cancel(self, jobs, options=()):
        if jobs:
            self.asked.append(([job.id for job in jobs], tuple(options)))
        ids = {job.id for job in jobs}
        problem = CommandError("no") if ids & self.refuses else None
        return Cancelled(frozenset(ids - self.refuses), problem)


def job(number, ending=False):
    return LeaseJob(
        Lease(f"l{number}", str(number), LeaseState.RUNNING, f"n{number}"), "me", ending=ending
    )


@pytest.fixture
def scheduler():
    return Scheduler()


@pytest.fixture
def ender(scheduler):
    ledger = LeaseLedger("PBS", 60.0, 0, "me")
    ledger.jobs = {f"l{k}": job(k) for k in (1, 2)}
    return LeaseEnder(ledger, scheduler)


def test_an_accepted_cancel_is_not_repeated_within_the_grace_time(ender, scheduler):
    again = GRACE_S + CANCEL_AGAIN_S
    for now in (0.0, 2.0, again - 1, again, again + 2):
        assert ender.cancel([job(1)], GRACE_S, now) is None
    assert scheduler.asked == [(["1"], ()), (["1"], ())]


def test_what_stands_still_is_killed_first(ender, scheduler):
    ender.cancel([job(1), job(2)._replace(stopped=True)], GRACE_S, 0.0)
    assert scheduler.killed == ["2"]
    assert scheduler.asked == [(["1", "2"], ())]


def test_a_refused_cancel_is_repeated_at_once_and_takes_no_other_along(ender, scheduler):
    scheduler.refuses = {"2"}
    assert ender.cancel([job(1), job(2)], GRACE_S, 0.0) is not None
    assert ender.cancel([job(1), job(2)], GRACE_S, 2.0) is not None
    assert [ids for ids, _ in scheduler.asked] == [["1", "2"], ["2"]]


def test_who_was_asked_to_leave_is_asked_once_then_cancelled(ender, scheduler):
    signal = ("--signal=TERM",)
    for now in (0.0, 5.0, GRACE_S, GRACE_S + 1, GRACE_S + 3):
        ender.ask({"l1": "its node drains"}, signal, GRACE_S, now)
    assert scheduler.asked == [(["1"], signal), (["1"], ())]
    [lease] = ender.with_asked([job(1).lease], GRACE_S)
    assert (lease.reason, lease.leaving_by) == ("its node drains", GRACE_S)
    assert list(ender.with_asked([job(2).lease], GRACE_S)) == [job(2).lease]
    ender.forget({"l2"}, 40.0)
    assert ender.asked == {}


def test_where_asking_is_cancelling_the_cancel_is_not_repeated_either(ender, scheduler):
    for now in (0.0, GRACE_S + 1, GRACE_S + CANCEL_AGAIN_S):
        ender.ask({"l1": "its node drains"}, (), GRACE_S, now)
    assert [ids for ids, _ in scheduler.asked] == [["1"], ["1"]]
