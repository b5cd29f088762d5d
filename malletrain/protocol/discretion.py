"""What others may see of a job that somebody owns: pure functions from a view to the view of those
who may not manage the job.

Everybody sees which jobs there are and how they do. What a script said itself (notices, the words
it failed with, its metrics, its arguments) is for its owner and for operators
(docs/several-users.md). Who may manage what is decided by the daemon, and by the page for those
whom a proxy names.
"""

from __future__ import annotations

import msgspec

from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import EventView, JobDetail, JobView

PRIVATE: dict[str, str] = {
    EventKind.JOB_NOTICE: "The job's owner was told something.",
    EventKind.WORKERS_FAILED: "A round of the job broke.",
    EventKind.JOB_FAILED: "The job failed.",
    EventKind.JOB_HUNG: "Workers of the job hang.",
    EventKind.DRAIN_WITHOUT_SNAPSHOT: "The job stopped without a snapshot.",
}
"""Kinds of events that quote a script, with what others read instead."""
FAILED = "it failed; its owner sees why"
UNTOLD: dict[str, object] = {
    "args": [],
    "env": {},
    "setup": None,
    "software": None,
    "notify": [],
}
"""Of a job's specification, what only its owner is to see, with what others get."""


def event_for_others(event: EventView) -> EventView:
    """The event as everybody may see it."""
    if event.kind not in PRIVATE:
        return event
    return msgspec.structs.replace(event, sentence=PRIVATE[event.kind], data={})


def job_for_others(job: JobView) -> JobView:
    """The job as everybody may see it."""
    reason = FAILED if job.state == "failed" else job.reason
    return msgspec.structs.replace(job, reason=reason, metrics={}, goal=None)


def detail_for_others(detail: JobDetail) -> JobDetail:
    """Everything of a job that everybody may see."""
    return msgspec.structs.replace(
        detail,
        job=job_for_others(detail.job),
        spec={**detail.spec, **UNTOLD},
        notices=(),
        failure="",
        stacks={},
    )
