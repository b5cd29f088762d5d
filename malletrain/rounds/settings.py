"""How long each step of a rescale may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundSettings:
    """Time limits in seconds."""

    warmup_s: float = 60.0
    """For joiners to come up while the others train, or nobody can without them."""
    warmup_broken_s: float = 15.0
    """The same while those that could train cannot."""
    drain_s: float = 10.0
    """For a snapshot, or for a service's process to hand over what it holds."""
    join_s: float = 60.0
    """For all members to join a round."""
    failure_grace_s: float = 2.5
    """How long a failure waits for the news that a node was lost."""
    joiner_grace_s: float = 1.0
    """How long nodes that the main scheduler wants back wait for joiners without whom the job
    cannot go on.
    """
    stop_s: float = 5.0
    """Between SIGTERM and SIGKILL."""

    def drain_within(self, within_s: float | None) -> float:
        """Seconds for a drain when a node is gone in ``within_s`` (None: no node has to go)."""
        return self.drain_s if within_s is None else max(0.2, min(self.drain_s, within_s * 0.6))

    def end_within(self, within_s: float) -> float:
        """Seconds that a process gets to end by itself when its node is gone in ``within_s``: its
        agent stops it itself after that.
        """
        return max(0.2, 0.95 * (within_s - min(self.stop_s + 1.0, within_s / 2)))

    def joiners_within(self, within_s: float) -> float:
        """Seconds for joiners without whom nobody can train, when a node is gone in ``within_s``.
        A moment and no longer: the main scheduler's job waits for the node.
        """
        return max(0.0, min(self.joiner_grace_s, within_s * 0.9 - self.drain_within(within_s)))
