"""Runs tests of the network between nodes: which nodes reach each other, and how fast. Their agents
make the connections.

Decides how a test runs: all agents listen, then each connects to the others; an agent that does not
answer in time is left out. The caller decides why to test and what follows. Times are on the
daemon's clock.

:class:`Bandwidth` measures between two leased nodes of each class, once a day. The result is
recorded as an event, and shown next to the network in ``malletrain show`` and ``malletrain check``.
The measurement hardly affects main jobs: they run on other nodes, and one connection between two
leased nodes sends for a quarter of a second.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from malletrain.daemon.engine.agents import Agents
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import Transactions
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.messages import Probed, ProbeOpen, ProbeTo, ProbeUp
from malletrain.protocol.payloads import ProbeResult, ProbeTarget
from malletrain.protocol.views import NetworkView
from scavenger.interface import host_of

LISTEN_S, TRY_S = 5.0, 12.0
"""Time for all agents to listen, and to finish their connections, seconds."""
MAX_TEST_NODES = 64
"""Maximum number of nodes in one test."""

Results = dict[tuple[str, str], ProbeResult]
"""(from, to) → result of the connection."""


@dataclass
class _Trial:
    places: dict[str, str]
    """Node → its address."""
    tries: tuple[tuple[str, str], ...]
    """(from, to) of each connection."""
    seconds: float
    """Time for which each sends, seconds; 0 to connect only."""
    done: Callable[[Results], None]
    """Called with the results."""
    deadline: float
    """End of the current phase."""
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    """Secret by which the agents recognise the connections of this test."""
    ports: dict[str, int] = field(default_factory=dict)
    """Node → port on which its agent listens."""
    pending: set[str] = field(default_factory=set)
    """Nodes whose results are missing; empty before all listen."""
    results: Results = field(default_factory=dict)
    """Results so far."""


class Probes:
    """The running tests."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._trials: dict[int, _Trial] = {}
        self._number = 0

    def begin(
        self,
        places: Mapping[str, str],
        tries: tuple[tuple[str, str], ...],
        now: float,
        done: Callable[[Results], None],
        seconds: float = 0.0,
    ) -> None:
        """Start a test.

        Args:
            places: node → its address.
            tries: (from, to) of each connection.
            now: time, seconds.
            done: called with the results of the connections that were tried.
            seconds: time for which each sends, seconds; 0 to connect only.
        """
        self._number += 1
        trial = _Trial(dict(places), tries, seconds, done, now + LISTEN_S)
        self._trials[self._number] = trial
        for node in dict.fromkeys(to for _, to in tries):
            self._agents.tell(node, ProbeOpen(self._number, places[node], trial.token))

    def up(self, node: str, message: ProbeUp) -> None:
        """Record that an agent listens."""
        trial = self._trials.get(message.number)
        if trial is None or trial.pending:
            return
        trial.ports[node] = message.port
        if set(trial.ports) >= {to for _, to in trial.tries}:
            self._connect(message.number, trial, None)

    def tried(self, node: str, message: Probed) -> None:
        """Record the results of an agent."""
        trial = self._trials.get(message.number)
        if trial is None or node not in trial.pending:
            return
        trial.pending.discard(node)
        targets = {to for source, to in trial.tries if source == node}
        trial.results.update({(node, r.node): r for r in message.results if r.node in targets})
        if not trial.pending:
            self._end(message.number)

    def tick(self, now: float) -> None:
        """Continue without agents that are late."""
        for number, trial in list(self._trials.items()):
            if now >= trial.deadline and trial.pending:
                self._end(number)
            elif now >= trial.deadline:
                self._connect(number, trial, now)

    def _connect(self, number: int, trial: _Trial, now: float | None) -> None:
        trial.deadline = (trial.deadline if now is None else now) + TRY_S
        for source in dict.fromkeys(source for source, _ in trial.tries):
            targets = tuple(
                ProbeTarget(to, trial.places[to], trial.ports[to])
                for other, to in trial.tries
                if other == source and to in trial.ports
            )
            if targets:
                trial.pending.add(source)
                self._agents.tell(source, ProbeTo(number, trial.token, targets, trial.seconds))
        if not trial.pending:
            self._end(number)

    def _end(self, number: int) -> None:
        trial = self._trials.pop(number)
        trial.done(trial.results)


SEND_S = 0.25
"""Duration of a measurement, seconds."""
INTERVAL_S = 86_400.0
"""Interval between two measurements of a class, seconds."""
RETRY_INTERVAL_S = 600.0
"""Time until a failed measurement is repeated, seconds."""


class Bandwidth:
    """Schedules the measurements of all classes of nodes."""

    def __init__(self, state: SiteState, transactions: Transactions, probes: Probes) -> None:
        self._state = state
        self._transactions = transactions
        self._probes = probes
        self._due: dict[str, float] = {}

    def check(self, now: float) -> None:
        """Begin the measurements that are due. Call it about every half second."""
        interface_for = self._state.config.nodes.interface_for
        pairs: dict[str, list[str]] = {}
        for agent in self._state.agents:
            if interface_for(agent.node_class) and agent.gone_at is None and agent.networks:
                pairs.setdefault(agent.node_class, []).append(agent.node)
        for node_class, nodes in pairs.items():
            host = host_of(nodes[0])
            other = next((node for node in nodes if host_of(node) != host), None)
            if other is not None and now >= self._due.get(node_class, 0.0):
                self._due[node_class] = now + RETRY_INTERVAL_S
                self._measure(node_class, nodes[0], other, now)

    def _measure(self, node_class: str, a: str, b: str, now: float) -> None:
        rounds = self._state.rounds
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
                self._due[node_class] = self._state.clock.now() + INTERVAL_S
                finding = (
                    f"{result.mbit / 1000:.3g} Gbit/s go through one connection from {a} to {b}"
                )
            else:
                finding = f"{a} cannot connect to {b} ({result.trouble})"
            sentence = f"By {interface} {finding}."
            rounds.measured[node_class] = NetworkView(
                node_class, sentence, result.reached, result.mbit if result.reached else 0.0
            )
            with self._transactions.begin():
                self._state.audit.record(
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
