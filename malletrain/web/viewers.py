"""Who looks, and what is shown to whom.

The page runs as one user and asks the daemon with that user's key. Where a proxy says who looks,
others than that user see what they would see on the command line: their own jobs, and of those of
others what everybody may see. They may cancel what is theirs, and submit nothing: a job runs as the
user whose key submits it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from malletrain.protocol.discretion import detail_for_others, event_for_others, job_for_others
from malletrain.protocol.views import EventView, JobDetail, JobView, UsageView
from malletrain.web.board import BoardChange


@dataclass(frozen=True)
class Viewer:
    """One who looks. ``own``: as who the page runs."""

    name: str
    own: str

    @property
    def all_of_it(self) -> bool:
        """Whether the daemon's answers are this viewer's already."""
        return self.name == self.own

    def may_manage(self, owner: str) -> bool:
        """Whether this viewer may do more with a job of ``owner`` than look. (The daemon decides
        once more, for the user as who the page runs.)
        """
        return self.all_of_it or self.name == owner

    def job(self, job: JobView) -> JobView:
        """As much of a job as this viewer may see."""
        return job if self.may_manage(job.owner) else job_for_others(job)

    def detail(self, detail: JobDetail) -> JobDetail:
        """As much of everything of a job as this viewer may see."""
        return detail if self.may_manage(detail.job.owner) else detail_for_others(detail)

    def event(self, event: EventView, owners: dict[str, str]) -> EventView:
        """As much of an event as this viewer may see. ``owners``: of the jobs; one that is not
        known is somebody else's.
        """
        mine = not event.job or self.may_manage(owners.get(event.job, ""))
        return event if mine else event_for_others(event)

    def usage(self, rows: list[UsageView]) -> list[UsageView]:
        """The rows of this viewer."""
        return [row for row in rows if self.may_manage(row.user)]

    def change(self, change: BoardChange, owners: dict[str, str]) -> BoardChange:
        """As much of a change as this viewer may see."""
        if self.all_of_it:
            return change
        machine = msgspec.structs.replace(change.machine, user=self.name)
        return msgspec.structs.replace(
            change,
            machine=machine,
            jobs=tuple(self.job(job) for job in change.jobs),
            events=tuple(self.event(event, owners) for event in change.events),
        )
