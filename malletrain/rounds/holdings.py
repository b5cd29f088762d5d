"""Which nodes hold a job and what each last reported of it. Decides only which assignments need not
be sent again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from malletrain.protocol.messages import Assignment
from malletrain.protocol.phases import AT_WORK, BROKEN, OF_NO_ROUND, AssignmentPhase
from malletrain.rounds.actions import Action, SendAssign, SendRelease


@dataclass
class Holdings:
    """The nodes of one job, by what was asked of them."""

    assigned: set[str] = field(default_factory=set)
    """Have been told to hold the job, or said that they do."""
    releasing: set[str] = field(default_factory=set)
    """Have been told to let go; what they still say of the job does not count."""
    phases: dict[str, Assignment] = field(default_factory=dict)
    """What each said last."""
    unreachable: set[str] = field(default_factory=set)
    """Their agents cannot be reached at present."""
    givers: tuple[str, ...] = ()
    """Members of the next round although they leave: they have the job's state, and give it."""
    occupied: set[str] = field(default_factory=set)
    """Another job is on its way out of them; the launcher is started when it is gone."""
    doubted: set[str] = field(default_factory=set)
    """Workers failed there, and it is being looked whether the node is to blame."""

    def is_in(self, node: str, *phases: AssignmentPhase) -> bool:
        """Whether ``node`` said one of ``phases`` last, of whatever round."""
        assignment = self.phases.get(node)
        return assignment is not None and assignment.phase in phases

    def is_in_round(self, node: str, generation: int, *phases: AssignmentPhase) -> bool:
        """As :meth:`is_in`, of the round ``generation`` where the phase is of one."""
        assignment = self.phases.get(node)
        if assignment is None or assignment.phase not in phases:
            return False
        return assignment.phase in OF_NO_ROUND or assignment.generation == generation

    def belongs(self, node: str, generation: int) -> bool:
        """Whether the workers on ``node`` are of that round, whatever became of them. None are of
        round 0: that is before the first.
        """
        if generation == 0:
            return False
        if self.is_in_round(node, generation, *AT_WORK):
            return True
        return self.is_in(node, *BROKEN) and self.phases[node].generation == generation

    def keepers(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Where those of ``nodes`` that keep snapshots in memory can be reached."""
        assignments = (self.phases.get(node) for node in nodes)
        return tuple(a.address for a in assignments if a is not None and a.address)

    def note(self, node: str, assignment: Assignment) -> None:
        """``node`` holds the job and says so."""
        self.assigned.add(node)
        self.occupied.discard(node)
        self.phases[node] = assignment

    def adopt(self, phases: dict[str, Assignment], generation: int) -> list[Action]:
        """Take over what nodes hold after a restart of the daemon; those in a newer round than
        ``generation``, the newest that the store knows, are released.
        """
        self.phases = {n: a for n, a in phases.items() if a.generation <= generation}
        self.assigned = set(phases)
        return self.release(n for n in sorted(phases) if n not in self.phases)

    def assign(self, node: str) -> list[Action]:
        """Have ``node`` hold the job, unless it does."""
        again = self.is_in(node, AssignmentPhase.EXITED)
        if node in self.releasing or (node in self.assigned and not again):
            return []
        self.assigned.add(node)
        self.phases.pop(node, None)
        return [SendAssign(node)]

    def doubt(self, node: str, over: bool) -> None:
        """Begin or end to doubt that the workers on ``node`` failed by themselves."""
        (self.doubted.discard if over else self.doubted.add)(node)

    def release(self, nodes: Iterable[str]) -> list[Action]:
        """Have ``nodes`` let go, unless they are about to."""
        actions: list[Action] = []
        for node in nodes:
            if node not in self.releasing:
                self.forget(node)
                self.releasing.add(node)
                actions.append(SendRelease(node))
        return actions

    def take_back(self, node: str, assignment: Assignment) -> None:
        """``node`` has not been told yet that it is to let go: it is in one round more."""
        self.releasing.discard(node)
        self.note(node, assignment)
        self.givers = (*self.givers, node)

    def forget(self, node: str) -> None:
        """Nothing of the job is on ``node``."""
        self.assigned.discard(node)
        self.releasing.discard(node)
        self.occupied.discard(node)
        self.givers = tuple(n for n in self.givers if n != node)
        self.doubted.discard(node)
        self.phases.pop(node, None)
