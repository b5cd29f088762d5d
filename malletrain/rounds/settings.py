"""Time limits of the stages of a rescale, and how a preemption shortens them."""

from __future__ import annotations

from dataclasses import dataclass

DRAIN_FRACTION = 0.6
"""Maximum fraction of the remaining time of a leaving node that a drain takes."""
DRAIN_AND_WAIT_FRACTION = 0.9
"""Maximum fraction of that time for a drain and a wait for joiners together."""
END_MARGIN = 0.95
"""Factor on the time until an agent stops the processes of a leaving node."""
MIN_LIMIT_S = 0.2
"""Minimum of a drain and of the time for processes to end, seconds, however soon the node is
gone.
"""


@dataclass(frozen=True)
class RoundSettings:
    """Time limits in seconds."""

    warmup_s: float = 60.0
    """Maximum time for joiners to start while the others train, or while no node can train without
    them.
    """
    warmup_blocking_s: float = 15.0
    """Maximum time for joiners to start while the remaining members wait for them, although they
    could train without them.
    """
    drain_s: float = 10.0
    """Maximum time for a snapshot, or for a service's process to hand over its data."""
    join_s: float = 60.0
    """Maximum time for all members to join a round."""
    failure_grace_s: float = 2.5
    """Time that a failure waits for a report that a node was lost."""
    joiner_grace_s: float = 1.0
    """Maximum time that a preempted node is held for joiners, if the job cannot continue without
    them.
    """
    stop_s: float = 5.0
    """Time between SIGTERM and SIGKILL."""

    def drain_limit_s(self, within_s: float | None) -> float:
        """Return the seconds for a drain if a node is gone in ``within_s`` (None: no node
        leaves). A drain takes at most :data:`DRAIN_FRACTION` of that time; the rest is for the wait
        for joiners and for the end of the processes.
        """
        if within_s is None:
            return self.drain_s
        return max(MIN_LIMIT_S, min(self.drain_s, within_s * DRAIN_FRACTION))

    def self_exit_limit_s(self, within_s: float) -> float:
        """Return the seconds that a process gets to end by itself if its node is gone in
        ``within_s``. After that its agent stops it: ``stop_s`` and a second before the node is
        gone, or at half of the time if that is later. The result is below that time by a factor
        of :data:`END_MARGIN`, so that the round decides before the agent does.
        """
        agent_stops_in_s = within_s - min(self.stop_s + 1.0, within_s / 2)
        return max(MIN_LIMIT_S, END_MARGIN * agent_stops_in_s)

    def joiner_wait_s(self, within_s: float) -> float:
        """Return how long to wait for joiners that the job cannot train without, if a node is gone
        in ``within_s``, seconds. The time is short, because a main job waits for that node. This
        wait and the drain take at most :data:`DRAIN_AND_WAIT_FRACTION` of ``within_s``.
        """
        remaining_s = within_s * DRAIN_AND_WAIT_FRACTION - self.drain_limit_s(within_s)
        return max(0.0, min(self.joiner_grace_s, remaining_s))
