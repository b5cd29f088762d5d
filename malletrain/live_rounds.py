"""The rescales of a job in live mode: the same state machine, but workers live on from round to round and hold the job's state.

What differs from :class:`malletrain.rounds.JobRounds`: nothing is drained while somebody stays (the state lives in the workers; only a job
that lets go of all its nodes takes a snapshot); those that hold state come first in rank order; leavers are released when the others have
left the old group; a lost member or a failed worker is answered by a new round of those that are left at once, without waiting for a plan.
Workers whose group broke although nobody was lost get a new round after a moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from malletrain.round_actions import Action, Finished, Formed, SendAbort, SendRelease
from malletrain.rounds import JobRounds, Stage
from malletrain.wire import Assignment

MOST_EXTENSIONS = 20
"""Times ``join_s`` that a round may wait for the others to reach the end of a step."""


@dataclass
class LiveRounds(JobRounds):
    """The rescales of one live job."""

    because_lost: bool = False
    """Whether the newest round was formed because a member was lost."""
    _group: tuple[str, ...] = ()
    _held: list[str] = field(default_factory=list)
    _extended: int = 0
    _adrift_at: float | None = None
    """When workers that wait in a broken group get a new round, should no news of a loss come."""

    # --- what differs in the steps ---

    def _holds_state(self, node: str) -> bool:
        a = self.phases.get(node)
        return a is not None and a.phase in ("running", "lost") and a.generation > 0

    def _ready(self, node: str) -> bool:
        return super()._ready(node) or self._holds_state(node)

    def _survivors(self) -> tuple[str, ...]:
        order = dict.fromkeys((*self.members, *self._group, *self.target))
        return tuple(n for n in order if n in self.target and self._holds_state(n))

    def _bad(self) -> list[str]:
        return [n for n in self.members if (a := self.phases.get(n)) is not None and a.phase in ("failed", "exited")]

    def _drain(self, now: float) -> list[Action]:
        return self._form(now) if self._survivors() else super()._drain(now)

    def _form(self, now: float) -> list[Action]:
        self.because_lost, self._extended, self._adrift_at = self.lost_member, 0, None
        return super()._form(now)

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

    def _break_up(self, now: float) -> list[Action]:
        """The group is broken: have nobody wait in it, and go on with those that are left if they are enough."""
        stays = self._survivors()
        actions: list[Action] = [SendAbort(n, self.phases[n].generation) for n in stays]
        actions += self._let_go()
        if len(stays) < max(1, self.min_nodes):
            return actions
        self.lost_member = True
        return actions + self._form(now)

    # --- news ---

    def phase(self, node: str, assignment: Assignment, now: float) -> list[Action]:
        before = self.phases.get(node)
        stateful = self._holds_state(node) and node in self.members
        joining = self.stage is Stage.FORMING and node in self.members and not self._holds_state(node)
        actions = self._noted(super().phase(node, assignment, now))
        failed = assignment.phase in ("failed", "exited") and assignment != before and node in self.phases
        if assignment.phase == "lost" and assignment.generation == self.generation and node in self.members and self._adrift_at is None:
            self._adrift_at = now + self.settings.verdict_s
        if self.stage is Stage.COMPLETED or not failed:
            return actions + self._old_group_done()
        if stateful and self._survivors():
            self._verdict_at = self._failed_at = None
            actions += self._break_up(now)
        elif joining and self._survivors():
            actions += self._leave_out([node], "its worker failed while it joined; see `malletrain logs`")
            actions += self._form(now)
        return self._noted(actions)

    def gone(self, node: str, now: float) -> list[Action]:
        concerned = node in self.members or node in self._group
        if node in self._held:
            self._held.remove(node)
        self._group = tuple(n for n in self._group if n != node)
        actions = super().gone(node, now)
        # DRAINING: nobody stays, so nobody goes on.
        if concerned and self.stage is not Stage.DRAINING and self._survivors():
            actions += self._break_up(now)
        return self._noted(actions)

    def tick(self, now: float) -> list[Action]:
        if self._adrift_at is not None and now >= self._adrift_at:
            self._adrift_at = None
            if self.stage is not Stage.COMPLETED and any(self._is(n, "lost") for n in self.members):
                return self._noted(self._break_up(now))
        due = self.deadline is not None and now >= self.deadline
        if due and self.stage is Stage.FORMING and not self._bad() and (stays := self._survivors()):
            late = [n for n in self.members if n not in stays and not self._is(n, "running", "succeeded")]
            self._extended += 1
            if late:
                return self._leave_out(late, f"its workers did not join within {self.settings.join_s:g} s") + self._form(now)
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

    def adopt(self, generation: int, members: Iterable[str], phases: dict[str, Assignment], now: float) -> list[Action]:
        actions = super().adopt(generation, members, phases, now)
        self._group = tuple(n for n in self.members if n in phases)
        return actions

    def _noted(self, actions: list[Action]) -> list[Action]:
        if any(isinstance(a, Formed) for a in actions):
            self._group = self.members
            return actions + self._let_go()
        return actions

    def _old_group_done(self) -> list[Action]:
        """The workers were done before they came to the change that was planned."""
        left = [self.phases.get(n) for n in self._group if n not in self._releasing]
        if self.stage is not Stage.FORMING or not left or not all(a is not None and a.phase == "succeeded" for a in left):
            return []
        self.stage, self.deadline, self._verdict_at = Stage.COMPLETED, None, None
        return [Finished()]
