"""Time limits of the steps of a rescale."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundSettings:
    """Time limits in seconds."""

    warmup_s: float = 60.0
    """Maximum time for joiners to start while the others train, or while no node can train without
    them.
    """
    warmup_broken_s: float = 15.0
    """The same while the remaining members could train and wait for the joiners."""
    drain_s: float = 10.0
    """Maximum time for a snapshot, or for a service's process to hand over its data."""
    join_s: float = 60.0
    """Maximum time for all members to join a round."""
    failure_grace_s: float = 2.5
    """Time that a failure waits for a report that a node was lost."""
    joiner_grace_s: float = 1.0
    """Maximum time that nodes which the main scheduler takes back wait for joiners without which
    the job cannot continue.
    """
    stop_s: float = 5.0
    """Time between SIGTERM and SIGKILL."""

    def drain_within(self, within_s: float | None) -> float:
        """Return the seconds for a drain if a node is gone in ``within_s`` (None: no node
        leaves).
        """
        return self.drain_s if within_s is None else max(0.2, min(self.drain_s, within_s * 0.6))

    def end_within(self, within_s: float) -> float:
        """Return the seconds that a process gets to end by itself if its node is gone in
        ``within_s``. After that its agent stops it.
        """
        return max(0.2, 0.95 * (within_s - min(self.stop_s + 1.0, within_s / 2)))

    def joiners_within(self, within_s: float) -> float:
        """Return the seconds to wait for joiners without which no node can train, if a node is gone
        in ``within_s``. The time is short, because the main scheduler's job waits for the node.
        """
        return max(0.0, min(self.joiner_grace_s, within_s * 0.9 - self.drain_within(within_s)))
