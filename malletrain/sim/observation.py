"""The interval in which a log of batch jobs contains every job that ran. Pure.

Decides where the observation of a machine begins and ends. At its edges a log contains only some of
the jobs, and the nodes of a missing job would look idle:

* Slurm's accounting lists the jobs that ran at some time between ``--starttime`` and ``--endtime``.
  A job that ended earlier is not listed, even if it overlaps with listed ones. So the observation
  cannot begin before the first end in the log.
* PBS writes a record when a job ends, with its start. So all jobs are known from the first record
  on, except those that ran through the whole log. How many these were follows from the jobs that
  began before the log and ran for longer than it lasts; the report states it if they matter.
* A log in the Standard Workload Format lists jobs by their submission. A job that was submitted
  before the first entry and still ran is not listed.
* At its end a log lists jobs that have ended; only some logs list those that still ran. A missing
  job would have ended after the last end in the log. So no job can be missing at times that are
  earlier than that end by the duration of the longest job.
* After the last submission of a log nodes run empty. A log in the Standard Workload Format does not
  list the jobs that were submitted later. In other logs, a time without submissions at the end that
  is longer than every one before (and than :data:`MIN_SILENCE_S`) is left out, unless the user
  states the end.

If the longest job is longer than a quarter of the log, the edge is where missing longer jobs have
at most the fraction :data:`MAX_MISSING_FRACTION` of the node-seconds, and the report states this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import numpy.typing as npt

from malletrain.sim.logged_jobs import JobLog, LogJob
from malletrain.sim.workloads import WorkloadError

Floats = npt.NDArray[np.float64]

MAX_MISSING_FRACTION = 0.01
"""Maximum fraction of the node-seconds of jobs that may be missing at an edge."""
MAX_CUT_FRACTION = 0.25
"""Maximum fraction of the log that is cut off for its longest job."""
MIN_SILENCE_S = 3600.0
"""Minimum time without submissions at the end of a log that is left out or named, seconds."""
MIN_SUBMISSIONS = 10
"""Minimum number of different times of submission from which a time without any is judged."""


@dataclass(frozen=True)
class Observation:
    """The part of a log in which every job is known."""

    begin_s: float
    """Seconds of the log."""
    end_s: float
    """Seconds of the log."""
    sentences: tuple[str, ...] = ()
    """How the edges were determined, for the reader of a report."""


def observe(log: JobLog, begin: float | None = None, end: float | None = None) -> Observation:
    """Determine the observation of a log.

    Args:
        log: jobs. Those without a start are ignored.
        begin: begin that the user states, seconds of the log (:func:`moment`); None to determine
            it.
        end: the same for the end.

    Raises:
        WorkloadError: no time is left between the edges.
    """
    jobs = [job for job in log.jobs if job.start_s is not None]
    if not jobs:
        raise WorkloadError(
            f"The log ({log.source}) does not say when jobs started, so that nothing is known "
            "of idle nodes."
        )
    starts = [_start(job) for job in jobs]
    first, last = min(starts), max(starts)
    ends = [_start(job) + job.run_s for job in jobs if job.run_s is not None]
    sentences: list[str] = []
    edge, inexact = _longest(jobs, last - first)
    is_stated = begin is not None and end is not None
    if begin is None:
        begin = _begin(log, first, ends, edge, sentences)
    submissions = np.unique([job.submit_s for job in jobs])
    stated_end = end
    if end is None:
        end = last
        if (
            log.lists in ("running", "submitted")
            and ends
            and all(job.run_s is not None for job in jobs)
        ):
            end = min(last, max(ends) - edge)
        if end < last:
            sentences.append(
                f"The last {_time(last - end)} in which jobs started are left out: jobs that still "
                "ran when the log ended are not in it, and their nodes would look idle. If they "
                "are, say where it ends (--to)."
            )
    if inexact and sentences:
        sentences.append(
            f"The longest job lasts longer than a quarter of the log; at its edges up to "
            f"{100 * MAX_MISSING_FRACTION:.0f} % of the node-hours may be those of jobs that are "
            "missing."
        )
    if log.lists == "since":
        sentences += _spanning(log, jobs, max([last, *ends]))
    if stated_end is None:
        end = _without_silence(log, submissions, begin, end, sentences)
    else:
        sentences += _silence_within(submissions, stated_end)
    if last <= first and not is_stated:
        raise WorkloadError(
            "All jobs of the log start at one time; there is no time in which nodes could be "
            "seen idle."
        )
    if not end > begin:
        raise WorkloadError(
            "Nothing is known of idle nodes: the log has no time in which all jobs are known. Give "
            "a longer log, or say where it begins and ends (--from, --to)."
        )
    return Observation(begin, end, tuple(sentences))


def moment(text: str, log: JobLog) -> float:
    """Return a time on the command line as seconds of the log.

    Args:
        text: a date and time such as ``2024-01-31`` or ``2024-01-31T12:00``, or the time since the
            log's first submission such as ``30 d`` or ``36 h``.
        log: the log.

    Raises:
        WorkloadError: it is neither, or it is a date and the log has no dates.
    """
    number, unit = text.strip()[:-1].strip(), text.strip()[-1:]
    if unit in _UNITS:
        try:
            return float(number) * _UNITS[unit]
        except ValueError:
            pass
    try:
        when = datetime.fromisoformat(text.strip()).timestamp()
    except ValueError:
        raise WorkloadError(
            f"'{text}' is no time; give a date such as 2024-01-31T12:00, or the time since the "
            "log's first submission such as '30 d' or '36 h'."
        ) from None
    if log.zero is None:
        raise WorkloadError(
            f"The log ({log.source}) knows no dates; give the time since its first submission, "
            "such as '30 d'."
        )
    return when - log.zero


_UNITS = {"h": 3600.0, "d": 86400.0}


def _begin(
    log: JobLog, first: float, ends: Sequence[float], edge: float, sentences: list[str]
) -> float:
    if log.lists == "all":
        return first
    if log.lists == "since":
        return max(0.0, log.since_s)
    if log.lists == "submitted":
        sentences.append(
            f"The first {_time(edge)} are left out: jobs that ran before the log began are not in "
            "it, and their nodes would look idle. If the machine was empty, say so (--from)."
        )
        return first + edge
    begin = max(first, min(ends, default=first))
    if begin > first:
        sentences.append(
            f"The observation begins with the first end of a job, {_time(begin - first)} after "
            "the first start: jobs that ended earlier are not in the log. If it is known to begin "
            "earlier, say when (--from)."
        )
    return begin


def _spanning(log: JobLog, jobs: Sequence[LogJob], last: float) -> list[str]:
    """Return a sentence about jobs that ran from before the first record until after the last one,
    which are not in the log. ``last``: the time of the last record.

    Of jobs of length L that start at any time, L − D run through a log of length D for D that end
    in it, and each of these hides D.
    """
    first = max(0.0, log.since_s)
    lasts_s = last - first
    ended = [(job.run_s, job.nodes) for job in jobs if job.run_s is not None]
    longer = [(run_s - lasts_s, nodes) for run_s, nodes in ended if run_s > lasts_s]
    missing_s = sum(beyond * nodes for beyond, nodes in longer)
    spans = [(_start(job), _start(job) + (job.run_s or math.inf), job.nodes) for job in jobs]
    known_s = sum((min(end, last) - max(start, first)) * nodes for start, end, nodes in spans)
    if missing_s <= MAX_MISSING_FRACTION * (known_s + missing_s):
        return []
    return [
        f"Jobs that ran from before the first record until after the last one are not in the log "
        f"of {_time(lasts_s)}, and their nodes look idle. {len(longer):,} jobs ended that had run "
        f"for longer than that; by these, about {missing_s / 3600:,.0f} node-hours are missing, "
        f"beside {known_s / 3600:,.0f} that are known. Give more days."
    ]


def _without_silence(
    log: JobLog, submissions: Floats, begin: float, end: float, sentences: list[str]
) -> float:
    """Return the end of the observation without a time in which nobody submitted jobs."""
    silent_s = end - float(submissions[-1])
    if log.lists == "all" or silent_s <= 0 or submissions[-1] <= begin:
        return end
    if log.lists != "submitted" and not _is_unusual(submissions, silent_s):
        return end
    why = (
        "the log lists jobs by their submission, and those submitted later are not in it"
        if log.lists == "submitted"
        else "the log never was without submissions for so long before, and nodes run empty then"
    )
    sentences.append(
        f"The last {_time(silent_s)}, after the last submission, are left out: {why}. If they "
        "count, say where the log ends (--to)."
    )
    return float(submissions[-1])


def _silence_within(submissions: Floats, end: float) -> list[str]:
    """Return a sentence if nobody submitted jobs for long before the end that the user states."""
    before = submissions[submissions <= end]
    silent_s = end - float(before[-1]) if len(before) else 0.0
    if not _is_unusual(before, silent_s):
        return []
    return [
        f"In the last {_time(silent_s)} before the stated end (--to) no job was submitted, longer "
        "than ever before in the log. Nodes run empty then; if the machine was closed, state an "
        "earlier end."
    ]


def _is_unusual(submissions: Floats, silent_s: float) -> bool:
    """Return whether so long a time without submissions never was before."""
    if len(submissions) < MIN_SUBMISSIONS:
        return False
    return silent_s > max(MIN_SILENCE_S, float(np.diff(submissions).max()))


def _longest(jobs: Sequence[LogJob], duration: float) -> tuple[float, bool]:
    """Return the distance from an edge beyond which no job is missing, seconds, and whether some
    can be missing nevertheless.
    """
    lengths = sorted((job.run_s, job.nodes) for job in jobs if job.run_s is not None)
    if not lengths:
        return 0.0, False
    longest = lengths[-1][0]
    if longest <= MAX_CUT_FRACTION * duration:
        return longest, False
    total = sum(run * nodes for run, nodes in lengths)
    # For each length: the part of the longer jobs beyond it can be missing.
    total_missing, nodes_above = 0.0, 0
    for k in range(len(lengths) - 1, 0, -1):
        nodes_above += lengths[k][1]
        missing_node_s = nodes_above * (lengths[k][0] - lengths[k - 1][0])
        if total_missing + missing_node_s > MAX_MISSING_FRACTION * total:
            cut = lengths[k][0] - (MAX_MISSING_FRACTION * total - total_missing) / nodes_above
            return min(cut, MAX_CUT_FRACTION * duration), True
        total_missing += missing_node_s
    return min(lengths[0][0], MAX_CUT_FRACTION * duration), True


def _start(job: LogJob) -> float:
    return job.start_s or 0.0


def _time(seconds: float) -> str:
    if not math.isfinite(seconds) or seconds >= 2 * 86400:
        return f"{seconds / 86400:.1f} days"
    return f"{seconds / 3600:.1f} hours" if seconds >= 7200 else f"{seconds / 60:.0f} minutes"
