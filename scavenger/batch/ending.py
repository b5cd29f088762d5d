"""How leases end before their time: cancelled, or asked to leave first.

Decides when a scheduler is asked once more; which leases have to end is decided by
:mod:`scavenger.batch.lease_ledger` and :mod:`scavenger.batch.leaving`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from scavenger.batch.commands import CommandError
from scavenger.batch.groups import PartOf, is_unknown
from scavenger.batch.lease_ledger import LeaseJob, LeaseLedger
from scavenger.batch.submission import Shrink, Submitter
from scavenger.interface import Lease, LeaseState, SchedulerError

CANCEL_AGAIN_S = 15.0
"""So long after the grace time an accepted cancel is repeated. Not sooner: PBS starts the time to
its SIGKILL anew at each (OpenPBS 23.06), so that a job deleted at every poll was never killed.
"""
REFUSED_AGAIN_S = 300.0
"""So long after it was refused the cancel of a job that is of no lease is tried again: anybody who
has leases can give a job such a name.
"""
REMEMBERED_S = 3600.0


Steps = Callable[[Collection[str]], Mapping[tuple[str, str], str]]
"""Ids of jobs → (job, node) → what there may be sent a signal alone. Raises SchedulerError."""


class WholeJob(NamedTuple):
    """A job of the main scheduler that ends with everything in it."""

    id: str
    user: str


class LeaseEnder:
    """Ends the leases of one scheduler. ``steps``: what runs on each node of jobs that are shared;
    None: nothing there can be told apart.
    """

    def __init__(
        self, ledger: LeaseLedger, submitter: Submitter, steps: Steps | None = None
    ) -> None:
        self.ledger = ledger
        self.submitter = submitter
        self.steps = steps
        self.leave_requests: dict[str, tuple[float, str]] = {}
        """Running lease → when it was asked to leave, and why."""
        self._cancelled: dict[str, float] = {}
        """Lease → when the scheduler accepted to end it."""
        self._refused: dict[str, float] = {}
        """What is of no lease → when the scheduler refused to end it."""

    def forget(self, running: Collection[str], now: float) -> None:
        """Only these leases run still."""
        self.leave_requests = {
            lease: at for lease, at in self.leave_requests.items() if lease in running
        }
        self._cancelled = {
            lease: at for lease, at in self._cancelled.items() if now - at < REMEMBERED_S
        }
        self._refused = {
            lease: at for lease, at in self._refused.items() if now - at < REFUSED_AGAIN_S
        }

    def cancel(self, jobs: Iterable[LeaseJob], grace_s: float, now: float) -> CommandError | None:
        """End leases, those left out whose end was accepted a short while ago. A job that they
        share with others only gives back their nodes. Returns what went wrong.
        """
        since = now - grace_s - CANCEL_AGAIN_S
        due = [
            job
            for job in jobs
            if self._cancelled.get(job.lease.id, -math.inf) <= since
            and now - self._refused.get(job.lease.id, -math.inf) >= REFUSED_AGAIN_S
        ]
        ends: dict[WholeJob, list[LeaseJob]] = {}
        problem = None
        removable: dict[str, list[LeaseJob]] = {}
        for job in due:
            if job.part is not None and job.part.removable:
                removable.setdefault(job.part.job, []).append(job)
            else:
                ends.setdefault(WholeJob(job.id, job.user), []).append(job)
        for name, some in removable.items():
            if (shrink := self._shrink(name, some)) is None:
                ends.setdefault(WholeJob(name, some[0].user), []).extend(some)
            elif shrink.released:
                if failed := self.submitter.shrink(shrink):
                    problem = failed
                    continue
                gone = [j.lease.id for j in some if j.part and j.part.node in shrink.released]
                self._cancelled.update(dict.fromkeys(gone, now))
        stopped = [job for job, of in ends.items() if any(one.stopped for one in of)]
        self.submitter.kill(stopped)
        done = self.submitter.cancel(list(ends))
        accepted = [one for job, of in ends.items() if job.id in done.accepted for one in of]
        self._cancelled.update((one.lease.id, now) for one in accepted)
        refused = [one for job, of in ends.items() if job.id not in done.accepted for one in of]
        self._refused.update((one.lease.id, now) for one in refused if is_unknown(one.lease.id))
        return done.problem or problem

    def _shrink(self, name: str, some: Sequence[LeaseJob]) -> Shrink | None:
        """What is to be given back of a job when ``some`` of its leases end; None: all of it."""
        ending = {job.lease.id for job in some} | self.ledger.given_up.keys()
        ending |= self._cancelled.keys()
        parts = {
            lease: (job.part, job.user)
            for lease, job in self.ledger.jobs.items()
            if job.part is not None and job.part.job == name and job.alive
        }
        stay = {part.node for lease, (part, _) in parts.items() if lease not in ending}
        if not stay:
            return None
        # The first node goes last.
        first = {part.node for part, _ in parts.values() if part.first}
        released = {job.part.node for job in some if job.part is not None} - first
        return Shrink(name, some[0].user, tuple(sorted(stay | first)), tuple(sorted(released)))

    def ask(
        self, leave: Mapping[str, str], options: Sequence[str], grace_s: float, now: float
    ) -> None:
        """Tell leases to leave, once; one that stays longer than the grace time is cancelled. The
        node of one that shares a job is given back as soon as nothing runs there any more. The
        first node of a job goes last, so the others leave with it.

        Args:
            leave: lease id → why.
            options: with which the command that cancels only sends a signal; none: leases are
                cancelled, which leaves them the grace time too.
            grace_s: seconds that they have.
            now: epoch seconds.
        """
        jobs = self.ledger.jobs
        leave = {**self._others(leave), **leave}
        steps = self._steps_of([*leave, *self.leave_requests]) if options else {}
        over = [lease for lease, (at, _) in self.leave_requests.items() if now - at > grace_s]
        if options and steps is not None:
            over += [i for i in self.leave_requests if i not in over and _has_left(jobs[i], steps)]
        self.cancel([jobs[lease] for lease in over if not jobs[lease].ending], grace_s, now)
        new = [
            lease for lease in leave if lease not in self.leave_requests and not jobs[lease].ending
        ]
        if not options:
            self.cancel([jobs[lease] for lease in new], grace_s, now)
            notified = [lease for lease in new if lease in self._cancelled]
        else:
            notified = self._signal([jobs[lease] for lease in new], steps, options)
        self.leave_requests.update({lease: (now, leave[lease]) for lease in notified})

    def _others(self, leave: Mapping[str, str]) -> dict[str, str]:
        """Lease → why it has to leave, of jobs whose first node has to go."""
        parts = [_removable(job) for lease in leave if (job := self.ledger.jobs.get(lease))]
        ends = {part.job for part in parts if part is not None and part.first}
        return {
            lease: "the first node of its job is wanted"
            for lease, job in self.ledger.jobs.items()
            if job.alive and (part := _removable(job)) is not None and part.job in ends
        }

    def _signal(
        self,
        some: Iterable[LeaseJob],
        steps: Mapping[tuple[str, str], str] | None,
        options: Sequence[str],
    ) -> list[str]:
        """Send leases a signal. Returns those that have it, or had left before."""
        alone: dict[str, LeaseJob] = {}
        shared: dict[str, LeaseJob] = {}
        gone = []
        for job in some:
            if (part := _removable(job)) is None:
                alone[job.id] = job
            elif steps is not None and (step := steps.get((part.job, part.node))):
                shared[step] = job
            elif steps is not None:
                gone.append(job.lease.id)
        done = self.submitter.cancel(list(alone.values()), options)
        notified = [alone[i].lease.id for i in done.accepted]
        # scancel says of a step that it has just signalled that it is not there (Slurm 22.05).
        signals = [WholeJob(step, job.user) for step, job in shared.items()]
        if shared and self.submitter.cancel(signals, options).problem is None:
            notified += [job.lease.id for job in shared.values()]
        return notified + gone

    def _steps_of(self, leases: Iterable[str]) -> Mapping[tuple[str, str], str] | None:
        """What runs of the jobs that some of these leases share; None when that is not known."""
        parts = [_removable(job) for lease in leases if (job := self.ledger.jobs.get(lease))]
        shared = {part.job for part in parts if part is not None}
        if not shared or self.steps is None:
            return {}
        try:
            return self.steps(shared)
        except SchedulerError:
            return None

    def mark_leaving(self, leases: Iterable[Lease], grace_s: float) -> Iterator[Lease]:
        """The leases, those that were asked to leave as leaving."""
        for lease in leases:
            if lease.id in self.leave_requests and lease.state is LeaseState.RUNNING:
                at, reason = self.leave_requests[lease.id]
                by = min(at + grace_s, lease.gone_at or math.inf)
                lease = replace(lease, reason=reason, gone_at=by)
            yield lease


def _removable(job: LeaseJob) -> PartOf | None:
    """Where it is in a job that can give back its node alone."""
    return job.part if job.part is not None and job.part.removable else None


def _has_left(job: LeaseJob, steps: Mapping[tuple[str, str], str]) -> bool:
    """Whether nothing runs any more on its node of a job that goes on."""
    part = _removable(job)
    return part is not None and (part.job, part.node) not in steps
