"""Restores sick and slow nodes from the audit log, so that a restarted daemon leaves them alone."""

from __future__ import annotations

from malletrain.config.model import Config
from malletrain.core.sick_nodes import SickNode, SickNodes
from malletrain.core.slow_nodes import SlowNode, SlowNodes
from malletrain.protocol.event_kinds import EventKind
from malletrain.store.store import Store

_HALF_LIVES = 8
"""Number of half-lives after which a slow node no longer counts as slow."""


def sick_nodes(config: Config, store: Store, now: float) -> SickNodes:
    """Return the sick nodes at ``now``, seconds since the epoch.

    Args:
        config: the site's configuration.
        store: the database.
        now: time, seconds since the epoch.
    """
    nodes = config.nodes
    sick = SickNodes(nodes.sick_for, nodes.sick_for_most)
    since = now - 2 * nodes.sick_for_most
    resumed = store.events_of(EventKind.NODE_RESUMED, since)
    resumed_seq = {
        row.node: row.seq for row in resumed if "by" in row.data
    }  # else a drain has ended
    for row in store.events_of(EventKind.NODE_SICK, since):
        if row.seq < resumed_seq.get(row.node, -1):
            continue
        sentence, until = str(row.data["sentence"]), float(row.data["until"])
        sick.remember(row.node, SickNode(row.time, until, sentence))
    return sick


def slow_nodes(config: Config, store: Store, now: float) -> SlowNodes:
    """Return the slow nodes at ``now``, seconds since the epoch.

    Args:
        config: the site's configuration.
        store: the database.
        now: time, seconds since the epoch.
    """
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
            sentence, slowdown = str(row.data["sentence"]), float(row.data["slowdown"])
            usual_mbit = float(row.data.get("usual_mbit", 0.0))
            slow.remember(row.node, SlowNode(row.time, slowdown, sentence, usual_mbit))
    return slow


def slow_node_policy(config: Config) -> str:
    """Return the action for slow nodes: ``off``, ``name`` or ``swap``."""
    if config.nodes.slow_nodes == "auto":
        return "off" if config.scheduler.kind == "local" else "swap"
    return config.nodes.slow_nodes
