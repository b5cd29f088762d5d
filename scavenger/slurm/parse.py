"""Parses Slurm's output at one poll: nodes, jobs and reservations. Text in, plain values out.

The format strings use fields that have not changed since Slurm 20.11 (sinfo(1), squeue(1), option
``-o``). Times are requested in epoch seconds (``SLURM_TIME_FORMAT=%s``). Text that users can choose
(a job's name, a reason) comes last in its line, and each line begins with a random mark of this
poll. So a name with a line break cannot imitate another job. This module decides nothing about
gaps.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Collection
from typing import NamedTuple

from scavenger.batch.commands import require_complete, shorten
from scavenger.batch.groups import PartOf
from scavenger.hostlist import HostlistError, expand
from scavenger.interface import SchedulerError, kind_of

SINFO_FIELDS = "%R|%a|%T|%b|%G|%N|%E"
"""Partition, whether it is up, state with flags, active features, GRES, nodes, reason. One line per
group of nodes with equal values.
"""
SQUEUE_FIELDS = "%T|%i|%u|%P|%D|%V|%S|%e|%N|%n|%Y|%r|%a|%B|%j"
"""State, job id (``7_2`` for an array task, ``7_[3-5]`` for pending ones), user, partitions, number
of nodes, submission, (expected) start, (expected) end, nodes, requested nodes, planned nodes,
reason, account, host of the batch script, name.
"""

OF_THIS_CLUSTER = ("--local",)
"""Option of squeue and sinfo, which otherwise list the jobs and nodes of all clusters of a
federation if ``FederationParameters=fed_display`` is set (slurm.conf(5)).
"""
WAITING_STATES = ("PENDING", "EXPEDITING")
"""States of a job that waits for nodes. EXPEDITING, since Slurm 25.11: it was submitted with
``--requeue=expedite``, was requeued and waits before all other jobs.
"""


SUSPENDED_STATE = "SUSPENDED"
"""State of a job whose processes are stopped and whose processors Slurm gives to others. It keeps
its memory, and Slurm lists its node as idle if no other job runs there.
"""


class NodeGroup(NamedTuple):
    """The common values of the nodes in one sinfo line."""

    state: str
    """As printed."""
    base: str
    """The state without its marks."""
    marks: str
    """The marks."""
    features: tuple[str, ...]
    """Active features."""
    gres: str
    """GRES, as Slurm prints them."""
    reason: str
    """Reason of the state; empty if there is none."""


class NodeTable(NamedTuple):
    """The nodes of one poll."""

    nodes: dict[str, NodeGroup]
    """Node → its group."""
    partitions: dict[str, list[str]]
    """Node → partitions that are up and contain it."""


class SlurmJob(NamedTuple):
    """One job of the queue. Times are in epoch seconds, None if not known."""

    state: str
    """Slurm's name of the state."""
    id: str
    """Job id."""
    user: str
    """User of the job."""
    partition: str
    """Partitions, separated by commas."""
    nodes: int
    """Number of nodes, the minimum of a range."""
    submitted: float | None
    """Time of submission."""
    start: float | None
    """Start; for a pending job the expected start."""
    end: float | None
    """End; for a running job the expected end."""
    node_list: str
    """Allocated nodes, as a node list in Slurm's form."""
    requested_nodes: str
    """Nodes requested by name, as a node list."""
    planned_on: str
    """Nodes that the backfill scheduler plans to use, as a node list."""
    reason: str
    """Reason of the state."""
    name: str
    """Name of the job."""
    batch_host: str = ""
    """Host of its batch script; empty if it has not started."""
    account: str = ""
    """Account of the job."""
    part: PartOf | None = None
    """Its part of a job that it shares with other leases."""
    renamed: bool = False
    """Whether ``name`` is only a part of the name that Slurm shows."""


class SlurmJobTable(NamedTuple):
    """The relevant jobs of one poll."""

    pending: list[SlurmJob]
    """Jobs of others in WAITING_STATES, and all that are renamed."""
    ours: list[SlurmJob]
    """All jobs with our prefix in their names, including ended ones. A renamed one can be a main
    job.
    """
    suspended: list[SlurmJob]
    """Suspended jobs of others, and all that are renamed."""


class SlurmReservation(NamedTuple):
    """One reservation."""

    name: str
    """Name of the reservation."""
    start: float
    """Start, epoch seconds."""
    end: float
    """End, epoch seconds."""
    nodes: str
    """Its nodes, a node list in Slurm's form."""
    maintenance: bool
    """Whether it has the maintenance flag; then no job may run there."""


def new_mark() -> str:
    """Return a random mark for the lines of one poll."""
    return secrets.token_hex(6)


def read_nodes(text: str, mark: str) -> NodeTable:
    """Parse ``sinfo -h -a -o MARK|SINFO_FIELDS``. Raises SchedulerError if the text has another
    form.
    """
    nodes: dict[str, NodeGroup] = {}
    partitions: dict[str, list[str]] = {}
    begin = mark + "|"
    for line in require_complete(text, "sinfo").split("\n"):
        if not line.startswith(begin):
            continue  # the rest of a reason that contains a line break
        fields = line.split("|", 7)
        if len(fields) != 8:
            raise _unreadable("sinfo", line)
        _, partition, up, state, features, gres, names, reason = fields
        base = state.rstrip("*~#!%$@^-+").lower()
        group = NodeGroup(
            state,
            base,
            state[len(base) :],
            () if features in ("(null)", "") else tuple(features.split(",")),
            "" if gres in ("(null)", "") else gres,
            "" if reason in ("none", "(null)") else reason,
        )
        if names in ("", "(null)"):  # a partition without nodes
            continue
        try:
            expanded = expand(names)
        except HostlistError as error:
            raise SchedulerError(f"The answer of sinfo cannot be understood: {error}") from None
        if up == "up":
            for name in expanded:
                if name in nodes:
                    partitions[name].append(partition)
                else:
                    nodes[name] = group
                    partitions[name] = [partition]
        else:
            for name in expanded:
                nodes.setdefault(name, group)
                partitions.setdefault(name, [])
    if not nodes:
        raise _unreadable("sinfo", text)
    return NodeTable(nodes, partitions)


def read_jobs(text: str, mark: str, prefix: str) -> SlurmJobTable:
    """Parse ``squeue -h -a -t all -o MARK|SQUEUE_FIELDS``. Lines of other users' jobs that neither
    wait nor are suspended are skipped.

    Args:
        text: the output.
        mark: the first field of each line.
        prefix: beginning of the names of our jobs.

    Raises:
        SchedulerError: the text has another form.
    """
    table = SlurmJobTable([], [], [])
    begin = mark + "|"
    relevant = tuple(f"{state}|" for state in (*WAITING_STATES, SUSPENDED_STATE))
    # Users choose accounts and names, and plugins write reasons. All may contain line breaks.
    _, *records = ("\n" + require_complete(text, "squeue")).split("\n" + begin)
    for record in records:
        may_be_lease = prefix in record
        if not may_be_lease and not record.startswith(relevant):
            continue
        fields = record.rstrip("\n").split("|", 14)
        if len(fields) != 15:
            raise _unreadable("squeue", record)
        count = fields[4].partition("-")[0]
        node_list, requested_nodes, planned_on = (
            "" if nodes == "(null)" else nodes for nodes in fields[8:11]
        )
        job = SlurmJob(
            fields[0],
            fields[1],
            fields[2],
            fields[3],
            int(count) if count.isdecimal() else 1,
            read_time(fields[5]),
            read_time(fields[6]),
            read_time(fields[7]),
            node_list,
            requested_nodes,
            planned_on,
            fields[11],
            fields[14].partition("\n")[0],
            "" if fields[13] == "n/a" else fields[13],
            "" if fields[12] == "(null)" else fields[12],
        )
        if may_be_lease and (name := own_name(job.name, prefix)):
            renamed = name != job.name
            table.ours.append(job._replace(name=name, renamed=renamed))
            if not renamed:
                continue
        if job.state in WAITING_STATES:
            table.pending.append(job)
        elif job.state == SUSPENDED_STATE:
            table.suspended.append(job)
    if text.strip() and begin not in text:
        raise _unreadable("squeue", text)
    return table


_LEASES = r"[A-Za-z]+\d+(?:[-+]\d+)*(?![A-Za-z0-9+])"


def own_name(name: str, prefix: str) -> str:
    """Return the name with which a job of ours was submitted; empty if it is no job of ours. A
    job_submit plugin may have put text before or behind it. A user can have given such a name to a
    main job, so that a longer name alone does not make a job ours.

    Args:
        name: the job's name.
        prefix: beginning of the names of our jobs.
    """
    if match := re.search(f"(?<![A-Za-z0-9]){re.escape(prefix)}{_LEASES}", name):
        return match[0]
    return name if name.startswith(prefix) else ""


_FIELD = re.compile(r"(\w+)=(\S*)")


def read_reservations(text: str) -> list[SlurmReservation]:
    """Parse ``scontrol show reservation -o``. Raises SchedulerError if the text has another
    form.
    """
    reservations, begun = [], False
    for line in require_complete(text, "scontrol show reservation").split("\n"):
        if not line.startswith("ReservationName="):
            if line.strip() and "No reservations" not in line and not begun:
                raise _unreadable("scontrol show reservation", line)
            continue  # the rest of a comment that contains a line break
        begun = True
        fields: dict[str, str] = {}
        for name, value in _FIELD.findall(line):
            # A later one is part of the comment, which people write.
            fields.setdefault(name, value)
        start, end = read_time(fields.get("StartTime", "")), read_time(fields.get("EndTime", ""))
        nodes = fields.get("Nodes", "")
        if start is None or end is None or nodes in ("", "(null)"):  # only licences
            continue
        reservations.append(
            SlurmReservation(
                fields["ReservationName"],
                start,
                end,
                nodes,
                "MAINT" in fields.get("Flags", "").split(","),
            )
        )
    return reservations


STEP_FIELDS = "%i|%N|%j"
"""Step id, nodes, name."""


def read_steps(text: str) -> dict[tuple[str, str], str]:
    """Parse ``squeue -h -s -o STEP_FIELDS``. Return (job, node) → the step that runs there, and
    (job, slot) → the step with the name of that slot, without batch scripts. Raises SchedulerError
    if the text has another form.
    """
    steps: dict[tuple[str, str], str] = {}
    for line in require_complete(text, "squeue").splitlines():
        step, bar, rest = line.partition("|")
        nodes, _, name = rest.partition("|")
        job, dot, number = step.partition(".")
        if not bar or not dot:
            raise _unreadable("squeue", line)
        if number.isdecimal():
            places = [name] if kind_of(name) else expand(nodes)
            steps.update(dict.fromkeys(((job, place) for place in places), step))
    return steps


def planned_uses(pending: Collection[SlurmJob]) -> dict[str, float]:
    """Return node → the earliest time at which a pending job is expected to start there (as
    ``squeue --start`` shows).
    """
    uses: dict[str, float] = {}
    for job in pending:
        if job.start is None or not job.planned_on:
            continue
        try:
            names = expand(job.planned_on)
        except HostlistError as error:
            raise SchedulerError(f"The answer of squeue cannot be understood: {error}") from None
        for name in names:
            if job.start < uses.get(name, float("inf")):
                uses[name] = job.start
    return uses


def read_time(text: str) -> float | None:
    """Return the epoch seconds of a time that Slurm printed: epoch seconds, or local time if the
    command ignores SLURM_TIME_FORMAT.
    """
    if text.isdecimal():
        return float(text)
    try:
        return time.mktime(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def read_duration(text: str) -> float | None:
    """Return the seconds of ``[days-]hours:minutes:seconds``, ``minutes:seconds`` or ``minutes``;
    None for UNLIMITED and similar words.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    weights = (3600, 60, 1) if days is not None or len(numbers) == 3 else (60, 1, 0)
    return float(
        86400 * int(days or 0) + sum(w * n for w, n in zip(weights, numbers, strict=False))
    )


def _unreadable(command: str, text: str) -> SchedulerError:
    return SchedulerError(
        f'The answer of {command} cannot be understood: "{shorten(text, 120)}". Nothing was '
        "changed."
    )
