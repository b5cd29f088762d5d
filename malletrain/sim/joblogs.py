"""Logs of real batch jobs: the Standard Workload Format, Slurm's and PBS's accounting, and CSV of
GPU jobs.

Decides how a log is read and what a job of it is. Two things are made of it elsewhere: the idle
nodes that these jobs left, as a trace (:mod:`malletrain.sim.idle`), and malleable jobs that arrive
as these jobs did (:func:`malletrain.sim.workloads.from_log`).
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

from malletrain.sim.workload_files import read_text
from malletrain.sim.workloads import WorkloadError
from scavenger.slurm.hostlist import expand

SACCT = (
    "sacct --allusers --allocations --parsable2 --starttime=FROM --endtime=TO "
    "--format=JobID,Submit,Start,End,State,NNodes,NodeList"
)
"""The command whose output :func:`read_sacct` reads (more columns do not hurt; SLURM_TIME_FORMAT
must not be set).
"""


Lists = Literal["all", "running", "since", "submitted"]


@dataclass(frozen=True)
class LogJob:
    """One job of a log; times in seconds since the first submission in it.

    ``start_s``: None when the log does not say. ``run_s``: None when it still ran when the log
    ended. ``nodes``: how many; ``names``: which, empty when the log does not say. ``user``:
    whose, likewise.
    """

    submit_s: float
    start_s: float | None
    run_s: float | None
    nodes: int
    names: tuple[str, ...] = ()
    user: str = ""


@dataclass(frozen=True)
class JobLog:
    """Jobs by submission."""

    source: str
    """What kind of log it is."""
    jobs: tuple[LogJob, ...]
    """Those that ran."""
    nodes: int | None = None
    """Size of the machine as the log states it; None: it does not."""
    skipped: int = 0
    """Entries of jobs that never ran, or that say nothing of use."""
    lists: Lists = "all"
    """Which jobs it lists (:mod:`malletrain.sim.observation`): ``all`` that ran, those that ran at
    some time while it was kept (``running``), those that ended or began ``since`` its first record,
    those ``submitted`` while it was kept."""
    since_s: float = 0.0
    """When the first record was written, seconds of the log; for ``since``."""
    zero: float | None = None
    """The first submission, seconds since the epoch; None: the log knows no dates."""
    notes: tuple[str, ...] = ()
    """What was taken for granted while reading it, as sentences for the reader of a report."""


def read_log(path: str | Path, *, per_node: int | None = None) -> JobLog:
    """A log of any kind known, recognised by its content; a directory is one of PBS accounting
    logs.

    ``per_node``: processors or GPUs of one node, for logs that count those. Raises WorkloadError.
    """
    if Path(path).is_dir():
        return read_pbs(path)
    first = next((line for line in read_text(path).splitlines() if line.strip()), "")
    if "|" in first or {"Submit", "Start", "End"} <= {name.strip() for name in first.split(",")}:
        return read_sacct(path)
    if "," in first:
        return read_gpu_csv(path, per_node=per_node or 1)
    return read_swf(path, per_node=per_node)


def read_swf(path: str | Path, *, per_node: int | None = None) -> JobLog:
    """A log in the Standard Workload Format (Chapin et al., JSSPP 1999): 18 numbers a job, -1 for
    unknown; ``;`` begins a comment.

    ``per_node``: processors of one node; default MaxProcs / MaxNodes of the header, else 1. Raises
    WorkloadError with the line.
    """
    header: dict[str, int] = {}
    rows: list[list[float]] = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if line.lstrip().startswith(";"):
            found = re.match(r"\s*;\s*(MaxNodes|MaxProcs|UnixStartTime):\s*(\d+)", line)
            if found:
                header[found[1]] = int(found[2])
        elif line.strip():
            try:
                row = [float(word) for word in line.split()]
            except ValueError:
                row = []
            if len(row) != 18:
                raise WorkloadError(
                    f"{path}, line {number}: A job in this format (SWF) is 18 numbers; got "
                    f"'{line.strip()[:60]}'."
                )
            rows.append(row)
    notes: list[str] = []
    if per_node is None:
        per_node = _processors_per_node(path, header, [max(row[4], row[7]) for row in rows], notes)
        if header.get("MaxNodes", 0) > MOST_NODES:
            del header["MaxNodes"]  # it counts processors
    jobs, skipped = [], 0
    for _, submit, wait, run, used, _, _, asked, _, _, _, user, *_ in rows:
        processors = used if used > 0 else asked
        if processors <= 0 or run <= 0 or submit < 0:
            skipped += 1
            continue
        jobs.append(
            LogJob(
                submit,
                submit + wait if wait >= 0 else None,
                run,
                math.ceil(processors / per_node),
                user=f"u{user:.0f}" if user >= 0 else "",
            )
        )
    nodes = header.get("MaxNodes") or (
        math.ceil(header["MaxProcs"] / per_node) if header.get("MaxProcs") else None
    )
    zero = header.get("UnixStartTime")
    log = _log("Standard Workload Format", path, jobs, nodes, skipped)
    return replace(
        log,
        lists="submitted",
        zero=None if zero is None else zero + min(job.submit_s for job in jobs),
        notes=tuple(notes),
    )


MOST_NODES = 16384
"""A log that speaks of more nodes than this is taken to count processors, unless told otherwise."""
COMMON_SIZES = (256, 192, 128, 112, 104, 96, 80, 72, 64, 56, 52, 48, 40, 36, 32, 28, 24, 20, 16, 12)
"""Processors of a node, as machines have them; smaller ones have too many multiples to tell."""
EVIDENT = 0.9
"""Share of the processors asked for that lie in multiples of the size that is inferred."""


def _processors_per_node(
    path: str | Path, header: dict[str, int], asked: Sequence[float], notes: list[str]
) -> int:
    """How many processors a node of the log has. Raises WorkloadError when nobody can tell."""
    processors, nodes = header.get("MaxProcs", 0), header.get("MaxNodes", 0)
    if nodes and processors > nodes:
        return processors // nodes
    size = max(processors, nodes)
    if size <= MOST_NODES:
        return 1
    total = sum(asked)
    shares = {k: sum(n for n in asked if n > 0 and n % k == 0) / total for k in COMMON_SIZES}
    best = max(
        shares, key=lambda k: (shares[k] >= EVIDENT, shares[k] if shares[k] < EVIDENT else k)
    )
    if shares[best] < EVIDENT:
        raise WorkloadError(
            f"{path}: The log counts {size:,} processors and does not say how many a node has. "
            f"Give --per-node N (1: they are nodes). {100 * shares[best]:.0f} % of what jobs asked "
            f"for comes in multiples of {best}."
        )
    notes.append(
        f"The log counts {size:,} processors; a node is taken to have {best}, because "
        f"{100 * shares[best]:.0f} % of what jobs asked for comes in multiples of it (else: "
        "--per-node)."
    )
    return best


def read_sacct(path: str | Path) -> JobLog:
    """Slurm's accounting: the output of :data:`SACCT`, or the same as CSV.

    Without a column NodeList, or for jobs that have none, the number of nodes counts. Raises
    WorkloadError with the line.
    """
    lines = read_text(path).splitlines()
    bars = "|" in next((line for line in lines if line.strip()), "|")
    rows = csv.reader(lines, delimiter="|", quoting=csv.QUOTE_NONE) if bars else _comma_rows(lines)
    header = [name.strip() for name in next(rows, [])]
    missing = [name for name in ("Submit", "Start", "End", "NNodes") if name not in header]
    if missing:
        raise WorkloadError(
            f"{path}: The output of sacct has no column {', '.join(missing)}; run: {SACCT}"
        )
    at = {name: header.index(name) for name in header}
    jobs, skipped = [], 0
    for number, row in enumerate(rows, start=2):
        where = f"{path}, line {number}"
        if not row:
            continue
        if len(row) > len(header) and not bars and "NodeList" in at:
            # Unquoted commas between the names of nodes.
            first, more = at["NodeList"], len(row) - len(header)
            row = [*row[:first], ",".join(row[first : first + more + 1]), *row[first + more + 1 :]]
        if len(row) != len(header):
            raise WorkloadError(
                f"{where}: There are {len(row)} columns instead of {len(header)}; use --parsable2."
            )
        times = (_slurm_time(row[at[name]], where) for name in ("Submit", "Start", "End"))
        submit, start, end = times
        if start and end and end < start < end + 3600:  # local times: through autumn's double hour
            end += 3600
        listed = row[at["NodeList"]].strip() if "NodeList" in at else ""
        try:
            names = () if listed in ("", "None assigned") else expand(listed)
            count = len(names) or _count(row[at["NNodes"]])
        except ValueError as error:
            raise WorkloadError(f"{where}: {error}") from None
        if submit is None or start is None or not count or (end is not None and end <= start):
            skipped += 1
            continue
        jobs.append(LogJob(submit, start, None if end is None else end - start, count, names))
    zero = min((job.submit_s for job in jobs), default=None)
    return replace(_log("sacct", path, jobs, None, skipped), lists="running", zero=zero)


def _comma_rows(lines: Sequence[str]) -> Iterator[list[str]]:
    """Rows of a file with commas between its columns; those within brackets or quotes are none."""
    for line in lines:
        quoted = '"' in line
        yield next(csv.reader([line])) if quoted else list(_split_outside(line + ","))


def _count(text: str) -> int:
    """A number of nodes as sacct prints it (``1K`` is 1,024)."""
    found = re.fullmatch(r"\s*(\d+)([Kk]?)\s*", text)
    if found is None:
        raise WorkloadError(f"'{text}' is no number of nodes.")
    return int(found[1]) * (1024 if found[2] else 1)


_PBS_LINE = re.compile(r"(\d\d/\d\d/\d{4} \d\d:\d\d:\d\d);(\w);([^;]*);(.*)", re.DOTALL)


def read_pbs(path: str | Path) -> JobLog:
    """PBS accounting logs: a directory of files named by day (``server_priv/accounting``), or one
    of them.

    Start records (S) open a job, end (E) and rerun (R) records close it (PBS Professional,
    Administrator's Guide, chapter "Accounting"). Other records are skipped. Raises WorkloadError
    with file and line.
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
    skipped, since = 0, math.inf
    for file in files:
        for number, line in enumerate(read_text(file).splitlines(), start=1):
            found = _PBS_LINE.fullmatch(line)
            if found is None:
                if line.strip():
                    raise WorkloadError(
                        f"{file}, line {number}: This is no PBS accounting record: '{line[:60]}'."
                    )
                continue
            at, kind, job, message = found.groups()
            since = min(since, _pbs_time(at))
            if kind not in "SER":
                continue
            started = _pbs_job(dict(_pairs(message)))
            if kind == "S" and started is not None:
                running[job] = started
                continue
            begun = running.pop(job, None)
            entry = begun if kind == "R" or started is None else started
            if entry is None or entry.start_s is None:
                skipped += 1
                continue
            fields = dict(_pairs(message))
            stop = float(fields["end"]) if fields.get("end", "").isdigit() else _pbs_time(found[1])
            if stop > entry.start_s:
                jobs.append(replace(entry, run_s=stop - entry.start_s))
    jobs += running.values()
    log = _log("PBS accounting", path, jobs, None, skipped)
    zero = min(job.submit_s for job in jobs)
    return replace(log, lists="since", since_s=since - zero, zero=zero)


def read_gpu_csv(path: str | Path, *, per_node: int = 1) -> JobLog:
    """GPU jobs as CSV with the columns ``timestamp`` (YYYY-MM-DD HH:MM:SS), ``duration`` (seconds)
    and ``num_gpus``, in any order of rows.

    Such a log knows no starts. ``per_node``: GPUs of one node. Raises WorkloadError with the line.
    """
    reader = csv.DictReader(read_text(path).splitlines())
    missing = [
        name
        for name in ("timestamp", "duration", "num_gpus")
        if name not in (reader.fieldnames or ())
    ]
    if missing:
        raise WorkloadError(f"{path}: The CSV has no column {', '.join(missing)}.")
    jobs, skipped = [], 0
    for row in reader:
        try:
            submit = datetime.fromisoformat(row["timestamp"]).timestamp()
            duration, gpus = float(row["duration"]), float(row["num_gpus"])
        except (TypeError, ValueError) as error:
            raise WorkloadError(
                f"{path}, line {reader.line_num}: The job cannot be read: {error}."
            ) from None
        if not (0 < duration < math.inf and 0 < gpus < math.inf):
            skipped += 1
            continue
        user = row.get("user") or row.get("cluster") or ""
        jobs.append(LogJob(submit, None, duration, math.ceil(gpus / per_node), user=user))
    return _log("CSV of GPU jobs", path, jobs, None, skipped)


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
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise WorkloadError(
            f"{where}: '{text}' is no time such as 2024-01-31T12:00:00; do not set "
            "SLURM_TIME_FORMAT."
        ) from None


def _pbs_time(text: str) -> float:
    return datetime.strptime(text, "%m/%d/%Y %H:%M:%S").timestamp()


def _pairs(message: str) -> Iterator[tuple[str, str]]:
    for word in message.split():
        key, equals, value = word.partition("=")
        if equals:
            yield key, value


def _pbs_job(fields: dict[str, str]) -> LogJob | None:
    """The job of a start or end record, None where it says nothing of use."""
    start, submit = fields.get("start", ""), fields.get("ctime", fields.get("qtime", ""))
    hosts = fields.get("exec_host", "")
    if not start.isdigit() or not hosts:
        return None
    names = tuple(dict.fromkeys(part.partition("/")[0] for part in hosts.split("+")))
    return LogJob(
        float(submit) if submit.isdigit() else float(start), float(start), None, len(names), names
    )


def _log(
    source: str, path: str | Path, jobs: Iterable[LogJob], nodes: int | None, skipped: int
) -> JobLog:
    ordered = sorted(jobs, key=lambda job: (job.submit_s, job.start_s or 0.0))
    if not ordered:
        why = f"; all {skipped} entries are of jobs that never ran" if skipped else ""
        raise WorkloadError(f"{path}: The log has no job that ran{why}.")
    zero = ordered[0].submit_s
    moved = (
        replace(
            j,
            submit_s=j.submit_s - zero,
            start_s=None if j.start_s is None else max(j.start_s, j.submit_s) - zero,
        )
        for j in ordered
    )
    return JobLog(source, tuple(moved), nodes, skipped)
