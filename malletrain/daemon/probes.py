"""Runs tests of the network between nodes: which nodes reach each other, and how fast. Their agents
make the connections.

Decides how a test runs: all agents listen, then each connects to the others; an agent that does not
answer in time is left out. The caller decides why to test and what follows. Times are on the
daemon's clock.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from malletrain.daemon.agents import Agents
from malletrain.protocol.messages import Probed, ProbeOpen, ProbeTo, ProbeUp
from malletrain.protocol.payloads import ProbeResult, ProbeTarget

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
