"""New leased nodes, from the first message of their agents until jobs get them.

Decides which Pythons each agent keeps warm (those that unfinished jobs of the lease's owner use,
the most used first), and how long plans leave a new node out for that: a job that got the node
earlier would wait for the same imports. :mod:`malletrain.agent.fork_servers` keeps a Python warm on
the node.
"""

from __future__ import annotations

from collections import Counter

from malletrain.core.events import NodeJoined
from malletrain.daemon.agents import LeasedAgent
from malletrain.daemon.parts import Parts
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.interpreters import Interpreter, WarmUp, interpreter_of

MOST = 2
"""Interpreters on one node: each takes some hundred megabytes."""
AGAIN_S = 5.0
"""After which a node that is waited for is told again what to warm up: the word may be lost."""


class Arrivals:
    """Of one daemon. What feeds the controller belongs into a step of the core."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._idle_s = parts.config.nodes.keep_warm
        self._wait_s = parts.config.nodes.warm_wait
        self._jobs: frozenset[str] = frozenset()
        """Those that were unfinished when the agents were told last."""

    def interpreters_for(self, owner: str) -> tuple[Interpreter, ...]:
        """What the nodes of an owner of leases are to have warm, the first one first."""
        if not self._idle_s:
            return ()
        uses: Counter[str] = Counter()
        interpreters: dict[str, Interpreter] = {}
        for run in self._parts.runs.values():
            interpreter = interpreter_of(run.spec)
            if interpreter is not None and self._parts.accounts.of(run.spec.owner) == owner:
                uses[interpreter.key] += 1
                interpreters.setdefault(interpreter.key, interpreter)
        return tuple(interpreters[key] for key, _ in uses.most_common(MOST))

    def reported(self, agent: LeasedAgent, job: str | None, works: str, now: float) -> None:
        """A node is ours: let jobs have it, now or when it is warm.

        Args:
            agent: that of the node, new.
            job: what it is adopted with.
            works: a job that it works for, for the audit log.
            now: seconds.
        """
        interpreters = () if agent.warm is None else self.interpreters_for(agent.owner)
        if interpreters:
            self._tell(agent, interpreters, now)
        if (
            interpreters
            and not works
            and self._wait_s
            and interpreters[0].key not in (agent.warm or ())
        ):
            agent.awaited, agent.awaited_until = interpreters[0].key, now + self._wait_s
        doing = f"; it works for {works}" if works else "; it warms up" if agent.awaited else ""
        self._parts.audit.record(
            EventKind.NODE_JOINED, f"The node is ours{doing}.", node=agent.node, lease=agent.lease
        )
        if not agent.awaited:
            self._join(agent, job, now)

    def warm(self, agent: LeasedAgent, keys: tuple[str, ...], now: float) -> None:
        """An agent says what is warm, or cannot be."""
        agent.warm = keys
        if agent.awaited and agent.awaited in keys:
            self._join(agent, None, now)

    def back(self, agent: LeasedAgent, keys: tuple[str, ...] | None, now: float) -> None:
        """A known agent says Hello once more, and what is warm: its connection broke, and what it
        was told last may have gone with it.
        """
        self.warm(agent, keys or (), now)
        agent.warm = keys
        if keys is not None and agent.gone_at is None:
            self._tell_what_lacks(agent, self.interpreters_for(agent.owner), now)

    def look(self, now: float) -> None:
        """Let jobs have the nodes that were waited for long enough, and where there are other jobs
        than before tell the agents that lack their Python.
        """
        for agent in self._parts.agents:
            if agent.awaited and now >= agent.awaited_until:
                self._join(agent, None, now)
            elif agent.awaited and now >= agent.warm_up_sent_at + AGAIN_S:
                self._tell(agent, self.interpreters_for(agent.owner), now)
        jobs = frozenset(self._parts.runs)
        if jobs == self._jobs:
            return
        self._jobs = jobs
        interpreters: dict[str, tuple[Interpreter, ...]] = {}
        for agent in self._parts.agents:
            if agent.warm is None or agent.gone_at is not None:
                continue
            if agent.owner not in interpreters:
                interpreters[agent.owner] = self.interpreters_for(agent.owner)
            mine = interpreters[agent.owner]
            if agent.awaited and agent.awaited not in {one.key for one in mine}:
                agent.awaited = mine[0].key if mine else ""
                if agent.awaited in ("", *agent.warm):
                    self._join(agent, None, now)
            self._tell_what_lacks(agent, mine, now)

    def _tell_what_lacks(
        self, agent: LeasedAgent, interpreters: tuple[Interpreter, ...], now: float
    ) -> None:
        if any(interpreter.key not in (agent.warm or ()) for interpreter in interpreters):
            self._tell(agent, interpreters, now)

    def _tell(self, agent: LeasedAgent, interpreters: tuple[Interpreter, ...], now: float) -> None:
        agent.warm_up_sent_at = now
        self._parts.agents.reach(agent, WarmUp(interpreters, self._idle_s))

    def _join(self, agent: LeasedAgent, job: str | None, now: float) -> None:
        agent.awaited = ""
        if agent.gone_at is not None:
            return
        gap = self._parts.gaps.get(agent.node)
        horizon, group = (gap.horizon_s, gap.group) if gap else (None, None)
        row = self._parts.lease_rows.active.get(agent.lease)
        leased_s = now - row.started if row is not None and row.started is not None else 0.0
        self._parts.events.append(
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
