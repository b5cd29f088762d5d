"""``sbatch`` and ``scancel``: run at the site's pace, and what their complaints mean.

Decides whether a submission that failed may have made a job all the same. Which leases are asked for or cancelled is decided in
:mod:`scavenger.slurm`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from scavenger.commands import CommandError, Commands, failure
from scavenger.interface import SchedulerError
from scavenger.slurm_job import job_id, owner_prefix
from scavenger.slurm_parse import Job
from scavenger.slurm_settings import SlurmSettings
from scavenger.slurm_source import submitting_environment
from scavenger.submission import LimitReachedError, Pace, UnsureError

CANCEL_AT_ONCE = 200

_LIMIT_REACHED = re.compile(r"MaxSubmit|MaxJobs|job submit limit|submit.*limit|too many jobs|Slurm temporarily unable", re.IGNORECASE)
_UNSURE = re.compile(r"timed? ?out|Unable to contact|Connection|Communication|Zero Bytes|transmission", re.IGNORECASE)
_ENDED_ALREADY = re.compile(r"Invalid job id|already complet", re.IGNORECASE)


class Submitter:
    """Submits and cancels jobs. ``environment``: what leases inherit, less what would change sbatch's mind. Safe to use from threads."""

    def __init__(self, settings: SlurmSettings, commands: Commands, environment: Mapping[str, str]) -> None:
        self.settings = settings
        self.commands = commands
        self.environment = environment
        self.pace = Pace(settings.submit_rate, commands)

    def submit(self, argv: Sequence[str], script: bytes) -> str:
        """The id of the new job. Raises SchedulerError, UnsureError or LimitReachedError with Slurm's words."""
        self.pace.wait()
        try:
            result = self.commands.run(argv, stdin=script, environment=submitting_environment(self.environment))
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

    def cancel(self, jobs: Sequence[Job], options: Sequence[str] = ()) -> CommandError | None:
        """scancel, many at once for each owner. Returns what went wrong; jobs that have ended are no error."""
        lease = self.settings.lease
        problem = None
        by_owner: dict[str | None, list[str]] = {}
        for job in jobs:
            owner = job.user if lease.submit_as and job.user != self.settings.user else None
            by_owner.setdefault(owner, []).append(job.id)
        for owner, ids in by_owner.items():
            for begin in range(0, len(ids), CANCEL_AT_ONCE):
                argv = [*owner_prefix(lease, owner), "scancel", *options, *ids[begin : begin + CANCEL_AT_ONCE]]
                try:
                    result = self.commands.run(argv)
                except CommandError as error:
                    problem = error
                    continue
                if result.status != 0 and not _ENDED_ALREADY.search(result.stderr):
                    problem = failure(result)
        return problem
