"""Ends leases early: cancels them, or asks them to leave first.

:class:`LeaseEnder` decides when a cancel is repeated. :mod:`scavenger.batch.lease_ledger`,
:class:`MovedLeases` and :func:`must_leave` decide which leases have to end.

:class:`MovedLeases` detects leases whose jobs are in another partition or queue than requested: a
plugin or hook of the scheduler (job_submit of Slurm, queuejob of PBS) or an operator moved them.
MalleTrain relies on preemption, and the scheduler may not preempt jobs in other partitions. Such
leases therefore leave, and for :data:`MOVED_PAUSE_S` no lease is requested.

:func:`must_leave` decides by the site's plans for the nodes. The main scheduler preempts leases to
take a node back for a job. It does not preempt for a reservation that begins, or for a node that an
administrator drains: it waits until the lease ends. It does not know the hours of ``[gaps]``
either. So leases are asked to leave as in a preemption.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from scavenger.batch.commands import CommandError
from scavenger.batch.groups import PartOf, is_unknown
from scavenger.batch.lease_ledger import LeaseJob, LeaseLedger
from scavenger.batch.rules import NodeFacts, hours_sentence, span
from scavenger.batch.submission import Shrink, Submitter
from scavenger.interface import Lease, LeaseState, SchedulerError, kind_of

MOVED_PAUSE_S = 600.0
"""Time for which no lease is requested after one was moved, seconds."""


class MovedLeases:
    """Checks in each poll in which partitions or queues the jobs of leases are.

    Args:
        scheduler: name of the scheduler, for messages.
        noun: the scheduler's word, ``"partition"`` or ``"queue"``.
        table: table of the configuration that names the partition or queue of leases.
    """

    def __init__(self, scheduler: str, noun: str, table: str) -> None:
        self._scheduler, self._noun, self._table = scheduler, noun, table
        self._seen_at = float("-inf")
        """Time of the newest poll with a moved lease."""
        self._sentence = ""

    def reasons_to_leave(
        self, partitions: Mapping[str, str], allowed: Collection[str], now: float
    ) -> dict[str, str]:
        """Return lease → why it has to leave, for the moved leases.

        Args:
            partitions: lease → partitions or queue of its job, separated by commas; without leases
                that have ended.
            allowed: partitions or queues in which leases may run; empty: any.
            now: epoch seconds.
        """
        leave = {}
        for lease, names in sorted(partitions.items()):
            others = sorted(set(names.split(",")).difference(allowed, {""}))
            if allowed and others:
                place = f"in {self._noun} {', '.join(others)}"
                leave[lease] = f"its job is {place}, not in {', '.join(sorted(allowed))}"
                self._seen_at = now
                self._sentence = (
                    f"lease {lease} is {place}, not in {', '.join(sorted(allowed))}, and "
                    f"{self._scheduler} may not preempt it there; exempt leases from the plugin or "
                    f"hook that moves them, or set {self._noun} in [{self._table}] to where leases "
                    "may run"
                )
        return leave

    def reason_to_pause(self, now: float) -> str:
        """Return why no lease may be requested now; empty if leases may be requested."""
        remaining_s = self._seen_at + MOVED_PAUSE_S - now
        return f"{self._sentence} (next try in {span(remaining_s)})" if remaining_s > 0 else ""


def must_leave(
    leases: Iterable[Lease],
    facts: Mapping[str, NodeFacts],
    notice_s: float,
    now: float,
    hours_remaining_s: float | None = None,
    grace_s: float = 0.0,
) -> dict[str, str]:
    """Return lease id → why it has to leave now.

    Args:
        leases: all leases; only running ones are asked.
        facts: node → its facts.
        notice_s: time before the beginning of a reservation at which leases must leave, seconds.
        now: epoch seconds.
        hours_remaining_s: time for which leases are still allowed, seconds; None: no end. The time
            limit of a lease that was taken under these hours ends with them. That of a lease from
            before they were reloaded does not.
        grace_s: maximum time to leave after the request, seconds.
    """
    reasons = {}
    for lease in leases:
        node = facts.get(lease.node)
        if lease.state is not LeaseState.RUNNING or node is None:
            continue
        if node.drained or node.reserved:
            reasons[lease.id] = f"its node is wanted: {node.drained or node.reserved}"
        elif node.reserved_from is not None and node.reserved_from - now <= notice_s:
            begins_in = span(node.reserved_from - now)
            reasons[lease.id] = f"a reservation of its node begins in {begins_in}"
        elif hours_remaining_s is not None and hours_remaining_s <= grace_s:
            reasons[lease.id] = hours_sentence(hours_remaining_s)
    return reasons


CANCEL_RETRY_S = 15.0
"""Time after the grace time at which an accepted cancel is repeated, seconds. PBS restarts its time
to SIGKILL at each cancel (OpenPBS 23.06), so a job that was deleted at every poll would never be
killed.
"""
REFUSED_RETRY_S = 300.0
"""Time after which a refused cancel is tried again for a job without a lease, seconds. Any user
with leases can give a job such a name.
"""
MIN_LEAVE_S = 2.0
"""Minimum time to leave of a lease, seconds, however long a job has waited for its node. A training
saves a snapshot in that time.
"""
RECORD_LIFETIME_S = 3600.0
ASK_TO_LEAVE = ("--signal=TERM",)
"""Options of scancel with which a step is not killed."""

Steps = Callable[[Collection[str]], Mapping[tuple[str, str], str]]
"""Job ids → (job, node) → id of the step there that can be signalled separately. Raises
SchedulerError.
"""


class WholeJob(NamedTuple):
    """A job of the main scheduler that is ended as a whole."""

    id: str
    """The main scheduler's id of the job."""
    user: str
    """User of the job."""


class LeaseEnder:
    """Ends the leases of one scheduler.

    Args:
        ledger: the leases.
        submitter: cancels their jobs.
        steps: returns the steps on the nodes of shared jobs; None: single nodes of a job cannot be
            signalled.
    """

    def __init__(
        self, ledger: LeaseLedger, submitter: Submitter, steps: Steps | None = None
    ) -> None:
        self.ledger = ledger
        self.submitter = submitter
        self.steps = steps
        self.leave_requests: dict[str, tuple[float, str]] = {}
        """Running lease → (time at which it was asked to leave, reason)."""
        self._cancelled: dict[str, float] = {}
        """Lease → time at which the scheduler accepted its cancel."""
        self._signalled: set[str] = set()
        """Leases of slots that were given up and whose step has received SIGTERM."""
        self._refused: dict[str, float] = {}
        """Job without a lease → time at which the scheduler refused its cancel."""

    def forget(self, running: Collection[str], now: float) -> None:
        """Drop the records of leases that are not in ``running``, and old ones."""
        self.leave_requests = {
            lease: at for lease, at in self.leave_requests.items() if lease in running
        }
        self._cancelled = {
            lease: at for lease, at in self._cancelled.items() if now - at < RECORD_LIFETIME_S
        }
        self._signalled &= self._cancelled.keys()
        self._refused = {
            lease: at for lease, at in self._refused.items() if now - at < REFUSED_RETRY_S
        }

    def cancel(self, jobs: Iterable[LeaseJob], grace_s: float, now: float) -> CommandError | None:
        """End leases, except those whose cancel was accepted recently. A job that is shared with
        other leases only releases their nodes. Return the error, None if there is none.

        Args:
            jobs: the leases to end.
            grace_s: grace time of a lease, seconds.
            now: epoch seconds.
        """
        since = now - grace_s - CANCEL_RETRY_S
        due_jobs = [
            job
            for job in jobs
            if self._cancelled.get(job.lease.id, -math.inf) <= since
            and now - self._refused.get(job.lease.id, -math.inf) >= REFUSED_RETRY_S
        ]
        jobs_to_end: dict[WholeJob, list[LeaseJob]] = {}
        problem = None
        removable: dict[str, list[LeaseJob]] = {}
        for job in due_jobs:
            if job.part is not None and job.part.removable:
                removable.setdefault(job.part.job, []).append(job)
            else:
                jobs_to_end.setdefault(WholeJob(job.id, job.user), []).append(job)
        for name, members in removable.items():
            if (shrink := self._shrink(name, members)) is None:
                jobs_to_end.setdefault(WholeJob(name, members[0].user), []).extend(members)
            elif any(job.part is not None and kind_of(job.part.node) for job in members):
                problem = self._end_steps(members, now) or problem
            elif shrink.released:
                if failed := self.submitter.shrink(shrink):
                    problem = failed
                    continue
                released = [
                    j.lease.id for j in members if j.part and j.part.node in shrink.released
                ]
                self._cancelled.update(dict.fromkeys(released, now))
        stopped = [
            job for job, members in jobs_to_end.items() if any(member.stopped for member in members)
        ]
        self.submitter.kill(stopped)
        result = self.submitter.cancel(list(jobs_to_end))
        accepted = [
            member
            for job, members in jobs_to_end.items()
            if job.id in result.accepted
            for member in members
        ]
        self._cancelled.update((member.lease.id, now) for member in accepted)
        refused = [
            member
            for job, members in jobs_to_end.items()
            if job.id not in result.accepted
            for member in members
        ]
        self._refused.update(
            (member.lease.id, now) for member in refused if is_unknown(member.lease.id)
        )
        return result.problem or problem

    def _end_steps(self, leaving: Sequence[LeaseJob], now: float) -> CommandError | None:
        """End the steps of slots whose job goes on with other slots. Return the error, None if
        there is none.
        """
        steps = self._steps_of(job.lease.id for job in leaving)
        if steps is None:  # the next poll tries again
            return None
        step_of = {
            job.lease.id: WholeJob(step, job.user)
            for job in leaving
            if job.part is not None and (step := steps.get((job.part.job, job.part.node)))
        }
        # A step that is cancelled is killed at once. It has its time to leave first.
        again = [lease for lease in step_of if lease in self._signalled]
        first = [lease for lease in step_of if lease not in self._signalled]
        without_step = [job.lease.id for job in leaving if job.lease.id not in step_of]
        self._cancelled.update(dict.fromkeys(without_step, now))
        problem = None
        for leases, options in ((first, ASK_TO_LEAVE), (again, ())):
            result = self.submitter.cancel([step_of[lease] for lease in leases], options)
            problem = result.problem or problem
            if result.problem is None:
                self._cancelled.update(dict.fromkeys(leases, now))
                self._signalled.update(leases)
        return problem

    def _shrink(self, name: str, leaving: Sequence[LeaseJob]) -> Shrink | None:
        """Return the nodes that a job releases when the leases ``leaving`` end; None if it ends as
        a whole.
        """
        ending = {job.lease.id for job in leaving} | self.ledger.given_up.keys()
        ending |= self._cancelled.keys()
        parts = {
            lease: (job.part, job.user)
            for lease, job in self.ledger.jobs.items()
            if job.part is not None and job.part.job == name and job.alive
        }
        staying = {part.node for lease, (part, _) in parts.items() if lease not in ending}
        if not staying:
            return None
        # The first node goes last.
        first_nodes = {part.node for part, _ in parts.values() if part.first}
        released = {job.part.node for job in leaving if job.part is not None} - first_nodes
        return Shrink(
            name, leaving[0].user, tuple(sorted(staying | first_nodes)), tuple(sorted(released))
        )

    def ask(
        self, leave: Mapping[str, str], options: Sequence[str], grace_s: float, now: float
    ) -> None:
        """Ask leases to leave, once each, and cancel those that exceed the grace time.

        The node of a shared job is released as soon as its step has ended. The first node of a job
        is released last, so the other leases leave with it.

        Args:
            leave: lease id → why.
            options: options with which the cancel command only sends a signal. If empty, leases are
                cancelled, which gives them the grace time too.
            grace_s: grace time, seconds.
            now: epoch seconds.
        """
        jobs = self.ledger.jobs
        leave = {**self._leases_of_ending_jobs(leave), **leave}
        steps = self._steps_of([*leave, *self.leave_requests]) if options else {}
        expired = [
            lease
            for lease, (asked_at, _) in self.leave_requests.items()
            if now - asked_at > grace_s
        ]
        if options and steps is not None:
            expired += [
                i for i in self.leave_requests if i not in expired and _has_left(jobs[i], steps)
            ]
        self.cancel([jobs[lease] for lease in expired if not jobs[lease].ending], grace_s, now)
        new_leases = [
            lease for lease in leave if lease not in self.leave_requests and not jobs[lease].ending
        ]
        if not options:
            self.cancel([jobs[lease] for lease in new_leases], grace_s, now)
            notified = [lease for lease in new_leases if lease in self._cancelled]
        else:
            notified = self._signal([jobs[lease] for lease in new_leases], steps, options)
        self.leave_requests.update({lease: (now, leave[lease]) for lease in notified})

    def _leases_of_ending_jobs(self, leave: Mapping[str, str]) -> dict[str, str]:
        """Return lease → why it has to leave, for the other leases of jobs whose first node is
        leaving, and of jobs that have a whole host, which is free only when all have left.
        """
        parts = [_removable(job) for lease in leave if (job := self.ledger.jobs.get(lease))]
        ending_jobs = {part.job for part in parts if part is not None and part.ends_with_others}
        return {
            lease: "another lease of its job has to leave"
            for lease, job in self.ledger.jobs.items()
            if job.alive
            and lease not in self.ledger.given_up
            and (part := _removable(job)) is not None
            and part.job in ending_jobs
        }

    def _signal(
        self,
        lease_jobs: Iterable[LeaseJob],
        steps: Mapping[tuple[str, str], str] | None,
        options: Sequence[str],
    ) -> list[str]:
        """Send a signal to leases. Return the leases that received it or had left before."""
        whole_jobs: dict[str, LeaseJob] = {}
        job_by_step: dict[str, LeaseJob] = {}
        departed = []
        for job in lease_jobs:
            if (part := _removable(job)) is None:
                whole_jobs[job.id] = job
            elif steps is not None and (step := steps.get((part.job, part.node))):
                job_by_step[step] = job
            elif steps is not None:
                departed.append(job.lease.id)
        result = self.submitter.cancel(list(whole_jobs.values()), options)
        notified = [whole_jobs[i].lease.id for i in result.accepted]
        # scancel reports a step that it has just signalled as missing (Slurm 22.05).
        signals = [WholeJob(step, job.user) for step, job in job_by_step.items()]
        if job_by_step and self.submitter.cancel(signals, options).problem is None:
            notified += [job.lease.id for job in job_by_step.values()]
        return notified + departed

    def _steps_of(self, leases: Iterable[str]) -> Mapping[tuple[str, str], str] | None:
        """Return the steps of the jobs that any of these leases share; None if they are not
        known.
        """
        parts = [_removable(job) for lease in leases if (job := self.ledger.jobs.get(lease))]
        shared = {part.job for part in parts if part is not None}
        if not shared or self.steps is None:
            return {}
        try:
            return self.steps(shared)
        except SchedulerError:
            return None

    def mark_leaving(
        self, leases: Iterable[Lease], grace_s: float, leave_by: Mapping[str, float]
    ) -> Iterator[Lease]:
        """Yield the leases, with those that were asked to leave marked as leaving, and each with
        the time by which it should have left.

        Args:
            leases: all leases.
            grace_s: grace time, seconds.
            leave_by: lease → time by which it should have left, epoch seconds, because a job waits
                already. It has :data:`MIN_LEAVE_S` at least.
        """
        for lease in leases:
            if lease.id in self.leave_requests and lease.state is LeaseState.RUNNING:
                asked_at, reason = self.leave_requests[lease.id]
                gone_at = min(asked_at + grace_s, lease.gone_at or math.inf)
                lease = replace(lease, reason=reason, gone_at=gone_at)
            if lease.gone_at is not None and lease.id in leave_by:
                earliest = lease.gone_at - max(0.0, grace_s - MIN_LEAVE_S)
                until = max(earliest, leave_by[lease.id])
                lease = replace(lease, leave_by=until if until < lease.gone_at else None)
            yield lease


def _removable(job: LeaseJob) -> PartOf | None:
    """Return the lease's part of a job that can release its node separately; None if there is
    none.
    """
    return job.part if job.part is not None and job.part.removable else None


def _has_left(job: LeaseJob, steps: Mapping[tuple[str, str], str]) -> bool:
    """Return whether the lease's step in a shared job has ended."""
    part = _removable(job)
    return part is not None and (part.job, part.node) not in steps
