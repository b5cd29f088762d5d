"""``malletrain extend``: changes the goals of a job that has not ended.

Decides which requests are valid. The API decides who may send them, the controller what follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from malletrain.core.goals import OwnerGoals
from malletrain.daemon.admission import RequestRefused
from malletrain.daemon.core import Core
from malletrain.daemon.goals import HOUR_S, goals_problem
from malletrain.daemon.job_repository import decode_spec
from malletrain.protocol import messages
from malletrain.protocol.event_kinds import EventKind
from malletrain.store.records import JobRow

KEYS = ("deadline", "budget_nh", "more_nh", "work")


def goals_of(spec: messages.JobSpec) -> OwnerGoals:
    """Return the goals in a job's specification."""
    budget_s = None if spec.budget_nh is None else spec.budget_nh * HOUR_S
    return OwnerGoals(spec.deadline, budget_s, spec.work)


def extended(
    core: Core, row: JobRow, changes: Mapping[str, float | None]
) -> tuple[OwnerGoals, bool]:
    """Return the new goals of the job, and whether its owner stated its work. Raises
    RequestRefused.

    Args:
        core: the daemon's core.
        row: row of the job.
        changes: goal (one of ``KEYS``) → new value; None removes the goal.
    """
    unknown = sorted(set(changes) - set(KEYS))
    if unknown or not changes:
        raise RequestRefused(f"A job is extended by some of {', '.join(KEYS)}.", "usage")
    goals, stated = core.goals.of(row.id)
    fields: dict[str, Any] = {}
    if "deadline" in changes:
        fields["deadline"] = changes["deadline"]
    if "budget_nh" in changes:
        hours = changes["budget_nh"]
        fields["budget_s"] = None if hours is None else hours * HOUR_S
    if (more := changes.get("more_nh")) is not None:
        if goals.budget_s is None:
            raise RequestRefused(
                f"Job {row.id} has no budget that could be raised; give one, such as 200nh.",
                "usage",
            )
        fields["budget_s"] = goals.budget_s + more * HOUR_S
    if "work" in changes:
        fields["work"], stated = changes["work"], changes["work"] is not None
    new_goals = replace(goals, **fields)
    changed = OwnerGoals(**fields)  # unchanged goals may be invalid by now
    if problem := goals_problem(changed, decode_spec(row.spec).mode, core.clock.now()):
        raise RequestRefused(problem, "usage")
    return new_goals, stated


def extend(core: Core, row: JobRow, new_goals: OwnerGoals, stated: bool) -> None:
    """Set the goals of the job. Call it within a transaction.

    Args:
        core: the daemon's core.
        row: row of the job.
        new_goals: the goals.
        stated: whether the owner stated the work.
    """
    data: dict[str, Any] = {
        "deadline": new_goals.deadline,
        "budget_nh": None if new_goals.budget_s is None else new_goals.budget_s / HOUR_S,
        "work": new_goals.work,
    }
    core.audit.record(EventKind.JOB_EXTENDED, _sentence(new_goals), job=row.id, **data)
    core.feed(core.goals.extend(row.id, new_goals, stated=stated))


def _sentence(goals: OwnerGoals) -> str:
    parts = [
        "no deadline" if goals.deadline is None else f"the deadline {_utc(goals.deadline)}",
        "no budget" if goals.budget_s is None else f"a budget of {goals.budget_s / HOUR_S:.4g} nh",
    ]
    return f"The job has {parts[0]} and {parts[1]} from now on."


def _utc(moment: float) -> str:
    return datetime.fromtimestamp(moment, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
