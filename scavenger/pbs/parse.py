r"""Parses PBS's output at one poll: vnodes, jobs and reservations. Text (or the same values from
the bindings) in, plain values out. Decides nothing about gaps.

Commands run with ``TZ=UTC0``, so times are UTC. Formats: recordings of OpenPBS 23.06, the PBS
Professional Reference Guide, and the sources of pbsnodes, qstat and pbs_rstat.

:func:`decode` reads JSON as PBS prints it, which is not always valid. ``pbsnodes`` and ``qstat -F
json`` print one key per line. Depending on the version, they do not escape quotes in strings, use
escapes that JSON does not have (``\'``), and print each string that strtod(3) accepts as a number:
``005``, ``.5``, ``inf``, ``0x1f`` (openpbs issues 1255 and 2541, pull requests 830, 2049 and 2603).
One user's environment variable is enough. So text that cannot be decoded is repaired line by line
(:func:`repair`) and decoded again.
"""

from __future__ import annotations

import calendar
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from scavenger.batch.commands import require_complete, shorten
from scavenger.interface import SchedulerError

T = TypeVar("T")

_STRING = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'
_NUMBER = r"-?(?:0|[1-9]\d{0,14})(?:\.\d{1,15})?(?:[eE][-+]?\d{1,2})?"
_VALUE = (
    rf"(?:{_STRING}|{_NUMBER}|true|false|null|\{{\s*\}}?|\[(?:\s*(?:{_STRING}|{_NUMBER})\s*,?)*\]?)"
)
_BAD_LINE = re.compile(
    rf'^([ \t]*"[^"\n]*"[ \t]*:)(?![ \t]*{_VALUE},?[ \t]*$)[ \t]*(.*)$', re.MULTILINE
)
_BROKEN_LINE = re.compile(r'\n(?![ \t]*(?:"[^"\n]*"[ \t]*[:,\]]|"[^"\n]*"[ \t]*$|[{}\[\]]|$))')
"""A line break inside a string: the next line does not have the form of this format."""
_POSITION = re.compile(r"\(byte (\d+)\)")
MAX_SINGLE_REPAIRS = 10
"""Maximum number of lines that are repaired one by one, which is fast. If there are more, the whole
text is repaired.
"""
_INSIDE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})|\\|"|[\x00-\x1f]')


def decode(text: str, kind: type[T], command: str) -> T:
    """Decode ``text`` as msgspec's type ``kind``. Raises SchedulerError that names ``command`` if
    it has another form.

    Args:
        text: the output of a command.
        kind: type of the result.
        command: name of the command, for the error message.
    """
    data = text.encode("utf-8", "surrogateescape")
    for _ in range(MAX_SINGLE_REPAIRS):
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            mended = _mend_at(data, str(error))
        if mended is None:
            break
        data = mended
    try:
        return msgspec.json.decode(repair(text).encode("utf-8", "replace"), type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        detail = f" ({shorten(str(error), 100)})" if text.strip() else ""
        raise SchedulerError(
            f'The answer of {command} cannot be understood: "{shorten(text, 120)}"{detail}. '
            "Nothing was changed."
        ) from None


def decode_joined(text: str, kind: type[T], command: str) -> T:
    """Like :func:`decode`, but joins strings under equal keys of one object by commas. PBS prints
    an attribute with several limits as one key per limit.

    Args:
        text, kind, command: see :func:`decode`.
    """
    for each in (text, repair(text)):
        try:
            value = json.loads(each, object_pairs_hook=_joined, strict=False)
        except (ValueError, RecursionError):
            continue
        return decode(json.dumps(value), kind, command)
    return decode(text, kind, command)  # raises the error that says what is wrong


def _joined(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for key, value in pairs:
        before = joined.get(key)
        if isinstance(before, str) and isinstance(value, str):
            value = f"{before},{value}"
        elif isinstance(before, dict) and isinstance(value, dict):
            value = _joined([*before.items(), *value.items()])
        joined[key] = value
    return joined


def _mend_at(data: bytes, complaint: str) -> bytes | None:
    """Return ``data`` with the line repaired at which the decoder failed; None if that is not
    possible.
    """
    where = _POSITION.search(complaint)
    if where is None:
        return None
    begin = data.rfind(b"\n", 0, int(where[1])) + 1
    end = data.find(b"\n", int(where[1]))
    end = len(data) if end < 0 else end
    line = data[begin:end].decode("utf-8", "replace")
    mended = _BAD_LINE.sub(_mend, line)
    return None if mended == line else data[:begin] + mended.encode("utf-8", "replace") + data[end:]


def repair(text: str) -> str:
    """Return ``text`` with each line made valid JSON that has one key and an invalid value."""
    whole = _BROKEN_LINE.sub("\\\\n", text.replace("\r\n", "\n"))
    return _BAD_LINE.sub(_mend, whole)


def _mend(line: re.Match[str]) -> str:
    value = line[2].rstrip(" \t")
    comma = ""
    if value.endswith(","):
        value, comma = value[:-1].rstrip(" \t"), ","
    if len(value) >= 2 and value[0] == value[-1] == '"':
        return f'{line[1]}"{_INSIDE.sub(_escape, value[1:-1])}"{comma}'
    return line[1] + json.dumps(value) + comma


def _escape(match: re.Match[str]) -> str:
    return match[0] if match[1] else json.dumps(match[0])[1:-1]


def text_of(value: Any) -> str:
    """Return a value as the string that it was in PBS, which prints a job name ``42`` as a
    number.
    """
    if isinstance(value, str):
        return value
    try:
        return "" if value is None else str(value)
    except ValueError:  # a number with thousands of digits
        return ""


def words_of(value: Any) -> tuple[str, ...]:
    """Return the items of a list, which can have the form of a list, ``a, b`` or a single word."""
    if isinstance(value, list):
        return tuple(text_of(item) for item in value)
    return tuple(word for part in text_of(value).split(",") if (word := part.strip()))


def number_of(value: Any, otherwise: float = 0.0) -> float:
    """Return a number, which can have the form of a string."""
    if isinstance(value, (int, float)):
        try:
            return float(value) if math.isfinite(value) else otherwise
        except OverflowError:
            return otherwise
    match = re.match(r"-?\d+(?:\.\d+)?", text_of(value))
    return float(match[0]) if match and len(match[0]) < 300 else otherwise


def truth_of(value: Any, otherwise: bool) -> bool:
    """Return a boolean, which can have the form of a string; ``otherwise`` if there is none."""
    if isinstance(value, bool):
        return value
    return otherwise if value is None else text_of(value).lower() in ("true", "t", "yes", "y", "1")


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
    "stime",
)
"""Attributes of a job that are read."""
SUSPENDED_STATES = frozenset({"S", "U"})
SUSPENDED_SUBSTATES = frozenset({43, 45})
"""Suspended by request (qsig) and by the scheduler."""
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
    partition: Any = ""
    resources_available: dict[str, Any] = {}
    resources_assigned: dict[str, Any] = {}
    sharing: Any = ""


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
    stime: Any = ""


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
    ends_by: float | None = None
    """End of its walltime if it has started."""


class PbsJobTable(NamedTuple):
    """The relevant jobs of one poll."""

    pending: list[PbsJob]
    """Jobs of others with an expected start."""
    ours: list[PbsJob]
    """All jobs with our prefix in their names."""
    running: list[PbsJob]
    """Jobs of others that have vnodes, and arrays that have begun, if they were asked for. PBS
    lists an array without its subjobs.
    """
    suspended: list[PbsJob]
    """Suspended jobs of others."""


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
    """Parse ``pbsnodes -av -F json``. Return vnode → its values. Raises SchedulerError if the text
    has another form.
    """
    return checked_nodes(decode(text, _Nodes, "pbsnodes").nodes)


def checked_nodes(nodes: dict[str, RawNode]) -> dict[str, RawNode]:
    """Return ``nodes``. Raises SchedulerError if it is empty."""
    if not nodes:
        raise SchedulerError("PBS names no nodes. Nothing was changed.")
    return nodes


def read_jobs(text: str, prefix: str, with_running: bool = False) -> PbsJobTable:
    """Parse ``qstat -f -F json``. Raises SchedulerError if the text has another form.

    Args:
        text: the output.
        prefix: beginning of the names of our jobs.
        with_running: whether to return the running jobs of others.
    """
    return job_table(decode(text, _Jobs, "qstat").Jobs, prefix, with_running)


def read_ended(text: str, prefix: str, mark: str = DSV_MARK) -> PbsJobTable:
    """Parse ``qstat -x -f -F dsv -D DSV_MARK IDS``. With several ids, its JSON contains only the
    first (OpenPBS 23.06).

    Args:
        text: the output.
        prefix: beginning of the names of our jobs.
        mark: separator of the attributes.
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


def job_table(raw: Mapping[str, RawJob], prefix: str, with_running: bool = False) -> PbsJobTable:
    """Return the relevant jobs: ours, those of others that are suspended or have an expected start,
    and, if requested, those of others that run.

    Args:
        raw: id → job.
        prefix: beginning of the names of our jobs.
        with_running: whether to return running jobs of others.
    """
    table = PbsJobTable([], [], [], [])
    for job_id, job in raw.items():
        name = job.Job_Name
        if isinstance(name, str) and name.startswith(prefix):
            table.ours.append(_job(job_id, job))
            continue
        if job.estimated is not None and job.job_state in ("Q", "B", "T"):
            pbs_job = _job(job_id, job)
            if pbs_job.start is not None and pbs_job.planned_on:
                table.pending.append(pbs_job)
        if job.exec_vnode and is_suspended(job.job_state, job.substate):
            table.suspended.append(_job(job_id, job))
        has_vnodes = job.exec_vnode and job.job_state in ("R", "E", "S", "U")
        if with_running and (has_vnodes or job.job_state == "B"):
            table.running.append(_job(job_id, job))
    return table


def is_suspended(state: Any, substate: Any) -> bool:
    """Return whether the processes of a job in this state are stopped. Its state can still be R for
    a moment.
    """
    return state in SUSPENDED_STATES or (
        state == "R" and int(number_of(substate)) in SUSPENDED_SUBSTATES
    )


def _job(job_id: str, raw: RawJob) -> PbsJob:
    estimated = raw.estimated if isinstance(raw.estimated, dict) else {}
    resources = raw.Resource_List if isinstance(raw.Resource_List, dict) else {}
    host = _HOST.search(text_of(resources.get("select")))
    started, walltime_s = read_time(raw.stime), read_duration(resources.get("walltime"))
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
        ends_by=None if started is None or not walltime_s else started + walltime_s,
    )


def vnodes_of(text: str) -> tuple[str, ...]:
    """Return the vnodes in ``(a[1]:ncpus=2+a[2]:ncpus=1)+(b:ncpus=2)``, without duplicates."""
    return tuple(dict.fromkeys(match[1] or match[2] for match in _VNODE.finditer(text)))


def read_reservations(text: str) -> dict[str, PbsReservation]:
    """Parse ``pbs_rstat -f``. Return id → reservation. Raises SchedulerError if the text has
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
