"""Events about a model job for the controller of a simulation: its submission and its progress.

Decides nothing. The policy decides which curve is stated.
"""

from __future__ import annotations

from collections.abc import Iterable

from malletrain.core.events import JobSubmitted
from malletrain.core.goals import OwnerGoals, WorkReported
from malletrain.sim.costs import SimRun
from malletrain.sim.policies import Policy
from malletrain.sim.reports import Reports, kind_of
from malletrain.sim.workloads import SimJob


def submission(job: SimJob, policy: Policy, reports: Reports) -> JobSubmitted:
    """Return the submission of the job. It contains the amount of work only if the job has a
    deadline or a budget.
    """
    profiled = policy.profiled(job)
    goals = OwnerGoals()
    if job.deadline_s is not None or job.budget_nh is not None:
        budget_s = None if job.budget_nh is None else 3600.0 * job.budget_nh
        goals = OwnerGoals(job.deadline_s, budget_s, job.samples)
    return JobSubmitted(
        job.name,
        job.min_nodes,
        job.max_nodes,
        weight=job.weight,
        goal=job.goal,
        curve=policy.stated(job),
        sizes=job.sizes,
        profile=profiled,
        scaling=reports.starts_with(job) if profiled else None,
        kind=kind_of(job) if job.model else "",
        goals=goals,
        party=job.user,
        exempt_from_shares=job.deadline_s is not None,  # as in the daemon
        trainer=job.trainer,
    )


def work_done(runs: Iterable[SimRun], now: float) -> list[WorkReported]:
    """Return the progress of the jobs with goals that have nodes."""
    reports = []
    for run in runs:
        if run.nodes and (run.job.deadline_s is not None or run.job.budget_nh is not None):
            run.accrue(now)
            reports.append(WorkReported(run.job.name, max(0.0, run.done)))
    return reports
