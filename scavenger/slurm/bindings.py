"""Reads Slurm through pyslurm (23.02 and later: ``Nodes``, ``Jobs``, ``Partitions`` and
``Reservations`` with ``load()``).

pyslurm calls slurmctld through libslurm, so its version must be that of the running Slurm. Its
calls hold Python's global interpreter lock while they wait (pyslurm 25.11). Therefore they run in a
separate process (:mod:`scavenger.slurm.ask_pyslurm`), which has a time limit like every command.
Its output is converted into the same tables as the output of the commands. Leases are always
requested and given back through the commands, because only these can act as another user.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import msgspec

from scavenger.batch.commands import Commands, shorten
from scavenger.interface import SchedulerError
from scavenger.slurm.parse import (
    SUSPENDED_STATE,
    WAITING_STATES,
    NodeGroup,
    NodeTable,
    SlurmJob,
    SlurmJobTable,
    SlurmReservation,
    own_name,
)

Tables = tuple[NodeTable, SlurmJobTable, list[SlurmReservation]]
PROGRAM = (sys.executable, "-m", "scavenger.slurm.ask_pyslurm")
OLDEST = (23, 2)
STATE_MARKS = {
    "MAINTENANCE": "$",
    "REBOOT_ISSUED": "^",
    "REBOOT_REQUESTED": "@",
    "POWERING_UP": "#",
    "POWERING_DOWN": "%",
    "POWERED_DOWN": "~",
    "POWER_DOWN": "!",
    "NOT_RESPONDING": "*",
}
"""Flags after the base state of a node (scontrol(1), "NODES - SPECIFICATIONS FOR SHOW":
``IDLE+DRAIN``) → the mark that sinfo prints behind the state; of several the first.
"""
IDLE_WORDS = {"RESERVED": "reserved", "BLOCKED": "blocked", "PLANNED": "planned"}
"""Flags → sinfo's name of the state of an idle node without mark. The first one counts."""


def load_module(slurm_version: tuple[int, int]) -> tuple[ModuleType | None, str]:
    """Return (pyslurm, empty) if it can be imported and has the running Slurm's version, otherwise
    (None, the reason).
    """
    try:
        module = importlib.import_module("pyslurm")
    except Exception as error:  # ImportError, or any error of its library without slurm.conf
        return (
            None,
            f"pyslurm cannot be imported ({shorten(str(error) or type(error).__name__, 80)})",
        )
    text = str(getattr(module, "__version__", ""))
    parts = [int(part) for part in text.split(".")[:2] if part.isdecimal()]
    if tuple(parts) != slurm_version:
        return (
            None,
            f"pyslurm {text or 'of unknown version'} is not of Slurm's version "
            f"{slurm_version[0]}.{slurm_version[1]:02d}",
        )
    if slurm_version < OLDEST:
        return (
            None,
            f"pyslurm {text} is older than {OLDEST[0]}.{OLDEST[1]:02d}, the oldest whose "
            "interface is known here",
        )
    return module, ""


def is_installed() -> bool:
    """Return whether there is a pyslurm, of whatever version."""
    return importlib.util.find_spec("pyslurm") is not None


class PyslurmSource:
    """Reads through pyslurm of the version of this Slurm; see
    :class:`scavenger.slurm.source.SlurmSource`.
    """

    name = "pyslurm"
    reason = ""

    def __init__(self, commands: Commands, version: tuple[int, int]) -> None:
        self.commands = commands
        self._argv = [*PROGRAM, *(str(number) for number in version)]

    def trouble(self) -> str:
        """Return why it cannot be used; empty if it can."""
        if not is_installed():  # the most frequent case, without a process
            return "pyslurm cannot be imported (it is not installed)"
        result = self.commands.run(self._argv)
        return "" if result.status == 0 else result.complaint or "pyslurm cannot be imported"

    def read(self, prefix: str) -> Tables:
        """Return the present nodes, jobs and reservations. Raises SchedulerError."""
        text = self.commands.ask([*self._argv, prefix])
        try:
            tables: Tables = msgspec.json.decode(text, type=Tables)
        except msgspec.DecodeError as error:
            raise SchedulerError(
                f"The answer of pyslurm cannot be understood: {error}. Nothing was changed."
            ) from None
        return tables


def read(module: Any, prefix: str) -> Tables:
    """Return pyslurm's present tables. Raises SchedulerError."""
    jobs = _load(module, "Jobs", lambda collection: job_table(collection, prefix))
    partitions = _load(
        module,
        "Partitions",
        lambda collection: {p.name for p in items(collection) if str(p.state) == "UP"},
    )
    nodes = _load(module, "Nodes", lambda collection: node_table(collection, partitions))
    return nodes, jobs, _load(module, "Reservations", reservations)


def _load(module: Any, name: str, read: Callable[[Any], Any]) -> Any:
    try:
        return read(getattr(module, name).load())
    except Exception as error:  # RPCError, and anything that a changed interface can raise
        raise SchedulerError(
            f"pyslurm.{name}.load() failed: {shorten(str(error) or type(error).__name__)}"
        ) from None


def items(collection: Any) -> Iterable[Any]:
    """Return the objects of a pyslurm collection: a mapping by name or id (a list in some
    versions).
    """
    objects: Iterable[Any] = collection.values() if hasattr(collection, "values") else collection
    return objects


def node_table(nodes: Any, up: set[str]) -> NodeTable:
    """Return the table of ``pyslurm.Nodes``. ``up``: partitions that accept jobs."""
    table = NodeTable({}, {})
    for node in items(nodes):
        gres = ",".join(f"{name}:{count}" for name, count in (node.configured_gres or {}).items())
        state = str(node.state)
        # sinfo counts what a suspended job keeps; pyslurm counts only processors in use.
        if state.startswith("IDLE") and getattr(node, "allocated_tres", None):
            state = state.replace("IDLE", "MIXED", 1)
        table.nodes[node.name] = node_group(
            state, tuple(node.active_features or ()), gres, node.reason or ""
        )
        table.partitions[node.name] = [name for name in node.partitions or () if name in up]
    return table


def node_group(state: str, features: tuple[str, ...], gres: str, reason: str) -> NodeGroup:
    """Return the group of a node.

    Args:
        state: its state, such as ``IDLE+PLANNED``.
        features: its active features.
        gres: its GRES, as Slurm prints them.
        reason: the reason of its state.
    """
    base, *flags = state.upper().split("+")
    word, marks = sinfo_state(base, frozenset(flags))
    return NodeGroup(word + marks, word, marks, features, gres, reason)


def sinfo_state(base: str, flags: frozenset[str]) -> tuple[str, str]:
    """Return the state and the mark that sinfo prints (``node_state_string`` of Slurm 25.11)."""
    mark = next((mark for flag, mark in STATE_MARKS.items() if flag in flags), "")
    silent = "*" if "NOT_RESPONDING" in flags else ""
    has_jobs = base in ("ALLOCATED", "MIXED")
    if "INVALID_REG" in flags:
        return "inval", ""
    if "EXTERNAL" in flags:  # sinfo does not show it
        return "external", ""
    if "MAINTENANCE" in flags and not (has_jobs or base == "DOWN" or "DRAIN" in flags):
        return "maint", silent
    if not has_jobs and "REBOOT_ISSUED" in flags:
        return "reboot", "^"
    if not has_jobs and "REBOOT_REQUESTED" in flags:
        return "reboot", silent
    leaving = has_jobs or "COMPLETING" in flags
    if "DRAIN" in flags:
        return "draining" if leaving else "drained", mark
    if "FAIL" in flags:
        return "failing" if leaving else "fail", silent
    if "COMPLETING" in flags and base == "ALLOCATED":
        return "allocated", mark or "+"
    if "COMPLETING" in flags and base != "DOWN":
        return "completing", mark
    if base == "IDLE" and not mark:
        return next((word for flag, word in IDLE_WORDS.items() if flag in flags), "idle"), ""
    if base == "MIXED" and not mark and "PLANNED" in flags:
        return "mixed", "-"
    return base.lower(), mark


def job_table(jobs: Any, prefix: str) -> SlurmJobTable:
    """Return the table of ``pyslurm.Jobs``: pending and suspended jobs, and ours."""
    table = SlurmJobTable([], [], [])
    for job in items(jobs):
        name, state = job.name or "", str(job.state)
        lease_name = own_name(name, prefix)
        if not lease_name and state not in (*WAITING_STATES, SUSPENDED_STATE):
            continue
        slurm_job = SlurmJob(
            state,
            _id(job),
            str(job.user_name),
            job.partition or "",
            int(job.num_nodes or 1),
            _time(job.submit_time),
            _time(job.start_time),
            _time(job.end_time),
            job.allocated_nodes or "",
            job.required_nodes or "",
            job.scheduled_nodes or "",
            str(job.state_reason),
            name,
            job.batch_host or "",
            str(job.account or ""),
        )
        if lease_name:
            table.ours.append(slurm_job._replace(name=lease_name, renamed=lease_name != name))
        if name != lease_name and state in (*WAITING_STATES, SUSPENDED_STATE):
            others = table.suspended if state == SUSPENDED_STATE else table.pending
            others.append(slurm_job)
    return table


def _id(job: Any) -> str:
    """Return the job id as squeue prints it (its ``%i``): ``7+1`` for a component of a
    heterogeneous job, ``7_[0-9%2]`` for the pending tasks of an array, of which pyslurm lists the
    limit separately. pyslurm 25.11 has None for the number 0 of a task.
    """
    if job.heterogeneous_id:
        return f"{job.heterogeneous_id}+{job.heterogeneous_offset or 0}"
    if not job.array_id:
        return str(job.id)
    if not job.array_tasks_waiting:
        return f"{job.array_id}_{job.array_task_id or 0}"
    limit = f"%{job.array_tasks_parallel}" if job.array_tasks_parallel else ""
    return f"{job.array_id}_[{job.array_tasks_waiting}{limit}]"


def reservations(collection: Any) -> list[SlurmReservation]:
    """Return the ``pyslurm.Reservations`` that hold nodes."""
    result = []
    for r in items(collection):
        start, end = _time(r.start_time), _time(r.end_time)
        if r.nodes and start is not None and end is not None:
            result.append(SlurmReservation(r.name, start, end, r.nodes, _for_maintenance(r)))
    return result


def _for_maintenance(reservation: Any) -> bool:
    """Return whether it has the maintenance flag; False if its flags cannot be read, which changes
    only how it is called.
    """
    try:
        return "MAINT" in str(reservation.flags).upper()
    except ValueError:  # pyslurm 25.11, with a flag that it has no name for, such as DAILY
        return False


def _time(value: Any) -> float | None:
    return float(value) if value else None
