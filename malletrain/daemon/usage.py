"""What leases were used for: node-time by user, account, class of nodes and month, from the stored
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


class Drawn(NamedTuple):
    """What a node draws, watts: without a job, and with one."""

    idle: float
    busy: float


class Key(NamedTuple):
    """What sums are kept by."""

    month: str
    """``2026-11``."""
    user: str
    node_class: str
    account: str = ""


@dataclass(frozen=True)
class Usage:
    """Node-seconds."""

    leased: float = 0.0
    trained: float = 0.0
    starting: float = 0.0
    rescaling: float = 0.0
    lost: float = 0.0
    silent: float = 0.0
    samples: float = 0.0

    @property
    def busy(self) -> float:
        """Those with a job."""
        return self.trained + self.starting + self.rescaling + self.lost + self.silent

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, n) + getattr(other, n) for n in self.__dataclass_fields__))

    def kwh(self, drawn: Drawn) -> float:
        """Energy of nodes that draw so much."""
        busy = min(self.busy, self.leased)
        return (busy * drawn.busy + (self.leased - busy) * drawn.idle) / JOULES_PER_KWH


class LeasedSpan(NamedTuple):
    """One node held from ``begin`` to ``end``, epoch seconds."""

    user: str
    node_class: str
    begin: float
    end: float
    account: str = ""


@dataclass(frozen=True)
class JobHistory:
    """What is known of one job. Times in epoch seconds."""

    user: str
    rescales: Sequence[RescaleRow]
    """Those that came to a first sample, oldest first."""
    stops: Sequence[float]
    """When it was suspended, and when it ended or was looked at last; oldest first."""
    classes: Sequence[tuple[float, str]]
    """Since when it was on nodes of which class, oldest first."""
    samples: float = 0.0
    account: str = ""
    moves: Sequence[tuple[float, int]] = ()
    """Since when it had so many nodes, oldest first."""


def usage(
    leases: Iterable[LeasedSpan], jobs: Iterable[JobHistory], since: float, until: float
) -> dict[Key, Usage]:
    """The sums over ``since`` to ``until``, epoch seconds. Samples of a job are shared out over the
    time in which it trained.
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
    """(field of Usage, nodes, begin, end) of each time in which the job held nodes."""
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
    """The class of the nodes on which a job was."""
    index = bisect_right([since for since, _ in classes], at) - 1
    return classes[max(index, 0)][1] if classes else "default"


def by_month(begin: float, end: float) -> Iterator[tuple[str, float]]:
    """(month, seconds of it) of a span of time; nothing when it is empty."""
    while begin < end:
        year, month = time.gmtime(begin)[:2]
        following = timegm((year + month // 12, month % 12 + 1, 1, 0, 0, 0))
        to = min(end, float(following))
        yield f"{year}-{month:02d}", to - begin
        begin = to


def kwh_of(sums: Mapping[Key, Usage], watts: Mapping[str, Drawn]) -> dict[Key, float]:
    """Energy by key, of the classes of which it is known what their nodes draw."""
    return {
        key: each.kwh(watts[key.node_class])
        for key, each in sums.items()
        if key.node_class in watts
    }
