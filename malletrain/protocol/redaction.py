"""Redacts what users see of the jobs of others, and of the daemon's status, unless they are
operators: functions from a view to the view for users who may not manage the job. Pure.

Every user sees which jobs exist and their state. Output of a script (notices, error messages,
metrics), its arguments and its owner's goals are for its owner and for operators
(docs/several-users.md). The daemon decides who may manage a job; for users whom a proxy
authenticates, the page does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import EventView, JobDetail, JobView, StatusView

PRIVATE: dict[str, str] = {
    EventKind.JOB_NOTICE: "The job's owner was told something.",
    EventKind.WORKERS_FAILED: "A round of the job broke.",
    EventKind.JOB_FAILED: "The job failed.",
    EventKind.LAYOUT_FAILED: "The job failed in a layout of its nodes.",
    EventKind.JOB_HUNG: "Workers of the job hang.",
    EventKind.DRAIN_WITHOUT_SNAPSHOT: "The job stopped without a snapshot.",
    EventKind.COMMAND_RUN: "The job's owner ran a command on a node.",
    EventKind.TASKS_FAILING: "Tasks of the farm failed on the node.",
    EventKind.NODE_REJECTED: "The job could not start on the node.",
    EventKind.JOB_EXTENDED: "The job's goals were changed.",
    EventKind.GOAL_STANDING: "The standing of the job's goals changed.",
    EventKind.BUDGET_SPENT: "The job has used up its budget.",
}
"""Kinds of events that quote a script or a command, or tell an owner's goals → the sentence that
other users read instead.
"""
FAILED_REASON = "it failed; its owner sees why"
_HIDDEN_SPEC_FIELDS: dict[str, object] = {
    "args": [],
    "env": {},
    "setup": None,
    "software": None,
    "notify": [],
    "key": "",
    "deadline": None,
    "budget_nh": None,
    "work": None,
}
"""Fields of a job's specification that only its owner sees → the value that others get."""


def event_for_others(event: EventView) -> EventView:
    """Return the event as every user may see it."""
    if event.kind not in PRIVATE:
        return event
    return msgspec.structs.replace(event, sentence=PRIVATE[event.kind], data={})


def status_for_others(status: StatusView, late: Mapping[str, str]) -> StatusView:
    """Return an operator's status as a user may see it who is none.

    Args:
        status: as the daemon answers an operator.
        late: its field of this name, for the user's own jobs.
    """
    return msgspec.structs.replace(
        status,
        shares=(),
        handler_failures="",
        late=dict(late),
        users_problems=(),
        failed_starts=(),
    )


def job_for_others(job: JobView) -> JobView:
    """Return the job as every user may see it."""
    reason = FAILED_REASON if job.state == "failed" else job.reason
    return msgspec.structs.replace(job, reason=reason, metrics={}, goal=None)


def _farm_for_others(spec: Mapping[str, Any]) -> dict[str, object]:
    """Return the field ``farm`` of a specification as every user may see it: without what the
    tasks run.
    """
    farm = spec.get("farm")
    return {"farm": {**farm, "command": []}} if farm else {}


def detail_for_others(detail: JobDetail) -> JobDetail:
    """Return the details of a job as every user may see them."""
    return msgspec.structs.replace(
        detail,
        job=job_for_others(detail.job),
        spec={**detail.spec, **_HIDDEN_SPEC_FIELDS, **_farm_for_others(detail.spec)},
        notices=(),
        failure="",
        stacks={},
        data=(),
    )
