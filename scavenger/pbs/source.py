"""Reads the state of a PBS through its commands, or through its Python bindings if they are
installed. Decides which, and with what environment.

:class:`PbsCommandSource` runs the commands. :class:`BindingsSource` runs the bindings in a separate
process (:mod:`scavenger.pbs.ask_pbs_ifl`), which has a time limit like every command, and converts
the answers into the same values as the commands' output. Leases are always requested and given back
through the commands, because only these can act as another user.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from scavenger.batch.commands import Commands
from scavenger.interface import SchedulerError
from scavenger.pbs.parse import (
    JOB_ATTRIBUTES,
    PbsJobTable,
    PbsReservation,
    RawJob,
    RawNode,
    checked_nodes,
    job_table,
    read_jobs,
    read_nodes,
    read_reservations,
    reservations_of,
)

NODE_ATTRIBUTES = (
    *("state", "jobs", "resv", "comment", "queue", "partition", "sharing"),
    *("resources_available", "resources_assigned"),
)
PROGRAM = (sys.executable, "-I", str(Path(__file__).with_name("ask_pbs_ifl.py")))


class _Answer(msgspec.Struct):
    jobs: dict[str, RawJob]
    nodes: dict[str, RawNode]


class BindingsSource:
    """Reads through pbs_ifl; see :class:`scavenger.pbs.source.PbsSource`.

    Args:
        commands: runs the process.
        installed: PBS's installation directory; its bindings are in ``lib/python/altair`` there.
            None: Python's search path.
    """

    name = "bindings"

    def __init__(self, commands: Commands, installed: Path | None = None) -> None:
        self.commands = commands
        folder = "" if installed is None else str(installed / "lib" / "python" / "altair")
        self._argv = [*PROGRAM, folder]

    def trouble(self) -> str:
        """Return why the bindings cannot be used; empty if they can."""
        result = self.commands.run(self._argv)
        return "" if result.status == 0 else result.complaint or "pbs_ifl cannot be imported"

    def read(
        self, prefix: str, with_running: bool = False
    ) -> tuple[dict[str, RawNode], PbsJobTable]:
        """Return the present vnodes and jobs. Raises SchedulerError."""
        attributes = (",".join(JOB_ATTRIBUTES), ",".join(NODE_ATTRIBUTES))
        text = self.commands.ask([*self._argv, *attributes])
        try:
            answer: Any = msgspec.json.decode(text, type=_Answer)
        except msgspec.DecodeError as error:
            raise SchedulerError(
                f"The answer of PBS's Python bindings cannot be understood: {error}. Nothing was "
                "changed."
            ) from None
        return checked_nodes(answer.nodes), job_table(answer.jobs, prefix, with_running)


Api = Literal["auto", "commands", "bindings"]
RESERVATIONS_INTERVAL_S = 60.0
PBS_CONF = Path("/etc/pbs.conf")
_EXEC = re.compile(r"^\s*PBS_EXEC=(.+?)\s*$", re.MULTILINE)
_INHERITED = (
    "PBS_CONF_FILE",
    "PBS_SERVER",
    "PBS_DEFAULT",
    "PBS_EXEC",
    "PBS_HOME",
    "PBS_PRIMARY",
    "PBS_SECONDARY",
    "PBS_AUTH",
    "PBS_ENCRYPT_METHOD",
    "PBS_BATCH_SERVICE_PORT",
    "PBS_LEAF",
)
"""Beginnings of the variables that replace a line of pbs.conf for a client (openpbs,
pbs_loadconf.c). PBS_SUPPORTED_AUTH_METHODS is read by servers only, and
PBS_GSS_USER_CREDENTIALS_BIN on terminals only. PBS_PUBLIC_HOST_NAME is left out because with it no
client of OpenPBS 22.05 and later connects (pbsD_connect.c binds before there is a socket).
"""


class PbsSource(Protocol):
    """A way to read the state of a PBS."""

    name: str

    def read(
        self, prefix: str, with_running: bool = False
    ) -> tuple[dict[str, RawNode], PbsJobTable]:
        """Return the present vnodes and jobs. Raises SchedulerError.

        Args:
            prefix: beginning of the names of our jobs.
            with_running: whether to return the running jobs of others.
        """
        ...


class PbsCommandSource:
    """Reads through pbsnodes and qstat."""

    name = "commands"

    def __init__(self, commands: Commands) -> None:
        self.commands = commands

    def read(
        self, prefix: str, with_running: bool = False
    ) -> tuple[dict[str, RawNode], PbsJobTable]:
        """See :class:`PbsSource`.

        Reads jobs first. A lease that starts between the commands then shows as waiting for a busy
        node. In the other order its node would seem idle.
        """
        jobs = self.commands.ask(["qstat", "-f", "-F", "json"])
        nodes = self.commands.ask(["pbsnodes", "-av", "-F", "json"])
        return read_nodes(nodes), read_jobs(jobs, prefix, with_running)


class Reservations:
    """The reservations that vnodes name. They are read (``pbs_rstat``) if one is not known, and at
    intervals.
    """

    def __init__(self, commands: Commands) -> None:
        self.commands = commands
        self._by_name: dict[str, PbsReservation] = {}
        self._at = float("-inf")

    def of(self, nodes: Mapping[str, RawNode], now: float) -> Mapping[str, PbsReservation]:
        """Return all reservations that ``nodes`` name. Raises SchedulerError."""
        named = {name for node in nodes.values() if node.resv for name in reservations_of(node)}
        if named and (
            not named <= self._by_name.keys() or not 0 <= now - self._at < RESERVATIONS_INTERVAL_S
        ):
            reservations = read_reservations(self.commands.ask(["pbs_rstat", "-f"]))
            # A reservation that pbs_rstat does not show (for example because it has just ended) is
            # not requested again at every poll.
            self._by_name = {
                **dict.fromkeys(named - reservations.keys(), PbsReservation("", 0.0, 0.0, "")),
                **reservations,
            }
            self._at = now
        return {name: r for name, r in self._by_name.items() if r.name}


def asking_environment(
    environment: Mapping[str, str] = os.environ, conf: Path = PBS_CONF
) -> dict[str, str]:
    """Return the environment of PBS's commands: their location, no translation, times in UTC, and
    no variables of a job in which this process may run.
    """
    inherited = {
        k: v for k, v in environment.items() if not k.startswith("PBS_") or k.startswith(_INHERITED)
    }
    if shutil.which("qstat", path=inherited.get("PATH")) is None:
        folders = [f"{inherited['PBS_EXEC']}/bin"] if inherited.get("PBS_EXEC") else []
        try:
            folders += [
                f"{folder}/bin"
                for folder in _EXEC.findall(
                    Path(inherited.get("PBS_CONF_FILE", conf)).read_text("utf-8", "replace")
                )
            ]
        except OSError:
            pass
        inherited["PATH"] = os.pathsep.join(
            [*filter(None, [inherited.get("PATH", "")]), *folders, "/opt/pbs/bin"]
        )
    return {**inherited, "LC_ALL": "C", "TZ": "UTC0"}


def submitting_environment(
    asking: Mapping[str, str], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of qsub, parts of which PBS stores with the job: ``asking``, with this
    process's own language and time zone.
    """
    own = {k: environment[k] for k in ("LC_ALL", "TZ") if k in environment}
    return {**{k: v for k, v in asking.items() if k not in ("LC_ALL", "TZ")}, **own}


def source_for(api: Api, commands: Commands) -> PbsSource:
    """Return the source to use. Raises SchedulerError if the bindings are configured and cannot be
    used.

    Args:
        api: the site's setting.
        commands: runs PBS's commands.
    """
    if api == "commands":
        return PbsCommandSource(commands)
    qstat = shutil.which("qstat", path=(commands.environment or {}).get("PATH"))
    source = BindingsSource(commands, Path(qstat).resolve().parents[1] if qstat else None)
    if not (why := source.trouble()):
        return source
    if api == "bindings":
        raise SchedulerError(
            f'{why}; install PBS\'s bindings (pbs_ifl), or set api = "auto" in [scheduler.pbs].'
        )
    return PbsCommandSource(commands)
