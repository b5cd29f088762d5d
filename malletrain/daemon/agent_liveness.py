"""Whether silent agents are lost, or the daemon itself is cut off from them. Pure.

A daemon that was stopped, swapped out or suspended with its machine receives nothing for that
time, and one whose link is down receives nothing at all, while the agents go on training. Decides
which of these it is. :class:`malletrain.daemon.core.Core` acts on it: while the daemon is cut off,
no agent is declared lost, no time limit runs and nothing is planned.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from enum import Enum

LATE_S = 2.0
"""A check that comes later than this after the previous one is late: the daemon stood still."""
PARTIAL_TIMEOUTS = 3.0
"""How long most agents may be silent while some are heard, in agent time-outs. Then they are
declared lost: a part of the machine failed, not the daemon's connection.
"""


class AgentLiveness(Enum):
    """What the silence of agents means."""

    OK = "ok"
    """An agent that exceeds its time-out is lost."""
    PARTITIONED = "partitioned"
    """The daemon is cut off from most or all agents; none of them is lost."""
    RECOVERED = "recovered"
    """The daemon has just begun to receive from the agents again."""


class LivenessMonitor:
    """Judges the silence of the agents of one daemon.

    Args:
        timeout_s: silence after which a single agent is lost, seconds.
        heartbeat_s: interval of the agents' heartbeats, seconds.
    """

    def __init__(self, timeout_s: float, heartbeat_s: float) -> None:
        self._timeout_s, self._heartbeat_s = timeout_s, heartbeat_s
        self._quiet_s = max(timeout_s / 2, 1.5 * heartbeat_s)
        self._checked: float | None = None
        self.partitioned_since: float | None = None
        """Since when the daemon is cut off; None while it is not."""
        self._some_since: float | None = None
        """Since when, within that time, some agents are heard without a break."""
        self.settling_until: float | None = None
        """Until when the daemon waits for agents to report again after a partition; None if it
        does not wait.
        """
        self._recovered_at = math.inf

    def settle(self, until: float, recovered_at: float = math.inf) -> None:
        """Wait for the agents to report again.

        Args:
            until: when to stop waiting, seconds on the daemon's clock.
            recovered_at: since when agents can be heard.
        """
        self.settling_until, self._recovered_at = until, recovered_at

    def settled(self, last_heard: Collection[float], now: float) -> bool:
        """Whether that wait has just ended, because its time is over or because all agents have
        been heard.

        A message that was sent before the recovery and read after it does not count: its sender
        may have disconnected since.

        Args:
            last_heard: time of the last message of each agent, seconds.
            now: seconds.
        """
        until, after = self.settling_until, self._recovered_at + self._heartbeat_s
        if until is None or (now < until and not all(after <= at <= now for at in last_heard)):
            return False
        self.settling_until = None
        return True

    def unheard_s(self, now: float) -> float:
        """Seconds since the last call in which the daemon cannot have received anything; usually
        0. Call it in every batch of messages, and every second at least.
        """
        since = 0.0 if self._checked is None else now - self._checked
        self._checked = now
        return since if since > LATE_S or self.partitioned_since is not None else 0.0

    def check(self, last_heard: Collection[float], now: float) -> AgentLiveness:
        """What the silence of the agents means now.

        Args:
            last_heard: time of the last message of each agent, seconds.
            now: seconds.
        """
        # Agents that are cut off together fall silent within one heartbeat, not at one instant.
        quiet = sum(now - at > self._quiet_s for at in last_heard)
        most = quiet >= 2 and 2 * quiet > len(last_heard)
        if self.partitioned_since is None:
            if not most or all(now - at <= self._timeout_s for at in last_heard):
                return AgentLiveness.OK
            self.partitioned_since = now
        if quiet == len(last_heard):
            self._some_since = None
        elif self._some_since is None:
            self._some_since = now
        partial = (
            self._some_since is not None
            and now - self._some_since > PARTIAL_TIMEOUTS * self._timeout_s
        )
        if most and not partial:
            return AgentLiveness.PARTITIONED
        self.partitioned_since = self._some_since = None
        return AgentLiveness.OK if most else AgentLiveness.RECOVERED
