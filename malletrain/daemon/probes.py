"""Tests of the network between nodes, made by their agents: which nodes reach each other, how fast.

Decides how a test runs: all agents listen, then each connects to the others; an agent that does not
answer in time is left out. The caller decides why a test is made and what follows. Times are the
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
"""For all agents to listen, and to have tried."""
MOST_NODES = 64
"""Nodes that take part in one trial."""

Results = dict[tuple[str, str], ProbeResult]
"""(from, to) → what came of it."""


@dataclass
class _Trial:
    places: dict[str, str]
    """Node → its address."""
    tries: tuple[tuple[str, str], ...]
    """(from, to) of each way."""
    seconds: float
    done: Callable[[Results], None]
    deadline: float
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    ports: dict[str, int] = field(default_factory=dict)
    pending: set[str] = field(default_factory=set)
    """Who is to say what came of it; empty before all listen."""
    results: Results = field(default_factory=dict)


class Probes:
    """The trials under way."""

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
        """Have nodes try ways between them.

        Args:
            places: node → its address.
            tries: (from, to) of each way.
            done: takes what came of each that was tried.
            seconds: for how long to send; 0: only connect.
        """
        self._number += 1
        trial = _Trial(dict(places), tries, seconds, done, now + LISTEN_S)
        self._trials[self._number] = trial
        for node in dict.fromkeys(to for _, to in tries):
            self._agents.tell(node, ProbeOpen(self._number, places[node], trial.token))

    def up(self, node: str, message: ProbeUp) -> None:
        """An agent listens."""
        trial = self._trials.get(message.number)
        if trial is None or trial.pending:
            return
        trial.ports[node] = message.port
        if set(trial.ports) >= {to for _, to in trial.tries}:
            self._go(message.number, trial, None)

    def tried(self, node: str, message: Probed) -> None:
        """An agent has tried."""
        trial = self._trials.get(message.number)
        if trial is None or node not in trial.pending:
            return
        trial.pending.discard(node)
        meant = {to for source, to in trial.tries if source == node}
        trial.results.update({(node, r.node): r for r in message.results if r.node in meant})
        if not trial.pending:
            self._end(message.number)

    def tick(self, now: float) -> None:
        """Go on without those that are late."""
        for number, trial in list(self._trials.items()):
            if now >= trial.deadline and trial.pending:
                self._end(number)
            elif now >= trial.deadline:
                self._go(number, trial, now)

    def _go(self, number: int, trial: _Trial, now: float | None) -> None:
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
