"""What ``malletrain check`` tests of every batch scheduler. Decides the sentences.

:func:`try_lease` takes one lease to its end: a poll, a submission, a start, an end. The scavenger
does everything as in the daemon. Decides how long each step may take.

:func:`job_limit` and :func:`preemption_grace` say what a limit of the main scheduler on a user's
jobs, or on the time of preempted ones, means for leases. Each scheduler's own check
(:mod:`scavenger.slurm.check`, :mod:`scavenger.pbs.check`) reads the limits.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from scavenger.batch.poll_result import Finding, SiteT
from scavenger.batch.scavenger import BatchScavenger
from scavenger.batch.settings import OptionsT
from scavenger.interface import (
    Lease,
    LeaseRequest,
    LeaseState,
    PollResult,
    Scavenger,
    SchedulerError,
)

ARGV = ("sleep", "3600")
GAP_TIMEOUT_S, START_TIMEOUT_S, END_TIMEOUT_S = 180.0, 120.0, 120.0
"""Maximum time to wait for a gap, for the start and for the end, seconds."""
POLL_INTERVAL_S = 1.0

Sleep = Callable[[float], None]


class _TrialError(Exception):
    """A step failed. The message says why."""


def use_trial_prefix(scavenger: BatchScavenger[OptionsT, SiteT]) -> None:
    """Give the scavenger's leases a different prefix than any daemon uses. Otherwise a running
    daemon would cancel the trial as an unknown lease of its own, and the trial would cancel the
    daemon's leases.
    """
    scavenger.settings = replace(scavenger.settings, tag=f"check{secrets.token_hex(4)}")


def try_lease(
    scavenger: Scavenger,
    owner: str | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Sleep = time.sleep,
) -> Iterator[tuple[bool, str]]:
    """Yield (works, sentence) per step, up to the first that fails. The lease is always given back;
    if that fails too, the last sentence names its job.

    Args:
        scavenger: the scavenger that takes the lease; see :func:`use_trial_prefix`.
        owner: user to submit as; None: the daemon's own user.
        clock: returns monotonic seconds.
        sleep: waits between two polls.
    """
    lease: Lease | None = None
    is_over = False
    try:
        began = clock()
        node = _gap(scavenger, clock, sleep)
        yield True, f"{node} became a gap after {clock() - began:.1f} s."
        began = clock()
        [lease] = scavenger.take([LeaseRequest("l1", node, ARGV, owner=owner)])
        while lease.state is LeaseState.NOT_YET and clock() - began < START_TIMEOUT_S:
            sleep(POLL_INTERVAL_S)
            [lease] = scavenger.take([LeaseRequest("l1", node, ARGV, owner=owner)])
        if lease.state in (LeaseState.ENDED, LeaseState.NOT_YET):
            raise _TrialError(f"The lease on {node} was not taken: {lease.reason}.")
        yield True, f"The lease on {node} was taken as job {lease.scheduler_id}."
        _wait(scavenger, lease, LeaseState.RUNNING, START_TIMEOUT_S, clock, sleep)
        yield True, f"It started within {clock() - began:.1f} s."
        began = clock()
        scavenger.give_back([lease])
        _wait(scavenger, lease, LeaseState.ENDED, END_TIMEOUT_S, clock, sleep)
        is_over = True
        yield True, f"It ended within {clock() - began:.1f} s of being given back."
    except (SchedulerError, _TrialError) as error:
        yield False, str(error)
        if lease is not None and lease.state is not LeaseState.ENDED:
            is_over = True
            if problem := _end(scavenger, lease):
                yield False, problem
    finally:
        if lease is not None and lease.state is not LeaseState.ENDED and not is_over:
            _end(scavenger, lease)


def _end(scavenger: Scavenger, lease: Lease) -> str:
    """Give the lease back. If the scheduler does not say which job is the lease's, cancel the one
    that this trial has just submitted. Return why neither works; empty if one does.
    """
    try:
        scavenger.give_back([lease])
        return ""
    except SchedulerError as error:
        problem = error
    if isinstance(scavenger, BatchScavenger) and not scavenger.cancel_submitted(lease):
        return ""
    return (
        f"Job {lease.scheduler_id} of the lease on {lease.node} may go on until its time limit: "
        f"{str(problem).rstrip('.')}. Cancel it."
    )


def _gap(scavenger: Scavenger, clock: Callable[[], float], sleep: Sleep) -> str:
    """Return a node that is a gap. A node that has just become idle is not one until the main
    scheduler has had its scheduling cycle.
    """
    began = clock()
    while True:
        poll = scavenger.poll()
        if poll.gaps:
            return poll.gaps[0].node
        if clock() - began >= GAP_TIMEOUT_S:
            raise _TrialError(
                f"No node became a gap within {GAP_TIMEOUT_S:g} s, so that no lease could be tried"
                f"{_idle_reason(poll)}. Try again when nodes are idle."
            )
        sleep(POLL_INTERVAL_S)


def _idle_reason(poll: PollResult) -> str:
    """Return why an idle node, or the first node, is no gap."""
    for node in sorted(poll.explanations, key=lambda each: each.state != "idle")[:1]:
        for _, passed, sentence in node.rules:
            if not passed:
                return f" ({node.node}: {sentence})"
    return ""


def _wait(
    scavenger: Scavenger,
    lease: Lease,
    state: LeaseState,
    within_s: float,
    clock: Callable[[], float],
    sleep: Sleep,
) -> None:
    """Poll until the lease is in this state. Raises _TrialError.

    As in the daemon, a lease has ended if two successive polls lack it, because a single answer can
    be truncated.
    """
    began, reason, absent = clock(), "", 0
    while True:
        current = next((each for each in scavenger.poll().leases if each.id == lease.id), None)
        absent = absent + 1 if current is None else 0
        ended = absent > 1 if current is None else current.state is LeaseState.ENDED
        reason = current.reason if current is not None and current.reason else reason
        if state is LeaseState.ENDED if ended else current is not None and current.state is state:
            return
        words = f": {reason}" if reason else ""
        if ended:
            raise _TrialError(f"The lease on {lease.node} ended before it was given back{words}.")
        if clock() - began >= within_s:
            step = "start" if state is LeaseState.RUNNING else "end"
            raise _TrialError(
                f"The lease on {lease.node} did not {step} within {within_s:g} s{words}."
            )
        sleep(POLL_INTERVAL_S)


def no_lease(limit: str, name: str, table: str) -> Finding:
    """Return the finding about a limit that allows no lease at all.

    Args:
        limit: its value, as the scheduler shows it.
        name: name of the limit.
        table: table of the configuration, such as ``scheduler.slurm``.
    """
    return (
        False,
        f"{name} is {limit}, so that no lease can start; raise it, or set options in [{table}] "
        "with which it does not apply to leases.",
    )


def job_limit(title: str, name: str, limit: int, max_leases: int, table: str) -> Iterator[Finding]:
    """Yield the findings about one limit.

    Args:
        title: name of the scheduler, for sentences.
        name: name of the limit, such as ``MaxJobs of user ann``.
        limit: number of jobs that it allows one user.
        max_leases: maximum number of leases of one user in the configuration; 0: no limit.
        table: table of the configuration, such as ``scheduler.slurm``.
    """
    jobs = "1 job" if limit == 1 else f"{limit} jobs"
    if not limit:
        yield no_lease("0", name, table)
    elif max_leases >= limit:
        yield (
            False,
            f"{title} allows one user {jobs} ({name}), leases included, and "
            f"max_leases_per_user is {max_leases}, so the user's other jobs would be refused or "
            f"wait; set max_leases_per_user in [{table}] below {limit}.",
        )
    elif not max_leases:
        yield (
            True,
            f"{title} allows one user {jobs} ({name}), and leases count as jobs; set "
            f"max_leases_per_user in [{table}] to leave room for the user's other jobs.",
        )
    else:
        yield (
            True,
            f"{title} allows one user {jobs} ({name}); leases take {max_leases} of them at most.",
        )


def preemption_grace(grace_s: float, needed_s: float, remedy: str, source: str = "") -> Finding:
    """Return the finding about the time that a preempted lease has.

    Args:
        grace_s: that time, seconds.
        needed_s: maximum time that jobs need to take a snapshot and stop, seconds.
        remedy: how to lengthen it, as a part of a sentence.
        source: name of the scheduler's setting; empty for none.
    """
    if grace_s < needed_s:
        return (
            False,
            f"A preempted lease has {grace_s:g} s until it is killed, too short to take a "
            f"snapshot and leave in order ({needed_s:g} s with drain_timeout and stop_grace of "
            f"[jobs]); {remedy}, or make those shorter.",
        )
    shown_source = f" ({source})" if source else ""
    return (
        True,
        f"A preempted lease has {grace_s:g} s to leave{shown_source}; jobs need {needed_s:g} s at "
        "most to take a snapshot and stop.",
    )
