"""``qsub`` and ``qdel``: run at the site's pace, and what their complaints mean.

Decides whether a submission that failed may have made a job all the same. Which leases are asked for or deleted is decided in
:mod:`scavenger.pbs`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence

from scavenger.commands import CommandError, Commands, failure
from scavenger.interface import SchedulerError
from scavenger.lease_script import owner_prefix
from scavenger.pbs_job import LeaseOptions, job_id
from scavenger.pbs_parse import Job
from scavenger.submission import LimitReachedError, Pace, UnsureError

DELETE_AT_ONCE = 100

_LIMIT_REACHED = re.compile(r"would exceed|maximum number of jobs|limit on (?:number|jobs)|max_(?:queued|run)|too many jobs", re.IGNORECASE)
_UNSURE = re.compile(r"timed? ?out|end of file|communication|connection (?:reset|closed|broken)|protocol|no reply|premature", re.IGNORECASE)
"""After these complaints of qsub the job may be there or not."""
_ENDED_ALREADY = re.compile(r"unknown job|has finished|job is (?:already )?exiting|invalid for (?:finished|state)", re.IGNORECASE)


class Submitter:
    """Submits and deletes jobs. ``user``: this process's. ``environment``: that of qsub. Safe to use from threads."""

    def __init__(self, options: LeaseOptions, user: str, rate: float, commands: Commands, environment: Mapping[str, str]) -> None:
        self.options = options
        self.user = user
        self.commands = commands
        self.environment = environment
        self.pace = Pace(rate, commands)

    def submit(self, argv: Sequence[str], script: bytes, owner: str | None) -> str:
        """The id of the new job. Raises SchedulerError, UnsureError or LimitReachedError with PBS's words."""
        self.pace.wait()
        try:
            result = self.commands.run(self._as(owner, argv), stdin=script, environment=self.environment)
            if result.status == 0:
                return job_id(result.stdout)
        except SchedulerError as error:
            raise UnsureError(str(error)) from None
        sentence = str(failure(result))
        if _LIMIT_REACHED.search(result.complaint):
            raise LimitReachedError(sentence)
        if _UNSURE.search(result.complaint):
            raise UnsureError(sentence)
        raise SchedulerError(sentence)

    def delete(self, jobs: Sequence[Job]) -> CommandError | None:
        """qdel, many at once for each owner. Returns what went wrong; jobs that have ended are no error."""
        problem = None
        by_owner: dict[str | None, list[str]] = {}
        for job in jobs:
            owner = job.user if self.options.submit_as and job.user != self.user else None
            by_owner.setdefault(owner, []).append(job.id)
        for owner, ids in by_owner.items():
            for begin in range(0, len(ids), DELETE_AT_ONCE):
                try:
                    result = self.commands.run(self._as(owner, ["qdel", *ids[begin : begin + DELETE_AT_ONCE]]))
                except CommandError as error:
                    problem = error
                    continue
                complaints = [line for line in result.stderr.splitlines() if line.strip()]
                if result.status != 0 and (not complaints or not all(_ENDED_ALREADY.search(line) for line in complaints)):
                    problem = failure(result)
        return problem

    def _as(self, owner: str | None, argv: Sequence[str]) -> list[str]:
        """The command as ``owner``, then by its full path: sudo looks for commands in a PATH of its own."""
        prefix = owner_prefix(self.options.submit_as, owner)
        found = shutil.which(argv[0], path=self.environment.get("PATH")) if prefix else None
        return [*prefix, found or argv[0], *argv[1:]]
