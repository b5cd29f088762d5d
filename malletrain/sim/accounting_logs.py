"""Reads the accounting of batch schedulers: Slurm's ``sacct``, and PBS's daily files.

Decides which entries are jobs that ran, and their nodes.
"""

from __future__ import annotations

import csv
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from malletrain.protocol.counting import counted
from malletrain.sim.logged_jobs import (
    FILE_LINES,
    JobLog,
    LogJob,
    first_known,
    holds_part_of_gpu,
    job_log,
    pbs_resources,
    slurm_tres,
)
from malletrain.sim.text_files import first_line, json_objects, lines_of
from malletrain.sim.workloads import WorkloadError
from scavenger.hostlist import HostlistError, expand

SACCT = (
    "sacct --allusers --allocations --duplicates --parsable2 --starttime=FROM --endtime=TO "
    "--format=JobID,Submit,Start,End,State,NNodes,NodeList,AllocTRES"
)
"""Command whose output :func:`read_sacct` reads. Further columns are ignored; times may be epoch
seconds (SLURM_TIME_FORMAT=%s). Without --duplicates the runs of a job before a requeue are missing,
and their nodes look idle.
"""
_EPOCH = re.compile(r"\d{1,11}(?:\.\d+)?")


class _SacctEntry(NamedTuple):
    """One entry of sacct; times are seconds since the epoch, None if unknown."""

    line: int
    job: str
    """Empty if the log has no JobID."""
    submit: float | None
    start: float | None
    end: float | None
    nodes: str
    """NodeList; empty if unknown."""
    node_count: int
    """NNodes; 0 if unknown."""
    tres: str
    """AllocTRES; empty if unknown."""
    was_suspended: bool = False
    """Whether it was suspended for a time, as far as the log says it."""


def read_sacct(path: str | Path) -> JobLog:
    """Read Slurm's accounting: the output of :data:`SACCT`, the same as CSV, or that of
    ``sacct --json``.

    Without a NodeList, only the number of nodes is used. Job steps, which are listed without
    --allocations, are left out, because their jobs hold the nodes.

    Raises:
        WorkloadError: the file cannot be read; the message names the line.
    """
    first = first_line(path)
    counts: Counter[str] = Counter()
    if first.lstrip().startswith("{"):
        entries, columns = _json_entries(path), frozenset(("JobID", "AllocTRES"))
    else:
        columns = frozenset(_JOB_ID.get(name, name) for name in _columns(first))
        entries = _text_entries(path, counts)
    jobs: dict[_Run, LogJob] = {}
    for entry in entries:
        submit, start, end = entry.submit, entry.start, entry.end
        try:
            names = _node_names(entry.nodes)
            allocated = slurm_tres(entry.tres)
        except (HostlistError, WorkloadError) as error:
            raise WorkloadError(f"{path}, line {entry.line}: {error}") from None
        count = len(names) or entry.node_count
        if submit is None or start is None or not count or (end is not None and end <= start):
            counts["skipped"] += 1
            continue
        # Several files list the same run if it falls into the time of each. A job that is resized
        # has an entry for each size, which is submitted when that begins.
        run = (entry.job, start, submit) if entry.job else entry.line
        if end is not None or run not in jobs:
            run_s = None if end is None else end - start
            jobs[run] = LogJob(
                submit, start, run_s, count, names, allocated=allocated, line=entry.line
            )
            counts["parts of GPUs"] += holds_part_of_gpu(entry.tres)
            counts["suspended"] += entry.was_suspended
    runs = {run[:2] for run in jobs if isinstance(run, tuple)}
    is_each_alone = len(runs) == len({job for job, _ in runs})
    if len(runs) < len(jobs):
        jobs = _sizes_in_turn(jobs)
    zero = min(map(first_known, jobs.values()), default=None)
    notes = []
    if "JobID" not in columns:
        notes.append(
            "The log has no column JobID: steps of jobs, if it lists them, count as jobs of their "
            "own (sacct --allocations lists none)."
        )
    if steps := counts["steps"]:
        are = "is" if steps == 1 else "are"
        listed = f"{counted(steps, 'step')} of jobs, which {are} left out"
        notes.append(f"The log lists {listed} (sacct --allocations lists none).")
    if "JobID" in columns and is_each_alone:
        notes.append(
            "No job of the log ran twice. Where jobs are requeued, sacct lists their earlier runs "
            "with --duplicates only; without it the nodes of these look idle."
        )
    if parts := counts["parts of GPUs"]:
        notes.append(
            f"{counted(parts, 'job')} {'holds' if parts == 1 else 'hold'} parts of GPUs "
            "(gres/shard, gres/mps), which count as no GPU: these GPUs look idle."
        )
    if times := counts["no such times"]:
        notes.append(
            f"{counted(times, 'time')} of the log {'does' if times == 1 else 'do'} not exist in "
            "the time zone of this computer, whose clocks were put forward then. So the log is of "
            "another zone, and times around changes of the clocks are wrong by an hour; set the "
            "machine's zone, such as TZ=UTC."
        )
    if suspended := counts["suspended"]:
        were = "was" if suspended == 1 else "were"
        notes.append(_suspended(f"{counted(suspended, 'job')} {were} suspended for a time"))
    log = job_log("sacct", path, jobs.values(), None, counts["skipped"])
    return replace(
        log,
        lists="running",
        zero=zero,
        notes=tuple(notes),
        lists_resources="AllocTRES" in columns,
    )


_Run = tuple[str, float, float] | int
"""A run in the output of sacct: job, start and submission; its line if the log has no JobID."""


def _sizes_in_turn(jobs: Mapping[_Run, LogJob]) -> dict[_Run, LogJob]:
    """Return the runs, each of a size of its job from when it was resized to that (``scontrol
    update NumNodes``). Entries of all sizes name the start of the job as theirs.
    """
    submits = defaultdict[tuple[str, float], list[float]](list)
    for run in jobs:
        if isinstance(run, tuple):
            submits[run[:2]].append(run[2])
    result = {}
    for run, job in jobs.items():
        if isinstance(run, tuple) and len(submits[run[:2]]) > 1:
            _, start, submit = run
            begin = start if submit == min(submits[run[:2]]) else max(start, submit)
            # A log that was written before the job was resized does not know the end of a size.
            later = (each for each in submits[run[:2]] if each > max(begin, submit))
            end = min(later, default=None) if job.run_s is None else start + job.run_s
            if end is not None and end <= begin:
                continue
            job = replace(job, start_s=begin, run_s=None if end is None else end - begin)
        result[run] = job
    return result


def _suspended(how_many: str) -> str:
    """Return the sentence about jobs that were suspended."""
    return (
        f"{how_many}: the nodes count as those of the job meanwhile, so that more may have been "
        "idle."
    )


def _text_entries(path: str | Path, counts: Counter[str]) -> Iterator[_SacctEntry]:
    """Yield the jobs in columns separated by bars or commas. Count job steps, and times that there
    are not in this computer's zone.
    """
    lines = enumerate(lines_of(path), start=1)
    first = next(((number, line) for number, line in lines if line.strip()), (1, ""))
    bars = "|" in first[1] or not first[1]
    header = [_JOB_ID.get(name, name) for name in _columns(first[1])]
    if header.count("JobID") > 1:  # the first column of both says it
        header = _columns(first[1])
    missing = [name for name in ("Submit", "Start", "End") if name not in header]
    if not {"NNodes", "AllocNodes", "NodeList"} & set(header):
        missing.append("NNodes")
    if missing:
        raise WorkloadError(
            f"{path}: The output of sacct has no column {', '.join(missing)}; run: {SACCT}"
        )
    at = {name: header.index(name) for name in header}
    job, nodes, tres = (at.get(name) for name in ("JobID", "NodeList", "AllocTRES"))
    counted = at.get("NNodes", at.get("AllocNodes"))
    cluster, clusters, suspended = at.get("Cluster"), set[str](), at.get("Suspended")
    state = at.get("State")
    submit, start, end = (at[name] for name in ("Submit", "Start", "End"))
    for number, line in lines:
        row = line.rstrip("\n").split("|") if bars else _comma_row(line.rstrip("\n"), header)
        if len(row) != len(header):
            if not line.strip():
                continue
            raise WorkloadError(f"{path}, line {number}: {_wrong_length(row, header, line)}")
        if job is not None and "." in row[job]:
            counts["steps"] += 1
            continue
        if row[start].strip() == "Start" and row[end].strip() == "End":
            continue  # several concatenated files
        listed = "" if nodes is None else row[nodes].strip()
        if state is not None and row[state].strip() == "PENDING":
            row[start] = "Unknown"  # it may be when it is expected to start
        try:
            if cluster is not None:
                _require_one_cluster(clusters, row[cluster].strip())
            times = row[submit], row[start], row[end]
            counts["no such times"] += sum(not _exists(each) for each in times)
            yield _SacctEntry(
                number,
                "" if job is None else row[job],
                *_slurm_times(*times),
                listed,
                0 if counted is None or listed else _count(row[counted]),
                "" if tres is None else row[tres],
                suspended is not None and any(map("123456789".__contains__, row[suspended])),
            )
        except WorkloadError as error:
            raise WorkloadError(f"{path}, line {number}: {error}") from None


_JOB_ID = {"JobIDRaw": "JobID"}
"""Column to the one that says the same."""


def _require_one_cluster(clusters: set[str], cluster: str) -> None:
    """Add the cluster of a job to ``clusters``. Raises WorkloadError if there are several."""
    clusters.add(cluster)
    if len(clusters) > 1:
        raise WorkloadError(
            f"The log has jobs of several clusters ({', '.join(sorted(clusters))}); give those of "
            "one (sacct --clusters NAME)."
        )


def _slurm_times(
    submitted: str, started: str, ended: str
) -> tuple[float | None, float | None, float | None]:
    """Return when a job was submitted, started and ended. A local time may mean two moments in the
    hour that is repeated at the end of summer time; the order of the three says which. Seconds
    since the epoch mean one.
    """
    submit, start, end = (_slurm_time(text) for text in (submitted, started, ended))
    if any(_EPOCH.fullmatch(text) for text in (submitted, started, ended)):
        return submit, start, end
    if submit and start and start < submit <= _repeated(start):
        start = _repeated(start)
    if start and end and end < start < _repeated(end):
        end = _repeated(end)
    return submit, start, end


def _exists(text: str) -> bool:
    """Return whether a local time exists in this computer's zone. Some do not where clocks are put
    forward.
    """
    try:
        when = datetime.fromisoformat(text)
        return datetime.fromtimestamp(when.timestamp(), when.tzinfo) == when
    except (OverflowError, ValueError):
        return True  # none at all, seconds since the epoch, or of a year that cannot be


def _repeated(seconds: float) -> float:
    """Return the other moment that has this local time at the end of summer time, else the same."""
    return datetime.fromtimestamp(seconds).replace(fold=1).timestamp()


def _columns(line: str) -> list[str]:
    """Return the names in a header."""
    return [name.strip() for name in line.split("|" if "|" in line else ",")]


def _wrong_length(row: list[str], header: list[str], line: str) -> str:
    """Return the sentence about a line with too few or too many columns."""
    cut = len(row) < len(header) and not line.endswith("\n")
    why = (
        "the file ends in the middle of a line. Fetch it again."
        if cut
        else "use --parsable2, and no column in which names chosen by users stand (JobName, "
        "Comment)."
    )
    return f"There are {len(row)} columns instead of {len(header)}; {why}"


NO_NODE = "None assigned"
"""The NodeList of a job that never had a node."""


@lru_cache(maxsize=65536)
def _node_names(listed: str) -> tuple[str, ...]:
    """Return the names of nodes in a NodeList. Equal names are one object, because a log has few
    names and many lists.
    """
    return () if listed in ("", NO_NODE) else tuple(map(sys.intern, expand(listed)))


def _json_entries(path: str | Path) -> Iterator[_SacctEntry]:
    """Yield the jobs in the output of ``sacct --json`` (Slurm 21.08 to 25.11). Their steps lie in
    them.
    """
    clusters = set[str]()
    for number, job in json_objects(path, "jobs"):
        try:
            if job.get("cluster"):
                _require_one_cluster(clusters, str(job["cluster"]))
            times, listed = job["time"], job.get("nodes") or ""
            tres = (
                f"{entry['type']}{'/' if entry.get('name') else ''}{entry.get('name') or ''}="
                f"{_json_number(entry.get('count')):.0f}"
                for entry in job.get("tres", {}).get("allocated", ())
            )
            yield _SacctEntry(
                number,
                str(job["job_id"]),
                _json_number(times["submission"]) or None,
                _json_number(times["start"]) or None,
                _json_number(times["end"]) or None,
                listed,
                0 if listed == NO_NODE else int(_json_number(job.get("allocation_nodes"))),
                ",".join(tres),
                _json_number(times.get("suspended")) > 0,
            )
        except WorkloadError as error:
            raise WorkloadError(f"{path}, line {number}: {error}") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise WorkloadError(
                f"{path}, line {number}: The job is not as sacct --json prints it "
                f"({type(error).__name__}: {error})."
            ) from None


def _json_number(value: Any) -> float:
    """Return a number as any version of Slurm prints it: plain, or in an object that says whether
    it is set; 0 if it is not.
    """
    if isinstance(value, Mapping):
        value = value.get("number") if value.get("set", True) else 0
    return float(value or 0)


_TRES = re.compile(r"[\w.:/-]+=[^=,]*")


def _comma_row(line: str, header: Sequence[str]) -> list[str]:
    """Return the words of a line with comma-separated columns. Commas in brackets or quotes do not
    separate, nor those in AllocTRES and between the names of nodes.
    """
    if '"' in line:
        return next(csv.reader([line]))
    row = list(_split_outside(line + ","))
    if "AllocTRES" in header:
        joined: list[str] = []
        for word in row:
            if joined and _TRES.fullmatch(word) and _TRES.match(joined[-1]):
                joined[-1] += f",{word}"
            else:
                joined.append(word)
        row = joined
    more = len(row) - len(header)
    if more > 0 and "NodeList" in header:
        first = header.index("NodeList")
        row = [*row[:first], ",".join(row[first : first + more + 1]), *row[first + more + 1 :]]
    return row


def _count(text: str) -> int:
    """Return a number of nodes as sacct prints it (``1K`` is 1,024)."""
    number_match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)([Kk]?)\s*", text)
    if number_match is None:
        raise WorkloadError(f"'{text}' is no number of nodes.")
    return round(float(number_match[1]) * (1024 if number_match[2] else 1))


_PBS_RECORD = re.compile(r"\d\d/\d\d/\d{4} \d\d:\d\d:\d\d;\w;[^;]*;")
"""The beginning of an accounting record."""
CLOCK_CHANGE_S = 3600.0
"""By how much clocks are put forward and back, seconds."""
_PBS_START = re.compile(r"(?:^|\s)start=(\d+)(?:\s|$)")
_PBS_NODE_DOWN = "Job deleted, execution node"
_PBS_NOTES = {
    "lost ends": "{:,} runs of jobs have no end in the log and were followed by another run of the "
    "same job: they count until that one began.",
    "released": "In {:,} cases a job released a part of its nodes before its end "
    "(pbs_release_nodes, tolerate_node_failures): these count as its own until its end, so that "
    "more were idle.",
    "z": _suspended("In {:,} cases a job was suspended"),
    "B": "In {:,} cases a reservation began: its nodes count as idle while no job runs on them, "
    "although PBS keeps them for the reservation, so that fewer could be leased.",
}
"""What is counted (a letter: records of this kind) → the sentence about it."""


def read_pbs(path: str | Path) -> JobLog:
    """Read PBS accounting logs: a directory of files named by day (``server_priv/accounting``), or
    one file.

    Start records (S) open a job; end (E), rerun (R) and abort (A) records close it, and deletions
    (D) because a node is down, which have no E (PBS Professional, Administrator's Guide, chapter
    "Accounting"; OpenPBS, node_manager.c). Other records are skipped. The time of a record is local
    time of the machine; start and end in it are seconds since the epoch. Starts show the difference
    between the time zones of the machine and the reader.

    Raises:
        WorkloadError: a file cannot be read; the message names file and line.
    """
    folder = Path(path)
    files = sorted(f for f in folder.iterdir() if f.is_file()) if folder.is_dir() else [folder]
    if folder.is_dir():
        files = [f for f in files if re.fullmatch(r"\d{8}(\.gz)?", f.name)]
        if not files:
            raise WorkloadError(
                f"{path}: No accounting log lies here; they are named by day, such as 20240131."
            )
        plain = {f.name for f in files}
        files = [f for f in files if f.suffix != ".gz" or f.stem not in plain]
    files.sort(key=lambda f: f.name)
    # Jobs that run, as (file, line, message): the record of the end says all that the start does.
    running: dict[str, tuple[int, int, str]] = {}
    jobs: list[LogJob] = []
    # Starts of jobs whose end was recorded first, in the same second.
    ended: dict[str, str] = {}
    counts: Counter[str] = Counter()
    since, ahead_s, first_ahead_s = math.inf, None, 0.0

    def job_of(number: int, line: int, message: str) -> tuple[LogJob | None, dict[str, str]]:
        fields = dict(_pairs(message))
        try:
            return _pbs_job(fields, number * FILE_LINES + line), fields
        except WorkloadError as error:
            raise WorkloadError(f"{files[number]}, line {line}: {error}") from None

    for number, line, record in chain.from_iterable(
        ((k, *each) for each in _pbs_records(file)) for k, file in enumerate(files)
    ):
        at, kind, name, message = record.split(";", 3)
        since = min(since, _pbs_time(at))
        counts[kind] += 1
        if kind not in "SERADus" or (kind == "D" and not message.startswith(_PBS_NODE_DOWN)):
            continue
        start = _PBS_START.search(message)
        if kind == "S" and start is not None and "exec_host=" in message:
            apart_s = _zones_apart(_pbs_time(at) - float(start[1]))
            if ahead_s is None:
                first_ahead_s = ahead_s = apart_s
            elif abs(apart_s - ahead_s) == CLOCK_CHANGE_S:
                ahead_s = apart_s
            if ended.pop(name, None) == start[1]:
                continue
            before = running.get(name)
            running[name] = number, line, message
            lost, _ = (None, {}) if before is None else job_of(*before)
            if lost is not None and lost.start_s is not None and lost.start_s < float(start[1]):
                counts["lost ends"] += 1
                jobs.append(replace(lost, run_s=float(start[1]) - lost.start_s))
            continue
        if kind in "us":
            counts["released"] += 1
            continue
        begun = running.pop(name, None)
        if kind in "AD" and begun is None:
            continue  # it never ran
        job, fields = job_of(number, line, message)
        if begun is not None and (kind != "E" or job is None):
            job, _ = job_of(*begun)
        if job is None or job.start_s is None:
            counts["skipped"] += 1
            continue
        if begun is None and start is not None:
            ended[name] = start[1]
        end = fields.get("end", "")
        stop = float(end) if end.isdigit() else _pbs_time(at) - (ahead_s or 0.0)
        if stop > job.start_s:
            jobs.append(replace(job, run_s=stop - job.start_s))
    jobs += [job for record in running.values() if (job := job_of(*record)[0]) is not None]
    log = job_log("PBS accounting", path, jobs, None, counts["skipped"], files)
    zero = min(map(first_known, jobs))
    notes = (text.format(counts[what]) for what, text in _PBS_NOTES.items() if counts[what])
    return replace(
        log,
        notes=tuple(notes),
        lists="since",
        since_s=since - first_ahead_s - zero,
        zero=zero,
        lists_resources=True,
    )


def _pbs_records(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number of its first line, record). A record may contain line breaks, such as in a
    job's name or a variable. It ends where the next one begins.

    Raises:
        WorkloadError: the file does not begin with a record; the message names the line.
    """
    begun, record = 1, ""
    for number, line in enumerate(lines_of(path), start=1):
        line = line.rstrip("\n")
        if _PBS_RECORD.match(line):
            if record:
                yield begun, record
            begun, record = number, line
        elif record:
            record += f" {line}" if line.strip() else ""
        elif line.strip():
            raise WorkloadError(
                f"{path}, line {number}: This is no PBS accounting record: '{line[:60]}'."
            )
    if record:
        yield begun, record


def _split_outside(text: str) -> Iterator[str]:
    depth, word = 0, ""
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            yield word
            word = ""
        else:
            word += letter
    if word or depth:
        yield word


def _slurm_time(text: str) -> float | None:
    if text in ("", "Unknown", "None", "N/A"):
        return None
    if _EPOCH.fullmatch(text):
        return float(text) or None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise WorkloadError(
            f"'{text}' is no time such as 2024-01-31T12:00:00 or 1706702400; set "
            "SLURM_TIME_FORMAT to nothing else than %s."
        ) from None


def _pbs_time(text: str) -> float:
    """Return the seconds since the epoch of the time of a record, such as 03/01/2024 10:00:00."""
    return _pbs_minute(text[:16]) + int(text[17:])


@lru_cache(maxsize=4096)
def _pbs_minute(text: str) -> float:
    return datetime.strptime(text, "%m/%d/%Y %H:%M").timestamp()


def _zones_apart(seconds: float) -> float:
    """Return the difference of two time zones, from the difference of two clocks."""
    return 900.0 * round(seconds / 900.0)


def _pairs(message: str) -> Iterator[tuple[str, str]]:
    for word in message.split():
        key, equals, value = word.partition("=")
        if equals:
            yield key, value


def _pbs_job(fields: Mapping[str, str], line: int) -> LogJob | None:
    """Return the job of a record; None if data is missing, or if it never started (0)."""
    start, submit = fields.get("start", ""), fields.get("ctime", fields.get("qtime", ""))
    hosts = fields.get("exec_host", "")
    if not start.isdigit() or int(start) == 0 or not hosts:
        return None
    chunk_hosts = tuple(sys.intern(part.partition("/")[0]) for part in hosts.split("+"))
    names = tuple(dict.fromkeys(chunk_hosts))
    per_node, allocated = pbs_resources(fields, chunk_hosts)
    return LogJob(
        float(submit) if submit.isdigit() else float(start),
        float(start),
        None,
        len(names),
        names,
        allocated=allocated,
        per_node=per_node,
        line=line,
    )
