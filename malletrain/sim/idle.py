"""Derives the idle nodes from a log of batch jobs, as a trace.

If the log names the nodes of jobs, a node is idle while no job is on it, and the trace is exact.

Some logs contain only the number of nodes (SWF; sacct without NodeList). Then the number of idle
nodes is exact at each time if every job had its nodes alone. Jobs that hold fewer CPUs than their
nodes have may have shared nodes; :mod:`malletrain.sim.occupancy` gives the bounds. The trace has
the fewest idle nodes within the bounds. Decides on which nodes jobs ran: a starting job takes the
nodes that have been idle longest, which makes the longest gaps as short as possible, so that the
harvest is not overestimated. A job that finds too few nodes gets the next ones that other jobs
free.

A node without a job counts as idle, because logs do not show which nodes are down, drained or
reserved.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import numpy as np

from malletrain.protocol.counting import counted
from malletrain.sim.logged_jobs import JobLog
from malletrain.sim.observation import MAX_MISSING_FRACTION, Observation, observe
from malletrain.sim.occupancy import (
    JobSpan,
    NodeCpus,
    Occupancy,
    cpus_of_a_node,
    names_nodes,
    node_seconds,
    occupancy,
    spans_of,
)
from malletrain.sim.workloads import WorkloadError
from scavenger.trace.trace import Trace

MAX_EDGE_FRACTION = 0.25
"""Maximum fraction of the observation for which a node that is there may have no job at an edge,
unless the report names it.
"""

MIN_EMPTY_S = 3600.0
"""Minimum time without any job that the report names, seconds."""

FIRST_YEAR = 1980
"""No log is older. One that begins at 0, in 1970, has no dates."""


@dataclass(frozen=True)
class IdleBounds:
    """What is known of the idle node-seconds of a machine."""

    least_node_s: float
    """Idle node-seconds if each job was on nodes of its own."""
    most_node_s: float
    """Idle node-seconds if jobs shared nodes as far as they could."""
    cpus_inferred: bool = False
    """Whether this depends on CPUs of a node that follow from what jobs hold. If nodes have more,
    jobs could share more of them.
    """

    @property
    def exact(self) -> bool:
        """Whether the number is known: both are the same, and depend on no inferred CPUs."""
        return self.equal and not self.cpus_inferred

    @property
    def equal(self) -> bool:
        """Whether both are the same."""
        return math.isclose(self.least_node_s, self.most_node_s, rel_tol=1e-9, abs_tol=1e-3)

    def to_dict(self) -> dict[str, float | bool]:
        """Return plain values for JSON."""
        return {
            "least_node_hours": self.least_node_s / 3600.0,
            "most_node_hours": self.most_node_s / 3600.0,
            "exact": self.exact,
            "cpus_inferred": self.cpus_inferred,
        }


@dataclass(frozen=True)
class IdleNodes:
    """A trace of idle nodes, and how it was derived."""

    trace: Trace
    """The idle nodes; within the bounds those of ``least_node_s``, except jobs left out because
    the log does not name their nodes.
    """
    assumptions: tuple[str, ...]
    """Assumptions, as sentences for the reader of a report."""
    bounds: IdleBounds
    """What is known of the number of idle nodes."""
    is_named: bool
    """Whether the log names the nodes of jobs."""
    cpus_per_node: int | None = None
    """CPUs of a node that the bounds assume; None if the log names nodes or lists no CPUs."""
    short_node_s: float = 0.0
    """Node-seconds of jobs beyond the number of nodes of the machine."""


def idle_nodes(
    log: JobLog,
    nodes: int | None = None,
    observed: Observation | None = None,
    *,
    nodes_ground: str = "as stated",
    cpus_per_node: int | None = None,
) -> IdleNodes:
    """Return the idle nodes of the machine of ``log``.

    Args:
        log: jobs. A job that still ran when the log ended holds its nodes until the end.
        nodes: number of nodes of the machine. Default: as in the log; else the named nodes; else
            the maximum number used at once.
        observed: interval in which every job is known. Default: by the kind of log.
        nodes_ground: how ``nodes`` is known, for a sentence.
        cpus_per_node: CPUs of a node, for logs that do not name nodes. Default: as in the log;
            else the most that a job holds on a node.

    Raises:
        WorkloadError: the log has no start times, names more nodes than ``nodes``, or no
            observation is left.
    """
    observed = observed or observe(log)
    spans = spans_of(log)
    assumptions = [
        *log.notes,
        *observed.sentences,
        *_unstarted_sentences(log, spans),
        *_endless_sentences(spans, observed),
        "Nodes without a job count as idle: the log does not tell those that are down, drained "
        "or reserved.",
    ]
    result = _derived(log, spans, observed, (nodes, nodes_ground), cpus_per_node, assumptions)
    empty = _empty_sentences(log, spans, observed, result.trace)
    return replace(result, assumptions=(*result.assumptions, *empty))


def _derived(
    log: JobLog,
    spans: Sequence[JobSpan],
    observed: Observation,
    stated: tuple[int | None, str],
    cpus_per_node: int | None,
    assumptions: list[str],
) -> IdleNodes:
    """Return the idle nodes, of a log with or without names of nodes."""
    nodes, nodes_ground = stated
    begin, duration = observed.begin_s, observed.end_s - observed.begin_s
    named = [span for span in spans if span.job.names]
    unnamed = [span for span in spans if not span.job.names]
    if names_nodes(spans, observed):
        trace = _named(named, begin, duration, nodes, nodes_ground, assumptions)
        idle_s = float(trace.gaps().length.sum())
        least_s = idle_s
        if unnamed:
            least_s -= _taken_s(trace, unnamed, begin)
            unnamed_s, used_s = (node_seconds(each, observed) for each in (unnamed, spans))
            share = 100 * unnamed_s / max(used_s, 1.0)
            assumptions.append(
                f"{counted(len(unnamed), 'job')} {'is' if len(unnamed) == 1 else 'are'} left out, "
                f"with {share:.1f} % "
                "of the node-hours in use: the log does not say which nodes they had. With them "
                f"{(idle_s - least_s) / 3600:,.1f} node-hours less would be idle at most."
            )
        return IdleNodes(trace, tuple(assumptions), IdleBounds(least_s, idle_s), is_named=True)
    return _without_names(log, spans, observed, stated, cpus_per_node, assumptions)


def _unstarted_sentences(log: JobLog, spans: Sequence[JobSpan]) -> list[str]:
    """Return a sentence about jobs that ran, and of which the log does not say when."""
    missing = len(log.jobs) - len(spans)
    if not missing:
        return []
    are, they, their = ("is", "it", "Its") if missing == 1 else ("are", "they", "Their")
    return [
        f"{counted(missing, 'job')} {are} left out: the log does not say when {they} started. "
        f"{their} nodes look idle."
    ]


def _endless_sentences(spans: Sequence[JobSpan], observed: Observation) -> list[str]:
    """Return a sentence about jobs that have no end although they run longer than any that ended.
    Accounting that missed the end of a job lists it as running for ever (Slurm's "runaway jobs").
    """
    longest_s = max((span.end - span.start for span in spans if span.end < math.inf), default=None)
    if longest_s is None:
        return []
    endless = [
        span for span in spans if span.end == math.inf and observed.end_s - span.start > longest_s
    ]
    if not endless:
        return []
    hours = node_seconds(endless, observed) / 3600
    jobs, run, count, ends = f"{len(endless):,} jobs have", "run", "they count", "their ends"
    if len(endless) == 1:
        jobs, run, count, ends = "1 job has", "runs", "it counts", "its end"
    return [
        f"{jobs} no end in the log and {run} longer than any that ended "
        f"({longest_s / 86400:.1f} days): {count} as running, with {hours:,.0f} node-hours. If "
        f"the accounting has missed {ends} (sacctmgr show runawayjobs lists such jobs of "
        "Slurm), more nodes were idle."
    ]


def _empty_sentences(
    log: JobLog, spans: Sequence[JobSpan], observed: Observation, trace: Trace
) -> list[str]:
    """Return a sentence about times without any job: the machine may have been closed."""
    empty, until = [], observed.begin_s
    for start, end in [*((span.start, span.end) for span in spans), (observed.end_s, math.inf)]:
        start = min(start, observed.end_s)
        if start - until >= MIN_EMPTY_S:
            empty.append((start - until, until))
        until = max(until, end)
    if not empty:
        return []
    empty_s = sum(length for length, _ in empty)
    share = empty_s * len(trace.names) / max(float(trace.gaps().length.sum()), 1.0)
    if share <= MAX_MISSING_FRACTION:
        return []
    length, begin = max(empty)
    return [
        f"No job ran at all for {empty_s / 3600:,.1f} hours (times of an hour or more), with "
        f"{100 * share:.0f} % of the idle node-hours; the longest time is of {length / 3600:,.1f} "
        f"hours, from {_date(log, begin)}. If the machine was closed then, as for maintenance, "
        "fewer nodes were idle (else choose a time by --from and --to)."
    ]


def _date(log: JobLog, seconds: float) -> str:
    """Return a time of a log as a date, or since its first submission if its dates are unknown.
    Headers may state 0 for that, or a number in another unit.
    """
    try:
        when = datetime.fromtimestamp(log.zero + seconds) if log.zero else None
    except (OSError, OverflowError, ValueError):
        when = None
    if when is None or when.year < FIRST_YEAR:
        return f"{seconds / 86400:.1f} days after the first submission"
    return f"{when:%Y-%m-%d %H:%M}"


def require_time(trace: Trace) -> None:
    """Raise WorkloadError if the duration of the trace is 0."""
    if trace.duration_s <= 0:
        raise WorkloadError(
            "The trace lasts no time: it ends with its last event, and all are at one time. Add "
            "the event with which the observation ends, such as a node that becomes busy."
        )


def _taken_s(trace: Trace, spans: Sequence[JobSpan], begin: float) -> float:
    """Return the idle node-seconds of a trace that jobs of unknown nodes could have had."""
    used = occupancy(spans, begin, begin + trace.duration_s, size=None, cpus_per_node=None)
    times, counts = trace.idle_count()
    edges = np.union1d(np.append(times, trace.duration_s), used.edges - begin)
    starts = edges[:-1]
    idle = counts[np.searchsorted(times, starts, side="right") - 1]
    taken = used.most[np.searchsorted(used.edges - begin, starts, side="right") - 1]
    return float((np.minimum(idle, taken) * np.diff(edges)).sum())


def _named(
    spans: Sequence[JobSpan],
    begin: float,
    duration: float,
    nodes: int | None,
    nodes_ground: str,
    assumptions: list[str],
) -> Trace:
    busy: dict[str, list[tuple[float, float]]] = {}
    for start, end, job in spans:
        for name in job.names:
            busy.setdefault(name, []).append((start - begin, end - begin))
    names = sorted(busy)
    if nodes is not None:
        if nodes < len(names):
            raise WorkloadError(
                f"The log names {counted(len(names), 'node')}, more than the {nodes} given."
            )
        unused = nodes - len(busy)
        names += [f"unseen-{k + 1}" for k in range(unused)]
        assumptions.append(
            f"The machine has {counted(nodes, 'node')}, {nodes_ground}. {counted(unused, 'node')} "
            f"that no job of the log used {'counts' if unused == 1 else 'count'} as idle "
            "throughout."
        )
    else:
        assumptions.append(
            f"The machine is taken to have the {counted(len(names), 'node')} that the log names. "
            "Nodes that no job of the log used are not counted at all (else: --nodes)."
        )
    assumptions += _partly_present(busy, duration)
    node, gap_from, gap_to = [], [], []
    for k, name in enumerate(names):
        free_since = -math.inf
        for start, end in sorted(busy.get(name, ())):
            if start > free_since:
                node.append(k)
                gap_from.append(free_since)
                gap_to.append(start)
            free_since = max(free_since, end)
        node.append(k)
        gap_from.append(free_since)
        gap_to.append(max(duration, free_since))
    return Trace.from_gaps(node, gap_from, gap_to, names, duration)


def _partly_present(
    busy: Mapping[str, Sequence[tuple[float, float]]], duration: float
) -> list[str]:
    """Return a sentence about nodes that have no job for long at an edge of the observation: they
    may not have existed then, or had another name.

    Args:
        busy: node → (start, end) of its jobs, seconds of the observation.
        duration: length of the observation, seconds.
    """
    edge_s = MAX_EDGE_FRACTION * duration
    count, absent_s = 0, 0.0
    for jobs in busy.values():
        before_s = min(max(min(start for start, _ in jobs), 0.0), duration)
        after_s = min(max(duration - max(end for _, end in jobs), 0.0), duration - before_s)
        edges = [each for each in (before_s, after_s) if each > edge_s]
        count += bool(edges)
        absent_s += sum(edges)
    if absent_s <= MAX_MISSING_FRACTION * len(busy) * duration:
        return []
    return [
        f"{count:,} of the named nodes have no job in the first or last quarter of the time or "
        f"longer, and count as idle there, with {absent_s / 3600:,.0f} node-hours. If they were "
        "added, removed or renamed, fewer nodes were idle (else choose a time by --from and --to)."
    ]


def _without_names(
    log: JobLog,
    spans: Sequence[JobSpan],
    observed: Observation,
    stated: tuple[int | None, str],
    cpus_per_node: int | None,
    assumptions: list[str],
) -> IdleNodes:
    """Return the idle nodes of a log that does not name nodes."""
    assumptions.append(
        "The log does not say which nodes jobs used: a starting job takes the nodes idle "
        "longest, so that no gap is flattered."
    )
    cpus = cpus_of_a_node(log, spans, cpus_per_node)
    count = None if cpus is None else cpus.count
    size, sentence = _size(log, spans, stated, count)
    assumptions.append(sentence)
    begin, end = observed.begin_s, observed.end_s
    used = occupancy(spans, begin, end, size=size, cpus_per_node=count)
    least_s = used.node_s(np.maximum(size - used.most, 0))
    most_s = used.node_s(np.maximum(size - used.fewest, 0))
    short_s = used.node_s(np.maximum(used.most - size, 0))
    bounds = IdleBounds(least_s, most_s, cpus is not None and cpus.is_inferred)
    assumptions += _bounds_sentences(bounds, used, size, short_s, cpus)
    trace = _packed(spans, begin, end - begin, size)
    return IdleNodes(trace, tuple(assumptions), bounds, False, count, short_s)


def _size(
    log: JobLog, spans: Sequence[JobSpan], stated: tuple[int | None, str], cpus: int | None
) -> tuple[int, str]:
    """Return the number of nodes of the machine, and a sentence about how it is known."""
    if stated[0] is not None:
        return stated[0], f"The machine has {counted(stated[0], 'node')}, {stated[1]}."
    if log.nodes is not None:
        ground = log.nodes_ground or "as the log says"
        return log.nodes, f"The machine has {counted(log.nodes, 'node')}, {ground}."
    first, last = spans[0].start, spans[-1].start
    ends = [span.end for span in spans if span.end < math.inf]
    used = occupancy(spans, first, max([last + 1.0, *ends]), size=None, cpus_per_node=cpus)
    size, at, lasts = used.peak(used.fewest)
    on_fewer = float(np.diff(used.edges)[used.fewest <= 0.99 * size].sum())
    share = 100 * on_fewer / float(used.edges[-1] - used.edges[0])
    how = "that jobs used at once at most"
    if used.partial_jobs:
        how = "that jobs needed at once at most, if they shared nodes as far as their CPUs allow"
    return size, (
        f"The log does not say how large the machine is: it is taken to have the {size:,} nodes "
        f"{how}, {(at - first) / 86400:.1f} days after the first start and for "
        f"{lasts / 3600:.1f} hours in all; {share:.0f} % of the time jobs used at least 1 % fewer. "
        "Nodes that were never used then are not counted (else: --nodes)."
    )


def _bounds_sentences(
    bounds: IdleBounds,
    used: Occupancy,
    size: int,
    short_s: float,
    cpus: NodeCpus | None,
) -> list[str]:
    """Return what is known of the number of idle nodes, and why not more."""
    machine_s = size * float(used.edges[-1] - used.edges[0])
    sentences = []
    if short_s:
        sentences.append(
            f"The log uses more nodes than the machine has for {short_s / 3600:.1f} node-hours; "
            "these are left out."
        )
    if bounds.equal:
        alone = "no job of the log is known to have shared its nodes"
        if used.partial_jobs or used.conflicting_jobs:
            alone = "sharing of nodes, as far as it was possible, would have freed none"
        provided = ""
        if cpus is not None and cpus.is_inferred:
            provided = f" if no node has more than {cpus.count} CPUs ({cpus.ground})"
        sentences.append(f"The number of idle nodes is exact{provided}: {alone}.")
        return sentences
    low, high = (100 * each / machine_s for each in (bounds.least_node_s, bounds.most_node_s))
    reasons = []
    if used.partial_jobs and cpus is not None:
        share = 100 * used.partial_node_s / max(used.node_s(used.most), 1.0)
        reasons.append(
            f"{counted(used.partial_jobs, 'job')} with {share:.1f} % of the node-hours of jobs "
            f"{'holds' if used.partial_jobs == 1 else 'hold'} fewer "
            f"than the {cpus.count} CPUs of a node ({cpus.ground})"
        )
    if used.conflicting_jobs:
        reasons.append(
            f"{used.conflicting_jobs:,} jobs ran when more nodes were in use than there are: they "
            "shared nodes, or the times of the log overlap, or the machine is larger (--nodes)"
        )
    sentences.append(
        f"The number of idle nodes is known within bounds only, {low:.2f} to {high:.2f} % of the "
        f"machine ({bounds.least_node_s / 3600:,.0f} to {bounds.most_node_s / 3600:,.0f} "
        f"node-hours): {'; and '.join(reasons)}. The fewest count here, as if each job had been on "
        "nodes of its own."
    )
    return sentences


def _packed(spans: Sequence[JobSpan], begin: float, duration: float, size: int) -> Trace:
    """Return a trace on which each job has nodes of its own, as far as there are any."""
    free = deque((k, -math.inf) for k in range(size))
    nodes_of_job: dict[int, list[int]] = {}
    missing: dict[int, int] = {}
    ends: list[tuple[float, int]] = []
    node: list[int] = []
    gap_from: list[float] = []
    gap_to: list[float] = []

    def release(when: float) -> None:
        """Free the nodes of the jobs that end at a time; those that lack nodes get them first."""
        released: list[int] = []
        while ends and ends[0][0] <= when:
            _, number = heapq.heappop(ends)
            released += nodes_of_job.pop(number)
            missing.pop(number, None)
        while released and missing:
            number = next(iter(missing))
            got, released = released[: missing[number]], released[missing[number] :]
            nodes_of_job[number] += got
            missing[number] -= len(got)
            if not missing[number]:
                del missing[number]
        free.extend((k, when - begin) for k in released)

    for number, (start, end, job) in enumerate(spans):
        while ends and ends[0][0] <= start:
            release(ends[0][0])
        job_nodes = nodes_of_job[number] = []
        for _ in range(min(job.nodes, len(free))):
            k, since = free.popleft()
            job_nodes.append(k)
            if start - begin > since:
                node.append(k)
                gap_from.append(since)
                gap_to.append(start - begin)
        if len(job_nodes) < job.nodes:
            missing[number] = job.nodes - len(job_nodes)
        heapq.heappush(ends, (end, number))
    while ends and ends[0][0] < math.inf:
        release(ends[0][0])
    for k, since in free:
        node.append(k)
        gap_from.append(since)
        gap_to.append(max(since, duration))
    width = len(str(size))
    names = [f"n{k + 1:0{width}d}" for k in range(size)]
    return Trace.from_gaps(node, gap_from, gap_to, names, duration)
