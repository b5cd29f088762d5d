"""What a log of real batch jobs says: jobs by submission. Decides nothing about files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from malletrain.sim.workloads import WorkloadError

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


def job_log(
    source: str, path: str | Path, jobs: Iterable[LogJob], nodes: int | None, skipped: int
) -> JobLog:
    """Jobs of any order as a log; times become seconds since the first submission. Raises
    WorkloadError when there are none.
    """
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
