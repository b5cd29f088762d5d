"""The rescales of a job in live mode: the same state machine, but workers live on from round to
round and hold the job's state.

What differs from :class:`malletrain.rounds.JobRounds`: nothing is drained while somebody stays (the
state lives in the workers; only a job that lets go of all its nodes takes a snapshot); those that
hold state come first in rank order; leavers are released when the others have left the old group; a
lost member or a failed worker is answered by a new round of those that are left at once, without
waiting for a plan. Workers whose group broke although nobody was lost get a new round after a
moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from malletrain.protocol.failures import by_cause, describe, secondary
from malletrain.protocol.messages import Assignment
from malletrain.rounds.actions import Action, Broke, Finished, Formed, SendAbort, SendRelease
from malletrain.rounds.restart import JobRounds, Stage

MOST_EXTENSIONS = 20
"""Times ``join_s`` that a round may wait for the others to reach the end of a step."""
MOST_JOINS = 3
"""Times in a row that a node's worker may fail while it joins, before the node is left out."""
LAST_RESORT_CODE = 75
"""A worker that ends with it was lost with its peers (malletrain.elastic.membership)."""


@dataclass
class LiveRounds(JobRounds):
    """The rescales of one live job."""

    because_lost: bool = False
    """Whether the newest round was formed because a member was lost."""
    _group: tuple[str, ...] = ()
    _rosters: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """The rounds in which a worker may be at present: the one that trains and those formed since.
    """
    _held: list[str] = field(default_factory=list)
    _extended: int = 0
    _at_once: bool = False
    """Those that are left go on now: nobody is waited for."""
    _failed_joins: dict[str, int] = field(default_factory=dict)
    _adrift_at: float | None = None
    """When workers that wait in a broken group get a new round, should no news of a loss come."""

    # --- what differs in the steps ---

    def _holds_state(self, node: str) -> bool:
        a = self.phases.get(node)
        return (
            a is not None
            and a.phase in ("running", "lost")
            and a.generation > 0
            and node not in self.suspects
        )

    def _ready(self, node: str) -> bool:
        if node in self.suspects:
            return False
        if (
            self._at_once
        ):  # a worker that failed has to be started first: the others do not stand still for it
            return self._holds_state(node) or self._is(node, "ready")
        return super()._ready(node) or self._holds_state(node)

    def _survivors(self) -> tuple[str, ...]:
        order = dict.fromkeys((*self.members, *self._group, *self.target))
        return tuple(n for n in order if n in self.target and self._holds_state(n))

    def _bad(self) -> list[str]:
        return [
            n
            for n in self.members
            if (a := self.phases.get(n)) is not None and a.phase in ("failed", "exited")
        ]

    def _drain(self, now: float) -> list[Action]:
        return self._form(now) if self._survivors() else super()._drain(now)

    def _form(self, now: float) -> list[Action]:
        self.because_lost, self._extended, self._adrift_at = self.lost_member, 0, None
        actions = super()._form(now)
        self._rosters[self.generation] = self.members
        return actions

    def _release(self, nodes: Iterable[str]) -> list[Action]:
        actions = super()._release(nodes)
        if self.lost_member or not self._survivors():
            return actions
        # They finish the step with the others, who would lose it otherwise.
        held = [a.node for a in actions if isinstance(a, SendRelease) and a.node in self._group]
        self._held += held
        return [a for a in actions if not (isinstance(a, SendRelease) and a.node in held)]

    def _let_go(self) -> list[Action]:
        held, self._held = self._held, []
        return [SendRelease(node) for node in held]

    def _go_on(self, lost: Iterable[str], now: float) -> list[Action]:
        """Members are lost: have nobody wait in a group with them, and go on with those that are
        left if they are enough.
        """
        lost, stays = set(lost), self._survivors()
        void = sorted(g for g, roster in self._rosters.items() if lost & set(roster))
        actions: list[Action] = [SendAbort(n, g) for n in stays for g in void]
        if lost & set(self._group):
            actions += self._let_go()  # the step that they were to finish is lost
        if len(stays) < max(1, self.min_nodes):
            return actions
        self.lost_member, self._at_once = True, True
        try:
            return actions + self._form(now)
        finally:
            self._at_once = False

    # --- news ---

    def phase(self, node: str, assignment: Assignment, now: float) -> list[Action]:
        before = self.phases.get(node)
        stateful = self._holds_state(node) and node in self.members
        joining = (
            self.stage is Stage.FORMING and node in self.members and not self._holds_state(node)
        )
        actions = self._noted(super().phase(node, assignment, now))
        if self.stage is Stage.COMPLETED or node not in self.phases or assignment == before:
            return actions + self._old_group_done()
        if assignment.phase == "lost":
            return actions + self._adrift(node, assignment.generation, now)
        if assignment.phase not in ("failed", "exited"):
            return actions + self._old_group_done()
        if (stateful or joining) and self._survivors():
            self._verdict_at = self._failed_at = None
            if joining:
                self._failed_joins[node] = self._failed_joins.get(node, 0) + 1
                if self._failed_joins[node] >= MOST_JOINS:
                    actions += self._leave_out(
                        [node],
                        "its worker failed again and again while it joined; see `malletrain logs`",
                    )
            actions += self._go_on([node], now) + self._own_fault(assignment)
        return self._noted(actions)

    def _own_fault(self, assignment: Assignment) -> list[Action]:
        """The others go on, but a script that fails by itself uses up one of the job's tries each
        time.
        """
        failures = by_cause(
            f
            for f in assignment.failures
            if f.exitcode > 0 and f.exitcode != LAST_RESORT_CODE and not secondary(f)
        )
        return [Broke(failures, describe(failures))] if failures else []

    def _adrift(self, node: str, generation: int, now: float) -> list[Action]:
        """The workers on ``node`` wait in a broken group."""
        if generation != self.generation or node not in self.members:
            return []
        if gone := self.suspects.intersection(
            self.members
        ):  # the news of the loss only has yet to be confirmed
            return self._go_on(gone, now)
        if self._adrift_at is None:
            self._adrift_at = now + self.settings.verdict_s
        return []

    def gone(self, node: str, now: float) -> list[Action]:
        concerned = node in self.members or node in self._group
        if node in self._held:
            self._held.remove(node)
        actions = super().gone(node, now)
        # DRAINING: nobody stays, so nobody goes on.
        if concerned and self.stage is not Stage.DRAINING and self._survivors():
            actions += self._go_on([node], now)
        self._group = tuple(n for n in self._group if n != node)
        self._failed_joins.pop(node, None)
        return self._noted(actions)

    def tick(self, now: float) -> list[Action]:
        if self._adrift_at is not None and now >= self._adrift_at:
            self._adrift_at = None
            if self.stage is not Stage.COMPLETED and any(self._is(n, "lost") for n in self.members):
                return self._noted(self._go_on(self.members, now))
        due = self.deadline is not None and now >= self.deadline
        if due and self.stage is Stage.FORMING and not self._bad() and (stays := self._survivors()):
            late = [
                n
                for n in self.members
                if n not in stays and not self._is(n, "running", "succeeded")
            ]
            self._extended += 1
            if late:
                return self._leave_out(
                    late, f"its workers did not join within {self.settings.join_s:g} s"
                ) + self._form(now)
            if self._extended < MOST_EXTENSIONS:  # they are in a long step
                self.deadline = now + self.settings.join_s
                return []
        return self._noted(super().tick(now))

    def next_wakeup(self) -> float | None:
        times = [t for t in (super().next_wakeup(), self._adrift_at) if t is not None]
        return min(times, default=None)

    def stop(self) -> list[Action]:
        self._adrift_at = None
        return [*self._let_go(), *super().stop()]

    def adopt(
        self, generation: int, members: Iterable[str], phases: dict[str, Assignment], now: float
    ) -> list[Action]:
        actions = super().adopt(generation, members, phases, now)
        self._group = tuple(n for n in self.members if n in phases)
        self._rosters = {a.generation: tuple(phases) for a in phases.values()} | {
            generation: self.members
        }
        return actions

    def _noted(self, actions: list[Action]) -> list[Action]:
        formed = next((a for a in actions if isinstance(a, Formed)), None)
        if formed is None:
            return actions
        # Not ``self.members``: the next round may be on its way already.
        self._group = formed.members
        self._rosters = {g: roster for g, roster in self._rosters.items() if g >= formed.generation}
        for node in formed.members:
            self._failed_joins.pop(node, None)
        return actions + self._let_go()

    def _old_group_done(self) -> list[Action]:
        """The workers were done before they came to the change that was planned."""
        left = [self.phases.get(n) for n in self._group if n not in self._releasing]
        if (
            self.stage is not Stage.FORMING
            or not left
            or not all(a is not None and a.phase == "succeeded" for a in left)
        ):
            return []
        self.stage, self.deadline, self._verdict_at = Stage.COMPLETED, None, None
        return [Finished()]
