"""Parses PBS's output at one poll: vnodes, jobs and reservations. Text (or the same values from the
bindings) in, plain values out.

Commands run with ``TZ=UTC0``, so times are UTC. Formats: recordings of OpenPBS 23.06, the PBS
Professional Reference Guide, and the sources of pbsnodes, qstat and pbs_rstat. This module decides
nothing about gaps.
"""

from __future__ import annotations

import calendar
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from scavenger.batch.answers import require_complete
from scavenger.interface import SchedulerError
from scavenger.pbs.json_text import decode, number_of, text_of, truth_of, words_of

JOB_ATTRIBUTES = (
    "Job_Name",
    "Job_Owner",
    "job_state",
    "substate",
    "queue",
    "ctime",
    "comment",
    "exec_vnode",
    "estimated",
    "Resource_List",
    "run_count",
    "Exit_status",
    "Rerunable",
)
"""Attributes of a job that are read."""
DSV_MARK = "\x1f"
"""Separator of the fields in qstat's DSV output."""
_VNODE = re.compile(r"\(([^():+]+)|\+([^():+]+)")
_HOST = re.compile(r"(?:^|[:+])host=([^:+]+)")
_MONTHS = {month: number for number, month in enumerate(calendar.month_abbr) if month}
_UNKNOWN = re.compile(r"Unknown Job Id (\d+)|(\d+)\S* Job has finished")
_DATE = re.compile(r"\w{3} (\w{3}) +(\d{1,2}) (\d\d):(\d\d):(\d\d) (\d{4})")


class RawNode(msgspec.Struct):
    """One vnode of pbsnodes, unchanged."""

    state: Any = ""
    jobs: Any = ()
    resv: Any = ""
    comment: Any = ""
    queue: Any = ""
    resources_available: dict[str, Any] = {}


class _Nodes(msgspec.Struct):
    nodes: dict[str, RawNode]


class RawJob(msgspec.Struct):
    """One job of qstat, unchanged."""

    Job_Name: Any = ""
    Job_Owner: Any = ""
    job_state: Any = ""
    substate: Any = 0
    queue: Any = ""
    ctime: Any = ""
    comment: Any = ""
    exec_vnode: Any = ""
    estimated: Any = None
    Resource_List: Any = None
    run_count: Any = 0
    Exit_status: Any = None
    Rerunable: Any = True


class _Jobs(msgspec.Struct):
    timestamp: Any
    Jobs: dict[str, RawJob] = {}


class PbsJob(NamedTuple):
    """One job. Times are in epoch seconds, None if not known."""

    id: str
    """Job id with the name of the server."""
    name: str
    """Name of the job."""
    user: str
    """Owner without the host."""
    state: str
    """State letter."""
    substate: int
    """Number of the substate."""
    queue: str
    """Queue of the job."""
    submitted: float | None
    """Time of submission."""
    start: float | None
    """Forecast of the scheduler for a pending job."""
    planned_on: tuple[str, ...]
    """Vnodes in that forecast."""
    vnodes: tuple[str, ...]
    """Allocated vnodes."""
    host: str
    """Host that it requested by name."""
    comment: str
    """PBS's comment."""
    runs: int
    """Number of starts."""
    exit: int | None
    """Exit status, None before its end."""
    rerunnable: bool = True
    """Whether PBS can requeue it."""


class PbsJobTable(NamedTuple):
    """The relevant jobs of one poll."""

    pending: list[PbsJob]
    """Jobs of others with an expected start."""
    ours: list[PbsJob]
    """All jobs with our prefix in their names."""


class PbsReservation(NamedTuple):
    """One reservation."""

    name: str
    """Its id, which begins with R (single), S (standing) or M (maintenance)."""
    start: float
    """Start, epoch seconds."""
    end: float
    """End, epoch seconds."""
    state: str
    """PBS's name of the state."""


def read_nodes(text: str) -> dict[str, RawNode]:
    """Parse ``pbsnodes -av -F json``. Returns vnode → its values. Raises SchedulerError if the text
    has another form.
    """
    return checked_nodes(decode(text, _Nodes, "pbsnodes").nodes)


def checked_nodes(nodes: dict[str, RawNode]) -> dict[str, RawNode]:
    """Return ``nodes``. Raises SchedulerError if it is empty."""
    if not nodes:
        raise SchedulerError("PBS names no nodes. Nothing was changed.")
    return nodes


def read_jobs(text: str, prefix: str) -> PbsJobTable:
    """Parse ``qstat -f -F json``. ``prefix``: beginning of the names of our jobs. Raises
    SchedulerError if the text has another form.
    """
    return job_table(decode(text, _Jobs, "qstat").Jobs, prefix)


def read_ended(text: str, prefix: str, mark: str = DSV_MARK) -> PbsJobTable:
    """Parse ``qstat -x -f -F dsv -D DSV_MARK IDS``. With several ids, its JSON contains only the
    first (OpenPBS 23.06).
    """
    jobs = {}
    for part in re.split(r"^Job Id: ", require_complete(text, "qstat"), flags=re.MULTILINE)[1:]:
        job_id, *fields = part.rstrip("\n").split(mark)
        values: dict[str, Any] = {"Resource_List": {}}
        for field in fields:
            name, _, value = field.partition("=")
            if name.startswith("Resource_List."):
                values["Resource_List"][name.partition(".")[2]] = value
            elif name in JOB_ATTRIBUTES:
                values[name] = value
        jobs[job_id] = msgspec.convert(values, RawJob)
    return job_table(jobs, prefix)


def read_unknown(text: str) -> set[str]:
    """Return the numbers of the jobs that PBS does not know or that have ended, from the errors of
    qstat.
    """
    return {match[1] or match[2] for match in _UNKNOWN.finditer(text)}


def number_in(job_id: str) -> str:
    """Return ``99`` for ``99.pbs0``, because a server can have several names."""
    return job_id.partition(".")[0]


def job_table(raw: Mapping[str, RawJob], prefix: str) -> PbsJobTable:
    """Return the relevant jobs: ours, and those of others with an expected start."""
    table = PbsJobTable([], [])
    for job_id, job in raw.items():
        name = job.Job_Name
        if isinstance(name, str) and name.startswith(prefix):
            table.ours.append(_job(job_id, job))
        elif job.estimated is not None and job.job_state in ("Q", "B", "T"):
            pbs_job = _job(job_id, job)
            if pbs_job.start is not None and pbs_job.planned_on:
                table.pending.append(pbs_job)
    return table


def _job(job_id: str, raw: RawJob) -> PbsJob:
    estimated = raw.estimated if isinstance(raw.estimated, dict) else {}
    resources = raw.Resource_List if isinstance(raw.Resource_List, dict) else {}
    host = _HOST.search(text_of(resources.get("select")))
    return PbsJob(
        id=job_id,
        name=text_of(raw.Job_Name),
        user=text_of(raw.Job_Owner).partition("@")[0],
        state=text_of(raw.job_state),
        substate=int(number_of(raw.substate)),
        queue=text_of(raw.queue),
        submitted=read_time(raw.ctime),
        start=read_time(estimated.get("start_time")),
        planned_on=vnodes_of(text_of(estimated.get("exec_vnode"))),
        vnodes=vnodes_of(text_of(raw.exec_vnode)),
        host=host[1] if host else "",
        comment=text_of(raw.comment),
        runs=int(number_of(raw.run_count)),
        exit=None if raw.Exit_status is None else int(number_of(raw.Exit_status)),
        rerunnable=truth_of(raw.Rerunable, True),
    )


def vnodes_of(text: str) -> tuple[str, ...]:
    """Return the vnodes in ``(a[1]:ncpus=2+a[2]:ncpus=1)+(b:ncpus=2)``, without duplicates."""
    return tuple(dict.fromkeys(match[1] or match[2] for match in _VNODE.finditer(text)))


def read_reservations(text: str) -> dict[str, PbsReservation]:
    """Parse ``pbs_rstat -f``. Returns id → reservation. Raises SchedulerError if the text has
    another form.
    """
    reservations: dict[str, PbsReservation] = {}
    fields: dict[str, str] = {}
    last = ""
    for line in [*require_complete(text, "pbs_rstat").splitlines(), "Resv ID: "]:
        if line.startswith("Resv ID:"):
            if fields:
                start, end = (
                    read_time(fields.get("reserve_start")),
                    read_time(fields.get("reserve_end")),
                )
                if start is None or end is None:
                    raise SchedulerError(
                        f"The answer of pbs_rstat cannot be understood: {fields['id'][:60]} has "
                        "no times."
                    )
                reservations[fields["id"]] = PbsReservation(
                    fields["id"], start, end, fields.get("reserve_state", "")
                )
            fields = {"id": line.partition(":")[2].strip()} if line.strip() != "Resv ID:" else {}
            last = ""
        elif line.startswith("\t") and last:
            fields[last] += line.strip()  # long values are wrapped
        elif " = " in line and fields:
            last, _, value = line.strip().partition(" = ")
            fields[last] = value
        elif line.strip() and not fields:
            raise SchedulerError(
                f'The answer of pbs_rstat cannot be understood: "{line[:80]}". Nothing was changed.'
            )
    return reservations


def read_time(value: Any) -> float | None:
    """Return the epoch seconds of ``Fri Nov 20 18:07:53 2026`` (UTC), or of a number of seconds."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number_of(value, -1.0) if 0 <= value < 1e12 else None
    text = text_of(value).strip()
    if text.isdecimal() and len(text) < 20:
        return float(text)
    match = _DATE.fullmatch(text)
    if match is None or match[1] not in _MONTHS:
        return None
    month, day, hour, minute, second, year = (
        _MONTHS[match[1]],
        *(int(part) for part in match.groups()[1:]),
    )
    return (
        float(calendar.timegm((year, month, day, hour, minute, second)))
        if 1 <= day <= 31 and 1970 <= year <= 9999
        else None
    )


def read_duration(value: Any) -> float | None:
    """Return the seconds of ``hours:minutes:seconds``, ``minutes:seconds`` or ``seconds``."""
    if isinstance(value, (int, float)):
        return number_of(value)
    parts = text_of(value).split(":")
    if not all(part.isdecimal() and len(part) < 12 for part in parts) or len(parts) > 3:
        return None
    return float(sum(int(part) * 60**power for power, part in enumerate(reversed(parts))))


def planned_uses(pending: Iterable[PbsJob]) -> dict[str, float]:
    """Return vnode → the earliest time at which a pending job is expected to start there."""
    uses: dict[str, float] = {}
    for job in pending:
        if job.start is None:
            continue
        for vnode in job.planned_on:
            if job.start < uses.get(vnode, math.inf):
                uses[vnode] = job.start
    return uses


def reservations_of(node: RawNode) -> tuple[str, ...]:
    """Return the ids of the vnode's present and future reservations."""
    return words_of(node.resv) if node.resv else ()
