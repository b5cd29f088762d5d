"""Quotas: limits on the number of nodes that the jobs of a user or an account have at once. Pure.

The bid of one job cannot express a limit over several jobs. So the limit is divided before the bids
are made, and each job bids for at most its part. First each job gets its smallest size: jobs that
must run, then jobs with nodes, then the others in order of admission. The rest is divided equally.
A job with fixed nodes counts with its current size, a profiled job with its largest. The shell
decides which job is under which limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from malletrain.core.events import JobState, Quota
from malletrain.core.planning import Candidate
from malletrain.core.records import JobRecord
from malletrain.core.state import ControllerState


class Quotas:
    """The quotas of one controller's jobs."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state

    def within(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates, each limited to its part. Those without room for their smallest
        size are left out.
        """
        jobs = self._state.jobs
        limited = [c for c in candidates if jobs[c.job].submitted.quotas]
        if not limited:
            return list(candidates)
        parts = _parts(limited, [jobs[c.job] for c in limited])
        return [
            c if c.fixed or c.job not in parts else c.but(max_nodes=parts[c.job])
            for c in candidates
            if c.fixed or parts.get(c.job, 1)
        ]

    def may_profile(self, job: JobRecord) -> bool:
        """Return whether its quotas allow the job its largest size, given the nodes of the other
        jobs under them.
        """
        for quota in job.submitted.quotas:
            used_nodes = sum(
                len(other.nodes)
                for other in self._state.at_work.values()
                if other is not job and quota in other.submitted.quotas
            )
            if used_nodes + job.submitted.max_nodes > quota.nodes:
                return False
        return True

    def full(self, job: JobRecord) -> Quota | None:
        """Return the quota that prevents a job without nodes from running; None if none does."""
        for quota in job.submitted.quotas:
            used_nodes = sum(
                len(other.nodes)
                for other in self._state.at_work.values()
                if quota in other.submitted.quotas
            )
            if used_nodes + job.smallest > quota.nodes:
                return quota
        return None


def _parts(candidates: Sequence[Candidate], jobs: Sequence[JobRecord]) -> dict[str, int]:
    """Return job → maximum number of nodes that it may bid for; 0 if there is no room for its
    smallest size.
    """
    quotas = {c.job: job.submitted.quotas for c, job in zip(candidates, jobs, strict=True)}
    room = {quota: quota.nodes for job_quotas in quotas.values() for quota in job_quotas}
    parts: dict[str, int] = {}

    def give(name: str, more: int) -> None:
        parts[name] = parts.get(name, 0) + more
        for quota in quotas[name]:
            room[quota] -= more

    def remaining(name: str) -> int:
        return min(room[quota] for quota in quotas[name])

    for c, job in zip(candidates, jobs, strict=True):
        if c.fixed:
            profiled = job.state is JobState.PROFILING
            give(c.job, max(len(c.nodes), c.max_nodes if profiled else 0))
    rest = sorted(
        (c for c in candidates if not c.fixed), key=lambda c: (not c.must_run, not c.nodes)
    )
    for c in rest:
        smallest = c.smallest
        give(c.job, smallest if smallest is not None and smallest <= remaining(c.job) else 0)
    growing = [c for c in rest if parts[c.job]]
    while growing := [c for c in growing if parts[c.job] < c.max_nodes and remaining(c.job) > 0]:
        sharing = Counter(quota for c in growing for quota in quotas[c.job])
        for c in growing:
            sharing_jobs = max(sharing[quota] for quota in quotas[c.job])
            more = min(
                c.max_nodes - parts[c.job],
                remaining(c.job),
                max(1, remaining(c.job) // sharing_jobs),
            )
            give(c.job, max(0, more))
    return parts
