"""Computes the use of leases: node-time by user, account, class of nodes and month, from the stored
leases, jobs and rescales.

Decides what counts as what. A leased node *trains* from the first sample of a round to its last.
From the decision to start a job to its first sample it is *starting*. From the last sample before a
rescale to the first after it is *rescaling*; if the rescale followed from a preemption, that time
is *lost* to it. Nodes of a job that never reports a sample, such as a function or a script without
:func:`malletrain.report`, are *silent*. The rest of a lease is *unused*. The nodes of a pause are
those of the round after it. Months are UTC.

The sums are pure; :func:`usage_views` reads the rows. It decides how many are read at a time,
because the history is long and other requests are answered in between.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from calendar import timegm
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import UsageView
from malletrain.store.history_table import HistoryTable
from malletrain.store.records import STARTED, JobRow, LeaseRow, RescaleRow

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


class ClassCharge(NamedTuple):
    """What an hour on a node of one class counts."""

    node_h: float
    """Charged node-hours."""
    gpus: int | None
    """GPUs of a slot; None for a whole node, whose GPUs are not known."""


MOVES = (EventKind.JOB_STARTED, EventKind.JOB_RESCALED)
"""Events at which the nodes of a job change."""
AT_ONCE = 50
"""Number of jobs or leases that are read and added up at a time."""
EVENTS_AT_ONCE = 500
"""Number of events that are read at a time."""


async def usage_views(
    history: HistoryTable,
    since: float,
    until: float,
    own_user: str,
    watts: Mapping[str, NodePower],
    owner: str | None,
    now: float,
    charges: Mapping[str, ClassCharge],
    whole_node: ClassCharge,
) -> list[UsageView]:
    """Return a row for each month, user, class of nodes and account, in that order.

    Args:
        history: tables of leases, jobs and rescales.
        since: start of the period, epoch seconds.
        until: end of the period, epoch seconds; unfinished leases and jobs count until then.
        own_user: owner of the leases without a named owner.
        watts: class of nodes → power of a node.
        owner: user whose leases and jobs are counted; None for all users.
        now: epoch seconds, not before ``until``; samples of running jobs count until then.
        charges: kind of slots → what an hour of a slot counts.
        whole_node: what an hour of a node of any other class counts.
    """
    sums: dict[Key, Usage] = {}
    classes: dict[str, str] = {}
    last = 0
    while leases := history.leases(since, until, owner, last, AT_ONCE):
        last = int(leases[-1].id[1:])
        classes.update((lease.node, lease.node_class) for lease in leases)
        _add(sums, usage(_spans(leases, until, own_user), (), since, until))
        await asyncio.sleep(0)
    last = 0
    while jobs := history.jobs(since, until, owner, last, AT_ONCE):
        last = int(jobs[-1].id[1:])
        _add(sums, usage((), await _histories(history, jobs, classes, now), since, until))
        await asyncio.sleep(0)
    kwh = kwh_of(sums, watts)
    return [
        UsageView(
            key.month,
            key.user,
            key.node_class,
            each.leased / 3600.0,
            each.trained / 3600.0,
            each.starting / 3600.0,
            each.rescaling / 3600.0,
            each.lost / 3600.0,
            max(0.0, each.leased - each.busy) / 3600.0,
            each.samples,
            kwh.get(key),
            key.account,
            each.silent / 3600.0,
            *charged(each.leased / 3600.0, charges.get(key.node_class, whole_node)),
        )
        for key, each in sorted(sums.items())
    ]


def charged(hours: float, charge: ClassCharge) -> tuple[float, float | None]:
    """Return (charged node-hours, GPU-hours) of leased hours. GPU-hours are None if they are not
    known.
    """
    return hours * charge.node_h, None if charge.gpus is None else hours * charge.gpus


def _add(sums: dict[Key, Usage], more: Mapping[Key, Usage]) -> None:
    for key, each in more.items():
        sums[key] = sums.get(key, Usage()) + each


def _spans(leases: Sequence[LeaseRow], until: float, own_user: str) -> list[LeasedSpan]:
    return [
        LeasedSpan(
            lease.owner or own_user,
            lease.node_class,
            lease.started,
            until if lease.ended is None else lease.ended,
            lease.account,
        )
        for lease in leases
        if lease.started is not None
    ]


async def _histories(
    history: HistoryTable, jobs: Sequence[JobRow], classes: Mapping[str, str], now: float
) -> list[JobHistory]:
    ids = [row.id for row in jobs]
    rescales: defaultdict[str, list[RescaleRow]] = defaultdict(list)
    for rescale in history.rescales(ids):
        rescales[rescale.job].append(rescale)
    stops: defaultdict[str, list[float]] = defaultdict(list)
    classes_of: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    moves: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    last = 0
    while events := history.events(ids, (*MOVES, EventKind.JOB_SUSPENDED), last, EVENTS_AT_ONCE):
        last = events[-1].seq
        for event in events:
            if event.kind == EventKind.JOB_SUSPENDED:
                stops[event.job].append(event.time)
            elif nodes := event.data.get("nodes"):
                classes_of[event.job].append((event.time, classes.get(nodes[0], "default")))
                moves[event.job].append((event.time, len(nodes)))
        await asyncio.sleep(0)
    return [
        JobHistory(
            row.owner,
            rescales[row.id],
            [*stops[row.id], now if row.ended is None else row.ended],
            classes_of[row.id],
            row.samples,
            row.account,
            moves[row.id],
        )
        for row in jobs
    ]
