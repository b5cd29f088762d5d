"""Reads what :mod:`malletrain.daemon.usage` adds up, and makes of the sums what clients are shown.
Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from malletrain.daemon.usage import Drawn, JobHistory, LeasedSpan, kwh_of, usage
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import UsageView
from malletrain.store.records import JobRow
from malletrain.store.store import Store

MOVES = (EventKind.JOB_STARTED, EventKind.JOB_RESCALED)


def usage_views(
    store: Store,
    since: float,
    until: float,
    own_user: str,
    watts: Mapping[str, Drawn],
    visible: Callable[[str], bool],
    now: float,
) -> list[UsageView]:
    """A row for each month, user, class of nodes and account, in that order.

    Args:
        store: where leases, jobs and rescales are.
        since: epoch seconds.
        until: epoch seconds; what has not ended is counted to then.
        own_user: whose the leases without a named owner are.
        watts: what nodes of each class draw.
        visible: whether what a user used is to be told.
        now: epoch seconds, not before ``until``; to then count the samples of jobs that run.
    """
    leases = store.leases_between(since, until)
    classes = {lease.node: lease.node_class for lease in leases}
    spans = [
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
    histories = [_history(store, row, classes, now) for row in store.jobs_between(since, until)]
    sums = usage(spans, histories, since, until)
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
        )
        for key, each in sorted(sums.items())
        if visible(key.user)
    ]


def _history(store: Store, row: JobRow, classes: Mapping[str, str], now: float) -> JobHistory:
    stops, moves = [], []
    for event in store.job_events(row.id, (*MOVES, EventKind.JOB_SUSPENDED)):
        if event.kind == EventKind.JOB_SUSPENDED:
            stops.append(event.time)
        elif nodes := event.data.get("nodes"):
            moves.append((event.time, classes.get(nodes[0], "default")))
    stops.append(now if row.ended is None else row.ended)
    return JobHistory(row.owner, store.rescales(row.id), stops, moves, row.samples, row.account)
