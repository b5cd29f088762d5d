"""Reads the state of a Slurm through its commands, or through pyslurm if it can be used. Decides
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
    OF_THIS_CLUSTER,
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
"""Maximum length of the list of pending array tasks that squeue prints, characters."""


class SlurmSource(Protocol):
    """A way to read the state of a Slurm."""

    name: str

    def read(self, prefix: str) -> tuple[NodeTable, SlurmJobTable, list[SlurmReservation]]:
        """Return the present nodes, jobs and reservations. ``prefix``: beginning of the names of
        our jobs. Raises SchedulerError.
        """
        ...


class SlurmCommandSource:
    """Reads through squeue, sinfo and scontrol."""

    name = "commands"

    def __init__(self, commands: Commands) -> None:
        self.commands = commands

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
    """Return the source to use. Raises SchedulerError if pyslurm is configured and cannot be used.

    Args:
        api: the site's setting.
        commands: runs Slurm's commands.
        version: release of the running Slurm.
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
