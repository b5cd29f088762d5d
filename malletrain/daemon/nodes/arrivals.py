"""Handles new leased nodes, from the first message of their agents until jobs get them.

Decides which Python interpreters each agent keeps warm: those that unfinished jobs of the lease's
owner use, the most used first. Decides also how long a new node is kept out of plans meanwhile; a
job that got the node earlier would wait for the same imports. :mod:`malletrain.agent.fork_servers`
keeps a Python warm on the node.
"""

from __future__ import annotations

from collections import Counter

from malletrain.core.events import NodeJoined
from malletrain.daemon.engine.agents import LeasedAgent
from malletrain.daemon.engine.state import SiteState
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.interpreters import Interpreter, WarmUp, interpreter_of

MAX_INTERPRETERS = 2
"""Maximum number of warm interpreters on one node. Each takes some hundred megabytes."""
REPEAT_S = 5.0
"""Time after which the warm-up request to an awaited node is repeated, seconds. The first one may
be lost.
"""


class Arrivals:
    """The new nodes of one daemon. Methods that append events are called within a
    transaction.
    """

    def __init__(self, state: SiteState) -> None:
        self._state = state
        self._idle_s = state.config.nodes.keep_warm
        self._wait_s = state.config.nodes.warm_wait
        self._jobs: frozenset[str] = frozenset()
        """Jobs that were unfinished when warm-up requests were last sent."""

    def interpreters_for(self, owner: str) -> tuple[Interpreter, ...]:
        """Return the interpreters that nodes of an owner are to keep warm, the most used first."""
        if not self._idle_s:
            return ()
        uses: Counter[str] = Counter()
        interpreters: dict[str, Interpreter] = {}
        for run in self._state.runs.values():
            interpreter = interpreter_of(run.spec)
            if interpreter is not None and self._state.accounts.of(run.spec.owner) == owner:
                uses[interpreter.key] += 1
                interpreters.setdefault(interpreter.key, interpreter)
        return tuple(interpreters[key] for key, _ in uses.most_common(MAX_INTERPRETERS))

    def reported(self, agent: LeasedAgent, job: str | None, works: str, now: float) -> None:
        """Make a newly leased node available to jobs, now or when it is warm.

        Args:
            agent: the new agent of the node.
            job: job that is adopted with the node; None if there is none.
            works: job that the node runs, for the audit log; empty if there is none.
            now: time, seconds.
        """
        interpreters = () if agent.warm is None else self.interpreters_for(agent.owner)
        if interpreters:
            self._send_warm_up(agent, interpreters, now)
        if (
            interpreters
            and not works
            and self._wait_s
            and interpreters[0].key not in (agent.warm or ())
        ):
            agent.awaited, agent.awaited_until = interpreters[0].key, now + self._wait_s
        status = f"; it works for {works}" if works else "; it warms up" if agent.awaited else ""
        self._state.audit.record(
            EventKind.NODE_JOINED, f"The node is ours{status}.", node=agent.node, lease=agent.lease
        )
        if not agent.awaited:
            self._join(agent, job, now)

    def warm(self, agent: LeasedAgent, keys: tuple[str, ...], now: float) -> None:
        """Record the interpreters that are warm on a node or failed to start.

        Args:
            agent: agent of the node.
            keys: keys of the interpreters.
            now: time, seconds.
        """
        agent.warm = keys
        if agent.awaited and agent.awaited in keys:
            self._join(agent, None, now)

    def back(self, agent: LeasedAgent, keys: tuple[str, ...] | None, now: float) -> None:
        """Handle another Hello of a known agent. Its connection broke, and the last warm-up request
        may be lost.

        Args:
            agent: agent of the node.
            keys: keys of its warm interpreters; None if it warms up none.
            now: time, seconds.
        """
        self.warm(agent, keys or (), now)
        agent.warm = keys
        if keys is not None and agent.gone_at is None:
            self._send_warm_up_if_needed(agent, self.interpreters_for(agent.owner), now)

    def tick(self, now: float) -> None:
        """Make nodes available whose wait is over. If the set of jobs has changed, send warm-up
        requests to agents that lack an interpreter.
        """
        for agent in self._state.agents:
            if agent.awaited and now >= agent.awaited_until:
                self._join(agent, None, now)
            elif agent.awaited and now >= agent.warm_up_sent_at + REPEAT_S:
                self._send_warm_up(agent, self.interpreters_for(agent.owner), now)
        jobs = frozenset(self._state.runs)
        if jobs == self._jobs:
            return
        self._jobs = jobs
        interpreters: dict[str, tuple[Interpreter, ...]] = {}
        for agent in self._state.agents:
            if agent.warm is None or agent.gone_at is not None:
                continue
            if agent.owner not in interpreters:
                interpreters[agent.owner] = self.interpreters_for(agent.owner)
            wanted_interpreters = interpreters[agent.owner]
            if agent.awaited and agent.awaited not in {each.key for each in wanted_interpreters}:
                agent.awaited = wanted_interpreters[0].key if wanted_interpreters else ""
                if agent.awaited in ("", *agent.warm):
                    self._join(agent, None, now)
            self._send_warm_up_if_needed(agent, wanted_interpreters, now)

    def _send_warm_up_if_needed(
        self, agent: LeasedAgent, interpreters: tuple[Interpreter, ...], now: float
    ) -> None:
        if any(interpreter.key not in (agent.warm or ()) for interpreter in interpreters):
            self._send_warm_up(agent, interpreters, now)

    def _send_warm_up(
        self, agent: LeasedAgent, interpreters: tuple[Interpreter, ...], now: float
    ) -> None:
        agent.warm_up_sent_at = now
        self._state.agents.reach(agent, WarmUp(interpreters, self._idle_s))

    def _join(self, agent: LeasedAgent, job: str | None, now: float) -> None:
        agent.awaited = ""
        if agent.gone_at is not None:
            return
        gap = self._state.gaps.get(agent.node)
        horizon, group = (gap.horizon_s, gap.group) if gap else (None, None)
        row = self._state.lease_rows.active.get(agent.lease)
        leased_s = now - row.started if row is not None and row.started is not None else 0.0
        self._state.events.append(
            NodeJoined(
                agent.node,
                agent.node_class,
                horizon,
                group,
                job,
                agent.owner,
                max(0.0, leased_s),
            )
        )
