"""Reads the rows that :mod:`malletrain.daemon.usage` adds up, and creates the answer for clients.

Decides how many rows are read at a time, because the history is long and other requests are
answered in between.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence

from malletrain.daemon.usage import JobHistory, Key, LeasedSpan, NodePower, Usage, kwh_of, usage
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import UsageView
from malletrain.store.history_table import HistoryTable
from malletrain.store.records import JobRow, LeaseRow, RescaleRow

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
        )
        for key, each in sorted(sums.items())
    ]


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
