"""Computes the use of leases: node-time by user, account, class of nodes and month, from the stored
leases, jobs and rescales (:mod:`malletrain.daemon.usage_rows` reads them). Pure.

Decides what counts as what. A leased node *trains* from the first sample of a round to its last.
From the decision to start a job to its first sample it is *starting*. From the last sample before a
rescale to the first after it is *rescaling*; if the rescale followed from a preemption, that time
is *lost* to it. Nodes of a job that never reports a sample, such as a function or a script without
:func:`malletrain.report`, are *silent*. The rest of a lease is *unused*. The nodes of a pause are
those of the round after it. Months are UTC.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from calendar import timegm
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from malletrain.store.records import STARTED, RescaleRow

LOST = "loss"
JOULES_PER_KWH = 3.6e6


class NodePower(NamedTuple):
    """Power of a node without a job and with one, watts."""

    idle: float
    """Power without a job, watts."""
    busy: float
    """Power with a job, watts."""


class Key(NamedTuple):
    """Key of the sums."""

    month: str
    """``2026-11``."""
    user: str
    """Owner of the leases or jobs."""
    node_class: str
    """Class of the nodes."""
    account: str = ""
    """Account of the owner; empty if there is none."""


@dataclass(frozen=True)
class Usage:
    """Node-seconds."""

    leased: float = 0.0
    """Time for which nodes were leased."""
    trained: float = 0.0
    """Time in training."""
    starting: float = 0.0
    """Time from the decision to start a job to its first sample."""
    rescaling: float = 0.0
    """Time without samples in rescales."""
    lost: float = 0.0
    """Time without samples in rescales after preemptions."""
    silent: float = 0.0
    """Time of jobs that report no samples."""
    samples: float = 0.0
    """Number of samples processed."""

    @property
    def busy(self) -> float:
        """Node-seconds with a job."""
        return self.trained + self.starting + self.rescaling + self.lost + self.silent

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, n) + getattr(other, n) for n in self.__dataclass_fields__))

    def kwh(self, power: NodePower) -> float:
        """Return the energy of nodes with this power, kWh."""
        busy = min(self.busy, self.leased)
        return (busy * power.busy + (self.leased - busy) * power.idle) / JOULES_PER_KWH


class LeasedSpan(NamedTuple):
    """One node held from ``begin`` to ``end``, epoch seconds."""

    user: str
    """Owner of the lease."""
    node_class: str
    """Class of the node."""
    begin: float
    end: float
    account: str = ""
    """Account of the owner; empty if there is none."""


@dataclass(frozen=True)
class JobHistory:
    """History of one job. Times are in epoch seconds."""

    user: str
    """Owner of the job."""
    rescales: Sequence[RescaleRow]
    """Rescales that led to a first sample, oldest first."""
    stops: Sequence[float]
    """Times of its suspensions and of its end (now if it has not ended), oldest first."""
    classes: Sequence[tuple[float, str]]
    """(time, class of the nodes from then on), oldest first."""
    samples: float = 0.0
    """Number of samples processed so far."""
    account: str = ""
    """Account of the owner; empty if there is none."""
    moves: Sequence[tuple[float, int]] = ()
    """(time, number of nodes from then on), oldest first."""


def usage(
    leases: Iterable[LeasedSpan], jobs: Iterable[JobHistory], since: float, until: float
) -> dict[Key, Usage]:
    """Return the sums over a period. Samples of a job are distributed over the time in which it
    trained.

    Args:
        leases: time for which each node was leased.
        jobs: histories of the jobs.
        since: start of the period, epoch seconds.
        until: end of the period, epoch seconds.

    """
    usage_: dict[Key, Usage] = {}

    def add(key: Key, more: Usage) -> None:
        usage_[key] = usage_.get(key, Usage()) + more

    for lease in leases:
        for month, seconds in by_month(max(lease.begin, since), min(lease.end, until)):
            key = Key(month, lease.user, lease.node_class, lease.account)
            add(key, Usage(leased=seconds))
    for job in jobs:
        spans = list(spans_of(job))
        work = sum(n * (end - begin) for kind, n, begin, end in spans if kind == "trained")
        for kind, nodes, begin, end in spans:
            node_class = class_at(job.classes, begin if kind == "trained" else end)
            for month, seconds in by_month(max(begin, since), min(end, until)):
                more = replace(Usage(), **{kind: nodes * seconds})
                if kind == "trained":
                    more = replace(more, samples=job.samples * nodes * seconds / work)
                add(Key(month, job.user, node_class, job.account), more)
    return usage_


def spans_of(job: JobHistory) -> Iterator[tuple[str, int, float, float]]:
    """Yield (field of Usage, nodes, begin, end) for each span in which the job held nodes."""
    rows = job.rescales
    if not any(row.ended is not None for row in rows):
        for number, (begin, nodes) in enumerate(job.moves):
            ends = [stop for stop in job.stops if stop >= begin][:1]
            ends += [at for at, _ in job.moves[number + 1 : number + 2]]
            if (end := min(ends, default=begin)) > begin:
                yield "silent", nodes, begin, end
        return
    for number, row in enumerate(rows):
        if row.ended is None:
            continue
        cost_s = row.cost_s or 0.0
        pause = "starting" if row.kind == STARTED else "lost" if row.kind == LOST else "rescaling"
        if cost_s > 0:
            yield pause, row.to_nodes, row.ended - cost_s, row.ended
        ends = [stop for stop in job.stops if stop >= row.ended][:1]
        if number + 1 < len(rows) and (after := rows[number + 1]).ended is not None:
            ends.append(after.ended - (after.cost_s or 0.0))
        end = min(ends, default=row.ended)
        if end > row.ended:
            yield "trained", row.to_nodes, row.ended, end


def class_at(classes: Sequence[tuple[float, str]], at: float) -> str:
    """Return the class of the nodes on which a job ran at a time."""
    index = bisect_right([since for since, _ in classes], at) - 1
    return classes[max(index, 0)][1] if classes else "default"


def by_month(begin: float, end: float) -> Iterator[tuple[str, float]]:
    """Yield (month, seconds in it) for each month of a span of time."""
    while begin < end:
        year, month = time.gmtime(begin)[:2]
        following = timegm((year + month // 12, month % 12 + 1, 1, 0, 0, 0))
        to = min(end, float(following))
        yield f"{year}-{month:02d}", to - begin
        begin = to


def kwh_of(sums: Mapping[Key, Usage], watts: Mapping[str, NodePower]) -> dict[Key, float]:
    """Return key → energy in kWh, for classes with a known power."""
    return {
        key: each.kwh(watts[key.node_class])
        for key, each in sums.items()
        if key.node_class in watts
    }
