"""Creates the views of the machine's nodes for clients: idle, being leased, leased, or busy, and
the past and forecast numbers of nodes.

Decides how far ahead the forecast is shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from malletrain.core.forecast import SPAN_S, NodeHistory, nodes_ahead
from malletrain.daemon.api.job_views import of_class
from malletrain.daemon.engine.state import SiteState, slow_node_policy
from malletrain.daemon.engine.transactions import Operation
from malletrain.daemon.leases.reconciler import LeaseReconciler
from malletrain.protocol.views import NodeForecastView, NodeView
from scavenger.batch.rules import span

DAY = int(86400 / SPAN_S)
"""Number of spans in a day: the length of the past and of the forecast that are shown."""


def forecast_operations(state: SiteState) -> dict[str, Operation]:
    """Return name → operation of clients."""

    async def forecast(user: str, params: Mapping[str, Any]) -> list[NodeForecastView]:
        return node_forecasts(state.goals.history, state.clock.now())

    return {"forecast": forecast}


def node_forecasts(history: NodeHistory, now: float) -> list[NodeForecastView]:
    """Return the forecast for each class of nodes. ``now``: time on the daemon's clock, seconds."""
    return [_of_class(history, name, now) for name in history.classes()]


def _of_class(history: NodeHistory, name: str, now: float) -> NodeForecastView:
    past, current_nodes = history.nodes(name), history.now(name)
    last_day = past[-DAY:]
    forecast = nodes_ahead(past, current_nodes, DAY)
    return NodeForecastView(
        name,
        current_nodes,
        SPAN_S,
        tuple(
            (now - (len(last_day) - k) * SPAN_S, float(nodes)) for k, nodes in enumerate(last_day)
        ),
        tuple(
            (now + (k + 1) * SPAN_S, float(low), float(middle), float(high))
            for k, (low, middle, high) in enumerate(forecast)
        ),
        len(past) * SPAN_S / 3600.0,
    )


def natural(name: str) -> tuple[Any, ...]:
    """Return a sort key with which n2 comes before n10."""
    return tuple(
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    )


def node_views(state: SiteState, leases: LeaseReconciler, explain: bool) -> list[NodeView]:
    """Return the views of all idle and leased nodes.

    Args:
        state: the daemon's state.
        leases: answers of the main scheduler.
        explain: whether to include every node of the machine, and the rules by which it may be
            leased.

    """
    now = state.clock.now()
    rules = (
        {e.node: e.rules for e in leases.last_poll.explanations}
        if leases.last_poll and explain
        else {}
    )
    for node in rules:
        if refusal := leases.restrictions.now.refusal(node):
            rules[node] = (*rules[node], ("operator", False, refusal))
    views = {}
    for node, sick_node in state.sick.now(now).items():
        answer = f"{sick_node.sentence} It is left alone for another {span(sick_node.until - now)}."
        rules[node] = (*rules.get(node, ()), ("health", False, answer))
        views[node] = NodeView(node, "sick", "", "", sick_node.since)
    for node, slow_node in state.slow.current(now).items():
        alone = f" It is left alone for another {span(state.slow.until(node) - now)}."
        free = state.agents.on(node) is None and slow_node_policy(state.config) == "swap"
        answer = f"{slow_node.sentence}{alone if free else ''}"
        rules[node] = (*rules.get(node, ()), ("pace", not free, answer))
        views.setdefault(node, NodeView(node, "slow", "", "", slow_node.since))
    for gap in state.gaps.values():
        views[gap.node] = NodeView(
            gap.node, "idle", "", "", gap.idle_since, gap.horizon_s, node_class=gap.node_class
        )
    for row in leases.active.values():
        views[row.node] = NodeView(
            row.node,
            "leasing",
            row.id,
            "",
            row.requested,
            node_class=row.node_class,
            owner=row.owner,
        )
    for agent in state.agents:
        record = state.controller.nodes.get(agent.node)
        node_state = "leaving" if agent.gone_at is not None else "job" if agent.holds else "free"
        remaining_s = None if agent.gone_at is None else max(0.0, agent.gone_at - now)
        lease = leases.active.get(agent.lease)
        since = (lease.started or lease.requested) if lease else now
        horizon = record.info.horizon_s if record else None
        views[agent.node] = NodeView(
            agent.node,
            node_state,
            agent.lease,
            agent.holds or "",
            since,
            horizon,
            remaining_s,
            agent.node_class,
            agent.owner,
            warm_bytes=agent.warm_bytes,
            mode=state.mode_on(agent.node),
        )
    for node in rules.keys() - views.keys():
        # A node may be free without being a gap, because a rule excludes it.
        free = all(passed for rule, passed, _ in rules[node] if rule in ("idle", "usable"))
        views[node] = NodeView(node, "idle" if free else "busy", "", "", now)
    for node in views.keys() & state.failing_tasks.keys():
        for job, sentence in state.failing_tasks[node].items():
            rules[node] = (*rules.get(node, ()), ("tasks", False, f"Farm {job}: {sentence}"))
    ordered = sorted(views, key=natural)
    trainer_of_class = {v.node_class: of_class(state, v.node_class) for v in views.values()}
    return [
        msgspec.structs.replace(
            views[node],
            rules=rules.get(node, ()),
            trainer=trainer_of_class[views[node].node_class],
        )
        for node in ordered
    ]
