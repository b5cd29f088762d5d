"""Leases that an answer of squeue lacks: whether it was cut short, at the end of a line.

Slurm shows a job for minutes after its end, so that one of ours which is not there at all is rare,
and worth a question of its own: whether Slurm knows it. If so the answer was not whole, and nothing
in it counts: it lacks jobs of others as well.
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
    """Lease id → its job, of leases that have not ended and are not among ``own``. Those that share
    a job are left out: of them a node may go.
    """
    return {
        lease: job.lease.scheduler_id
        for lease, job in expected.items()
        if lease not in own and job.alive and job.part is None and job.lease.scheduler_id
    }


def ask_of_missing(commands: Commands, prefix: str, jobs: Mapping[str, str]) -> None:
    """Ask Slurm of these jobs of ours (lease id → job).

    Raises:
        SchedulerError: one of them is there, under its name; or Slurm does not say.
    """
    pairs = list(jobs.items())
    for first in range(0, len(pairs), IDS_PER_QUERY):
        some = dict(pairs[first : first + IDS_PER_QUERY])
        there = _those_there(commands, prefix, list(some.values()))
        cut = [lease for lease, job in some.items() if there.get(job) == prefix + lease]
        if cut:
            raise SchedulerError(
                f"An answer of squeue was cut short: it lacked job {some[cut[0]]}, which runs for "
                f"lease {cut[0]}. Nothing was changed."
            )


def _those_there(commands: Commands, prefix: str, ids: Sequence[str]) -> dict[str, str]:
    """Job id → name, of those that Slurm has and that have not ended."""
    mark = new_mark()
    result = commands.run(
        ["squeue", "-h", "-a", "-t", "all", "-j", ",".join(ids), "-o", f"{mark}|{SQUEUE_FIELDS}"]
    )
    if result.status:
        if "Invalid job id" in result.stderr:  # of a single job that it does not know
            return {}
        raise failure(result)
    jobs = read_jobs(result.stdout, mark, prefix).ours
    return {job.id: job.name for job in jobs if job.state not in ENDED_STATES}
