"""Decides what each viewer may see.

The page runs as one user and asks the daemon with that user's key. If a proxy names the viewer,
other users see what they would see on the command line: their own jobs, and the public parts of
others' jobs. They may cancel their own jobs, but not submit any, because a job runs as the user
whose key submits it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from malletrain.protocol.discretion import detail_for_others, event_for_others, job_for_others
from malletrain.protocol.views import EventView, JobDetail, JobView, UsageView
from malletrain.web.board import BoardChange


@dataclass(frozen=True)
class Viewer:
    """A user of the page. ``own``: user as whom the page runs."""

    name: str
    """The viewer's user name."""
    own: str

    @property
    def all_of_it(self) -> bool:
        """Whether the daemon's answers are for this viewer, because the page runs as this user."""
        return self.name == self.own

    def may_manage(self, owner: str) -> bool:
        """Whether this viewer may change a job of ``owner`` and see its private parts. (The daemon
        checks again for the user as whom the page runs.)
        """
        return self.all_of_it or self.name == owner

    def job(self, job: JobView) -> JobView:
        """Return the parts of a job that this viewer may see."""
        return job if self.may_manage(job.owner) else job_for_others(job)

    def detail(self, detail: JobDetail) -> JobDetail:
        """Return the details of a job that this viewer may see."""
        return detail if self.may_manage(detail.job.owner) else detail_for_others(detail)

    def event(self, event: EventView, owners: dict[str, str]) -> EventView:
        """Return the parts of an event that this viewer may see. ``owners``: job → its owner;
        unknown jobs count as another user's.
        """
        visible = not event.job or self.may_manage(owners.get(event.job, ""))
        return event if visible else event_for_others(event)

    def usage(self, rows: list[UsageView]) -> list[UsageView]:
        """Return the rows of this viewer."""
        return [row for row in rows if self.may_manage(row.user)]

    def change(self, change: BoardChange, owners: dict[str, str]) -> BoardChange:
        """Return the parts of a change that this viewer may see."""
        if self.all_of_it:
            return change
        machine = msgspec.structs.replace(change.machine, user=self.name)
        return msgspec.structs.replace(
            change,
            machine=machine,
            jobs=tuple(self.job(job) for job in change.jobs),
            events=tuple(self.event(event, owners) for event in change.events),
        )
