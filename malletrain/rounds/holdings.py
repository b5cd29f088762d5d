"""Tracks the nodes that hold a job and their last reports. Decides which assignments need not be
sent again.

:class:`ScriptEnds` decides when a job is completed: its script has ended with exit code 0 on every
node of one round. What happens to the nodes afterwards and which round is being formed does not
matter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice

from malletrain.protocol.messages import Assignment
from malletrain.protocol.phases import AT_WORK, BROKEN, OF_NO_ROUND, AssignmentPhase
from malletrain.rounds.interface import Action, SendAssign, SendRelease

MAX_SAMPLE_NODES = 512
"""Maximum number of nodes of a job that pool their samples. Every member of a round gets the
addresses of all of them.
"""
MAX_RESTARTS = 3
"""Number of times that a launcher which has come up and ended is started again on its node. Then
the node is rejected.
"""


@dataclass
class Holdings:
    """The nodes of one job, by the requests sent to them."""

    assigned: set[str] = field(default_factory=set)
    """Nodes that were asked to hold the job or reported that they do."""
    releasing: set[str] = field(default_factory=set)
    """Nodes that were asked to release the job. Their later reports of it are ignored."""
    phases: dict[str, Assignment] = field(default_factory=dict)
    """Node → last reported assignment."""
    unreachable: set[str] = field(default_factory=set)
    """Nodes whose agents currently cannot be reached."""
    givers: tuple[str, ...] = ()
    """Leavers that take part in the next round, because they pass on the job's state."""
    occupied: set[str] = field(default_factory=set)
    """Nodes that another job is still leaving. The launcher starts when that job has left."""
    doubted: set[str] = field(default_factory=set)
    """Nodes on which workers failed while a check decides whether the node is to blame."""
    restarts: dict[str, set[int]] = field(default_factory=dict)
    """Node → rounds in which its launcher ended and was started again."""

    def is_in(self, node: str, *phases: AssignmentPhase) -> bool:
        """Return whether the last phase of ``node`` is one of ``phases``, of any round."""
        assignment = self.phases.get(node)
        return assignment is not None and assignment.phase in phases

    def is_in_round(self, node: str, generation: int, *phases: AssignmentPhase) -> bool:
        """Like :meth:`is_in`, and of round ``generation`` if the phase belongs to a round."""
        assignment = self.phases.get(node)
        if assignment is None or assignment.phase not in phases:
            return False
        return assignment.phase in OF_NO_ROUND or assignment.generation == generation

    def belongs(self, node: str, generation: int) -> bool:
        """Return whether the workers on ``node`` belong to that round, even if they failed. No
        workers belong to round 0, which is before the first one.
        """
        if generation == 0:
            return False
        if self.is_in_round(node, generation, *AT_WORK):
            return True
        return self.is_in(node, *BROKEN) and self.phases[node].generation == generation

    def keepers(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return the addresses of the keepers on ``nodes``."""
        assignments = (self.phases.get(node) for node in nodes)
        return tuple(a.address for a in assignments if a is not None and a.address)

    def samples(self, nodes: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """Return those of ``nodes`` that serve samples, up to MAX_SAMPLE_NODES, with the address of
        each.
        """
        assignments = ((node, self.phases.get(node)) for node in nodes)
        serving = ((n, a.data_address) for n, a in assignments if a is not None and a.data_address)
        return tuple(islice(serving, MAX_SAMPLE_NODES))

    def note(self, node: str, assignment: Assignment) -> None:
        """Store the assignment that ``node`` reports."""
        self.assigned.add(node)
        self.occupied.discard(node)
        self.phases[node] = assignment

    def adopt(self, phases: dict[str, Assignment], generation: int) -> list[Action]:
        """Adopt the assignments of nodes after a restart of the daemon. Nodes in a newer round than
        ``generation``, the newest in the store, are released.
        """
        self.phases = {n: a for n, a in phases.items() if a.generation <= generation}
        self.assigned = set(phases)
        return self.release(n for n in sorted(phases) if n not in self.phases)

    def assign(self, node: str) -> list[Action]:
        """Ask ``node`` to hold the job, unless it already does."""
        launcher_ended = self.is_in(node, AssignmentPhase.EXITED)
        if node in self.releasing or (node in self.assigned and not launcher_ended):
            return []
        self.assigned.add(node)
        self.phases.pop(node, None)
        return [SendAssign(node)]

    def restart_ended(self, nodes: Iterable[str]) -> list[Action]:
        """Ask those of ``nodes`` whose launchers ended in a round to start them again, unless that
        happened in too many rounds. A repeated report of an end does not count.
        """
        actions: list[Action] = []
        for node in nodes:
            if not self.is_in(node, AssignmentPhase.EXITED):
                continue
            generation, rounds = self.phases[node].generation, self.restarts.get(node, set())
            if generation and len(rounds | {generation}) <= MAX_RESTARTS:
                self.restarts[node] = rounds | {generation}
                actions += self.assign(node)
        return actions

    def release(self, nodes: Iterable[str]) -> list[Action]:
        """Ask ``nodes`` to release the job, unless they were asked already."""
        actions: list[Action] = []
        for node in nodes:
            if node not in self.releasing:
                self.forget(node)
                self.releasing.add(node)
                actions.append(SendRelease(node))
        return actions

    def take_back(self, node: str, assignment: Assignment, leaves: bool) -> None:
        """Keep ``node``, whose release was not sent yet; ``leaves``: only for one more round."""
        self.releasing.discard(node)
        self.note(node, assignment)
        if leaves:
            self.givers = (*self.givers, node)

    def forget(self, node: str) -> None:
        """Forget ``node``, which no longer has anything of the job."""
        self.assigned.discard(node)
        self.releasing.discard(node)
        self.occupied.discard(node)
        self.givers = tuple(n for n in self.givers if n != node)
        self.doubted.discard(node)
        self.restarts.pop(node, None)
        self.phases.pop(node, None)


class NodeHolder:
    """The reports on a node that every mode notes alike, in whatever stage."""

    holdings: Holdings

    def unreachable(self, node: str) -> None:
        """Note that the agent on ``node`` cannot be reached. It may be lost with its process, and
        failures of its peers may come from that.
        """
        self.holdings.unreachable.add(node)

    def reachable(self, node: str) -> None:
        """Note that the agent on ``node`` can be reached again."""
        self.holdings.unreachable.discard(node)

    def occupied(self, node: str) -> None:
        """Note that another job is still leaving ``node``."""
        self.holdings.occupied.add(node)

    def doubt(self, node: str, over: bool) -> list[Action]:
        """Hold back a failure on ``node`` that the node may have caused; ``over``: the node did not
        cause it.
        """
        doubted = self.holdings.doubted
        (doubted.discard if over else doubted.add)(node)
        return []


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
