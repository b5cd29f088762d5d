"""Measures the network bandwidth between two leased nodes of each class, once a day.

Decides which two nodes are measured and when. The result is recorded as an event, and shown next to
the network in ``malletrain show`` and ``malletrain check``. The measurement hardly affects main
jobs: they run on other nodes, and one connection between two leased nodes sends for a quarter of a
second.
"""

from __future__ import annotations

from malletrain.daemon.core import Core
from malletrain.daemon.probes import Probes, Results
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import NetworkView

SEND_S = 0.25
"""Duration of a measurement, seconds."""
INTERVAL_S = 86_400.0
"""Interval between two measurements of a class, seconds."""
RETRY_INTERVAL_S = 600.0
"""Time until a failed measurement is repeated, seconds."""


class Bandwidth:
    """Schedules the measurements of all classes of nodes."""

    def __init__(self, core: Core, probes: Probes) -> None:
        self._core = core
        self._probes = probes
        self._due: dict[str, float] = {}

    def look(self, now: float) -> None:
        """Begin the measurements that are due. Call it about every half second."""
        interface_for = self._core.config.nodes.interface_for
        pairs: dict[str, list[str]] = {}
        for agent in self._core.agents:
            if interface_for(agent.node_class) and agent.gone_at is None and agent.networks:
                pairs.setdefault(agent.node_class, []).append(agent.node)
        for node_class, nodes in pairs.items():
            if len(nodes) > 1 and now >= self._due.get(node_class, 0.0):
                self._due[node_class] = now + RETRY_INTERVAL_S
                self._measure(node_class, nodes[0], nodes[1], now)

    def _measure(self, node_class: str, a: str, b: str, now: float) -> None:
        rounds = self._core.rounds
        fabric = rounds.networks([a, b])
        if fabric is None or len(fabric.places) < 2:
            return
        places = {node: place.address for node, place in fabric.places.items()}
        interface = fabric.places[a].interface

        def done(results: Results) -> None:
            result = results.get((a, b))
            if result is None:
                return
            if result.reached:
                self._due[node_class] = self._core.clock.now() + INTERVAL_S
                finding = (
                    f"{result.mbit / 1000:.3g} Gbit/s go through one connection from {a} to {b}"
                )
            else:
                finding = f"{a} cannot connect to {b} ({result.trouble})"
            sentence = f"By {interface} {finding}."
            rounds.measured[node_class] = NetworkView(
                node_class, sentence, result.reached, result.mbit if result.reached else 0.0
            )
            with self._core.transaction():
                self._core.audit.record(
                    EventKind.BANDWIDTH_MEASURED,
                    sentence,
                    node=a,
                    to=b,
                    interface=interface,
                    node_class=node_class,
                    mbit=round(result.mbit, 1),
                    reached=result.reached,
                )

        self._probes.begin(places, ((a, b),), now, done, SEND_S)
