"""Jobs in a log of real batch jobs, in order of submission. Decides nothing about files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from malletrain.sim.resources import Resources
from malletrain.sim.workloads import WorkloadError

Lists = Literal["all", "running", "since", "submitted"]
FILE_LINES = 2**32
"""More lines than a file of a log has."""


@dataclass(frozen=True, slots=True)
class LogJob:
    """One job of a log. Times are in seconds since the first submission in the log."""

    submit_s: float
    """Submission."""
    start_s: float | None
    """Start; None if the log does not contain it."""
    run_s: float | None
    """Run time; None if the job still ran when the log ended."""
    nodes: int
    """Number of nodes."""
    names: tuple[str, ...] = ()
    """Names of the nodes; empty if the log does not contain them."""
    user: str = ""
    """Its user; empty if the log does not contain it."""
    allocated: Resources | None = None
    """Resources on all its nodes together, except those in ``per_node``. None if the job holds its
    nodes as a whole, or the log does not list its resources.
    """
    per_node: tuple[Resources, ...] = ()
    """Resources on each of ``names``; empty if the log does not list them by node."""
    line: int = field(default=0, compare=False)
    """Number of its file times :data:`FILE_LINES`, plus its line (:meth:`JobLog.place`)."""


@dataclass(frozen=True)
class JobLog:
    """The jobs of a log, in order of submission."""

    source: str
    """Kind of log."""
    jobs: tuple[LogJob, ...]
    """The jobs that ran."""
    nodes: int | None = None
    """Number of nodes of the machine; None if the log does not contain it."""
    skipped: int = 0
    """Number of entries of jobs that never ran or lack data."""
    lists: Lists = "all"
    """Jobs in the log (:mod:`malletrain.sim.observation`): ``all`` that ran; those that ran at some
    time during the log (``running``); those that ended or started ``since`` its first record; those
    ``submitted`` during the log.
    """
    since_s: float = 0.0
    """Time of the first record, seconds of the log; for ``since``."""
    zero: float | None = None
    """First submission, seconds since the epoch; None if the log has no dates."""
    notes: tuple[str, ...] = ()
    """Assumptions made while reading it, as sentences for the reader of a report."""
    lists_resources: bool = False
    """Whether it says what jobs hold on their nodes."""
    files: tuple[str, ...] = ()
    """Paths of its files."""
    nodes_ground: str = ""
    """Where the log says how many nodes the machine has, for sentences."""
    cpus_per_node: int | None = None
    """CPUs of a node; None if the log does not contain it, or counts nodes only."""
    cpus_ground: str = "as the log says"
    """How ``cpus_per_node`` is known, for sentences."""
    cpus_inferred: bool = False
    """Whether ``cpus_per_node`` follows from the sizes of jobs, so that nodes may have more."""

    def place(self, job: LogJob) -> str:
        """Return the file and line of a job, for sentences."""
        number, line = divmod(job.line, FILE_LINES)
        return f"{self.files[number]}, line {line}"


def first_known(job: LogJob) -> float:
    """Return when a job was submitted: when it started at the latest, whatever its log says."""
    return job.submit_s if job.start_s is None else min(job.submit_s, job.start_s)


def job_log(
    source: str,
    path: str | Path,
    jobs: Iterable[LogJob],
    nodes: int | None,
    skipped: int,
    files: Sequence[str | Path] = (),
) -> JobLog:
    """Return a log with these jobs, sorted, with times relative to the first submission.

    Args:
        source: kind of log.
        path: path of the file, for errors.
        jobs: jobs in any order; times in seconds.
        nodes: number of nodes of the machine, or None.
        skipped: number of entries left out.
        files: paths of its files; default: ``path`` alone.

    Raises:
        WorkloadError: there are no jobs.
    """
    begun = (replace(job, submit_s=first_known(job)) for job in jobs)
    ordered = sorted(begun, key=lambda job: (job.submit_s, job.start_s or 0.0))
    if not ordered:
        why = f"; all {skipped} entries are of jobs that never ran" if skipped else ""
        raise WorkloadError(f"{path}: The log has no job that ran{why}.")
    zero = ordered[0].submit_s
    moved = (
        replace(
            j,
            submit_s=j.submit_s - zero,
            start_s=None if j.start_s is None else j.start_s - zero,
        )
        for j in ordered
    )
    return JobLog(source, tuple(moved), nodes, skipped, files=tuple(map(str, files or (path,))))
