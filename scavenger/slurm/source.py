"""How the state of a Slurm is read: through its commands, or through pyslurm where it fits. Decides
which, and with what environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, Protocol

from scavenger.batch.commands import CommandError, Commands
from scavenger.interface import SchedulerError
from scavenger.slurm.bindings import PyslurmSource
from scavenger.slurm.parse import (
    SINFO_FIELDS,
    SQUEUE_FIELDS,
    NodeTable,
    SlurmJobTable,
    SlurmReservation,
    new_mark,
    read_jobs,
    read_nodes,
    read_reservations,
)

Api = Literal["auto", "commands", "pyslurm"]
BITSTR_LEN = "1024"
"""Longest list of waiting tasks of an array that squeue prints, in characters."""


class SlurmSource(Protocol):
    """How the state of a Slurm is read."""

    name: str

    def read(self, prefix: str) -> tuple[NodeTable, SlurmJobTable, list[SlurmReservation]]:
        """Nodes, jobs and reservations now; ``prefix``: what the names of our jobs begin with.
        Raises SchedulerError.
        """
        ...


class SlurmCommandSource:
    """Reads through squeue, sinfo and scontrol."""

    name = "commands"

    def __init__(self, commands: Commands) -> None:
        self.commands = commands

    def read(self, prefix: str) -> tuple[NodeTable, SlurmJobTable, list[SlurmReservation]]:
        """See :class:`SlurmSource`.

        Jobs first: a lease that starts meanwhile is then pending on a node in use, never on an
        idle one unseen.
        """
        mark = new_mark()
        try:
            return self._read(prefix, mark)
        except CommandError as error:
            # The mark is another each time, and nobody's business.
            sentence = str(error).replace(f"{mark}|", "")
            raise CommandError(sentence, error.result) from error.__cause__

    def _read(
        self, prefix: str, mark: str
    ) -> tuple[NodeTable, SlurmJobTable, list[SlurmReservation]]:
        jobs = self.commands.ask(
            ["squeue", "-h", "-a", "-t", "all", "-o", f"{mark}|{SQUEUE_FIELDS}"]
        )
        nodes = self.commands.ask(["sinfo", "-h", "-a", "-o", f"{mark}|{SINFO_FIELDS}"])
        reservations = self.commands.ask(["scontrol", "show", "reservation", "-o"])
        return (
            read_nodes(nodes, mark),
            read_jobs(jobs, mark, prefix),
            read_reservations(reservations),
        )


_CONTACT = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_SOCKET"}
"""Where Slurm is and how one signs in there: no default of a command."""


def asking_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of commands that are read: no translation, no defaults of the user's, times
    as epoch seconds.
    """
    inherited = _without_defaults(environment)
    return {**inherited, "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": BITSTR_LEN, "LC_ALL": "C"}


def submitting_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of sbatch, which the lease inherits: this process's, less what would change
    sbatch's mind.
    """
    return _without_defaults(environment)


def _without_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    drop = ("SBATCH_", "SQUEUE_", "SINFO_", "SCANCEL_", "SALLOC_", "SRUN_", "SLURM_", "SLURMD_")
    return {k: v for k, v in environment.items() if k in _CONTACT or not k.startswith(drop)}


def source_for(api: Api, commands: Commands, version: tuple[int, int]) -> SlurmSource:
    """The source to use with a Slurm of this version. Raises SchedulerError when pyslurm is asked
    for and does not fit.
    """
    if api == "commands":
        return SlurmCommandSource(commands)
    source = PyslurmSource(commands, version)
    if not (why := source.trouble()):
        return source
    if api == "pyslurm":
        raise SchedulerError(
            f'{why}; install the one for this Slurm, or set api = "auto" in [scheduler.slurm].'
        )
    return SlurmCommandSource(commands)
