"""The rescales of a job in live mode: workers stay alive between rounds and hold the job's state.

The differences from :class:`malletrain.rounds.restart.RestartRounds`, in
:data:`malletrain.rounds.table.LIVE_TABLE` and in the methods below:

* There is no drain while a member stays. Only a job that loses all its nodes takes a snapshot.
* Members that hold state come first in rank order.
* Leavers are released when the others have left the old group.
* After a lost member or a failed worker, the remaining members form a new round at once, without a
  plan. If the group broke although no member was lost, they form a new round after a short wait.
* If no staying member has the state, leavers that have it take part in one more round, and so do
  members that are not planned any more.
* A leaver that is planned again goes on with its state in the next round, unless the newest round
  runs before that. Rounds that were not completed and have only leavers by then are aborted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from malletrain.protocol.messages import Assignment
from malletrain.protocol.phases import BROKEN, HOLDING, TRAINS, AssignmentPhase
from malletrain.rounds.failure_grace import own_fault
from malletrain.rounds.interface import (
    Action,
    Broke,
    NodesRejected,
    RoundStage,
    SendAbort,
    SendAssign,
    SendRelease,
)
from malletrain.rounds.restart import RestartRounds
from malletrain.rounds.table import LIVE_TABLE, RESTART_TABLE, Occurrence, RoundEvent, Table

MAX_EXTENSIONS = 20
"""Maximum time, in units of ``join_s``, that a round waits for members to reach the end of a step.
Then they must abort it.
"""
MAX_FAILED_JOINS = 3
"""Number of consecutive failed joins after which a node is rejected."""
ROUND_ENTRY_S = 2.0
"""Usual time to enter a round whose members have all started, seconds."""


@dataclass
class LiveRounds(RestartRounds):
    """The rescales of one live job."""

    table: ClassVar[Table] = LIVE_TABLE

    _group: tuple[str, ...] = ()
    """Nodes whose workers train together, leavers included."""
    _rosters: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Rounds in which a worker may currently be → members: the round that trains, and those formed
    since.
    """
    _leavers: dict[str, Assignment | None] = field(default_factory=dict)
    """Nodes that are released when the others have left their group → last assignment."""
    _extension_count: int = 0
    _without_waiting: bool = False
    """Whether the remaining members form a round now, without waiting for other nodes."""
    _failed_joins: dict[str, int] = field(default_factory=dict)
    _withheld_reports: dict[str, list[Action]] = field(default_factory=dict)
    """Doubted node → actions that report its failure later."""
    _complete_by: float | None = None
    """Time until which a round is completed first because leavers hold state; None if it is not."""
    _gone_at: float | None = None
    """Time at which one of these leavers is gone; None without a time limit."""
    _regroup_at: float | None = None
    """Time at which workers in a broken group get a new round if no loss is reported; None if none
    are.
    """

    # --- reports, losses and time: what follows beyond restart mode ---

    def adopt(
        self, generation: int, members: Iterable[str], phases: dict[str, Assignment], now: float
    ) -> list[Action]:
        """Adopt the assignments that agents report after a restart of the daemon."""
        actions = super().adopt(generation, members, phases, now)
        self._group = tuple(n for n in self.members if n in phases)
        self._rosters = {a.generation: tuple(phases) for a in phases.values()} | {
            generation: self.members
        }
        return actions

    def phase(self, node: str, assignment: Assignment, now: float) -> list[Action]:
        """Handle the assignment that the agent on ``node`` reports."""
        if node in self._leavers:
            self._leavers[node] = assignment
        before = self.holdings.phases.get(node)
        held_state = self._holds_state(node) and node in self.members
        joined = (
            self.stage is RoundStage.FORMING
            and node in self.members
            and not self._holds_state(node)
        )
        actions = super().phase(node, assignment, now)
        counts = node in self.holdings.phases or SendAssign(node) in actions  # and starts again
        is_new = counts and assignment != before
        if self.stage is not RoundStage.COMPLETED and is_new:
            report = Occurrence(RoundEvent.REPORTED, now, node, assignment)
            if assignment.phase is AssignmentPhase.LOST:
                if assignment.generation == self.generation and node in self.members:
                    actions += self.handle(report.then(RoundEvent.GROUP_BROKE))
                return actions
            if assignment.phase in BROKEN:
                is_failure = any(isinstance(action, Broke) for action in actions)
                others = self.survivors() or (not is_failure and self._outsiders())
                if not (held_state or joined) or not others:
                    return actions
                event = RoundEvent.JOINER_FAILED if joined else RoundEvent.WORKER_FAILED
                return actions + self.handle(report.then(event))
        ended = Occurrence(RoundEvent.ENDED, now)
        return actions + (self.handle(ended) if self._group_ended() else [])

    def drained(self, node: str, generation: int, now: float, number: int = 0) -> list[Action]:
        """Note that the requested snapshot is on disk, or that there is nothing to save."""
        return super().drained(node, generation, now)

    def gone(self, node: str, now: float) -> list[Action]:
        """Handle the loss of a node. The remaining members continue."""
        done = self.ends.on(node, self.generation)
        affected = not done and (node in self.members or node in self._group)
        if affected:
            self.failure.node_lost_in = self.generation
        was_giver = node in self.members and node not in self.target
        self._leavers.pop(node, None)
        actions = super().gone(node, now)
        if affected:
            actions += self.handle(Occurrence(RoundEvent.MEMBER_LOST, now, node))
            waits = self.stage is RoundStage.FORMING and self.lost_member and not self.survivors()
            if was_giver and waits:
                self.deadline = now  # nothing else ends the round, since no plan follows
        self._group = tuple(n for n in self._group if n != node)
        self._failed_joins.pop(node, None)
        self._withheld_reports.pop(node, None)
        return actions

    def doubt(self, node: str, over: bool) -> list[Action]:
        """Hold back a failure on ``node`` that the node may have caused; ``over``: the node did not
        cause it.
        """
        super().doubt(node, over)
        return self._withheld_reports.pop(node, []) if over else []

    def give_up(self) -> list[Action]:
        """Abort the steps of all survivors. Workers that cannot leave their step end and restart;
        the others have the state.
        """
        aborts = [SendAbort(n, g) for n in self.survivors() for g in sorted(self._rosters)]
        return [*super().give_up(), *aborts]

    def tick(self, now: float) -> list[Action]:
        """Handle the time limits that have passed."""
        if self._complete_by is not None and now >= self._complete_by:
            actions = self.handle(Occurrence(RoundEvent.HAND_OVER_DUE, now))
            self._complete_by = self._gone_at = None
            return actions
        if self._regroup_at is not None and now >= self._regroup_at:
            self._regroup_at = None
            waiting = any(self.is_in(n, AssignmentPhase.LOST) for n in self.members)
            if waiting and self.stage is not RoundStage.COMPLETED:
                return self.handle(Occurrence(RoundEvent.REGROUP_DUE, now))
        return super().tick(now)

    def postpone(self, by_s: float) -> None:
        """Extend all running time limits by a time in which no agent could be reached."""
        super().postpone(by_s)
        if self._regroup_at is not None:
            self._regroup_at += by_s
        if self._complete_by is not None:
            self._complete_by += by_s

    def released(self, node: str, now: float) -> list[Action]:
        """Note that no process of the job is left on ``node``, which may be a leaver."""
        self._leavers.pop(node, None)
        return super().released(node, now)

    def hasten(self, node: str, now: float, within_s: float) -> list[Action]:
        """Shorten the time in which leavers pass on the state, too."""
        if self._complete_by is not None and node not in self.target:
            self._complete_by = min(self._complete_by, now + within_s / 3)
            gone_at = now + within_s
            self._gone_at = min(gone_at, self._gone_at or gone_at)
        return super().hasten(node, now, within_s)

    def next_wakeup(self) -> float | None:
        """Return the time at which :meth:`tick` is due; None if no time limit runs."""
        due_times = (super().next_wakeup(), self._regroup_at, self._complete_by)
        return min((t for t in due_times if t is not None), default=None)

    # --- state of the round ---

    def _holds_state(self, node: str) -> bool:
        if node in self._leavers:  # it can go on, unless a newer round runs
            planned = node in self.target and not self.whole()
            return planned and self._leaver_with_state(node) is not None
        return (
            self.holdings.is_in(node, *HOLDING)
            and self.holdings.phases[node].generation > 0
            and node not in self.holdings.unreachable
        )

    def ready(self, node: str) -> bool:
        """Return whether ``node`` holds state or can be started."""
        if node in self.holdings.unreachable:
            return False
        if self._without_waiting:
            # A failed worker must be restarted first. The others train meanwhile.
            return self._holds_state(node) or self.is_in(node, AssignmentPhase.READY)
        return super().ready(node) or self._holds_state(node)

    def survivors(self) -> tuple[str, ...]:
        """Return the staying nodes that hold the job's state."""
        order = dict.fromkeys((*self.members, *self._group, *self.target))
        staying = (n for n in order if n in self.target and n not in self._leavers)
        return tuple(filter(self._holds_state, staying))

    def _holders_suffice(self) -> bool:
        """Return whether the planned nodes that hold the state are enough, leavers included."""
        return self._enough([n for n in self.target if self._holds_state(n)])

    def _outsiders(self) -> tuple[str, ...]:
        """Return the nodes that hold the state and do not stay, or are leavers that are planned
        again. They pass it on if no staying node has it.
        """
        leavers = (n for n in self._leavers if self._leaver_with_state(n) is not None)
        return (*leavers, *self._members_without_plan())

    def _members_without_plan(self) -> tuple[str, ...]:
        """Return the members that entered the newest round, hold its state, and are not planned.
        One in its last code is left out, because the round would wait for the end of that code.
        """
        left_out = (n for n in self.members if n not in self.target and n not in self._leavers)
        phases = (*TRAINS, AssignmentPhase.LOST)
        return tuple(n for n in left_out if self.is_in(n, *phases) and self._holds_state(n))

    @property
    def between_epochs(self) -> bool:
        """Whether the script is in the code after the steps of an epoch."""
        return any(self.holdings.is_in(n, AssignmentPhase.BETWEEN_EPOCHS) for n in self._group)

    def broken(self) -> list[str]:
        """Return the members whose workers failed, in any round."""
        return [n for n in self.members if self.holdings.is_in(n, *BROKEN)]

    def _group_ended(self) -> bool:
        """Return whether all workers of the old group ended before the planned rescale."""
        remaining = [
            self._leavers[n] if n in self._leavers else self.holdings.phases.get(n)
            for n in self._group
            if n in self._leavers or n not in self.holdings.releasing
        ]
        return (
            self.stage is RoundStage.FORMING
            and bool(remaining)
            and all(a is not None and a.phase is AssignmentPhase.SUCCEEDED for a in remaining)
        )

    def _late(self) -> list[str]:
        survivors, joined = self.survivors(), (AssignmentPhase.RUNNING, AssignmentPhase.SUCCEEDED)
        return [n for n in self.members if n not in survivors and not self.is_in(n, *joined)]

    def _hand_over_until(self, occurrence: Occurrence) -> float:
        now, within_s = occurrence.now, occurrence.within_s
        until = now + (self.settings.join_s if within_s is None else within_s / 3)
        if self.survivors():
            until = min(until, now + ROUND_ENTRY_S)
        return min(until, self._complete_by or until)

    # --- guards ---

    def passes_on_state(self, occurrence: Occurrence) -> bool:
        """The round that is being formed is intact and completed first: in it, leavers pass the
        state on to staying members, and there is time for it.
        """
        staying = set(self.members) & set(self.target)
        leavers_hold = any(map(self._holds_state, set(self.members) - staying))
        in_time = occurrence.now < self._hand_over_until(occurrence)
        return self._is_intact() and bool(staying) and leavers_hold and in_time

    def has_survivors(self, _: Occurrence) -> bool:
        """A node holds the job's state, and stays or can pass it on."""
        return any(map(self._holds_state, self.target)) or bool(self._outsiders())

    def waits_for_members(self, _: Occurrence) -> bool:
        """No member has failed, and a staying node holds the job's state."""
        return not self.failing() and bool(self.survivors())

    def joins_after_steps(self, _: Occurrence) -> bool:
        """No member has failed, and workers of the old group are in the code after their steps."""
        after_steps = (AssignmentPhase.BETWEEN_EPOCHS, AssignmentPhase.FINISHING)
        in_code = any(self.holdings.is_in(n, *after_steps) for n in self._group)
        return not self.failing() and in_code

    def has_late_joiners(self, occurrence: Occurrence) -> bool:
        """Members hold the state, and others have not joined."""
        return self.waits_for_members(occurrence) and bool(self._late())

    def may_be_in_step(self, occurrence: Occurrence) -> bool:
        """Members hold the state and may be in a long step."""
        return self.waits_for_members(occurrence) and self._extension_count + 1 < MAX_EXTENSIONS

    # --- steps: the state ---

    def drain(self, occurrence: Occurrence) -> list[Action]:
        """Form the next round without a drain, unless no member stays or all processes are
        started again.
        """
        continues = self.survivors() and not self.outdated
        return self.form(occurrence) if continues else super().drain(occurrence)

    def limit_hand_over(self, occurrence: Occurrence) -> list[Action]:
        """Limit the time for the round in which leavers pass on the state."""
        self._complete_by = self._hand_over_until(occurrence)
        if occurrence.within_s is not None:
            gone_at = occurrence.now + occurrence.within_s
            self._gone_at = min(gone_at, self._gone_at or gone_at)
        return []

    def move_without_hand_over(self, occurrence: Occurrence) -> list[Action]:
        """Move to the plan although the round was not completed."""
        now = occurrence.now
        within_s = None if self._gone_at is None else max(0.0, self._gone_at - now)
        return self.move(self.target, now, within_s)

    # --- steps: the next round ---

    def form(self, occurrence: Occurrence) -> list[Action]:
        """Form a round of all nodes that are ready."""
        self._extension_count, self._regroup_at = 0, None
        self._complete_by = self._gone_at = None
        actions = self._release_needless_leavers()
        self._take_back(self.target, leaves=False)
        givers: tuple[str, ...] = ()
        if self.target and not self.survivors():
            self._take_back(sorted(self._leavers), leaves=True)
            # After a drain the state is in the snapshot, and the members wait to be stopped.
            drained = self.outdated or self.whole()
            # A round that lacks joiners would keep a node that is taken.
            complete = all(map(self.ready, self.target))
            if self.stage is RoundStage.WARMING and complete and not drained:
                givers = self._members_without_plan()
        givers = tuple(dict.fromkeys((*self.holdings.givers, *givers)))
        self.holdings.givers = tuple(n for n in givers if n not in self.target)
        actions += self._form(occurrence, because_lost=self.lost_member)
        self._rosters[self.generation] = self.members
        actions += self._abort_rounds_of_leavers()
        # If no round is formed, no later event releases the leavers.
        return actions + self._release_leavers() if self.stage is RoundStage.IDLE else actions

    def _abort_rounds_of_leavers(self) -> list[Action]:
        """Abort the rounds that were not completed and have only leavers by now. These are not in
        the newest round, and would train in such a round until they are released.
        """
        between = [g for g in sorted(self._rosters)[1:] if g < self.generation]
        abandoned = [g for g in between if set(self._rosters[g]) <= self._leavers.keys()]
        return [SendAbort(node, g) for g in abandoned for node in self._rosters[g]]

    def _next_members(self) -> tuple[str, ...]:
        """Return the members of the next round in rank order. Those that hold state come first and
        keep their order; behind them the joiners of one host are neighbours.
        """
        staying, joining = self._staying_and_joining()
        return (*staying, *self.settings.by_host(joining))

    def check_joiners(self, occurrence: Occurrence) -> list[Action]:
        """Release leavers that are of no use, and continue if the launchers of the target are
        ready, or if the wait for them is over.
        """
        actions = self._release_needless_leavers()
        if any(SendRelease(node) in actions for node in self.target):  # and they start again
            self.deadline = self._joiners_until or occurrence.now + self._joiners_s
        return actions + super().check_joiners(occurrence)

    def _release_needless_leavers(self) -> list[Action]:
        """Release all leavers if the newest round runs, which has a newer state than they; else
        those that are planned again and have no state.
        """
        if self.whole():  # its last member may have come to run while the job awaited joiners
            self._leave_old_group()
            return self._release_leavers(but=self.members)
        again = (n for n in self._leavers if n in self.target)
        without_state = {n for n in again if not self._holds_state(n)}
        return self._release_leavers(but=self._leavers.keys() - without_state)

    def _take_back(self, nodes: Iterable[str], leaves: bool) -> None:
        """Take back those of ``nodes`` that are leavers and hold the state; ``leaves``: only for
        one more round, in which they pass it on.
        """
        for node in [n for n in nodes if n in self._leavers]:
            if assignment := self._leaver_with_state(node):
                del self._leavers[node]
                self.holdings.take_back(node, assignment, leaves)

    def _leaver_with_state(self, node: str) -> Assignment | None:
        """Return the last assignment of a leaver; None if it does not hold the job's state."""
        assignment = self._leavers[node]
        if assignment is None or node in self.holdings.unreachable:
            return None
        return assignment if assignment.phase in HOLDING and assignment.generation else None

    def resume(self, occurrence: Occurrence) -> list[Action]:
        """Note that the newest round runs, and release the leavers of the group before it."""
        self._complete_by = self._gone_at = None
        self._leave_old_group()
        for node in self.members:
            self._failed_joins.pop(node, None)
        return [*super().resume(occurrence), *self._release_leavers(but=self.members)]

    def _leave_old_group(self) -> None:
        self._group = self.members
        self._rosters = {g: names for g, names in self._rosters.items() if g >= self.generation}

    def release(self, nodes: Iterable[str]) -> list[Action]:
        """Release ``nodes`` at once, or when the others have left their group."""
        assignments = dict(self.holdings.phases)
        actions = super().release(nodes)
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

    def release_all(self, occurrence: Occurrence) -> list[Action]:
        """Release every node."""
        self._regroup_at = None
        return [*self._release_leavers(), *super().release_all(occurrence)]

    def await_end(self, occurrence: Occurrence) -> list[Action]:
        """Delay the change of nodes until the script has ended, as long as the nodes may stay, and
        release the leavers of the group before the newest round.
        """
        return [*self._release_needless_leavers(), *super().await_end(occurrence)]

    def extend_join(self, occurrence: Occurrence) -> list[Action]:
        """Wait for the end of the code after the steps."""
        self.deadline = occurrence.now + self.settings.join_s
        return []

    def extend_step(self, occurrence: Occurrence) -> list[Action]:
        """Wait for the end of the step, a limited number of times."""
        self._extension_count += 1
        return self.extend_join(occurrence)

    def form_without_late(self, occurrence: Occurrence) -> list[Action]:
        """Reject the members that did not join, and form the next round."""
        why = f"its workers did not join within {self.settings.join_s:g} s"
        return self.reject(self._late(), why) + self.form(occurrence)

    def abort_step(self, occurrence: Occurrence) -> list[Action]:
        """Abort the step of the members that do not leave it, and do what restart mode does."""
        actions = self.handle(occurrence, RESTART_TABLE)
        hung = [n for a in actions if isinstance(a, NodesRejected) for n in a.nodes]
        broke = any(isinstance(a, Broke) for a in actions)
        return [*(self.give_up() if broke else self._abort(hung)), *actions]

    # --- steps: losses and failures ---

    def _abort(self, lost: Collection[str]) -> list[Action]:
        void = sorted(g for g, roster in self._rosters.items() if not set(lost).isdisjoint(roster))
        # A step that is not lost goes on.
        outsiders = self._outsiders() if self._breaks_group(lost) else ()
        return [SendAbort(n, g) for n in self.survivors() or outsiders for g in void]

    def _breaks_group(self, lost: Collection[str]) -> bool:
        """Return whether one of ``lost`` is in the group that trains."""
        return not set(lost).isdisjoint(self._group)

    def _continue_without(self, lost: Collection[str], occurrence: Occurrence) -> list[Action]:
        """Abort the groups of the lost members, and form a round of the remaining ones if they are
        enough.
        """
        if self._holders_suffice():
            self._take_back(self.target, leaves=False)  # they abort their step, too
        actions = self._abort(lost)
        if not self._enough(self.survivors()):
            if not self._breaks_group(lost):
                return actions
            # The step that leavers should finish is lost, and no round follows.
            only_holders = () if self.survivors() else self._outsiders()
            return actions + self._release_leavers(but=only_holders)
        # Leavers stay until it is formed, because they have the state if the others fail.
        self.lost_member = self._without_waiting = True
        try:
            return actions + self.form(occurrence)
        finally:
            self._without_waiting = False

    def continue_without_node(self, occurrence: Occurrence) -> list[Action]:
        """Continue without the node."""
        return self._continue_without([occurrence.node], occurrence)

    def continue_without_unreachable(self, occurrence: Occurrence) -> list[Action]:
        """Continue without the members that cannot be reached: their loss is probable."""
        lost = self.holdings.unreachable.intersection(self.members)
        return self._continue_without(lost, occurrence)

    def continue_in_new_group(self, occurrence: Occurrence) -> list[Action]:
        """Form a new round of the workers that wait in a broken group."""
        return self._continue_without(self.members, occurrence)

    def await_loss(self, occurrence: Occurrence) -> list[Action]:
        """Wait for the report of the loss that broke the group."""
        if self._regroup_at is None:
            self._regroup_at = occurrence.now + self.settings.failure_grace_s
        return []

    def count_failed_join(self, occurrence: Occurrence) -> list[Action]:
        """Reject a node on which the workers fail again and again while they join."""
        node = occurrence.node
        self._failed_joins[node] = self._failed_joins.get(node, 0) + 1
        if self._failed_joins[node] < MAX_FAILED_JOINS:
            return []
        why = "its worker failed again and again while it joined; see `malletrain logs`"
        return self.reject([node], why)

    def continue_without_failed(self, occurrence: Occurrence) -> list[Action]:
        """Continue without the workers that failed, and report a failure that is the script's
        own.
        """
        node = occurrence.node
        assert occurrence.assignment is not None
        fault = own_fault(node, occurrence.assignment)
        if not self.survivors() and self.failure.told_of == self.generation:
            fault = []  # the same error on another member, and no round was formed since
        if fault:
            self.failure.told_of = self.generation
        if fault or self._enough(self.survivors()):
            self.failure.clear()  # else the remaining members cannot continue without it
        elif (
            self.stage is RoundStage.WARMING and not self.survivors() and self._enough(self.target)
        ):
            # The next round starts it again, and others pass the state on.
            self.failure.clear()
            self.failure.answered[node] = occurrence.assignment
        if node in self.holdings.doubted:
            self._withheld_reports[node], fault = fault, []
        return self._continue_without([node], occurrence) + fault
