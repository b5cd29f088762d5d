"""What the controller of a simulation is told of a model job: its submission, and how far it is.

Decides nothing: what is stated of its curve is the policy's decision.
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
    """The job, as its owner submits it. Only where there is a deadline or a budget the controller
    is told how much work there is.
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
        whole=job.deadline_s is not None,  # as the daemon has it
        trainer=job.trainer,
    )


def work_done(runs: Iterable[SimRun], now: float) -> list[WorkReported]:
    """How far the jobs with goals are, that have nodes."""
    reports = []
    for run in runs:
        if run.nodes and (run.job.deadline_s is not None or run.job.budget_nh is not None):
            run.accrue(now)
            reports.append(WorkReported(run.job.name, max(0.0, run.done)))
    return reports
