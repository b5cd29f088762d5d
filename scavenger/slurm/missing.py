"""Detects that an answer of squeue was truncated at the end of a line, because leases are missing.

Slurm shows a job for minutes after its end. So it is rare that one of our jobs is missing, and
Slurm is asked whether it knows the job. If it does, the answer was truncated, and none of it is
used, because it lacks jobs of others too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scavenger.batch.commands import Commands, failure
from scavenger.batch.lease_ledger import LeaseJob
from scavenger.interface import SchedulerError
from scavenger.slurm.parse import SQUEUE_FIELDS, SlurmJob, new_mark, read_jobs
from scavenger.slurm.state import ENDED_STATES

IDS_PER_QUERY = 500


def missing(expected: Mapping[str, LeaseJob], own: Mapping[str, SlurmJob]) -> dict[str, str]:
    """Return lease id → its job, for leases that have not ended and are not in ``own``. Leases that
    share a job are excluded, because a single node of theirs can be released.
    """
    return {
        lease: job.lease.scheduler_id
        for lease, job in expected.items()
        if lease not in own and job.alive and job.part is None and job.lease.scheduler_id
    }


def ask_of_missing(commands: Commands, prefix: str, jobs: Mapping[str, str]) -> None:
    """Ask Slurm about missing jobs of ours.

    Args:
        commands: runs the command.
        prefix: beginning of the names of our jobs.
        jobs: lease id → its job.

    Raises:
        SchedulerError: one of them exists under its name, or Slurm does not answer.
    """
    pairs = list(jobs.items())
    for start in range(0, len(pairs), IDS_PER_QUERY):
        batch = dict(pairs[start : start + IDS_PER_QUERY])
        name_by_id = _those_there(commands, prefix, list(batch.values()))
        existing = [lease for lease, job in batch.items() if name_by_id.get(job) == prefix + lease]
        if existing:
            raise SchedulerError(
                f"An answer of squeue was cut short: it lacked job {batch[existing[0]]}, which "
                f"runs for lease {existing[0]}. Nothing was changed."
            )


def _those_there(commands: Commands, prefix: str, ids: Sequence[str]) -> dict[str, str]:
    """Return job id → name, for the jobs that Slurm knows and that have not ended."""
    mark = new_mark()
    result = commands.run(
        ["squeue", "-h", "-a", "-t", "all", "-j", ",".join(ids), "-o", f"{mark}|{SQUEUE_FIELDS}"]
    )
    if result.status:
        if "Invalid job id" in result.stderr:  # Slurm does not know a single job
            return {}
        raise failure(result)
    jobs = read_jobs(result.stdout, mark, prefix).ours
    return {job.id: job.name for job in jobs if job.state not in ENDED_STATES}
