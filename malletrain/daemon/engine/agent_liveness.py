"""Decides whether silent agents are lost, or the daemon itself is cut off from them. Pure.

A daemon that was stopped, swapped out or suspended with its machine receives nothing for that time.
One whose link is down receives nothing at all. The agents continue to train meanwhile.
:mod:`malletrain.daemon.engine.reachability` acts on the decision: while the daemon is cut off, no
agent is declared lost, no time limit runs and nothing is planned.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from enum import Enum

LATE_S = 2.0
"""A check later than this after the previous one means that the daemon stood still."""
PARTIAL_TIMEOUTS = 3.0
"""Maximum time for which most agents may be silent while others are heard, in agent time-outs.
After it the silent agents are declared lost: a part of the machine failed, not the daemon's
connection.
"""


class AgentLiveness(Enum):
    """Meaning of the silence of agents."""

    OK = "ok"
    """An agent that exceeds its time-out is lost."""
    PARTITIONED = "partitioned"
    """The daemon is cut off from most or all agents; none of them is lost."""
    RECOVERED = "recovered"
    """The daemon has just begun to receive from the agents again."""


class LivenessMonitor:
    """Interprets the silence of the agents of one daemon.

    Args:
        timeout_s: silence after which a single agent is lost, seconds.
        heartbeat_s: interval of the agents' heartbeats, seconds.
    """

    def __init__(self, timeout_s: float, heartbeat_s: float) -> None:
        self._timeout_s, self._heartbeat_s = timeout_s, heartbeat_s
        self._quiet_s = max(timeout_s / 2, 1.5 * heartbeat_s)
        self._last_check_at: float | None = None
        self.partitioned_since: float | None = None
        """Time at which the daemon was cut off; None if it is not."""
        self._some_since: float | None = None
        """Time within that partition since which some agents are heard without a break; None if all
        are silent.
        """
        self.settling_until: float | None = None
        """Time until which the daemon waits for agents to report again after a partition; None if
        it does not wait.
        """
        self._recovered_at = math.inf

    def settle(self, until: float, recovered_at: float = math.inf) -> None:
        """Wait for the agents to report again.

        Args:
            until: time at which the wait ends, seconds on the daemon's clock.
            recovered_at: time since which agents can be heard, seconds.
        """
        self.settling_until, self._recovered_at = until, recovered_at

    def settled(self, last_heard: Collection[float], now: float) -> bool:
        """Whether that wait has just ended: its time is over, or all agents have been heard.

        A message that was sent before the recovery and read after it does not count: its sender
        may have disconnected since.

        Args:
            last_heard: time of the last message of each agent, seconds.
            now: seconds.
        """
        until, earliest = self.settling_until, self._recovered_at + self._heartbeat_s
        if until is None or (now < until and not all(earliest <= at <= now for at in last_heard)):
            return False
        self.settling_until = None
        return True

    def unheard_s(self, now: float) -> float:
        """Return the seconds since the last call in which the daemon cannot have received anything;
        usually 0. Call it in every batch of messages, and at least every second.
        """
        elapsed_s = 0.0 if self._last_check_at is None else now - self._last_check_at
        self._last_check_at = now
        return elapsed_s if elapsed_s > LATE_S or self.partitioned_since is not None else 0.0

    def check(self, last_heard: Collection[float], now: float) -> AgentLiveness:
        """Interpret the current silence of the agents.

        Args:
            last_heard: time of the last message of each agent, seconds.
            now: seconds.
        """
        # Agents that are cut off together fall silent within one heartbeat, not at one instant.
        silent = sum(now - at > self._quiet_s for at in last_heard)
        most_are_silent = silent >= 2 and 2 * silent > len(last_heard)
        if self.partitioned_since is None:
            if not most_are_silent or all(now - at <= self._timeout_s for at in last_heard):
                return AgentLiveness.OK
            self.partitioned_since = now
        if silent == len(last_heard):
            self._some_since = None
        elif self._some_since is None:
            self._some_since = now
        partial = (
            self._some_since is not None
            and now - self._some_since > PARTIAL_TIMEOUTS * self._timeout_s
        )
        if most_are_silent and not partial:
            return AgentLiveness.PARTITIONED
        self.partitioned_since = self._some_since = None
        return AgentLiveness.OK if most_are_silent else AgentLiveness.RECOVERED
