"""Reads logs of real batch jobs: recognises the kind of a file, and reads the Standard Workload
Format and CSV of GPU jobs. :mod:`malletrain.sim.accounting_logs` reads the accounting of
schedulers.

Decides how a log is read. A log has two uses: a trace of the nodes that its jobs left idle
(:mod:`malletrain.sim.idle`), and malleable jobs with its arrivals
(:func:`malletrain.sim.workloads.arriving`).
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from malletrain.sim.accounting_logs import SACCT, read_pbs, read_sacct
from malletrain.sim.logged_jobs import JobLog, LogJob, Resources, job_log
from malletrain.sim.text_files import first_line, read_text
from malletrain.sim.workloads import WorkloadError


def read_log(path: str | Path, *, per_node: int | None = None) -> JobLog:
    """Read a log of any known kind, which is recognised by its content. A directory contains PBS
    accounting logs.

    Args:
        path: file or directory.
        per_node: number of processors or GPUs of one node, for logs that count those.

    Raises:
        WorkloadError: the log cannot be read.
    """
    if Path(path).is_dir():
        return read_pbs(path)
    first = first_line(path)
    if first.lstrip().startswith(";"):
        return read_swf(path, per_node=per_node)
    columns = {name.strip() for name in first.split(",")}
    if "|" in first or first.lstrip().startswith("{") or {"Submit", "Start", "End"} <= columns:
        return read_sacct(path)
    if {"Submit", "Start", "End"} <= set(first.split()):
        raise WorkloadError(
            f"{path}: The columns of this output of sacct are cut to a width; run: {SACCT}"
        )
    if "," in first:
        return read_gpu_csv(path, per_node=per_node or 1)
    return read_swf(path, per_node=per_node)


def read_swf(path: str | Path, *, per_node: int | None = None) -> JobLog:
    """Read a log in the Standard Workload Format (Chapin et al., JSSPP 1999): 18 numbers per job,
    -1 for unknown; ``;`` begins a comment.

    Args:
        path: file.
        per_node: number of processors of one node. Default: from the header or from the sizes of
            jobs.

    Raises:
        WorkloadError: the log cannot be read; the message names the line.
    """
    header: dict[str, int] = {}
    rows: list[list[float]] = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if line.lstrip().startswith(";"):
            header_match = re.match(r"\s*;\s*(MaxNodes|MaxProcs|UnixStartTime):\s*(\d[\d,]*)", line)
            if header_match:
                header[header_match[1]] = int(header_match[2].replace(",", ""))
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
    cpus_ground, cpus_inferred = "as stated, --per-node", False
    if per_node is None:
        cpus_ground = "by the log's header, MaxProcs and MaxNodes"
        per_node, note = _processors_per_node(path, header, [max(row[4], row[7]) for row in rows])
        if note:
            notes.append(note)
            cpus_ground, cpus_inferred = "by the sizes of jobs; else: --per-node", True
        if header.get("MaxNodes", 0) > MAX_NODES:
            del header["MaxNodes"]  # it counts processors
    rows, parts = _whole_jobs(rows)
    if parts:
        notes.append(
            f"{parts:,} lines of parts of jobs (status 2 to 4), between which they were stopped, "
            "are left out: the line of the whole job counts, as if it ran in one piece."
        )
    jobs, skipped = [], 0
    for _, submit, wait, run, used, _, _, requested, _, _, _, user, *_ in rows:
        processors = used if used > 0 else requested
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
                allocated=Resources(cpus=math.ceil(processors)) if per_node > 1 else None,
            )
        )
    nodes, ground = header.get("MaxNodes"), "as the log's header says (MaxNodes)"
    if not nodes and header.get("MaxProcs"):
        nodes = math.ceil(header["MaxProcs"] / per_node)
        ground = f"as the log's header says (MaxProcs, {header['MaxProcs']:,}, by {per_node})"
    zero = header.get("UnixStartTime")
    log = job_log("Standard Workload Format", path, jobs, nodes or None, skipped)
    return replace(
        log,
        lists="submitted",
        zero=None if zero is None else zero + min(job.submit_s for job in jobs),
        notes=tuple(notes),
        nodes_ground=ground,
        cpus_per_node=per_node if per_node > 1 else None,
        cpus_ground=cpus_ground,
        cpus_inferred=cpus_inferred,
    )


def _whole_jobs(rows: list[list[float]]) -> tuple[list[list[float]], int]:
    """Return the rows without those of parts of jobs that have a row as a whole, and how many these
    are. A job that was stopped and went on has one row for all of it and, of the same number, one
    for each part, with a status of 2, 3 or 4 (Standard Workload Format, version 2.2). Numbers of 0
    and less name no job.
    """
    whole = {row[0] for row in rows if row[10] not in (2, 3, 4) and row[0] > 0}
    jobs = [row for row in rows if row[10] not in (2, 3, 4) or row[0] not in whole]
    return jobs, len(rows) - len(jobs)


MAX_NODES = 16384
"""A log with more nodes than this is assumed to count processors, unless ``per_node`` is given."""
COMMON_SIZES = (256, 192, 128, 112, 104, 96, 80, 72, 64, 56, 52, 48, 40, 36, 32, 28, 24, 20, 16, 12)
"""Common numbers of processors per node. Smaller numbers have too many multiples to be
recognised.
"""
MIN_MULTIPLE_FRACTION = 0.9
"""Minimum fraction of the requested processors in multiples of the inferred size."""


def _processors_per_node(
    path: str | Path, header: dict[str, int], requested: Sequence[float]
) -> tuple[int, str]:
    """Return the number of processors per node, and a sentence on how it is inferred from the sizes
    of jobs; an empty one if the header says it. Raises WorkloadError if it cannot be inferred.
    """
    processors, nodes = header.get("MaxProcs", 0), header.get("MaxNodes", 0)
    if nodes and processors > nodes:
        return processors // nodes, ""
    size = max(processors, nodes)
    if size <= MAX_NODES:
        return 1, ""
    total = sum(requested)
    shares = {k: sum(n for n in requested if n > 0 and n % k == 0) / total for k in COMMON_SIZES}
    best = max(
        shares,
        key=lambda k: (
            shares[k] >= MIN_MULTIPLE_FRACTION,
            shares[k] if shares[k] < MIN_MULTIPLE_FRACTION else k,
        ),
    )
    if shares[best] < MIN_MULTIPLE_FRACTION:
        raise WorkloadError(
            f"{path}: The log counts {size:,} processors and does not say how many a node has. "
            f"Give --per-node N (1: they are nodes). {100 * shares[best]:.0f} % of what jobs asked "
            f"for comes in multiples of {best}."
        )
    return best, (
        f"The log counts {size:,} processors; a node is taken to have {best}, because "
        f"{100 * shares[best]:.0f} % of what jobs asked for comes in multiples of it (else: "
        "--per-node)."
    )


def read_gpu_csv(path: str | Path, *, per_node: int = 1) -> JobLog:
    """Read GPU jobs from a CSV with the columns ``timestamp`` (YYYY-MM-DD HH:MM:SS), ``duration``
    (seconds) and ``num_gpus``, with rows in any order. Such a log has no start times.

    Args:
        path: file.
        per_node: number of GPUs of one node.

    Raises:
        WorkloadError: the file cannot be read; the message names the line.
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
    return job_log("CSV of GPU jobs", path, jobs, None, skipped)
