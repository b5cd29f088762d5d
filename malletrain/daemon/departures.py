"""Nodes that leave: preempted with notice, reclaimed for another owner's jobs, or lost without
notice.

Decides which events and messages that causes. Everything here runs within a transaction of the
core; the controller and the rounds decide what follows for the jobs.
"""

from __future__ import annotations

from collections.abc import Iterable

from malletrain.core.events import NodeLeaving, NodeLost
from malletrain.daemon.agents import LeasedAgent
from malletrain.daemon.job_repository import ActiveJob
from malletrain.daemon.logsink import LogSink
from malletrain.daemon.losses import lost_to_peers
from malletrain.daemon.parts import Parts
from malletrain.protocol.event_kinds import EventKind, LeaseStatus
from malletrain.protocol.messages import Goodbye

RELEASED, RECLAIMED, UNHEARD = "released", "reclaimed", "nothing was heard of its agent"
SICK = "its node is not fit for jobs"
"""The stored end reasons of a lease that MalleTrain itself gave up: no job needs the node; another
owner's job needs it more; its agent does not report; the node failed a health check.
"""
SPARE_SENTENCE = "No job needs the node."
RECLAIM_SENTENCE = "Jobs of another user have more use for the node."


class Departures:
    """Of all agents of one daemon."""

    def __init__(self, parts: Parts, logs: LogSink) -> None:
        self._parts = parts
        self._logs = logs

    def notice(self, agent: LeasedAgent, in_s: float, reason: str) -> None:
        """The main scheduler wants the node back within ``in_s`` seconds; saying it again does
        nothing.
        """
        if agent.gone_at is not None and not agent.reclaimed:
            return
        self._parts.metrics.preemption(notice=True)
        sentence = f"The main scheduler wants the node back within {in_s:.3g} s."
        agent.reclaimed = False
        self._goes(EventKind.NODE_LEAVING, agent, in_s, reason or "preempted", sentence)
        self._parts.poll_soon.set()

    def reclaim(
        self, agent: LeasedAgent, within_s: float, sentence: str = RECLAIM_SENTENCE
    ) -> None:
        """The agent's node goes as soon as its job has moved off."""
        self._send_off(agent, within_s, RECLAIMED, sentence)

    def sick(self, agent: LeasedAgent, within_s: float, sentence: str) -> None:
        """The agent's node, which is not fit for jobs, goes as soon as its job has moved off."""
        self._send_off(agent, within_s, SICK, sentence)

    def _send_off(self, agent: LeasedAgent, within_s: float, reason: str, sentence: str) -> None:
        if agent.gone_at is None:
            agent.reclaimed = True
            self._goes(EventKind.NODE_RECLAIMED, agent, within_s, reason, sentence)

    def _goes(
        self, kind: EventKind, agent: LeasedAgent, in_s: float, reason: str, sentence: str
    ) -> None:
        parts = self._parts
        agent.gone_at = parts.clock.now() + in_s
        parts.lease_rows.update(agent.lease, state=LeaseStatus.LEAVING, end_reason=reason)
        parts.audit.record(
            kind,
            sentence,
            node=agent.node,
            lease=agent.lease,
            job=agent.holds or "",
            in_s=in_s,
        )
        parts.events.append(NodeLeaving(agent.node, in_s))
        if (run := parts.runs.get(agent.holds or "")) is not None:
            # Its workers may end of the signal that the agent was sent: no failure of the job.
            parts.rounds.act(run, run.rounds.doubt(agent.node, over=False))
        self.may_go(agent, sentence)

    def may_go(
        self, agent: LeasedAgent, sentence: str = "The main scheduler wants the node back."
    ) -> None:
        """An agent whose node is wanted back goes once it is free of its job."""
        if agent.gone_at is not None and agent.holds is None:
            self._parts.agents.reach(agent, Goodbye(sentence))

    def lease_ended(self, lease: str) -> None:
        """The lease of an agent that was given back has ended."""
        agent = self._parts.agents.forget(lease)
        if agent is not None:
            self._logs.gone(agent.node)

    def lost_to_peers(self, runs: Iterable[ActiveJob]) -> None:
        """Look for nodes of ``runs`` whose loss shows by what their peers say."""
        for agent in lost_to_peers(self._parts.agents, runs):
            self.lost(agent, "its connection was closed, and its peers lost it too")

    def lost(self, agent: LeasedAgent, why: str) -> None:
        """The node is gone: with notice it left as announced, else it was taken without."""
        parts, node, lease = self._parts, agent.node, agent.lease
        parts.agents.remove(agent)
        self._logs.gone(node)
        if agent.gone_at is None:
            parts.metrics.preemption(notice=False)
            sentence = "The node was taken without notice."
            parts.audit.record(EventKind.NODE_VANISHED, sentence, node=node, lease=lease)
        parts.audit.record(
            EventKind.NODE_LOST,
            f"The node is gone: {why}.",
            node=node,
            lease=lease,
            job=agent.holds or "",
            notice=agent.gone_at is not None,
        )
        for run in parts.runs.values():
            parts.rounds.act(run, run.rounds.gone(node, parts.clock.now()))
        parts.events.append(NodeLost(node))
        parts.poll_soon.set()
