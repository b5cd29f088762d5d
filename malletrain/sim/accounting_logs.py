"""Reads the accounting of batch schedulers: Slurm's ``sacct``, and PBS's daily files.

Decides which entries are jobs that ran, and their nodes.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from malletrain.sim.logged_jobs import JobLog, LogJob, job_log
from malletrain.sim.workload_files import read_text
from malletrain.sim.workloads import WorkloadError
from scavenger.hostlist import HostlistError, expand

SACCT = (
    "sacct --allusers --allocations --duplicates --parsable2 --starttime=FROM --endtime=TO "
    "--format=JobID,Submit,Start,End,State,NNodes,NodeList"
)
"""Command whose output :func:`read_sacct` reads. Further columns are ignored; times may be epoch
seconds (SLURM_TIME_FORMAT=%s). Without --duplicates the runs of a job before a requeue are missing,
and their nodes look idle.
"""
_EPOCH = re.compile(r"\d{1,11}(?:\.\d+)?")


def read_sacct(path: str | Path) -> JobLog:
    """Read Slurm's accounting: the output of :data:`SACCT`, or the same as CSV.

    Without a NodeList, only the number of nodes is used. Job steps, which are listed without
    --allocations, are left out, because their jobs hold the nodes.

    Raises:
        WorkloadError: the file cannot be read; the message names the line.
    """
    text = read_text(path)
    lines = text.splitlines()
    bars = "|" in next((line for line in lines if line.strip()), "|")
    rows = csv.reader(lines, delimiter="|", quoting=csv.QUOTE_NONE) if bars else _comma_rows(lines)
    header = [name.strip() for name in next(rows, [])]
    missing = [name for name in ("Submit", "Start", "End") if name not in header]
    if not {"NNodes", "AllocNodes", "NodeList"} & set(header):
        missing.append("NNodes")
    if missing:
        raise WorkloadError(
            f"{path}: The output of sacct has no column {', '.join(missing)}; run: {SACCT}"
        )
    at = {name: header.index(name) for name in header}
    counted = at.get("NNodes", at.get("AllocNodes"))
    jobs: dict[object, LogJob] = {}
    skipped, steps = 0, 0
    for number, row in enumerate(rows, start=2):
        where = f"{path}, line {number}"
        if not row or [word.strip() for word in row] == header:  # several concatenated files
            continue
        if len(row) > len(header) and not bars and "NodeList" in at:
            # Unquoted commas between the names of nodes.
            first, more = at["NodeList"], len(row) - len(header)
            row = [*row[:first], ",".join(row[first : first + more + 1]), *row[first + more + 1 :]]
        if len(row) != len(header):
            cut = len(row) < len(header) and number == len(lines) and not text.endswith("\n")
            raise WorkloadError(
                f"{where}: There are {len(row)} columns instead of {len(header)}; "
                + (
                    "the file ends in the middle of a line. Fetch it again."
                    if cut
                    else "use --parsable2, and no column in which names chosen by users stand "
                    "(JobName, Comment)."
                )
            )
        if "JobID" in at and "." in row[at["JobID"]]:
            steps += 1
            continue
        submit, start, end = (
            _slurm_time(row[at[name]], where) for name in ("Submit", "Start", "End")
        )
        if start and end and end < start < end + 3600:
            end += 3600  # local times: it ran during the repeated hour at the end of summer time
        listed = row[at["NodeList"]].strip() if "NodeList" in at else ""
        try:
            names = () if listed in ("", "None assigned") else expand(listed)
            count = len(names) or (0 if counted is None else _count(row[counted]))
        except (ValueError, HostlistError) as error:
            raise WorkloadError(f"{where}: {error}") from None
        if submit is None or start is None or not count or (end is not None and end <= start):
            skipped += 1
            continue
        # Several files list the same run if it falls into the time of each.
        run = (row[at["JobID"]], start) if "JobID" in at else number
        if end is not None or run not in jobs:
            jobs[run] = LogJob(submit, start, None if end is None else end - start, count, names)
    zero = min((job.submit_s for job in jobs.values()), default=None)
    notes = []
    if steps:
        notes.append(
            f"The log lists {steps:,} steps of jobs, which are left out (sacct --allocations lists "
            "none)."
        )
    if "JobID" in at and len(jobs) == len({run[0] for run in jobs if isinstance(run, tuple)}):
        notes.append(
            "No job of the log ran twice. Where jobs are requeued, sacct lists their earlier runs "
            "with --duplicates only; without it the nodes of these look idle."
        )
    log = job_log("sacct", path, jobs.values(), None, skipped)
    return replace(log, lists="running", zero=zero, notes=tuple(notes))


def _comma_rows(lines: Sequence[str]) -> Iterator[list[str]]:
    """Yield the rows of a file with comma-separated columns. Commas in brackets or quotes do not
    separate.
    """
    for line in lines:
        quoted = '"' in line
        yield next(csv.reader([line])) if quoted else list(_split_outside(line + ","))


def _count(text: str) -> int:
    """Return a number of nodes as sacct prints it (``1K`` is 1,024)."""
    number_match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)([Kk]?)\s*", text)
    if number_match is None:
        raise WorkloadError(f"'{text}' is no number of nodes.")
    return round(float(number_match[1]) * (1024 if number_match[2] else 1))


_PBS_LINE = re.compile(r"(\d\d/\d\d/\d{4} \d\d:\d\d:\d\d);(\w);([^;]*);(.*)", re.DOTALL)


def read_pbs(path: str | Path) -> JobLog:
    """Read PBS accounting logs: a directory of files named by day (``server_priv/accounting``), or
    one file.

    Start records (S) open a job, end (E) and rerun (R) records close it (PBS Professional,
    Administrator's Guide, chapter "Accounting"). Other records are skipped. The time of a record is
    local time of the machine; start and end in it are seconds since the epoch. The first start
    shows the difference between the time zones of the machine and the reader.

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
    files.sort(key=lambda f: f.name)
    running: dict[str, LogJob] = {}
    jobs: list[LogJob] = []
    skipped, since, ahead_s = 0, math.inf, None
    for file in files:
        for number, line in _pbs_records(read_text(file)):
            record = _PBS_LINE.fullmatch(line)
            if record is None:
                if line.strip():
                    raise WorkloadError(
                        f"{file}, line {number}: This is no PBS accounting record: '{line[:60]}'."
                    )
                continue
            at, kind, job, message = record.groups()
            since = min(since, _pbs_time(at))
            if kind not in "SER":
                continue
            started = _pbs_job(dict(_pairs(message)))
            if started is not None and started.start_s is not None and kind == "S":
                if ahead_s is None:
                    ahead_s = _zones_apart(_pbs_time(at) - started.start_s)
                running[job] = started
                continue
            begun = running.pop(job, None)
            entry = begun if kind == "R" or started is None else started
            if entry is None or entry.start_s is None:
                skipped += 1
                continue
            fields = dict(_pairs(message))
            stop = (
                float(fields["end"])
                if fields.get("end", "").isdigit()
                else _pbs_time(at) - (ahead_s or 0.0)
            )
            if stop > entry.start_s:
                jobs.append(replace(entry, run_s=stop - entry.start_s))
    jobs += running.values()
    log = job_log("PBS accounting", path, jobs, None, skipped)
    zero = min(job.submit_s for job in jobs)
    return replace(log, lists="since", since_s=since - (ahead_s or 0.0) - zero, zero=zero)


def _pbs_records(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number of its first line, record). A record may contain line breaks, such as in a
    job's name or a variable. It ends where the next one begins.
    """
    begun, record = 1, ""
    for number, line in enumerate(text.split("\n"), start=1):
        if record and not _PBS_LINE.fullmatch(line):
            record += f" {line}" if line.strip() else ""
            continue
        if record:
            yield begun, record
        begun, record = number, line if line.strip() else ""
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


def _slurm_time(text: str, where: str) -> float | None:
    if text in ("", "Unknown", "None", "N/A"):
        return None
    if _EPOCH.fullmatch(text):
        return float(text) or None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise WorkloadError(
            f"{where}: '{text}' is no time such as 2024-01-31T12:00:00 or 1706702400; set "
            "SLURM_TIME_FORMAT to nothing else than %s."
        ) from None


def _pbs_time(text: str) -> float:
    return datetime.strptime(text, "%m/%d/%Y %H:%M:%S").timestamp()


def _zones_apart(seconds: float) -> float:
    """Return the difference of two time zones, from the difference of two clocks."""
    return 900.0 * round(seconds / 900.0)


def _pairs(message: str) -> Iterator[tuple[str, str]]:
    for word in message.split():
        key, equals, value = word.partition("=")
        if equals:
            yield key, value


def _pbs_job(fields: dict[str, str]) -> LogJob | None:
    """Return the job of a start or end record; None if data is missing."""
    start, submit = fields.get("start", ""), fields.get("ctime", fields.get("qtime", ""))
    hosts = fields.get("exec_host", "")
    if not start.isdigit() or not hosts:
        return None
    names = tuple(dict.fromkeys(part.partition("/")[0] for part in hosts.split("+")))
    return LogJob(
        float(submit) if submit.isdigit() else float(start), float(start), None, len(names), names
    )
