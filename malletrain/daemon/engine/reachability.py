"""Handles agents that the daemon cannot reach or hear.

Decides what a partition means for plans and time limits: while the daemon is cut off from its
agents, no time limit runs and nothing is planned; after it the daemon waits for them as after a
restart. :mod:`malletrain.daemon.engine.agents` decides whether the daemon is cut off.
"""

from __future__ import annotations

from malletrain.daemon.engine.agents import AgentLiveness
from malletrain.daemon.engine.state import SiteState
from malletrain.protocol.event_kinds import EventKind

RECONNECT_HEARTBEATS = 3
"""Number of unanswered heartbeats after which agents reconnect (:mod:`malletrain.agent.link`)."""
PARTITION_HOLD_S = 60.0
"""Time for which planning is suspended after the last check that found a partition, seconds."""


class Reachability:
    """The connections of one daemon to its agents."""

    def __init__(self, state: SiteState) -> None:
        self._state = state

    def check(self, now: float) -> bool:
        """Check whether the agents can be heard. Call it regularly, within a transaction.

        Returns:
            Whether the daemon is cut off from its agents.
        """
        state = self._state
        last_heard = [agent.last_seen for agent in state.agents]
        liveness = state.liveness.check(last_heard, now)
        if liveness is AgentLiveness.PARTITIONED:
            if state.liveness.settling_until is None:
                sentence = f"Most of the {len(last_heard)} agents fell silent at one moment"
                self._record_partition(sentence)
            state.liveness.settle(now + PARTITION_HOLD_S)
            state.controller.hold(now + PARTITION_HOLD_S)
        elif liveness is AgentLiveness.RECOVERED:
            self._recovered("The daemon hears its agents again", now)
        elif state.liveness.settled(last_heard, now):
            state.controller.hold(now)
        return liveness is AgentLiveness.PARTITIONED

    def postpone_limits(self, now: float) -> None:
        """Extend all time limits by the seconds in which the daemon cannot have received messages;
        usually 0. Call it at the beginning of each transaction.
        """
        state = self._state
        unheard_s = state.liveness.unheard_s(now)
        if not unheard_s:
            return
        for run in state.runs.values():
            run.rounds.postpone(unheard_s)
            if run.starting_until is not None:
                run.starting_until += unheard_s
        if state.liveness.partitioned_since is not None:
            return
        state.agents.heard(now)
        if unheard_s > RECONNECT_HEARTBEATS * state.config.daemon.heartbeat and list(state.agents):
            self._recovered(f"The daemon stood still for {unheard_s:.3g} s", now)

    def messages_lost(self, peers: set[bytes]) -> None:
        """Mark the agents to which a message could not be sent. ``peers``: their connections."""
        for agent in self._state.agents:
            if agent.peer in peers and agent.unreachable_since is None:
                agent.unreachable_since = self._state.clock.now()
                self.unreachable(agent.node)

    def unreachable(self, node: str) -> None:
        """Handle an agent that cannot be reached: until it is back or lost, failures of its peers
        do not count as the job's own.
        """
        for run in self._state.runs.values():
            if node in run.rounds.members:
                run.rounds.unreachable(node)

    def _recovered(self, sentence: str, now: float) -> None:
        """Wait for the agents as after a restart: the partition has ended, and they report again
        soon.
        """
        self._record_partition(sentence)
        back_by = now + self._state.config.daemon.adopt_wait  # they do not reconnect all at once
        self._state.agents.heard(back_by)
        self._state.liveness.settle(back_by, now)
        self._state.controller.hold(back_by)

    def _record_partition(self, sentence: str) -> None:
        self._state.audit.record(
            EventKind.DAEMON_PARTITIONED,
            f"{sentence}. The daemon was cut off from its agents, which are not lost. The jobs "
            "continue; the daemon waits for the agents to report again.",
        )
