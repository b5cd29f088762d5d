"""What a job's owner asked for besides nodes: that it begins after other jobs, and that it ends in
time.

Decides when that is so; looked at every moment, so that a restarted daemon needs to remember
nothing but the jobs themselves. Who is told of a job is :mod:`malletrain.daemon.notices`'s.
"""

from __future__ import annotations

from collections.abc import Iterable

from malletrain.config.units import show_duration
from malletrain.core.events import JobCancelled, JobState
from malletrain.daemon.core import Core
from malletrain.daemon.job_repository import decode_spec, not_completed
from malletrain.protocol.event_kinds import EventKind
from malletrain.store.records import EventRow, JobRow

HOLDING = (EventKind.JOB_STARTED, EventKind.JOB_SUSPENDED)
"""Events between which a job has nodes, and between which it has none."""


def held_s(events: Iterable[EventRow], now: float) -> float:
    """How long a job has had nodes, by its events of :data:`HOLDING`, seconds."""
    total, since = 0.0, None
    for event in events:
        if event.kind == EventKind.JOB_STARTED:
            since = event.time if since is None else since
        elif since is not None:
            total, since = total + event.time - since, None
    return total if since is None else total + max(0.0, now - since)


class Promises:
    """Jobs that wait for others, and jobs with a limit of time."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waiting: set[str] | None = None
        self._held: dict[str, float] = {}
        self._looked = 0.0

    def submitted(self, row: JobRow) -> None:
        """A new job of the store, which is in nobody's hands yet. Call it within a step."""
        spec = decode_spec(row.spec)
        if open_jobs := not_completed(self._core.store, spec.after):
            named = ", ".join(f"{job.id} ({job.name})" for job in open_jobs)
            self._core.store.update_job(row.id, reason=f"begins when {named} completed")
            self._others().add(row.id)
        else:
            self._core.add(row, spec)

    def waits(self, job: str) -> bool:
        """Whether the job waits for others."""
        return job in self._others()

    def cancel(self, job: str, reason: str) -> None:
        """End a job that waits for others. Call it within a step."""
        core, now = self._core, self._core.clock.now()
        state = JobState.CANCELLED.value
        core.store.update_job(job, state=state, reason=reason, ended=now)
        core.audit.record(EventKind.JOB_CANCELLED, f"The job was cancelled: {reason}.", job=job)
        core.metrics.job_ended(job, state)
        core.news.came(job)
        self._others().discard(job)

    def look(self) -> None:
        """See to what has become due."""
        for job in sorted(self._others()):
            self._look_at(job)
        self._look_at_limits()

    def _others(self) -> set[str]:
        """Ids of the jobs that wait for others; after a restart those that nobody has in hand."""
        if self._waiting is None:
            self._waiting = {
                row.id
                for row in self._core.store.list_jobs([JobState.QUEUED.value])
                if row.id not in self._core.runs and decode_spec(row.spec).after
            }
        return self._waiting

    def _look_at(self, job: str) -> None:
        core = self._core
        row = core.store.get_job(job)
        if row is None:
            return
        spec = decode_spec(row.spec)
        open_jobs = not_completed(core.store, spec.after)
        over = [other for other in open_jobs if JobState(other.state).ended]
        if over:
            first = over[0]
            with core.step():
                self.cancel(
                    job, f"job {first.id} ({first.name}), after which it was to begin, {was(first)}"
                )
        elif not open_jobs:
            with core.step():
                self._others().discard(job)
                core.add(core.store.update_job(job, reason=""), spec)

    def _look_at_limits(self) -> None:
        core, now = self._core, self._core.clock.now()
        passed, self._looked = now - (self._looked or now), now
        limited = {job: run for job, run in core.runs.items() if run.spec.time_limit_s}
        self._held = {job: held for job, held in self._held.items() if job in limited}
        for job, run in limited.items():
            if job not in self._held:
                self._held[job] = held_s(core.store.job_events(job, HOLDING), now)
            elif run.row.planned_nodes:
                self._held[job] += passed
            if self._held[job] >= run.spec.time_limit_s:
                limit = show_duration(run.spec.time_limit_s)
                core.feed(JobCancelled(job, f"its time limit of {limit} is over"))


def was(job: JobRow) -> str:
    """What became of a job, in words."""
    return "was cancelled" if job.state == JobState.CANCELLED.value else job.state
