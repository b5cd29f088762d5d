"""Derives the idle nodes from a log of batch jobs, as a trace.

Decides on which nodes jobs ran if the log does not say so (SWF contains only the number of nodes):
a starting job takes the nodes that have been idle longest. The number of idle nodes at each instant
is exact for any choice. This choice makes the longest gaps as short as possible, so that the
harvest is not overestimated.

A node without a job counts as idle, because logs do not show which nodes are down, drained or
reserved.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from malletrain.sim.logged_jobs import JobLog, LogJob
from malletrain.sim.observation import MAX_MISSING_FRACTION, Observation, observe
from malletrain.sim.workloads import WorkloadError
from scavenger.trace.trace import Trace

Span = tuple[float, float, LogJob]
"""(start, end, job); times in seconds of the log."""


@dataclass(frozen=True)
class IdleNodes:
    """A trace of idle nodes, and how it was derived."""

    trace: Trace
    assumptions: tuple[str, ...]
    """Assumptions, as sentences for the reader of a report."""
    short_node_s: float = 0.0
    """Node-seconds of jobs beyond the number of nodes of the machine."""


def idle_nodes(
    log: JobLog, nodes: int | None = None, observed: Observation | None = None
) -> IdleNodes:
    """Return the idle nodes of the machine of ``log``.

    Args:
        log: jobs. A job that still ran when the log ended holds its nodes until the end.
        nodes: number of nodes of the machine. Default: as in the log; else the named nodes; else
            the maximum number used at once.
        observed: interval in which every job is known. Default: by the kind of log.

    Raises:
        WorkloadError: the log has no start times, names more nodes than ``nodes``, or no
            observation is left.
    """
    observed = observed or observe(log)
    begin, duration = observed.begin_s, observed.end_s - observed.begin_s
    spans = [
        (job.start_s, math.inf if job.run_s is None else job.start_s + job.run_s, job)
        for job in log.jobs
        if job.start_s is not None
    ]
    spans.sort(key=lambda span: span[0])
    assumptions = [
        *log.notes,
        *observed.sentences,
        "Nodes without a job count as idle: the log does not tell those that are down, drained "
        "or reserved.",
    ]
    named = [span for span in spans if span[2].names]
    used = _node_s(spans, begin, observed.end_s)
    unnamed = used - _node_s(named, begin, observed.end_s)
    if named and unnamed <= MAX_MISSING_FRACTION * used:
        if len(named) < len(spans):
            share = 100 * unnamed / max(used, 1.0)
            assumptions.append(
                f"{len(spans) - len(named)} jobs are left out, with {share:.1f} % "
                "of the node-hours in use: the log does not say which nodes they had."
            )
        trace = _named(named, begin, duration, nodes, assumptions)
        return IdleNodes(trace, tuple(assumptions))
    trace, short = _packed(spans, begin, duration, nodes or log.nodes, assumptions)
    if short:
        assumptions.append(
            f"The log uses more nodes than the machine has for {short / 3600:.1f} node-hours; "
            "these are left out."
        )
    return IdleNodes(trace, tuple(assumptions), short)


def require_time(trace: Trace) -> None:
    """Raise WorkloadError if the duration of the trace is 0."""
    if trace.duration_s <= 0:
        raise WorkloadError(
            "The trace lasts no time: it ends with its last event, and all are at one time. Add "
            "the event with which the observation ends, such as a node that becomes busy."
        )


def _node_s(spans: Sequence[Span], begin: float, end: float) -> float:
    """Return the node-seconds of jobs between two times."""
    return sum(
        (min(stop, end) - max(start, begin)) * job.nodes
        for start, stop, job in spans
        if stop > begin and start < end
    )


def _named(
    spans: Sequence[Span], begin: float, duration: float, nodes: int | None, assumptions: list[str]
) -> Trace:
    busy: dict[str, list[tuple[float, float]]] = {}
    for start, end, job in spans:
        for name in job.names:
            busy.setdefault(name, []).append((start - begin, end - begin))
    names = sorted(busy)
    if nodes is not None:
        if nodes < len(names):
            raise WorkloadError(f"The log names {len(names)} nodes, more than the {nodes} given.")
        names += [f"unseen-{k + 1}" for k in range(nodes - len(names))]
        assumptions.append(
            f"{nodes - len(busy)} nodes that no job of the log used count as idle throughout."
        )
    else:
        assumptions.append("Nodes that no job of the log used are not counted at all.")
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


def _packed(
    spans: Sequence[Span], begin: float, duration: float, size: int | None, assumptions: list[str]
) -> tuple[Trace, float]:
    assumptions.append(
        "The log does not say which nodes jobs used: a starting job takes the nodes idle "
        "longest, so that no gap is flattered."
    )
    if size is None:
        size = _peak_nodes(spans)
        assumptions.append(
            f"The log does not say how large the machine is: it has the {size} nodes that were "
            "used at once at most."
        )
    free = deque((k, -math.inf) for k in range(size))
    ends: list[tuple[float, int, list[int]]] = []
    node, gap_from, gap_to, short = [], [], [], 0.0
    for number, (start, end, job) in enumerate(spans):
        while ends and ends[0][0] <= start:
            when, _, released = heapq.heappop(ends)
            free.extend((k, when - begin) for k in released)
        job_nodes = []
        for _ in range(min(job.nodes, len(free))):
            k, since = free.popleft()
            job_nodes.append(k)
            if start - begin > since:
                node.append(k)
                gap_from.append(since)
                gap_to.append(start - begin)
        within = min(end, begin + duration) - max(start, begin)
        short += (job.nodes - len(job_nodes)) * max(0.0, within)
        heapq.heappush(ends, (end, number, job_nodes))
    for when, _, released in ends:
        free.extend((k, when - begin) for k in released if when < math.inf)
    for k, since in free:
        node.append(k)
        gap_from.append(since)
        gap_to.append(max(since, duration))
    width = len(str(size))
    return Trace.from_gaps(
        node, gap_from, gap_to, [f"n{k + 1:0{width}d}" for k in range(size)], duration
    ), short


def _peak_nodes(spans: Sequence[Span]) -> int:
    steps = sorted(
        [(start, 1, job.nodes) for start, _, job in spans]
        + [(end, 0, -job.nodes) for _, end, job in spans]
    )
    peak = in_use = 0
    for _, _, change in steps:
        in_use += change
        peak = max(peak, in_use)
    return peak
