"""Jobs that share nodes with others, or could: how many, and what is idle beside them.

Decides which jobs count as sharing: those that hold fewer CPUs than their nodes have, and those
that run on a node at the same time as another job.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from malletrain.assess.hosts import Hosts, MachineUse, states
from malletrain.sim.idle import IdleNodes
from malletrain.sim.logged_jobs import JobLog
from malletrain.sim.observation import Observation
from malletrain.sim.occupancy import (
    JobSpan,
    cpus_of,
    lists_cpus,
    node_seconds,
    occupancy,
    spans_of,
)


@dataclass(frozen=True)
class SharingReport:
    """Jobs that share nodes, and what is idle beside them."""

    jobs: int
    """Number of jobs that hold fewer CPUs than their nodes, or overlap with others on a node."""
    all_jobs: int
    """Number of jobs in the observation."""
    node_hours: float
    """Node-hours of the sharing jobs, each counted with all its nodes."""
    fraction_of_used: float
    """The same as a fraction of the node-hours of all jobs."""
    idle_cpu_hours: float | None
    """CPU-hours that are idle on nodes with jobs; None if the log lists no CPUs. The most possible
    if the log does not name nodes.
    """
    is_named: bool
    """Whether the log names the nodes of jobs."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "jobs": self.jobs,
            "node_hours": self.node_hours,
            "fraction_of_used_node_hours": self.fraction_of_used,
            "idle_cpu_hours_beside_jobs": self.idle_cpu_hours,
        }

    def sentences(self, counts_slots: bool) -> list[str]:
        """Return what sharing means for leases.

        Args:
            counts_slots: whether the report counts what leases of slots could hold.
        """
        if not self.jobs:
            return []
        beside = ""
        if self.idle_cpu_hours is not None:
            most = "" if self.is_named else "Up to "
            beside = f" {most}{self.idle_cpu_hours:,.0f} CPU-hours were idle beside jobs."
        slots = (
            "what leases of slots could use of the rest is listed with the idle GPUs."
            if counts_slots
            else "leases of slots could use the rest. It is not counted here, because slots are "
            "counted by GPUs and the log lists none by node."
        )
        return [
            f"{self.jobs:,} of {self.all_jobs:,} jobs, with "
            f"{100 * self.fraction_of_used:.1f} % of the node-hours of jobs, share nodes with "
            f"other jobs or hold fewer CPUs than their nodes have.{beside} Leases of whole nodes "
            f"cannot use a node with such a job; {slots}"
        ]


def sharing_report(
    log: JobLog,
    observed: Observation,
    hosts: Hosts,
    available: IdleNodes,
    use: MachineUse | None,
) -> SharingReport:
    """Return which jobs share nodes.

    Args:
        log: the jobs.
        observed: interval that counts.
        hosts: what is stated about the hosts. Without it, a host has as many CPUs as its jobs
            held at once at most.
        available: the idle nodes of the same jobs.
        use: what these jobs hold on each host; None if the log does not name nodes or lists no
            CPUs.
    """
    spans = [
        span
        for span in spans_of(log)
        if span.end > observed.begin_s and span.start < observed.end_s
    ]
    if not available.is_named:
        return _without_names(spans, observed, available)
    named = [span for span in spans if span.job.names]
    sizes, idle_cpu_s = _named_cpus(use if lists_cpus(log.jobs) else None, hosts)
    sharing = _overlapping(named)
    for number, span in enumerate(named):
        cpus = cpus_of(span.job)
        if cpus and cpus < sum(sizes.get(name, 0) for name in span.job.names):
            sharing.add(number)
    return _report(spans, [named[k] for k in sorted(sharing)], observed, idle_cpu_s, is_named=True)


def _without_names(
    spans: Sequence[JobSpan], observed: Observation, available: IdleNodes
) -> SharingReport:
    cpus = available.cpus_per_node
    if cpus is None:
        return _report(spans, [], observed, None, is_named=False)
    sharing = [s for s in spans if 0 < cpus_of(s.job) < cpus * s.job.nodes]
    used = occupancy(sharing, observed.begin_s, observed.end_s, size=None, cpus_per_node=cpus)
    used_cpu_s = sum(_seconds(span, observed) * cpus_of(span.job) for span in sharing)
    on_nodes_s = used.node_s(np.minimum(used.most, len(available.trace.names)))
    idle_cpu_s = max(0.0, cpus * on_nodes_s - used_cpu_s)
    return _report(spans, sharing, observed, idle_cpu_s, is_named=False)


def _report(
    spans: Sequence[JobSpan],
    sharing: Sequence[JobSpan],
    observed: Observation,
    idle_cpu_s: float | None,
    *,
    is_named: bool,
) -> SharingReport:
    used_s, shared_s = (node_seconds(each, observed) for each in (spans, sharing))
    return SharingReport(
        len(sharing),
        len(spans),
        shared_s / 3600.0,
        shared_s / used_s if used_s else 0.0,
        None if idle_cpu_s is None else idle_cpu_s / 3600.0,
        is_named,
    )


def _seconds(span: JobSpan, observed: Observation) -> float:
    return min(span.end, observed.end_s) - max(span.start, observed.begin_s)


def _overlapping(spans: Sequence[JobSpan]) -> set[int]:
    """Return the indices of the jobs that run on a node at the same time as another."""
    by_node: dict[str, list[tuple[float, float, int]]] = {}
    for number, span in enumerate(spans):
        for name in span.job.names:
            by_node.setdefault(name, []).append((span.start, span.end, number))
    sharing: set[int] = set()
    for jobs in by_node.values():
        jobs.sort()
        until, last = -math.inf, -1
        for start, end, number in jobs:
            if start < until:
                sharing |= {last, number}
            if end > until:
                until, last = end, number
    return sharing


def _named_cpus(use: MachineUse | None, hosts: Hosts) -> tuple[dict[str, int], float | None]:
    """Return the CPUs of each host, and the CPU-seconds idle on hosts while they have jobs; None if
    the log lists no CPUs.
    """
    if use is None:
        return {}, None
    sizes: dict[str, int] = {}
    idle_cpu_s = 0.0
    for host in use.hosts:
        edges, (jobs, whole, _, cpus, _) = states(use.of(host), use.duration_s)
        stated = hosts.of(host).cpus
        sizes[host] = int(cpus.max()) if stated is None else stated
        idle = np.where((jobs > 0) & (whole == 0), np.maximum(sizes[host] - cpus, 0), 0)
        idle_cpu_s += float((idle * np.diff(edges)).sum())
    return sizes, idle_cpu_s
