"""Restores from the audit log which nodes failed a health check or were slow, so that a restarted
daemon leaves them alone.
"""

from __future__ import annotations

from malletrain.config.model import Config
from malletrain.core.sick_nodes import SickNode, SickNodes
from malletrain.core.slow_nodes import SlowNode, SlowNodes
from malletrain.protocol.event_kinds import EventKind
from malletrain.store.store import Store

_HALF_LIVES = 8
"""After so many nothing of a slow node is believed that could matter."""


def sick_nodes(config: Config, store: Store, now: float) -> SickNodes:
    """What is known of sick nodes at ``now``, seconds since the epoch."""
    nodes = config.nodes
    sick = SickNodes(nodes.sick_for, nodes.sick_for_most)
    since = now - 2 * nodes.sick_for_most
    resumed = store.events_of(EventKind.NODE_RESUMED, since)
    well = {row.node: row.seq for row in resumed if "by" in row.data}  # else a drain was over
    for row in store.events_of(EventKind.NODE_SICK, since):
        if row.seq < well.get(row.node, -1):
            continue
        sentence, until = str(row.data["sentence"]), float(row.data["until"])
        sick.remember(row.node, SickNode(row.time, until, sentence))
    return sick


def slow_nodes(config: Config, store: Store, now: float) -> SlowNodes:
    """What is known of slow nodes at ``now``, seconds since the epoch."""
    nodes = config.nodes
    slow = SlowNodes(nodes.slow_factor, nodes.slow_half_life, nodes.slow_after)
    if slow_node_policy(config) == "off":
        return slow
    since = now - _HALF_LIVES * nodes.slow_half_life
    cleared = {
        (row.node, "usual_mbit" in row.data): row.seq
        for row in store.events_of(EventKind.NODE_NOT_SLOW, since)
    }
    for row in store.events_of(EventKind.NODE_SLOW, since):
        if row.seq > cleared.get((row.node, "usual_mbit" in row.data), -1):
            sentence, times = str(row.data["sentence"]), float(row.data["slowdown"])
            usual = float(row.data.get("usual_mbit", 0.0))
            slow.remember(row.node, SlowNode(row.time, times, sentence, usual))
    return slow


def slow_node_policy(config: Config) -> str:
    """What is done about slow nodes: ``off``, ``name`` or ``swap``."""
    if config.nodes.slow_nodes == "auto":
        return "off" if config.scheduler.kind == "local" else "swap"
    return config.nodes.slow_nodes
