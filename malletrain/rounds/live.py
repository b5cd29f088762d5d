"""The rescales of a job in live mode: the state machine of restart mode, but workers live on from
round to round and hold the job's state.

The differences from :class:`malletrain.rounds.restart.JobRounds`:

* Nothing is drained while a member stays; only a job that loses all its nodes takes a snapshot.
* Members that hold state come first in rank order.
* Leavers are released when the others have left the old group.
* A lost member or a failed worker is answered at once by a new round of the remaining members,
  without a plan. Workers whose group broke although no member was lost get a new round after a
  moment.
* If no staying member has the state, leavers that have it are members of one more round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from malletrain.protocol.messages import Assignment
from malletrain.protocol.phases import BROKEN, HOLDING, AssignmentPhase
from malletrain.rounds.actions import Action, Broke, Formed, NodesRejected, SendAbort, SendRelease
from malletrain.rounds.failure_grace import own_fault
from malletrain.rounds.interface import RoundStage, View
from malletrain.rounds.restart import JobRounds
from malletrain.rounds.settings import RoundSettings

MOST_EXTENSIONS = 20
"""Times ``join_s`` that a round may wait for the others to reach the end of a step; then they are
told to give it up.
"""
MOST_JOINS = 3
"""Times in a row that a node's worker may fail while it joins, before the node is rejected."""
CHANGE_S = 2.0
"""In which a round is usually entered whose members are all up."""


class LiveRounds:
    """The rescales of one live job."""

    interrupts = True
    view: View = ()

    def __init__(
        self,
        settings: RoundSettings | None = None,
        min_nodes: int = 1,
        generation: int = 0,
    ) -> None:
        """Begin without nodes.

        Args:
            settings: Time limits.
            min_nodes: Fewer train not at all.
            generation: Of the newest round that the store knows.
        """
        self.job = JobRounds(settings or RoundSettings(), min_nodes, generation, policy=self)
        self._holdings = self.job.holdings
        self._group: tuple[str, ...] = ()
        self._rosters: dict[int, tuple[str, ...]] = {}
        """The rounds in which a worker may be at present: the one that trains and those formed
        since.
        """
        self._leavers: dict[str, Assignment | None] = {}
        """Released when the others have left the group that they are in; what each said last."""
        self._extended = 0
        self._at_once = False
        """Those that are left go on now: nobody is waited for."""
        self._failed_joins: dict[str, int] = {}
        self._blamed: dict[str, list[Action]] = {}
        """What is to be told of failures on nodes that are doubted."""
        self._handed_by: float | None = None
        """Until when a round is completed only because some that hold state go."""
        self._gone_at: float | None = None
        """When a node that has the state meanwhile has to be gone."""
        self._adrift_at: float | None = None
        """When workers in a broken group get a new round, should no news of a loss come."""

    @property
    def generation(self) -> int:
        """Of the newest round."""
        return self.job.generation

    @property
    def stage(self) -> RoundStage:
        """Where the rescale stands."""
        return self.job.stage

    @property
    def target(self) -> tuple[str, ...]:
        """The nodes of the newest plan."""
        return self.job.target

    @property
    def members(self) -> tuple[str, ...]:
        """The nodes of the newest round, in rank order."""
        return self.job.members

    @property
    def drain_s(self) -> float:
        """Seconds that a drain may take now."""
        return self.job.drain_s

    @property
    def min_nodes(self) -> int:
        """Fewer train not at all."""
        return self.job.min_nodes

    @min_nodes.setter
    def min_nodes(self, number: int) -> None:
        self.job.min_nodes = number

    @property
    def finishing(self) -> bool:
        """Whether the script is done somewhere, or in the code after its training."""
        return self.job.finishing

    @property
    def between_epochs(self) -> bool:
        """Whether the script is in the code after the steps of an epoch."""
        return any(self._holdings.is_in(n, AssignmentPhase.BETWEEN_EPOCHS) for n in self._group)

    @property
    def lost_member(self) -> bool:
        """Whether a member was lost since the newest round was formed."""
        return self.job.lost_member

    # --- the steps of this mode (malletrain.rounds.restart.RoundPolicy) ---

    def _holds_state(self, node: str) -> bool:
        return (
            self._holdings.is_in(node, *HOLDING)
            and self._holdings.phases[node].generation > 0
            and node not in self._holdings.unreachable
        )

    def ready(self, node: str) -> bool:
        """Those that hold state and those that can be started."""
        if node in self._holdings.unreachable:
            return False
        if self._at_once:
            # A worker that failed has to be started first: the others train on meanwhile.
            return self._holds_state(node) or self.job.is_in(node, AssignmentPhase.READY)
        return self.job.ready(node) or self._holds_state(node)

    def survivors(self) -> tuple[str, ...]:
        """Those that hold the job's state and stay."""
        order = dict.fromkeys((*self.members, *self._group, *self.job.target))
        return tuple(n for n in order if n in self.job.target and self._holds_state(n))

    def keeps_round(self, now: float, within_s: float | None) -> bool:
        """Whether a round that is being formed is completed first: where some go that hold state,
        those that stay get it in this round, or hold parts of it and lose theirs.
        """
        if self.job.keeps_round(now, within_s):
            return True
        stay = set(self.members) & set(self.job.target)
        if not stay or not any(map(self._holds_state, set(self.members) - stay)):
            return False
        until = now + (self.job.settings.join_s if within_s is None else within_s / 3)
        if self.survivors():
            until = min(until, now + CHANGE_S)
        self._handed_by = min(until, self._handed_by or until)
        if within_s is not None:
            self._gone_at = min(now + within_s, self._gone_at or now + within_s)
        return now < self._handed_by

    def broken(self) -> list[str]:
        """Members whose workers failed, in whatever round."""
        return [n for n in self.members if self._holdings.is_in(n, *BROKEN)]

    def drain(self, now: float) -> list[Action]:
        """Nothing is drained while somebody stays."""
        return self.form(now) if self.survivors() else self.job.drain(now)

    def form(self, now: float) -> list[Action]:
        """A round of all that are ready."""
        self._extended, self._adrift_at = 0, None
        self._handed_by = self._gone_at = None
        if self.job.whole():  # the newest round may have been formed just now
            self._group = self.members
        if self.target and not self.survivors():
            self._take_back()
        actions = self.job.form(now, because_lost=self.lost_member)
        self._rosters[self.generation] = self.members
        # Where no round is formed none comes after which leavers would be let go.
        return actions + self._let_go() if self.stage is RoundStage.IDLE else actions

    def _take_back(self) -> None:
        """Leavers that hold the state give it to those that stay, and leave after that."""
        for node in sorted(self._leavers.keys() - self._holdings.unreachable):
            assignment = self._leavers[node]
            if assignment and assignment.phase in HOLDING and assignment.generation:
                del self._leavers[node]
                self._holdings.take_back(node, assignment)

    def release(self, nodes: Iterable[str]) -> list[Action]:
        """At once, or when the others have left the group that the nodes are in."""
        assignments = dict(self._holdings.phases)
        actions = self.job.release(nodes)
        if self.lost_member or not self.survivors():
            return actions
        # They finish the step with the others, who would lose it otherwise.
        released = [a.node for a in actions if isinstance(a, SendRelease) and a.node in self._group]
        self._leavers.update((node, assignments.get(node)) for node in released)
        return [a for a in actions if not (isinstance(a, SendRelease) and a.node in released)]

    def _let_go(self, but: Iterable[str] = ()) -> list[Action]:
        leavers = self._leavers
        self._leavers = {node: leavers[node] for node in leavers if node in but}
        return [SendRelease(node) for node in leavers if node not in but]

    def _abort(self, lost: Collection[str]) -> list[Action]:
        void = sorted(g for g, roster in self._rosters.items() if not set(lost).isdisjoint(roster))
        return [SendAbort(n, g) for n in self.survivors() for g in void]

    def _go_on(self, lost: Collection[str], now: float) -> list[Action]:
        """Members are lost: have nobody wait in a group with them, and go on with those that are
        left if they are enough.
        """
        actions = self._abort(lost)
        if len(self.survivors()) < max(1, self.job.min_nodes):
            # The step that leavers were to finish is lost, and no round follows.
            return actions + (self._let_go() if set(lost) & set(self._group) else [])
        # Leavers stay until it is formed: should those that are left fail, they have the state.
        self.job.lost_member = self._at_once = True
        try:
            return actions + self.form(now)
        finally:
            self._at_once = False

    def move(self, nodes: Iterable[str], now: float, within_s: float | None = None) -> list[Action]:
        """Go to exactly ``nodes`` (none: let go of all)."""
        return self.job.move(nodes, now, within_s)

    def store_up(self, node: str, generation: int, host: str, port: int) -> list[Action]:
        """The node of rank 0 serves the round's store."""
        return self.job.store_up(node, generation, host, port)

    def drained(self, node: str, generation: int, now: float, number: int = 0) -> list[Action]:
        """The snapshot asked for is on disk, or there is none to take."""
        return self.job.drained(node, generation, now)

    def released(self, node: str, now: float) -> list[Action]:
        """No process of the job is left on ``node``."""
        return self.job.released(node, now)

    def unreachable(self, node: str) -> None:
        """The agent on ``node`` cannot be reached."""
        self.job.unreachable(node)

    def reachable(self, node: str) -> None:
        """It is back."""
        self.job.reachable(node)

    def occupied(self, node: str) -> None:
        """Another job is on its way out of ``node``."""
        self.job.occupied(node)

    def doubt(self, node: str, over: bool) -> list[Action]:
        """Workers failed there, and it may be the node's fault; ``over``: it was not."""
        self.job.doubt(node, over)
        return self._blamed.pop(node, []) if over else []

    def phase(self, node: str, assignment: Assignment, now: float) -> list[Action]:
        """The agent on ``node`` reports its assignment."""
        if node in self._leavers:
            self._leavers[node] = assignment
        before = self._holdings.phases.get(node)
        stateful = self._holds_state(node) and node in self.members
        joining = (
            self.stage is RoundStage.FORMING
            and node in self.members
            and not self._holds_state(node)
        )
        actions = self._noted(self.job.phase(node, assignment, now))
        new = node in self._holdings.phases and assignment != before
        if self.stage is RoundStage.COMPLETED or not new:
            return actions + self._old_group_done()
        if assignment.phase is AssignmentPhase.LOST:
            return actions + self._adrift(node, assignment.generation, now)
        if assignment.phase not in BROKEN:
            return actions + self._old_group_done()
        if (stateful or joining) and self.survivors():
            fault = own_fault(assignment)
            if fault:
                self.job.failure.told_of = self.generation
            if fault or len(self.survivors()) >= max(1, self.job.min_nodes):
                self.job.failure.clear()  # else those that are left cannot go on without it
            if joining:
                self._failed_joins[node] = self._failed_joins.get(node, 0) + 1
                if self._failed_joins[node] >= MOST_JOINS:
                    actions += self.job.reject(
                        [node],
                        "its worker failed again and again while it joined; see `malletrain logs`",
                    )
            if node in self._holdings.doubted:
                self._blamed[node], fault = fault, []
            actions += self._go_on([node], now) + fault
        return self._noted(actions)

    def _adrift(self, node: str, generation: int, now: float) -> list[Action]:
        """The workers on ``node`` wait in a broken group."""
        if generation != self.generation or node not in self.members:
            return []
        # The news of the loss only has yet to be confirmed.
        if gone := self._holdings.unreachable.intersection(self.members):
            return self._go_on(gone, now)
        if self._adrift_at is None:
            self._adrift_at = now + self.job.settings.failure_grace_s
        return []

    def gone(self, node: str, now: float) -> list[Action]:
        """The node is lost: those that are left go on."""
        done = self.job.ends.on(node, self.generation)
        concerned = not done and (node in self.members or node in self._group)
        if concerned:
            self.job.failure.node_lost_in = self.generation
        self._leavers.pop(node, None)
        actions = self.job.gone(node, now)
        # DRAINING: nobody stays, so nobody goes on.
        if concerned and self.stage is not RoundStage.DRAINING and self.survivors():
            actions += self._go_on([node], now)
        self._group = tuple(n for n in self._group if n != node)
        self._failed_joins.pop(node, None)
        self._blamed.pop(node, None)
        return self._noted(actions)

    def tick(self, now: float) -> list[Action]:
        """Carry on where a time limit has passed."""
        if self._handed_by is not None and now >= self._handed_by:
            forming = self.stage is RoundStage.FORMING
            within_s = None if self._gone_at is None else max(0.0, self._gone_at - now)
            actions = self.move(self.job.target, now, within_s) if forming else []
            self._handed_by = self._gone_at = None
            return actions
        if self._adrift_at is not None and now >= self._adrift_at:
            self._adrift_at = None
            if self.stage is not RoundStage.COMPLETED and any(
                self.job.is_in(n, AssignmentPhase.LOST) for n in self.members
            ):
                return self._noted(self._go_on(self.members, now))
        due = self.job.deadline is not None and now >= self.job.deadline
        forming = due and self.stage is RoundStage.FORMING and not self.job.failing()
        later = (AssignmentPhase.BETWEEN_EPOCHS, AssignmentPhase.FINISHING)
        if forming and any(self._holdings.is_in(n, *later) for n in self._group):
            self.job.deadline = now + self.job.settings.join_s  # they come when that code has run
            return []
        if forming and (stays := self.survivors()):
            late = [
                n
                for n in self.members
                if n not in stays
                and not self.job.is_in(n, AssignmentPhase.RUNNING, AssignmentPhase.SUCCEEDED)
            ]
            self._extended += 1
            if late:
                return self.job.reject(
                    late, f"its workers did not join within {self.job.settings.join_s:g} s"
                ) + self.form(now)
            if self._extended < MOST_EXTENSIONS:  # they are in a long step
                self.job.deadline = now + self.job.settings.join_s
                return []
            actions = self.job.tick(now)
            hung = [n for a in actions if isinstance(a, NodesRejected) for n in a.nodes]
            broke = any(isinstance(a, Broke) for a in actions)
            return self._noted([*(self.give_up() if broke else self._abort(hung)), *actions])
        return self._noted(self.job.tick(now))

    def give_up(self) -> list[Action]:
        """Those that cannot leave their step end, and begin anew; the others have the state."""
        aborts = [SendAbort(n, g) for n in self.survivors() for g in sorted(self._rosters)]
        return [*self.job.give_up(), *aborts]

    def postpone(self, by_s: float) -> None:
        """Nobody could be heard for so long: every time limit that runs ends later."""
        self.job.postpone(by_s)
        if self._adrift_at is not None:
            self._adrift_at += by_s
        if self._handed_by is not None:
            self._handed_by += by_s

    def next_wakeup(self) -> float | None:
        """When :meth:`tick` is due."""
        times = (self.job.next_wakeup(), self._adrift_at, self._handed_by)
        return min((t for t in times if t is not None), default=None)

    def stop(self) -> list[Action]:
        """The job has ended: release every node."""
        self._adrift_at = None
        return [*self._let_go(), *self.job.stop()]

    def adopt(
        self, generation: int, members: Iterable[str], phases: dict[str, Assignment], now: float
    ) -> list[Action]:
        """Take over what the agents report."""
        actions = self.job.adopt(generation, members, phases, now)
        self._group = tuple(n for n in self.members if n in phases)
        self._rosters = {a.generation: tuple(phases) for a in phases.values()} | {
            generation: self.members
        }
        return actions

    def _noted(self, actions: list[Action]) -> list[Action]:
        formed = next((a for a in actions if isinstance(a, Formed)), None)
        if formed is None:
            return actions
        self._handed_by = self._gone_at = None
        # Not ``self.members``: the next round may be on its way already.
        self._group = formed.members
        self._rosters = {g: roster for g, roster in self._rosters.items() if g >= formed.generation}
        for node in formed.members:
            self._failed_joins.pop(node, None)
        return actions + self._let_go(but=formed.members)

    def _old_group_done(self) -> list[Action]:
        """The workers were done before they came to the change that was planned."""
        remaining = [
            self._leavers[n] if n in self._leavers else self._holdings.phases.get(n)
            for n in self._group
            if n in self._leavers or n not in self._holdings.releasing
        ]
        if (
            self.stage is not RoundStage.FORMING
            or not remaining
            or not all(a is not None and a.phase is AssignmentPhase.SUCCEEDED for a in remaining)
        ):
            return []
        return self.job.complete()
