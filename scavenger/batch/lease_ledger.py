"""The ledger of the leases of a batch scheduler: the job of each lease, the leases that were given
up, and whether more can be requested.

Decides which jobs have to be cancelled and how their leases end. It asks no scheduler and runs no
command. :mod:`scavenger.slurm.state` and :mod:`scavenger.pbs.state` interpret the state of a job
and create the :class:`LeaseJob`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Set
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

from scavenger.backoff import Backoff
from scavenger.batch.groups import PartOf
from scavenger.batch.submission import LimitReachedError, RefusedError, UnsureError
from scavenger.interface import Lease, LeaseState, SchedulerError

LIMIT_BACKOFF_S = (60.0, 900.0)
"""Minimum and maximum pause in requests for a user who has reached a limit of the main scheduler,
seconds.
"""
REFUSAL_BACKOFF_S = (10.0, 600.0)
"""The same after two successive submissions were refused for another reason. A single refusal can
be due to the node.
"""
RECORD_LIFETIME_S = 3600.0


class LeaseJob(NamedTuple):
    """One of our jobs, with the attributes that all batch schedulers have."""

    lease: Lease
    """The lease according to the job's state."""
    user: str
    """User of the job."""
    requested_node: str = ""
    """The node that its submission names."""
    submitted: float | None = None
    """Epoch seconds, None if not known."""
    lost: str = ""
    """Why the lease has ended although the job still exists."""
    ending: bool = False
    """The job is ending and need not be cancelled."""
    stopped: bool = False
    """Its processes are stopped, so that they react only to SIGKILL."""
    handle: str = ""
    """The main scheduler's id of the part that ends with this lease; empty: its ``scheduler_id``.
    """
    part: PartOf | None = None
    """Its part of a job that it shares with other leases; None if it has its own job."""

    @property
    def id(self) -> str:
        """The main scheduler's id of the job or part."""
        return self.handle or self.lease.scheduler_id

    @property
    def alive(self) -> bool:
        """Whether the job has not ended."""
        return self.lease.state is not LeaseState.ENDED


class _Job(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def user(self) -> str: ...
    @property
    def state(self) -> str: ...


JobT = TypeVar("JobT", bound=_Job)


def own_jobs(
    jobs: Iterable[JobT],
    prefix: str,
    user_of: Callable[[str], str],
    pending: Container[str],
    ended: Container[str],
) -> dict[str, JobT]:
    """Return lease id → its job.

    If several jobs have the same name, a running one takes precedence over a pending one, and a
    pending one over an ended one. Any user can see our names and use them, so a job is ours only if
    it belongs to the user of its lease.

    Args:
        jobs: all jobs whose names begin with ``prefix``.
        prefix: beginning of the names of our jobs.
        user_of: returns the user of a lease.
        pending: the scheduler's names of pending states.
        ended: the scheduler's names of ended states.
    """

    def liveliness(job: JobT) -> int:
        return 0 if job.state in ended else 1 if job.state in pending else 2

    return {
        lease: job
        for job in sorted(jobs, key=liveliness)
        if job.user == user_of(lease := job.name[len(prefix) :])
    }


class LeaseLedger:
    """The leases of one scheduler.

    Args:
        scheduler: its name, for sentences.
        start_within_s: maximum time from submission to start, seconds; then a lease is withdrawn.
        max_leases: maximum number of leases of all users together, 0: no limit.
        user: user of leases about which nothing is known.
    """

    def __init__(self, scheduler: str, start_within_s: float, max_leases: int, user: str) -> None:
        self.scheduler = scheduler
        self.start_within_s = start_within_s
        self.max_leases = max_leases
        self.user = user
        self.jobs: dict[str, LeaseJob] = {}
        """Lease id → its job, from the latest poll and from submissions since then."""
        self.given_up: dict[str, tuple[float, str]] = {}
        """Lease id → (time, reason) of giving it up. If its job appears later, it is cancelled."""
        self._missed: dict[str, str] = {}
        """Lease id → its job, which has been missing from the polls since."""
        self._users: dict[str, tuple[str, float]] = {}
        """Lease id → (its user, time of the last use of this entry)."""
        self._nodes: dict[str, str] = {}
        """Lease id → its node, if known."""
        self._job_ids: dict[str, str] = {}
        """Lease id → id that the scheduler returned for its job."""
        self._limits: dict[str, Backoff] = {}
        """User → back-off of a user who has reached a limit."""
        self._allowed: dict[str, int] = {}
        """User → number of leases when the limit was reached."""
        self._refusals: dict[str, Backoff] = {}
        """User → back-off of a user whose submissions are refused for another reason."""

    def know(self, lease_id: str, user: str, now: float, node: str = "") -> None:
        """Note that the lease is, or will be, a job of this user on this node. An earlier entry
        takes precedence.

        Args:
            lease_id: id of the lease.
            user: user of its job.
            now: epoch seconds.
            node: its node; empty if it is not known.
        """
        self._users.setdefault(lease_id, (user, now))
        if node:
            self._nodes.setdefault(lease_id, node)

    def node_of(self, lease_id: str) -> str:
        """Return the node of the lease; empty if it is not known."""
        return self._nodes.get(lease_id, "")

    def submitted(self, lease_id: str, job_id: str) -> None:
        """Note the id that the scheduler returned when the lease's job was submitted. The lease
        must be known.

        Args:
            lease_id: id of the lease.
            job_id: id of its job, or of the part of a job that it is.
        """
        self._job_ids[lease_id] = job_id.partition("/")[0]

    def job_of(self, lease_id: str) -> str:
        """Return the id of the job that was submitted for the lease; empty if it is not known."""
        return self._job_ids.get(lease_id, "")

    def user_of(self, lease_id: str) -> str:
        """Return the user of the lease."""
        return self._users[lease_id][0] if lease_id in self._users else self.user

    @property
    def users(self) -> Set[str]:
        """Users with present or recent leases, and this process's user."""
        return {self.user, *(user for user, _ in list(self._users.values()))}

    def give_up(self, lease_id: str, reason: str, now: float) -> None:
        """Mark the lease as no longer wanted. The first reason is stored.

        Args:
            lease_id: id of the lease.
            reason: words without a full stop.
            now: epoch seconds.
        """
        self.given_up.setdefault(lease_id, (now, reason))

    def update(
        self, jobs: Mapping[str, LeaseJob], hold: str, node_holds: Mapping[str, str], now: float
    ) -> tuple[tuple[Lease, ...], list[LeaseJob]]:
        """Update the ledger from a poll.

        A lease that has ended stays ended: in an array its node can receive the task that waited
        for another node.

        Args:
            jobs: lease id → its job.
            hold: why no lease may be requested; empty if leases may be.
            node_holds: node → why this node may not be requested.
            now: epoch seconds.

        Returns:
            All leases, and the jobs that have to be cancelled: given up earlier, lost, or pending
                for too long or for an unavailable node.
        """
        for lease_id in self.jobs.keys() - jobs.keys():
            if lease_id not in self.given_up:
                self._missed[lease_id] = self.jobs[lease_id].id
            self.give_up(lease_id, "the main scheduler ended it", now)
        for lease_id in self._missed.keys() & jobs.keys():
            job, earlier_id = jobs[lease_id], self._missed.pop(lease_id)
            if job.alive and job.id == earlier_id:  # the earlier answer was truncated
                del self.given_up[lease_id]
        self.jobs = dict(jobs)
        self.given_up = {
            lease: entry
            for lease, entry in self.given_up.items()
            if now - entry[0] < RECORD_LIFETIME_S or lease in jobs
        }
        self._missed = {i: job for i, job in self._missed.items() if i in self.given_up}
        users = {
            lease: (user, now if lease in jobs else last)
            for lease, (user, last) in self._users.items()
        }
        self._users = {
            lease: entry for lease, entry in users.items() if now - entry[1] < RECORD_LIFETIME_S
        }
        self._nodes = {lease: node for lease, node in self._nodes.items() if lease in self._users}
        self._job_ids = {lease: job for lease, job in self._job_ids.items() if lease in self._users}
        for user, count in self._allowed.items():
            if self._alive_count(user) < count:
                self._limits.pop(user, None)  # another lease can be requested
        leases, unwanted = [], []
        for lease_id, job in self.jobs.items():
            lease = job.lease
            if not job.alive:
                self.give_up(lease_id, lease.reason or "the main scheduler ended it", now)
            elif reason := self._end_reason(
                lease_id, job, hold or node_holds.get(job.requested_node, ""), now
            ):
                self.give_up(lease_id, reason, now)
                if not job.ending:
                    unwanted.append(job)
                lease = replace(lease, state=LeaseState.ENDED, reason=reason, gone_at=None)
            leases.append(lease)
        return tuple(leases), unwanted

    def _end_reason(self, lease_id: str, job: LeaseJob, unavailable: str, now: float) -> str:
        """Return why the lease has ended although its job has not; empty if it has not ended.
        ``unavailable``: why its node is unavailable; empty if it is available.
        """
        if lease_id in self.given_up:
            return self.given_up[lease_id][1]
        if job.lost or job.lease.state is not LeaseState.PENDING:
            return job.lost
        if (
            not unavailable
            and job.submitted is not None
            and now - job.submitted > self.start_within_s
        ):
            return (
                f"it did not start within {self.start_within_s:g} s "
                f"({job.lease.reason or 'no reason given'})"
            )
        return unavailable

    def limit_reached(self, user: str, words: str, now: float) -> None:
        """Note that the main scheduler refused this user a lease because the user has too many
        jobs.

        Args:
            user: the user.
            words: the scheduler's message.
            now: epoch seconds.
        """
        self._limits.setdefault(user, Backoff(*LIMIT_BACKOFF_S)).refused(now, words)
        self._allowed[user] = self._alive_count(user)

    def submissions_ended(self) -> None:
        """Note that no submission is under way. The main scheduler accepts as many leases of a user
        as there are now, although some were accepted after it had refused another.
        """
        for user, count in self._allowed.items():
            self._allowed[user] = max(count, self._alive_count(user))

    def _alive_count(self, user: str) -> int:
        return sum(job.alive and job.user == user for job in list(self.jobs.values()))

    def refused(self, user: str, words: str, now: float) -> None:
        """Note that the main scheduler refused this user a lease for another reason.

        Args:
            user: the user.
            words: the scheduler's message.
            now: epoch seconds.
        """
        self._refusals.setdefault(user, Backoff(*REFUSAL_BACKOFF_S, free_refusals=1)).refused(
            now, words
        )

    def not_taken(self, lease_id: str, error: SchedulerError, now: float) -> None:
        """Note that the submission of this lease failed.

        Args:
            lease_id: id of the lease.
            error: the error.
            now: epoch seconds.
        """
        user = self.user_of(lease_id)
        if isinstance(error, UnsureError):
            self.give_up(lease_id, str(error), now)
        elif isinstance(error, LimitReachedError):
            self.limit_reached(user, str(error), now)
        elif isinstance(error, RefusedError):
            self.refused(user, str(error), now)

    def accepted(self, user: str, now: float) -> None:
        """Note that the main scheduler accepted a lease of this user."""
        for backoff in (self._limits.get(user), self._refusals.get(user)):
            if backoff is not None:
                backoff.answered(now)

    def refusal(self, user: str, now: float) -> str:
        """Return why a lease of this user should not be requested now; empty if it may be."""
        is_first = not self._allowed.get(user)
        for backoff, refusal in (
            (self._limits.get(user), "takes no job" if is_first else "refuses more jobs"),
            (self._refusals.get(user), "refuses the jobs"),
        ):
            if backoff is not None and backoff.remaining_s(now) > 0:
                jobs_of = self._display_name(user)
                return f"{self.scheduler} {refusal} of {jobs_of} for now: {backoff.reason}"
        return ""

    def backing_off_s(self, now: float) -> float:
        """Return the seconds until no user's submissions are paused."""
        backoffs = [*list(self._limits.values()), *list(self._refusals.values())]
        return max((backoff.remaining_s(now) for backoff in backoffs), default=0.0)

    def room(self, active: int, now: float, only: str = "") -> tuple[int, str] | None:
        """Return (number of leases that can be added to the ``active`` ones, reason for the
        limit); None if there is no limit.

        Args:
            active: number of pending and running leases.
            now: epoch seconds.
            only: the one user who has leases; empty if there are several, each with their own
                limits (:meth:`refusal`).
        """
        limits = []
        if self.max_leases:
            leases = f"{self.max_leases} lease{'s' * (self.max_leases != 1)}"
            limits.append((self.max_leases - active, f"the configuration allows {leases}"))
        limit = self._limits.get(only)
        if limit is not None and limit.remaining_s(now) > 0:
            count = self._allowed[only]
            refusal = (
                f"refuses more jobs of {self._display_name(only)} than {count}"
                if count
                else f"takes no job of {self._display_name(only)}"
            )
            limits.append((count - active, f"{self.scheduler} {refusal} for now: {limit.reason}"))
        elif only and (reason := self.refusal(only, now)):
            limits.append((0, reason))
        return min(limits, default=None)

    def _display_name(self, user: str) -> str:
        return "ours" if user == self.user else user
