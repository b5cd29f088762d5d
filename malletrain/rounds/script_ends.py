"""Tracks on which nodes the script of a job has ended with exit code 0, by round. Pure.

A job is completed when its script has ended with exit code 0 on every node of one round. What
happens to the nodes afterwards and which round is being formed does not matter.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from malletrain.protocol.messages import Assignment
from malletrain.protocol.phases import AssignmentPhase


@dataclass
class ScriptEnds:
    """Nodes on which the script has ended, by round."""

    _sizes: dict[int, dict[str, int]] = field(default_factory=dict)
    """Round → node → number of nodes of that round as the node reported it; 0 if unknown."""

    def note(self, node: str, assignment: Assignment) -> None:
        """Note the reported assignment of ``node``."""
        if assignment.phase is AssignmentPhase.SUCCEEDED and assignment.generation:
            self._sizes.setdefault(assignment.generation, {})[node] = assignment.size

    def on(self, node: str, generation: int) -> bool:
        """Return whether every worker of round ``generation`` on ``node`` has ended with exit code
        0.
        """
        return node in self._sizes.get(generation, {})

    def everywhere(self, generation: int, members: Collection[str]) -> bool:
        """Return whether the script has ended on all ``members`` of the newest round,
        ``generation``, or on all nodes of an older round.
        """
        if members and all(self.on(node, generation) for node in members):
            return True
        older = (nodes for number, nodes in self._sizes.items() if number < generation)
        return any(0 < max(nodes.values()) <= len(nodes) for nodes in older)

    def clear(self) -> None:
        """Forget all ends, because no process of the job runs."""
        self._sizes.clear()
