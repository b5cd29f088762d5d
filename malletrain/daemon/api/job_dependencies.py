"""Handles jobs that start after others (``--after``), and jobs with a time limit
(``--time-limit``).

Decides when such a job starts, is cancelled because a job before it did not complete, or reaches
its limit. All decisions follow from stored jobs and events, so a restart of the daemon loses
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from malletrain.config.units import show_duration
from malletrain.core.events import JobCancelled, JobState
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import Transactions
from malletrain.daemon.engine.unfinished_jobs import UnfinishedJobs
from malletrain.daemon.jobs.repository import decode_spec, is_arriving, not_completed
from malletrain.protocol.event_kinds import EventKind
from malletrain.store.records import EventRow, JobRow

NODE_EVENTS = (EventKind.JOB_STARTED, EventKind.JOB_SUSPENDED)
"""Kinds of the events at which a job gets nodes and loses its last ones."""


def running_s(events: Iterable[EventRow], now: float) -> float:
    """Return for how long a job has had nodes.

    Args:
        events: the job's events of the kinds :data:`NODE_EVENTS`, oldest first.
        now: time, seconds.

    Returns:
        Seconds.
    """
    total, started_at = 0.0, None
    for event in events:
        if event.kind == EventKind.JOB_STARTED:
            started_at = event.time if started_at is None else started_at
        elif started_at is not None:
            total, started_at = total + event.time - started_at, None
    return total if started_at is None else total + max(0.0, now - started_at)


class JobDependencies:
    """Manages the jobs that wait for others and those with a time limit."""

    def __init__(self, state: SiteState, transactions: Transactions, jobs: UnfinishedJobs) -> None:
        self._state = state
        self._transactions = transactions
        self._jobs = jobs
        self._waiting: set[str] | None = None
        self._running_s: dict[str, float] = {}
        """Job with a time limit → time for which it has had nodes, seconds."""
        self._checked = 0.0

    def submitted(self, row: JobRow) -> None:
        """Start a newly stored job, or let it wait for others. Call it within a transaction."""
        spec = decode_spec(row.spec)
        if open_jobs := not_completed(self._state.store, spec.after):
            named = ", ".join(f"{job.id} ({job.name})" for job in open_jobs)
            self._state.store.update_job(row.id, reason=f"begins when {named} completed")
            self._waiting_jobs().add(row.id)
        else:
            self._jobs.add(row, spec)

    def waits(self, job: str) -> bool:
        """Whether the job waits for others to complete."""
        return job in self._waiting_jobs()

    def cancel(self, job: str, reason: str) -> None:
        """Cancel a job that waits for others, or for its tasks. Call it within a transaction."""
        state, cancelled = self._state, JobState.CANCELLED.value
        state.store.update_job(job, state=cancelled, reason=reason, ended=state.clock.now())
        state.audit.record(EventKind.JOB_CANCELLED, f"The job was cancelled: {reason}.", job=job)
        state.metrics.job_ended(job, cancelled)
        state.news.came(job)
        self._waiting_jobs().discard(job)

    def check(self) -> None:
        """Start or cancel the jobs that are due. Call it regularly."""
        for job in sorted(self._waiting_jobs()):
            self._check_job(job)
        self._check_limits()

    def _waiting_jobs(self) -> set[str]:
        """Return the ids of the jobs that wait for others. After a restart they are read from the
        store.
        """
        if self._waiting is None:
            queued = self._state.store.list_jobs([JobState.QUEUED.value])
            rows = [(row, decode_spec(row.spec)) for row in queued]
            self._waiting = {
                row.id
                for row, spec in rows
                if row.id not in self._state.runs
                and spec.after
                and not is_arriving(self._state.store, row, spec)
            }
        return self._waiting

    def _check_job(self, job: str) -> None:
        state = self._state
        row = state.store.get_job(job)
        if row is None:
            return
        spec = decode_spec(row.spec)
        open_jobs = not_completed(state.store, spec.after)
        ended = [other for other in open_jobs if JobState(other.state).ended]
        if ended:
            first = ended[0]
            with self._transactions.begin():
                self.cancel(
                    job,
                    f"job {first.id} ({first.name}), after which it was to begin, {outcome(first)}",
                )
        elif not open_jobs:
            with self._transactions.begin():
                self._waiting_jobs().discard(job)
                self._jobs.add(state.store.update_job(job, reason=""), spec)

    def _check_limits(self) -> None:
        state, now = self._state, self._state.clock.now()
        passed_s, self._checked = now - (self._checked or now), now
        limited = {job: run for job, run in state.runs.items() if run.spec.time_limit_s}
        self._running_s = {job: time for job, time in self._running_s.items() if job in limited}
        for job, run in limited.items():
            if job not in self._running_s:
                self._running_s[job] = running_s(state.store.job_events(job, NODE_EVENTS), now)
            elif run.row.planned_nodes:
                self._running_s[job] += passed_s
            if self._running_s[job] >= run.spec.time_limit_s:
                limit = show_duration(run.spec.time_limit_s)
                self._transactions.feed(JobCancelled(job, f"its time limit of {limit} is over"))


def outcome(job: JobRow) -> str:
    """Return the outcome of an ended job, as words of a sentence."""
    return "was cancelled" if job.state == JobState.CANCELLED.value else job.state
