"""Number of nodes that jobs occupy over time, from a log that does not name the nodes. Pure.

Jobs that have their nodes alone occupy as many nodes as the log says. Jobs that hold fewer CPUs
than their nodes have can share nodes, so that only bounds are known: the most, if each job is on
nodes of its own, and the fewest, if the jobs share nodes as far as their CPUs allow.

If even the fewest exceed the size of the machine at some time, the jobs that run then count as
jobs that share their nodes with any number of others: either they do, or times of the log overlap.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from malletrain.sim.logged_jobs import JobLog, LogJob
from malletrain.sim.observation import MAX_MISSING_FRACTION, Observation

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]


class JobSpan(NamedTuple):
    """A job and when it ran, seconds of the log."""

    start: float
    end: float
    job: LogJob


@dataclass(frozen=True)
class Occupancy:
    """Occupied nodes as step functions; ``most`` and ``fewest`` have a value for each interval
    between two ``edges``.
    """

    edges: Floats
    """Seconds of the log."""
    most: Integers
    """Occupied nodes if each job is on nodes of its own."""
    fewest: Integers
    """Occupied nodes if jobs share nodes as far as they can."""
    partial_jobs: int
    """Number of jobs that hold fewer CPUs than their nodes have."""
    partial_node_s: float
    """Their node-seconds."""
    conflicting_jobs: int
    """Number of jobs at times when even the fewest occupied nodes exceed the machine."""

    def node_s(self, values: Integers) -> float:
        """Return the integral of a step function with these edges."""
        return float((values * np.diff(self.edges)).sum())

    def peak(self, values: Integers) -> tuple[int, float, float]:
        """Return the maximum of a step function with these edges, when it is first reached
        (seconds of the log), and for how long in total, seconds.
        """
        if not len(values):
            return 0, 0.0, 0.0
        at = int(np.argmax(values))
        lasts = float(np.diff(self.edges)[values == values[at]].sum())
        return int(values[at]), float(self.edges[at]), lasts


def cpus_of(job: LogJob) -> int:
    """Return the CPUs of a job on all its nodes; 0 if it has its nodes alone, or the log does not
    say what it holds.
    """
    cpus = job.allocated.cpus if job.allocated is not None else 0
    return cpus + sum(part.cpus for part in job.per_node)


def lists_cpus(jobs: Iterable[LogJob]) -> bool:
    """Return whether the log says of any job how many CPUs it holds."""
    return any(cpus_of(job) for job in jobs)


def spans_of(log: JobLog) -> list[JobSpan]:
    """Return when the jobs of a log ran, in order of their starts. A job that still ran when the
    log ended has no end (infinity); jobs without a start are left out.
    """
    spans = [
        JobSpan(job.start_s, math.inf if job.run_s is None else job.start_s + job.run_s, job)
        for job in log.jobs
        if job.start_s is not None
    ]
    return sorted(spans, key=lambda span: span.start)


def node_seconds(spans: Iterable[JobSpan], observed: Observation) -> float:
    """Return the node-seconds of jobs in an observation."""
    return sum(
        (min(end, observed.end_s) - max(start, observed.begin_s)) * job.nodes
        for start, end, job in spans
        if end > observed.begin_s and start < observed.end_s
    )


def names_nodes(spans: Sequence[JobSpan], observed: Observation) -> bool:
    """Return whether a log says which nodes jobs had: of all jobs but those with at most the
    fraction :data:`malletrain.sim.observation.MAX_MISSING_FRACTION` of the node-hours.
    """
    unnamed = [span for span in spans if not span.job.names]
    missing_s = node_seconds(unnamed, observed)
    return len(unnamed) < len(spans) and missing_s <= MAX_MISSING_FRACTION * node_seconds(
        spans, observed
    )


@dataclass(frozen=True)
class NodeCpus:
    """The CPUs of a node of a machine whose log does not name nodes."""

    count: int
    """Their number."""
    ground: str
    """How it is known, for a sentence."""
    is_inferred: bool
    """Whether it follows from what jobs hold, so that nodes may have more."""


def cpus_of_a_node(log: JobLog, spans: Sequence[JobSpan], stated: int | None) -> NodeCpus | None:
    """Return the CPUs of a node; None if the log lists no CPUs of jobs.

    Args:
        log: the log.
        spans: its jobs.
        stated: CPUs of a node as somebody states them, which precedes the log; None if nobody does.
    """
    shares = [-(-cpus_of(span.job) // span.job.nodes) for span in spans if cpus_of(span.job)]
    if not shares:
        return None
    if stated is not None:
        return NodeCpus(stated, "as stated", is_inferred=False)
    if log.cpus_per_node is not None:
        return NodeCpus(log.cpus_per_node, log.cpus_ground, log.cpus_inferred)
    ground = "the most that a job holds on a node; else: --cpus-per-node"
    return NodeCpus(max(shares), ground, is_inferred=True)


def occupancy(
    spans: Sequence[JobSpan],
    begin: float,
    end: float,
    *,
    size: int | None,
    cpus_per_node: int | None,
) -> Occupancy:
    """Return how many nodes are occupied in an interval.

    Args:
        spans: the jobs.
        begin: begin of the interval, seconds of the log.
        end: its end.
        size: number of nodes of the machine; None if unknown.
        cpus_per_node: CPUs of a node; None if jobs have their nodes alone as far as is known.
    """
    inside = [span for span in spans if span.end > begin and span.start < end]
    start = np.array([max(span.start, begin) for span in inside])
    stop = np.array([min(span.end, end) for span in inside])
    nodes = np.array([span.job.nodes for span in inside], dtype=np.int64)
    cpus = np.array([cpus_of(span.job) for span in inside], dtype=np.int64)
    partial = np.zeros(len(inside), dtype=np.bool_)
    if cpus_per_node is not None:
        partial = (cpus > 0) & (cpus < nodes * cpus_per_node)
    edges = np.unique(np.concatenate([[begin, end], start, stop]))
    most = _sum(edges, start, stop, nodes)
    partial_cpus = np.where(partial, cpus, 0)
    fewest = _fewest(edges, start, stop, nodes, partial, partial_cpus, cpus_per_node or 1)
    conflicting = np.zeros(len(inside), dtype=np.bool_)
    if size is not None and (fewest > size).any():
        conflicting = _running(edges, fewest > size, start, stop)
        partial_cpus[conflicting] = 0
        loose = partial | conflicting
        fewest = _fewest(edges, start, stop, nodes, loose, partial_cpus, cpus_per_node or 1)
    return Occupancy(
        edges,
        most,
        fewest,
        int(partial.sum()),
        float(((stop - start) * nodes)[partial].sum()),
        int(conflicting.sum()),
    )


def _sum(edges: Floats, start: Floats, stop: Floats, amounts: Integers) -> Integers:
    """Return the sum of the amounts of the running jobs in each interval."""
    changes = np.zeros(len(edges), dtype=np.int64)
    np.add.at(changes, np.searchsorted(edges, start), amounts)
    np.add.at(changes, np.searchsorted(edges, stop), -amounts)
    return np.cumsum(changes)[:-1]


def _fewest(
    edges: Floats,
    start: Floats,
    stop: Floats,
    nodes: Integers,
    sharing: Booleans,
    cpus: Integers,
    cpus_per_node: int,
) -> Integers:
    """Return the fewest occupied nodes in each interval: those of jobs that have theirs alone, and
    of the others what their CPUs fill, but at least the nodes of the largest.
    """
    alone = _sum(edges, start, stop, np.where(sharing, 0, nodes))
    if not sharing.any():
        return alone
    filled = -(-_sum(edges, start, stop, np.where(sharing, cpus, 0)) // cpus_per_node)
    largest = _largest(edges, start[sharing], stop[sharing], nodes[sharing])
    return np.asarray(alone + np.maximum(filled, largest), dtype=np.int64)


def _largest(edges: Floats, start: Floats, stop: Floats, nodes: Integers) -> Integers:
    """Return the number of nodes of the largest running job in each interval; 0 without a job."""
    order = np.argsort(start, kind="stable")
    first = np.searchsorted(edges, start[order]).tolist()
    last = np.searchsorted(edges, stop[order]).tolist()
    counts = nodes[order].tolist()
    result = np.zeros(len(edges) - 1, dtype=np.int64)
    running: list[tuple[int, int]] = []
    job = 0
    for k in range(len(result)):
        while job < len(first) and first[job] == k:
            heapq.heappush(running, (-counts[job], last[job]))
            job += 1
        while running and running[0][1] <= k:
            heapq.heappop(running)
        if running:
            result[k] = -running[0][0]
    return result


def _running(edges: Floats, times: Booleans, start: Floats, stop: Floats) -> Booleans:
    """Return which jobs run in one of the marked intervals."""
    before = np.concatenate([[0], np.cumsum(times)])
    first, last = np.searchsorted(edges, start), np.searchsorted(edges, stop)
    return np.asarray(before[last] > before[first], dtype=np.bool_)
