"""The nodes that failed a health check, as the audit log has them: a daemon that was started again
leaves them alone too.
"""

from __future__ import annotations

from malletrain.config.model import Config
from malletrain.core.sick_nodes import SickNode, SickNodes
from malletrain.protocol.event_kinds import EventKind
from malletrain.store.store import Store


def sick_nodes(config: Config, store: Store, now: float) -> SickNodes:
    """What is known of sick nodes at ``now``, seconds since the epoch."""
    nodes = config.nodes
    found = SickNodes(nodes.sick_for, nodes.sick_for_most)
    for row in store.events_of(EventKind.NODE_SICK, now - 2 * nodes.sick_for_most):
        sentence, until = str(row.data["sentence"]), float(row.data["until"])
        found.remember(row.node, SickNode(row.time, until, sentence))
    return found
