"""How leases end before their time: cancelled, or asked to leave first.

Decides when a scheduler is asked once more; which leases have to end is decided by
:mod:`scavenger.batch.lease_ledger` and :mod:`scavenger.batch.leaving`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from scavenger.batch.commands import CommandError
from scavenger.batch.lease_ledger import LeaseJob, LeaseLedger
from scavenger.batch.submission import Submitter
from scavenger.interface import Lease, LeaseState

CANCEL_AGAIN_S = 15.0
"""So long after the grace time an accepted cancel is repeated. Not sooner: PBS starts the time to
its SIGKILL anew at each (OpenPBS 23.06), so that a job deleted at every poll was never killed.
"""
REMEMBERED_S = 3600.0


class LeaseEnder:
    """Ends the leases of one scheduler."""

    def __init__(self, ledger: LeaseLedger, submitter: Submitter) -> None:
        self.ledger = ledger
        self.submitter = submitter
        self.asked: dict[str, tuple[float, str]] = {}
        """Running lease → when it was asked to leave, and why."""
        self._cancelled: dict[str, float] = {}
        """Job → when the scheduler accepted to end it."""

    def forget(self, running: Collection[str], now: float) -> None:
        """Only these leases run still."""
        self.asked = {lease: at for lease, at in self.asked.items() if lease in running}
        self._cancelled = {
            job: at for job, at in self._cancelled.items() if now - at < REMEMBERED_S
        }

    def cancel(self, jobs: Iterable[LeaseJob], grace_s: float, now: float) -> CommandError | None:
        """End jobs, those left out whose end was accepted a short while ago. Returns what went
        wrong.
        """
        since = now - grace_s - CANCEL_AGAIN_S
        due = [job for job in jobs if self._cancelled.get(job.id, -math.inf) <= since]
        self.submitter.kill([job for job in due if job.stopped])
        done = self.submitter.cancel(due)
        self._cancelled.update(dict.fromkeys(done.accepted, now))
        return done.problem

    def ask(
        self, leave: Mapping[str, str], options: Sequence[str], grace_s: float, now: float
    ) -> None:
        """Tell leases to leave, once; one that stays longer than the grace time is cancelled.

        Args:
            leave: lease id → why.
            options: with which the command that cancels only sends a signal; none: leases are
                cancelled, which leaves them the grace time too.
            grace_s: seconds that they have.
            now: epoch seconds.
        """
        jobs = self.ledger.jobs
        late = [lease for lease, (at, _) in self.asked.items() if now - at > grace_s]
        self.cancel([jobs[lease] for lease in late if not jobs[lease].ending], grace_s, now)
        wanted = {
            jobs[lease].id: lease
            for lease in leave
            if lease not in self.asked and not jobs[lease].ending
        }
        done = self.submitter.cancel([jobs[lease] for lease in wanted.values()], options)
        if not options:
            self._cancelled.update(dict.fromkeys(done.accepted, now))
        self.asked.update({wanted[job]: (now, leave[wanted[job]]) for job in done.accepted})

    def with_asked(self, leases: Iterable[Lease], grace_s: float) -> Iterator[Lease]:
        """The leases, those that were asked to leave as leaving."""
        for lease in leases:
            if lease.id in self.asked and lease.state is LeaseState.RUNNING:
                at, reason = self.asked[lease.id]
                by = min(at + grace_s, lease.leaving_by or math.inf)
                lease = replace(lease, reason=reason, leaving_by=by)
            yield lease
