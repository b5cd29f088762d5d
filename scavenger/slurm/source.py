"""Reads the state of a Slurm through its commands, or through pyslurm if it can be used. Decides
which, and with what environment.

:func:`missing` and :func:`ask_of_missing` detect that an answer of squeue was truncated at the end
of a line, because leases are missing. Slurm shows a job for minutes after its end. So it is rare
that one of our jobs is missing, and Slurm is asked whether it knows the job. If it does, the answer
was truncated, and none of it is used, because it lacks jobs of others too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Literal, Protocol

from scavenger.batch.commands import CommandError, Commands, failure
from scavenger.batch.groups import leases_in
from scavenger.batch.lease_ledger import LeaseJob
from scavenger.interface import SchedulerError, kind_of
from scavenger.slurm.bindings import PyslurmSource, is_installed
from scavenger.slurm.parse import (
    OF_THIS_CLUSTER,
    SINFO_FIELDS,
    SQUEUE_FIELDS,
    NodeTable,
    SlurmJob,
    SlurmJobTable,
    SlurmReservation,
    new_mark,
    read_jobs,
    read_nodes,
    read_reservations,
)
from scavenger.slurm.state import ENDED_STATES

Api = Literal["auto", "commands", "pyslurm"]
TRIAL_PREFIX = "malletrain"
"""Prefix for a read whose answer is not used."""
TRIAL_EVERY_S = 3600.0
"""Time until a pyslurm that is installed and could not be used is tried again, seconds."""
BITSTR_LEN = "1024"
"""Maximum length of the list of pending array tasks that squeue prints, characters."""

log = logging.getLogger(__name__)


class SlurmSource(Protocol):
    """A way to read the state of a Slurm."""

    name: str
    reason: str
    """Why pyslurm, which is installed, is not used; empty if there is none."""

    def read(self, prefix: str) -> tuple[NodeTable, SlurmJobTable, list[SlurmReservation]]:
        """Return the present nodes, jobs and reservations. ``prefix``: beginning of the names of
        our jobs. Raises SchedulerError.
        """
        ...


class SlurmCommandSource:
    """Reads through squeue, sinfo and scontrol."""

    name = "commands"

    def __init__(self, commands: Commands, reason: str = "") -> None:
        self.commands = commands
        self.reason = reason

    def read(self, prefix: str) -> tuple[NodeTable, SlurmJobTable, list[SlurmReservation]]:
        """See :class:`SlurmSource`.

        Reads jobs first. A lease that starts between the commands then shows as pending on a busy
        node. In the other order its node would seem idle.
        """
        mark = new_mark()
        try:
            return self._read(prefix, mark)
        except CommandError as error:
            # The mark is random and must not appear in the message.
            sentence = str(error).replace(f"{mark}|", "")
            raise CommandError(sentence, error.result) from error.__cause__

    def _read(
        self, prefix: str, mark: str
    ) -> tuple[NodeTable, SlurmJobTable, list[SlurmReservation]]:
        jobs = self.commands.ask(
            ["squeue", "-h", "-a", *OF_THIS_CLUSTER, "-t", "all", "-o", f"{mark}|{SQUEUE_FIELDS}"]
        )
        nodes = self.commands.ask(
            ["sinfo", "-h", "-a", *OF_THIS_CLUSTER, "-o", f"{mark}|{SINFO_FIELDS}"]
        )
        reservations = self.commands.ask(["scontrol", "-o", "show", "reservation"])
        return (
            read_nodes(nodes, mark),
            read_jobs(jobs, mark, prefix),
            read_reservations(reservations),
        )


_CONTACT = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_SOCKET"}
"""Variables with Slurm's address and credentials. All others only set defaults of commands."""


def asking_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of commands whose output is parsed: no translation, no defaults of the
    user, times as epoch seconds.
    """
    inherited = _without_defaults(environment)
    return {**inherited, "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": BITSTR_LEN, "LC_ALL": "C"}


def submitting_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of sbatch, which the lease inherits: this process's, without variables
    that change options of sbatch.
    """
    return _without_defaults(environment)


def _without_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    drop = ("SBATCH_", "SQUEUE_", "SINFO_", "SCANCEL_", "SALLOC_", "SRUN_", "SLURM_", "SLURMD_")
    return {k: v for k, v in environment.items() if k in _CONTACT or not k.startswith(drop)}


def source_for(api: Api, commands: Commands, version: tuple[int, int]) -> SlurmSource:
    """Return the source to use. With ``auto`` it is pyslurm if it can read this Slurm, else the
    commands, whatever is wrong with pyslurm. Raises SchedulerError if pyslurm is configured and
    cannot be used.

    Args:
        api: the site's setting.
        commands: runs Slurm's commands.
        version: release of the running Slurm.
    """
    if api == "commands":
        return SlurmCommandSource(commands)
    source = PyslurmSource(commands, version)
    if api == "pyslurm":
        if why := source.trouble():
            raise SchedulerError(
                f'{why}; install the one for this Slurm, or set api = "auto" in [scheduler.slurm].'
            )
        return source
    if not is_installed():
        return SlurmCommandSource(commands)
    try:
        if not (why := source.trouble()):
            source.read(TRIAL_PREFIX)
            return source
    except SchedulerError as error:  # it crashes, gives no answer, or was built for another Slurm
        why = str(error).rstrip(".")
    return SlurmCommandSource(commands, why)


class SourceChoice:
    """Chooses the source: at first, and with ``auto`` again whenever Slurm's version has changed,
    and regularly while pyslurm is installed and cannot be used, because the cause may be temporary.

    Args:
        api: the site's setting.
        commands: runs Slurm's commands.
        clock: returns epoch seconds.
    """

    def __init__(self, api: Api, commands: Commands, clock: Callable[[], float]) -> None:
        self.api, self.commands, self.clock = api, commands, clock
        self._source: SlurmSource | None = None
        self._version = (0, 0)
        """Version of Slurm for which it was chosen."""
        self._chosen_at = 0.0

    def source(self, version: tuple[int, int]) -> SlurmSource:
        """Return the source for Slurm's present version. Raises SchedulerError if pyslurm is
        configured and cannot be used.
        """
        before = self._source
        if before is not None and not self._is_due(before, version):
            return before
        source = source_for(self.api, self.commands, version)
        if source.reason and (before is None or before.reason != source.reason):
            log.info("Slurm is asked through its commands, because %s.", source.reason)
        self._source, self._version, self._chosen_at = source, version, self.clock()
        return source

    def _is_due(self, source: SlurmSource, version: tuple[int, int]) -> bool:
        if self.api != "auto":
            return False
        tried_lately = 0 <= self.clock() - self._chosen_at < TRIAL_EVERY_S
        return version != self._version or (bool(source.reason) and not tried_lately)


IDS_PER_QUERY = 500


def missing(
    expected: Mapping[str, LeaseJob], own: Mapping[str, SlurmJob], listed: Container[str] = ()
) -> dict[str, str]:
    """Return lease id → its job, for leases that have not ended and whose job is missing. Leases on
    nodes of a shared job are excluded, because a single node can be released.

    Args:
        expected: lease id → its job at the previous poll.
        own: lease id → its job in the answer.
        listed: the jobs of the answer that have names of ours.
    """
    jobs = {
        lease: job.part.job if job.part is not None else job.lease.scheduler_id
        for lease, job in expected.items()
        if lease not in own and job.alive and (job.part is None or kind_of(job.part.node))
    }
    return {lease: job for lease, job in jobs.items() if job and job not in listed}


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
        name_by_id = _those_there(commands, prefix, list(dict.fromkeys(batch.values())))
        leases_of = {
            job: leases_in(name[len(prefix) :]) or (name[len(prefix) :],)
            for job, name in name_by_id.items()
        }
        existing = [lease for lease, job in batch.items() if lease in leases_of.get(job, ())]
        if existing:
            raise SchedulerError(
                f"An answer of squeue was cut short: it lacked job {batch[existing[0]]}, which "
                f"runs for lease {existing[0]}. Nothing was changed."
            )


def _those_there(commands: Commands, prefix: str, ids: Sequence[str]) -> dict[str, str]:
    """Return job id → name, for the jobs that Slurm knows and that have not ended."""
    mark = new_mark()
    argv = ["squeue", "-h", "-a", *OF_THIS_CLUSTER, "-t", "all", "-j", ",".join(ids)]
    result = commands.run([*argv, "-o", f"{mark}|{SQUEUE_FIELDS}"])
    if result.status:
        if "Invalid job id" in result.stderr:  # Slurm does not know a single job
            return {}
        raise failure(result)
    jobs = read_jobs(result.stdout, mark, prefix).ours
    return {job.id: job.name for job in jobs if job.state not in ENDED_STATES}
