"""The rescales of a job in live mode. It is the state machine of restart mode, but workers stay
alive between rounds and hold the job's state.

The differences from :class:`malletrain.rounds.restart.JobRounds`:

* There is no drain while a member stays. Only a job that loses all its nodes takes a snapshot.
* Members that hold state come first in rank order.
* Leavers are released when the others have left the old group.
* After a lost member or a failed worker, the remaining members form a new round at once, without a
  plan. If the group broke although no member was lost, they form a new round after a short wait.
* If no staying member has the state, leavers that have it take part in one more round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from malletrain.protocol.messages import Assignment
from malletrain.protocol.phases import BROKEN, HOLDING, AssignmentPhase
from malletrain.rounds.actions import Action, Broke, Formed, NodesRejected, SendAbort, SendRelease
from malletrain.rounds.failure_grace import own_fault
from malletrain.rounds.interface import RoundSettings, RoundStage, View
from malletrain.rounds.restart import JobRounds

MAX_EXTENSIONS = 20
"""Maximum time, in units of ``join_s``, that a round waits for members to reach the end of a step.
Then they must abort it.
"""
MAX_FAILED_JOINS = 3
"""Number of consecutive failed joins after which a node is rejected."""
ROUND_ENTRY_S = 2.0
"""Usual time to enter a round whose members have all started, seconds."""


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
        """Start without nodes.

        Args:
            settings: Time limits.
            min_nodes: Minimum number of nodes on which the job trains.
            generation: Number of the newest round in the store.
        """
        self.job = JobRounds(settings or RoundSettings(), min_nodes, generation, policy=self)
        self._holdings = self.job.holdings
        self._group: tuple[str, ...] = ()
        self._rosters: dict[int, tuple[str, ...]] = {}
        """Rounds in which a worker may currently be → members: the round that trains, and those
        formed since.
        """
        self._leavers: dict[str, Assignment | None] = {}
        """Nodes that are released when the others have left their group → last assignment."""
        self._extension_count = 0
        self._without_waiting = False
        """Whether the remaining members form a round now, without waiting for other nodes."""
        self._failed_joins: dict[str, int] = {}
        self._withheld_reports: dict[str, list[Action]] = {}
        """Doubted node → actions that report its failure later."""
        self._complete_by: float | None = None
        """Time until which a round is completed first because leavers hold state; None if it is
        not.
        """
        self._gone_at: float | None = None
        """Time at which one of these leavers is gone; None without a time limit."""
        self._regroup_at: float | None = None
        """Time at which workers in a broken group get a new round if no loss is reported; None if
        none are.
        """

    @property
    def generation(self) -> int:
        """Number of the newest round."""
        return self.job.generation

    @property
    def stage(self) -> RoundStage:
        """Current stage of the rescale."""
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
        """Current maximum time of a drain, seconds."""
        return self.job.drain_s

    @property
    def min_nodes(self) -> int:
        """Minimum number of nodes on which the job trains."""
        return self.job.min_nodes

    @min_nodes.setter
    def min_nodes(self, number: int) -> None:
        self.job.min_nodes = number

    @property
    def finishing(self) -> bool:
        """Whether the script has ended somewhere or runs the code after its training."""
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
        """Return whether ``node`` holds state or can be started."""
        if node in self._holdings.unreachable:
            return False
        if self._without_waiting:
            # A failed worker must be restarted first. The others train meanwhile.
            return self._holds_state(node) or self.job.is_in(node, AssignmentPhase.READY)
        return self.job.ready(node) or self._holds_state(node)

    def survivors(self) -> tuple[str, ...]:
        """Return the staying nodes that hold the job's state."""
        order = dict.fromkeys((*self.members, *self._group, *self.job.target))
        return tuple(n for n in order if n in self.job.target and self._holds_state(n))

    def keeps_round(self, now: float, within_s: float | None) -> bool:
        """Return whether a round that is being formed is completed first. This is necessary if
        leavers hold state that the staying members receive in this round.
        """
        if self.job.keeps_round(now, within_s):
            return True
        staying = set(self.members) & set(self.job.target)
        if not staying or not any(map(self._holds_state, set(self.members) - staying)):
            return False
        until = now + (self.job.settings.join_s if within_s is None else within_s / 3)
        if self.survivors():
            until = min(until, now + ROUND_ENTRY_S)
        self._complete_by = min(until, self._complete_by or until)
        if within_s is not None:
            self._gone_at = min(now + within_s, self._gone_at or now + within_s)
        return now < self._complete_by

    def broken(self) -> list[str]:
        """Return the members whose workers failed, in any round."""
        return [n for n in self.members if self._holdings.is_in(n, *BROKEN)]

    def drain(self, now: float) -> list[Action]:
        """Form the next round without a drain, unless no member stays."""
        return self.form(now) if self.survivors() else self.job.drain(now)

    def form(self, now: float) -> list[Action]:
        """Form a round of all nodes that are ready."""
        self._extension_count, self._regroup_at = 0, None
        self._complete_by = self._gone_at = None
        if self.job.whole():  # the newest round may have been formed just now
            self._group = self.members
        if self.target and not self.survivors():
            self._keep_for_one_round()
        actions = self.job.form(now, because_lost=self.lost_member)
        self._rosters[self.generation] = self.members
        # If no round is formed, no later event releases the leavers.
        return actions + self._release_leavers() if self.stage is RoundStage.IDLE else actions

    def _keep_for_one_round(self) -> None:
        """Keep leavers that hold the state for one more round, in which they pass it on."""
        for node in sorted(self._leavers.keys() - self._holdings.unreachable):
            assignment = self._leavers[node]
            if assignment and assignment.phase in HOLDING and assignment.generation:
                del self._leavers[node]
                self._holdings.take_back(node, assignment)

    def release(self, nodes: Iterable[str]) -> list[Action]:
        """Release ``nodes`` at once, or when the others have left their group."""
        assignments = dict(self._holdings.phases)
        actions = self.job.release(nodes)
        if self.lost_member or not self.survivors():
            return actions
        # They finish the step with the others, which would lose it otherwise.
        released = [a.node for a in actions if isinstance(a, SendRelease) and a.node in self._group]
        self._leavers.update((node, assignments.get(node)) for node in released)
        return [a for a in actions if not (isinstance(a, SendRelease) and a.node in released)]

    def _release_leavers(self, but: Iterable[str] = ()) -> list[Action]:
        leavers = self._leavers
        self._leavers = {node: leavers[node] for node in leavers if node in but}
        return [SendRelease(node) for node in leavers if node not in but]

    def _abort(self, lost: Collection[str]) -> list[Action]:
        void = sorted(g for g, roster in self._rosters.items() if not set(lost).isdisjoint(roster))
        return [SendAbort(n, g) for n in self.survivors() for g in void]

    def _continue_without(self, lost: Collection[str], now: float) -> list[Action]:
        """Abort the groups of the lost members, and form a round of the remaining ones if they are
        enough.
        """
        actions = self._abort(lost)
        if len(self.survivors()) < max(1, self.job.min_nodes):
            # The step that leavers should finish is lost, and no round follows.
            return actions + (self._release_leavers() if set(lost) & set(self._group) else [])
        # Leavers stay until it is formed, because they have the state if the others fail.
        self.job.lost_member = self._without_waiting = True
        try:
            return actions + self.form(now)
        finally:
            self._without_waiting = False

    def move(self, nodes: Iterable[str], now: float, within_s: float | None = None) -> list[Action]:
        """Move to exactly ``nodes`` (none: release all)."""
        return self.job.move(nodes, now, within_s)

    def store_up(self, node: str, generation: int, host: str, port: int) -> list[Action]:
        """Note the address of the round's store, which the node of rank 0 serves."""
        return self.job.store_up(node, generation, host, port)

    def drained(self, node: str, generation: int, now: float, number: int = 0) -> list[Action]:
        """Note that the requested snapshot is on disk, or that there is nothing to save."""
        return self.job.drained(node, generation, now)

    def released(self, node: str, now: float) -> list[Action]:
        """Note that no process of the job is left on ``node``."""
        return self.job.released(node, now)

    def unreachable(self, node: str) -> None:
        """Note that the agent on ``node`` cannot be reached."""
        self.job.unreachable(node)

    def reachable(self, node: str) -> None:
        """Note that the agent on ``node`` can be reached again."""
        self.job.reachable(node)

    def occupied(self, node: str) -> None:
        """Note that another job is still leaving ``node``."""
        self.job.occupied(node)

    def doubt(self, node: str, over: bool) -> list[Action]:
        """Hold back a failure on ``node`` that the node may have caused; ``over``: the node did not
        cause it.
        """
        self.job.doubt(node, over)
        return self._withheld_reports.pop(node, []) if over else []

    def phase(self, node: str, assignment: Assignment, now: float) -> list[Action]:
        """Handle the assignment that the agent on ``node`` reports."""
        if node in self._leavers:
            self._leavers[node] = assignment
        before = self._holdings.phases.get(node)
        holds_state = self._holds_state(node) and node in self.members
        joining = (
            self.stage is RoundStage.FORMING
            and node in self.members
            and not self._holds_state(node)
        )
        actions = self._after_formed(self.job.phase(node, assignment, now))
        is_new = node in self._holdings.phases and assignment != before
        if self.stage is RoundStage.COMPLETED or not is_new:
            return actions + self._complete_if_ended()
        if assignment.phase is AssignmentPhase.LOST:
            return actions + self._group_broke(node, assignment.generation, now)
        if assignment.phase not in BROKEN:
            return actions + self._complete_if_ended()
        if (holds_state or joining) and self.survivors():
            fault = own_fault(assignment)
            if fault:
                self.job.failure.told_of = self.generation
            if fault or len(self.survivors()) >= max(1, self.job.min_nodes):
                self.job.failure.clear()  # else the remaining members cannot continue without it
            if joining:
                self._failed_joins[node] = self._failed_joins.get(node, 0) + 1
                if self._failed_joins[node] >= MAX_FAILED_JOINS:
                    actions += self.job.reject(
                        [node],
                        "its worker failed again and again while it joined; see `malletrain logs`",
                    )
            if node in self._holdings.doubted:
                self._withheld_reports[node], fault = fault, []
            actions += self._continue_without([node], now) + fault
        return self._after_formed(actions)

    def _group_broke(self, node: str, generation: int, now: float) -> list[Action]:
        """Handle workers that wait in a broken group."""
        if generation != self.generation or node not in self.members:
            return []
        # The loss is probable but not confirmed yet.
        if lost := self._holdings.unreachable.intersection(self.members):
            return self._continue_without(lost, now)
        if self._regroup_at is None:
            self._regroup_at = now + self.job.settings.failure_grace_s
        return []

    def gone(self, node: str, now: float) -> list[Action]:
        """Handle the loss of a node. The remaining members continue."""
        done = self.job.ends.on(node, self.generation)
        affected = not done and (node in self.members or node in self._group)
        if affected:
            self.job.failure.node_lost_in = self.generation
        self._leavers.pop(node, None)
        actions = self.job.gone(node, now)
        # DRAINING: no member stays, so none continues.
        if affected and self.stage is not RoundStage.DRAINING and self.survivors():
            actions += self._continue_without([node], now)
        self._group = tuple(n for n in self._group if n != node)
        self._failed_joins.pop(node, None)
        self._withheld_reports.pop(node, None)
        return self._after_formed(actions)

    def tick(self, now: float) -> list[Action]:
        """Handle the time limits that have passed."""
        if self._complete_by is not None and now >= self._complete_by:
            forming = self.stage is RoundStage.FORMING
            within_s = None if self._gone_at is None else max(0.0, self._gone_at - now)
            actions = self.move(self.job.target, now, within_s) if forming else []
            self._complete_by = self._gone_at = None
            return actions
        if self._regroup_at is not None and now >= self._regroup_at:
            self._regroup_at = None
            if self.stage is not RoundStage.COMPLETED and any(
                self.job.is_in(n, AssignmentPhase.LOST) for n in self.members
            ):
                return self._after_formed(self._continue_without(self.members, now))
        due = self.job.deadline is not None and now >= self.job.deadline
        forming = due and self.stage is RoundStage.FORMING and not self.job.failing()
        after_steps = (AssignmentPhase.BETWEEN_EPOCHS, AssignmentPhase.FINISHING)
        if forming and any(self._holdings.is_in(n, *after_steps) for n in self._group):
            self.job.deadline = now + self.job.settings.join_s  # they join after that code
            return []
        if forming and (survivors := self.survivors()):
            late = [
                n
                for n in self.members
                if n not in survivors
                and not self.job.is_in(n, AssignmentPhase.RUNNING, AssignmentPhase.SUCCEEDED)
            ]
            self._extension_count += 1
            if late:
                return self.job.reject(
                    late, f"its workers did not join within {self.job.settings.join_s:g} s"
                ) + self.form(now)
            if self._extension_count < MAX_EXTENSIONS:  # they are in a long step
                self.job.deadline = now + self.job.settings.join_s
                return []
            actions = self.job.tick(now)
            hung = [n for a in actions if isinstance(a, NodesRejected) for n in a.nodes]
            broke = any(isinstance(a, Broke) for a in actions)
            return self._after_formed([*(self.give_up() if broke else self._abort(hung)), *actions])
        return self._after_formed(self.job.tick(now))

    def give_up(self) -> list[Action]:
        """Abort the steps of all survivors. Workers that cannot leave their step end and restart;
        the others have the state.
        """
        aborts = [SendAbort(n, g) for n in self.survivors() for g in sorted(self._rosters)]
        return [*self.job.give_up(), *aborts]

    def postpone(self, by_s: float) -> None:
        """Extend all running time limits by a time in which no agent could be reached."""
        self.job.postpone(by_s)
        if self._regroup_at is not None:
            self._regroup_at += by_s
        if self._complete_by is not None:
            self._complete_by += by_s

    def next_wakeup(self) -> float | None:
        """Return the time at which :meth:`tick` is due; None if no time limit runs."""
        due_times = (self.job.next_wakeup(), self._regroup_at, self._complete_by)
        return min((t for t in due_times if t is not None), default=None)

    def stop(self) -> list[Action]:
        """Release every node, because the job has ended."""
        self._regroup_at = None
        return [*self._release_leavers(), *self.job.stop()]

    def adopt(
        self, generation: int, members: Iterable[str], phases: dict[str, Assignment], now: float
    ) -> list[Action]:
        """Adopt the assignments that agents report after a restart of the daemon."""
        actions = self.job.adopt(generation, members, phases, now)
        self._group = tuple(n for n in self.members if n in phases)
        self._rosters = {a.generation: tuple(phases) for a in phases.values()} | {
            generation: self.members
        }
        return actions

    def _after_formed(self, actions: list[Action]) -> list[Action]:
        formed = next((a for a in actions if isinstance(a, Formed)), None)
        if formed is None:
            return actions
        self._complete_by = self._gone_at = None
        # Not ``self.members``: the next round may be forming already.
        self._group = formed.members
        self._rosters = {g: roster for g, roster in self._rosters.items() if g >= formed.generation}
        for node in formed.members:
            self._failed_joins.pop(node, None)
        return actions + self._release_leavers(but=formed.members)

    def _complete_if_ended(self) -> list[Action]:
        """Complete the job if all workers of the old group ended before the planned rescale."""
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
