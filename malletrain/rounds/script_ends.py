"""On which nodes the script of a job has ended with code 0, by round. Pure.

A job is completed when its script has ended so on every node of one round, whatever happens to the
nodes afterwards and whichever round is being formed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from malletrain.protocol.messages import Assignment
from malletrain.protocol.phases import AssignmentPhase


@dataclass
class ScriptEnds:
    """What the nodes have said of it."""

    _sizes: dict[int, dict[str, int]] = field(default_factory=dict)
    """Round → node → nodes of that round, as the node knows; 0: it does not."""

    def note(self, node: str, assignment: Assignment) -> None:
        """``node`` says how far the job is there."""
        if assignment.phase is AssignmentPhase.SUCCEEDED and assignment.generation:
            self._sizes.setdefault(assignment.generation, {})[node] = assignment.size

    def on(self, node: str, generation: int) -> bool:
        """Whether every worker of round ``generation`` on ``node`` has ended with code 0."""
        return node in self._sizes.get(generation, {})

    def everywhere(self, generation: int, members: Collection[str]) -> bool:
        """Whether that is so on all ``members`` of the newest round, ``generation``, or on all
        nodes of an older one.
        """
        if members and all(self.on(node, generation) for node in members):
            return True
        older = (nodes for number, nodes in self._sizes.items() if number < generation)
        return any(0 < max(nodes.values()) <= len(nodes) for nodes in older)

    def clear(self) -> None:
        """Nothing of the job runs."""
        self._sizes.clear()
