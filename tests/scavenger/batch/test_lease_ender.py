"""How leases are ended: when the scheduler is asked again, and which leases are to leave.

Leases whose jobs a plugin or hook of the scheduler moved elsewhere.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from scavenger.batch.commands import CommandError
from scavenger.batch.groups import PartOf
from scavenger.batch.lease_ender import CANCEL_RETRY_S, MOVED_PAUSE_S, LeaseEnder, MovedLeases
from scavenger.batch.lease_ledger import LeaseJob, LeaseLedger
from scavenger.batch.submission import Cancelled
from scavenger.interface import Lease, LeaseState, SchedulerError

GRACE_S = 30.0


class Scheduler:
    """A submitter that accepts all but ``refuses``."""

    def __init__(self):
        self.refuses = set()
        self.cancels = []
        self.killed = []
        self.shrunk = []

    def shrink(self, request):
        if request.job in self.refuses:
            return CommandError("no")
        self.shrunk.append((request.remaining, request.released))

    def kill(self, jobs):
        self.killed += [job.id for job in jobs]

    def cancel(self, jobs, options=()):
        if jobs:
            self.cancels.append(([job.id for job in jobs], tuple(options)))
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
    again = GRACE_S + CANCEL_RETRY_S
    for now in (0.0, 2.0, again - 1, again, again + 2):
        assert ender.cancel([job(1)], GRACE_S, now) is None
    assert scheduler.cancels == [(["1"], ()), (["1"], ())]


def test_what_stands_still_is_killed_first(ender, scheduler):
    ender.cancel([job(1), job(2)._replace(stopped=True)], GRACE_S, 0.0)
    assert scheduler.killed == ["2"]
    assert scheduler.cancels == [(["1", "2"], ())]


def test_a_refused_cancel_is_repeated_at_once_and_takes_no_other_along(ender, scheduler):
    scheduler.refuses = {"2"}
    assert ender.cancel([job(1), job(2)], GRACE_S, 0.0) is not None
    assert ender.cancel([job(1), job(2)], GRACE_S, 2.0) is not None
    assert [ids for ids, _ in scheduler.cancels] == [["1", "2"], ["2"]]


def test_who_was_asked_to_leave_is_asked_once_then_cancelled(ender, scheduler):
    signal = ("--signal=TERM",)
    for now in (0.0, 5.0, GRACE_S, GRACE_S + 1, GRACE_S + 3):
        ender.ask({"l1": "its node drains"}, signal, GRACE_S, now)
    assert scheduler.cancels == [(["1"], signal), (["1"], ())]
    [lease] = ender.mark_leaving([job(1).lease], GRACE_S, {})
    assert (lease.reason, lease.gone_at) == ("its node drains", GRACE_S)
    assert list(ender.mark_leaving([job(2).lease], GRACE_S, {})) == [job(2).lease]
    ender.forget({"l2"}, 40.0)
    assert ender.leave_requests == {}


@pytest.mark.parametrize(
    ("wanted_by", "leave_by"),
    [(115.0, None), (110.0, None), (109.0, 109.0), (104.0, 104.0), (102.0, 102.0), (90.0, 102.0)],
)
@pytest.mark.parametrize("is_request", [False, True])
def test_a_lease_that_a_job_has_waited_for_should_leave_earlier(
    ender, is_request, wanted_by, leave_by
):
    """It leaves since 100, and is gone at 110; it has two seconds at least."""
    lease = job(1).lease
    if is_request:
        ender.ask({"l1": "job 7 lacks its node"}, ("--signal=TERM",), 10.0, 100.0)
    else:
        lease = replace(lease, gone_at=110.0)
    [lease] = ender.mark_leaving([lease], 10.0, {"l1": wanted_by})
    assert (lease.gone_at, lease.leave_by) == (110.0, leave_by)


def test_a_lease_that_stays_has_no_time_by_which_it_should_leave(ender):
    assert list(ender.mark_leaving([job(1).lease], 10.0, {"l1": 5.0})) == [job(1).lease]


def test_where_asking_is_cancelling_the_cancel_is_not_repeated_either(ender, scheduler):
    for now in (0.0, GRACE_S + 1, GRACE_S + CANCEL_RETRY_S):
        ender.ask({"l1": "its node drains"}, (), GRACE_S, now)
    assert [ids for ids, _ in scheduler.cancels] == [["1"], ["1"]]


# --- leases that share a job ---


def part(number, first=False):
    of = PartOf("8", f"n{number}", first, removable=True)
    return LeaseJob(Lease(f"l{number}", of.id, LeaseState.RUNNING, of.node), "me", part=of)


@pytest.fixture
def block(scheduler):
    """Leases l1 to l4 are the nodes of job 8, the first of them that of its script."""
    ledger = LeaseLedger("Slurm", 60.0, 0, "me")
    ledger.jobs = {f"l{k}": part(k, k == 1) for k in (1, 2, 3, 4)}
    steps = {("8", f"n{k}"): f"8.{k}" for k in (1, 2, 3, 4)}
    made = LeaseEnder(ledger, scheduler, lambda jobs: dict(steps))
    made.all_steps = steps
    return made


def give_up(ender, *leases):
    jobs = [ender.ledger.jobs[lease] for lease in leases]
    for lease in leases:
        ender.ledger.give_up(lease, "given back", 0.0)
    return ender.cancel(jobs, GRACE_S, 0.0)


def test_a_job_that_leases_share_gives_back_single_nodes_and_ends_with_the_last(block, scheduler):
    assert give_up(block, "l3") is None
    assert give_up(block, "l2", "l3") is None
    assert scheduler.shrunk == [(("n1", "n2", "n4"), ("n3",)), (("n1", "n4"), ("n2",))]
    assert scheduler.cancels == []
    assert give_up(block, "l1", "l4") is None
    assert scheduler.cancels == [(["8"], ())]


def test_the_first_node_waits_for_the_others(block, scheduler):
    assert give_up(block, "l1") is None
    assert (scheduler.shrunk, scheduler.cancels) == ([], [])
    assert give_up(block, "l1", "l2", "l3") is None
    assert scheduler.shrunk == [(("n1", "n4"), ("n2", "n3"))]
    assert give_up(block, "l1", "l4") is None
    assert scheduler.cancels == [(["8"], ())]


def test_nodes_that_are_refused_are_given_back_once_more(block, scheduler):
    scheduler.refuses = {"8"}
    assert give_up(block, "l3") is not None
    scheduler.refuses = set()
    assert give_up(block, "l3") is None
    assert scheduler.shrunk == [(("n1", "n2", "n4"), ("n3",))]


def test_one_of_them_is_asked_alone_and_its_node_given_back_when_it_has_left(block, scheduler):
    signal = ("--signal=TERM",)
    block.ask({"l2": "its node drains"}, signal, GRACE_S, 0.0)
    block.ask({"l2": "its node drains"}, signal, GRACE_S, 1.0)
    assert scheduler.cancels == [(["8.2"], signal)]
    assert scheduler.shrunk == []
    del block.all_steps["8", "n2"]
    block.ask({"l2": "its node drains"}, signal, GRACE_S, 2.0)
    assert scheduler.shrunk == [(("n1", "n3", "n4"), ("n2",))]
    block.ask({"l3": "its node drains"}, signal, GRACE_S, 3.0)
    block.ask({"l3": "its node drains"}, signal, GRACE_S, GRACE_S + 4)
    assert scheduler.shrunk[1:] == [(("n1", "n4"), ("n3",))], "it stayed for too long"


def test_a_job_whose_first_node_is_wanted_ends(block, scheduler):
    signal = ("--signal=TERM",)
    block.ask({"l1": "its node drains"}, signal, GRACE_S, 0.0)
    assert scheduler.cancels == [(["8.1", "8.2", "8.3", "8.4"], signal)]
    assert block.leave_requests["l1"][1] == "its node drains"
    del block.all_steps["8", "n1"], block.all_steps["8", "n2"]
    block.ask({"l1": "its node drains"}, signal, GRACE_S, 2.0)
    assert scheduler.shrunk == [(("n1", "n3", "n4"), ("n2",))]
    block.all_steps.clear()
    block.ask({"l1": "its node drains"}, signal, GRACE_S, 4.0)
    assert scheduler.cancels[1:] == [(["8"], ())]


def test_nobody_is_taken_for_gone_while_the_scheduler_says_nothing(block, scheduler):
    signal = ("--signal=TERM",)
    block.ask({"l2": "its node drains"}, signal, GRACE_S, 0.0)

    def silent(jobs):
        raise SchedulerError("no answer")

    block.steps = silent
    block.ask({"l2": "its node drains", "l3": "its node drains"}, signal, GRACE_S, 1.0)
    assert (scheduler.shrunk, scheduler.cancels) == ([], [(["8.2"], signal)])


def test_where_asking_is_cancelling_a_shared_job_gives_the_node_back(block, scheduler):
    block.ask({"l2": "its node drains"}, (), GRACE_S, 0.0)
    assert scheduler.shrunk == [(("n1", "n3", "n4"), ("n2",))]
    assert list(block.leave_requests) == ["l2"]


# --- slots of a host that a job has as a whole ---


@pytest.fixture
def slots(scheduler):
    """Leases l1 to l3 are slots of the host of job 8."""
    names = {f"l{k}": f"c1/gpu.{k}" for k in (1, 2, 3)}
    ledger = LeaseLedger("Slurm", 60.0, 0, "me")
    for lease, name in names.items():
        of = PartOf("8", name, removable=True)
        ledger.jobs[lease] = LeaseJob(Lease(lease, of.id, LeaseState.RUNNING, name), "me", part=of)
    steps = {("8", name): f"8.{name[-1]}" for name in names.values()}
    made = LeaseEnder(ledger, scheduler, lambda jobs: dict(steps))
    made.all_steps = steps
    return made


TERM = ("--signal=TERM",)


def test_a_slot_alone_ends_its_step_and_the_last_ones_the_job(slots, scheduler):
    assert give_up(slots, "l2") is None
    assert give_up(slots, "l2") is None, "once"
    assert scheduler.cancels == [(["8.2"], TERM)]
    assert give_up(slots, "l1", "l3") is None
    assert scheduler.cancels[1:] == [(["8"], ())]
    assert scheduler.shrunk == []


def test_a_step_that_does_not_leave_is_killed(slots, scheduler):
    give_up(slots, "l2")
    job = slots.ledger.jobs["l2"]
    assert slots.cancel([job], GRACE_S, GRACE_S + CANCEL_RETRY_S) is None
    assert scheduler.cancels == [(["8.2"], TERM), (["8.2"], ())]


def test_all_slots_together_end_the_job(slots, scheduler):
    assert give_up(slots, "l1", "l2", "l3") is None
    assert scheduler.cancels == [(["8"], ())]


def test_a_slot_whose_step_has_ended_needs_no_command(slots, scheduler):
    del slots.all_steps["8", "c1/gpu.2"]
    assert give_up(slots, "l2") is None
    assert scheduler.cancels == []


def test_a_refused_end_of_a_step_is_tried_again(slots, scheduler):
    scheduler.refuses = {"8.2"}
    assert give_up(slots, "l2") is not None
    scheduler.refuses = set()
    assert give_up(slots, "l2") is None
    assert [ids for ids, _ in scheduler.cancels] == [["8.2"], ["8.2"]]


def test_slots_of_a_host_leave_together(slots, scheduler):
    slots.ask({"l1": "its node is wanted"}, TERM, GRACE_S, 0.0)
    assert scheduler.cancels == [(["8.1", "8.2", "8.3"], TERM)]
    assert set(slots.leave_requests) == {"l1", "l2", "l3"}


def test_a_step_that_begins_after_its_lease_was_given_up_has_its_time_to_leave(slots, scheduler):
    step = slots.all_steps.pop(("8", "c1/gpu.2"))
    give_up(slots, "l2")
    job, later = slots.ledger.jobs["l2"], GRACE_S + CANCEL_RETRY_S
    slots.all_steps["8", "c1/gpu.2"] = step
    slots.cancel([job], GRACE_S, later)
    slots.cancel([job], GRACE_S, 2 * later)
    assert scheduler.cancels == [(["8.2"], TERM), (["8.2"], ())]


def test_slots_that_were_given_up_are_not_signalled_again(slots, scheduler):
    give_up(slots, "l2")
    slots.ask({"l1": "its node is wanted"}, TERM, GRACE_S, 1.0)
    assert scheduler.cancels == [(["8.2"], TERM), (["8.1", "8.3"], TERM)]


def test_a_lease_that_was_moved_leaves_and_none_is_requested_for_a_while():
    watch = MovedLeases("Slurm", "partition", "scheduler.slurm")
    assert watch.reasons_to_leave({"l1": "low", "l2": "low,lower"}, ["low", "lower"], 0.0) == {}
    assert watch.reason_to_pause(0.0) == ""
    leave = watch.reasons_to_leave({"l1": "low", "l2": "long"}, ["low"], 100.0)
    assert leave == {"l2": "its job is in partition long, not in low"}
    assert "lease l2 is in partition long, not in low" in watch.reason_to_pause(100.0)
    assert "next try in 10 min" in watch.reason_to_pause(100.0)
    assert watch.reasons_to_leave({"l1": "low"}, ["low"], 200.0) == {}
    assert watch.reason_to_pause(100.0 + MOVED_PAUSE_S) == ""


def test_leases_without_a_partition_of_their_own_may_run_anywhere():
    watch = MovedLeases("Slurm", "partition", "scheduler.slurm")
    assert watch.reasons_to_leave({"l1": "batch"}, [], 0.0) == {}
    assert watch.reasons_to_leave({"l1": ""}, ["low"], 0.0) == {}
