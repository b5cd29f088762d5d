"""The membership of a service: its members, joiners and leavers. A pure state machine like
:mod:`malletrain.rounds.restart`.

    assigned ─process up─▶ member ─not planned any more─▶ leaving ─drained, or time over─▶ released
                                │ lost, or its process ended: out of the next view at once

The differences from :class:`malletrain.rounds.restart.RestartRounds`: no member is stopped because
another one joins or leaves. A round is a *view*, a numbered list of the members with their
addresses; every change makes a new view, which is stored and then sent to all members. A leaver
stays in the views until it reports that it is drained, or until its time is over. A member may join
before it is ready to serve; the view says so. If a process ends
by itself, the controller is informed, which uses up a try of the job. The next plan restarts the
process; the others continue.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from malletrain.protocol.failures import by_cause, describe, unfit
from malletrain.protocol.messages import Assignment
from malletrain.protocol.phases import BROKEN, UP, AssignmentPhase
from malletrain.rounds.holdings import MAX_RESTARTS, Holdings, NodeHolder
from malletrain.rounds.interface import (
    Action,
    AllUp,
    Broke,
    NodesRejected,
    RoundSettings,
    RoundStage,
    SaveRound,
    SendView,
    StartMeasured,
    View,
    ViewMember,
    WorkersDone,
)


@dataclass
class ServiceRounds(NodeHolder):
    """The views of one service."""

    settings: RoundSettings = field(default_factory=RoundSettings)
    min_nodes: int = 1
    """Ignored: a service can have any size."""
    generation: int = 0
    """Number of the newest view."""
    stage: RoundStage = RoundStage.IDLE
    members: tuple[str, ...] = ()
    """All nodes in the newest view, including leavers, in rank order."""
    view: View = ()
    """The members, each with its address and the time at which it leaves."""
    target: tuple[str, ...] = ()
    """The nodes of the newest plan."""
    holdings: Holdings = field(default_factory=Holdings)
    deadline: float | None = None
    """Time limit for nodes of the target whose process has not started."""
    drain_s: float = 10.0
    """Maximum time for leavers to hand over their data, seconds."""
    lost_member: bool = False
    interrupts: bool = False
    finishing: bool = False
    between_epochs: bool = False
    _leaving: dict[str, float] = field(default_factory=dict)
    """Leaver → time at which it is released at the latest."""
    _came_up: set[str] = field(default_factory=set)
    """Nodes on which the process has started once."""
    _reported_failures: set[str] = field(default_factory=set)
    """Nodes whose failure has been reported, so that it is reported once."""
    _failures_due: dict[str, float] = field(default_factory=dict)
    """Failed node → end of the failure grace."""
    _awaited: bool = False
    """Whether the target is not complete yet."""

    # --- calls of the controller ---

    def move(self, nodes: Iterable[str], now: float, within_s: float | None = None) -> list[Action]:
        """Move to exactly ``nodes``. Leavers hand over their data first."""
        if self.stage is RoundStage.COMPLETED:
            return []
        self.target = tuple(nodes)
        self.drain_s = (
            self.settings.drain_s if within_s is None else self.settings.self_exit_limit_s(within_s)
        )
        self._failures_due.clear()
        self._reported_failures.clear()
        actions: list[Action] = []
        for node in self.target:
            self._leaving.pop(node, None)
            actions += self.holdings.assign(node)
        for node in sorted(self.holdings.assigned - set(self.target)):
            if self._up(node):
                self._leaving[node] = min(
                    now + self.drain_s, self._leaving.get(node, now + self.drain_s)
                )
            else:
                actions += self.holdings.release([node])
        self._awaited, self.deadline = True, now + self.settings.warmup_s
        return actions + self._announce() + self._settled()

    def stop(self) -> list[Action]:
        """Release every node, because the job has ended."""
        self._leaving.clear()
        self._failures_due.clear()
        self.view, self._awaited = (), False
        self.target, self.members, self.stage, self.deadline = (), (), RoundStage.IDLE, None
        return self.holdings.release(sorted(self.holdings.assigned))

    def adopt(
        self, generation: int, members: Iterable[str], phases: dict[str, Assignment], now: float
    ) -> list[Action]:
        """Adopt the assignments that agents report after a restart of the daemon."""
        self.generation = generation
        actions = self.holdings.adopt(phases, generation)
        order = [n for n in members if n in self.holdings.phases]
        self.target = (*order, *(n for n in sorted(self.holdings.phases) if n not in order))
        self.members = tuple(order)
        self._came_up = {n for n in self.target if self._up_or_done(n)}
        actions += self._announce()
        if self.members:
            self.stage = RoundStage.RUNNING
        return actions + self._notice_ends(now) + self._finished()

    # --- reports of the agents ---

    def phase(self, node: str, assignment: Assignment, now: float) -> list[Action]:
        """Handle the assignment that the agent on ``node`` reports."""
        if node in self.holdings.releasing or assignment.generation > self.generation:
            return []
        if node not in (*self.target, *self.holdings.assigned):
            return self.holdings.release([node])
        before = self.holdings.phases.get(node)
        self.holdings.note(node, assignment)
        measured: list[Action] = []
        if assignment.start_s is not None and (before is None or before.start_s is None):
            measured = [StartMeasured(node, assignment.start_s)]
        if self._up_or_done(node):
            self._came_up.add(node)
            self._reported_failures.discard(node)
        if done := self._finished():
            return done
        actions = self._announce()
        if not actions and node in self.members and assignment.generation < self.generation:
            actions = self._send_view(
                [node]
            )  # it may have missed the newest view during a lost connection
        return measured + actions + self._notice_ends(now) + self._settled()

    def store_up(self, node: str, generation: int, host: str, port: int) -> list[Action]:
        """Do nothing: a service has no store."""
        return []

    def drained(self, node: str, generation: int, now: float, number: int = 0) -> list[Action]:
        """Release a leaver whose process has handed over its data."""
        if self._leaving.pop(node, None) is None:
            return []
        return self.holdings.release([node]) + self._announce() + self._settled()

    def released(self, node: str, now: float) -> list[Action]:
        """Note that no process of the job is left on ``node``."""
        self._remove(node)
        actions = (
            self.holdings.assign(node)
            if node in self.target and self.stage is not RoundStage.COMPLETED
            else []
        )
        return actions + self._announce()

    def gone(self, node: str, now: float) -> list[Action]:
        """Remove a lost node."""
        self.holdings.unreachable.discard(node)
        self.target = tuple(n for n in self.target if n != node)
        self._remove(node)
        return self._announce() + self._settled()

    # --- time ---

    def tick(self, now: float) -> list[Action]:
        """Handle the time limits that have passed."""
        actions: list[Action] = []
        over = sorted(n for n, at in self._leaving.items() if now >= at)
        for node in over:
            del self._leaving[node]
        actions += self.holdings.release(over)
        due = sorted(n for n, at in self._failures_due.items() if now >= at)
        for node in due:
            actions += self._failed(node, now)
        if self._awaited and self.deadline is not None and now >= self.deadline:
            late = [
                n
                for n in self.target
                if n not in (*self._came_up, *self.holdings.occupied)
                and not self.holdings.is_in(n, AssignmentPhase.EXITED)
            ]
            if late and len(late) < len(self.target):
                actions += self._reject(late, "the service's process did not come up there in time")
            elif late:
                self._awaited, self.deadline = False, None
                return [
                    *actions,
                    Broke((), f"No process of the service came up in time on {', '.join(late)}."),
                ]
            self.deadline = now + self.settings.warmup_s if self.holdings.occupied else None
        return actions + self._announce() + self._settled()

    def outdate(self) -> None:
        """Do nothing: the processes of a service are independent."""

    def give_up(self) -> list[Action]:
        """Do nothing: members of a service make no steps."""
        return []

    def postpone(self, by_s: float) -> None:
        """Extend all running time limits by a time in which no agent could be reached."""
        if self.deadline is not None:
            self.deadline += by_s
        for deadlines in (self._leaving, self._failures_due):
            deadlines.update({node: at + by_s for node, at in deadlines.items()})

    def hasten(self, node: str, now: float, within_s: float) -> list[Action]:
        """Leave a leaver less time, and tell it."""
        if node not in self._leaving:
            return []
        until = now + self.settings.self_exit_limit_s(within_s)
        self._leaving[node] = min(until, self._leaving[node])
        return self._announce()

    def next_wakeup(self) -> float | None:
        """Return the time at which :meth:`tick` is due; None if no time limit runs."""
        awaited = [self.deadline] if self._awaited and self.deadline is not None else []
        return min([*self._leaving.values(), *self._failures_due.values(), *awaited], default=None)

    # --- inside ---

    def _up(self, node: str) -> bool:
        return self.holdings.is_in(node, *UP)

    def _up_or_done(self, node: str) -> bool:
        return self._up(node) or self.holdings.is_in(node, AssignmentPhase.SUCCEEDED)

    def _is_complete(self) -> bool:
        return bool(self.target) and all(self._up_or_done(n) for n in self.target)

    def _reject(self, nodes: list[str], why: str, unfit: bool = False) -> list[Action]:
        self.target = tuple(n for n in self.target if n not in nodes)
        return [*self.holdings.release(nodes), NodesRejected(tuple(nodes), why, unfit)]

    def _remove(self, node: str) -> None:
        self.holdings.forget(node)
        self._leaving.pop(node, None)
        self._failures_due.pop(node, None)
        self._came_up.discard(node)

    def _announce(self) -> list[Action]:
        """Make a new view for all members, if it differs from the newest one."""
        order = dict.fromkeys((*self.members, *self.target))
        present = [
            n
            for n in order
            if n in self.holdings.assigned and n not in self.holdings.releasing and self._up(n)
        ]
        phases = ((n, self.holdings.phases[n]) for n in present)
        view = tuple(ViewMember(n, a.address, self._leaving.get(n), a.loading) for n, a in phases)
        if view == self.view:
            return []
        self.view, self.members = view, tuple(present)
        self.stage = (
            RoundStage.RUNNING
            if present
            else RoundStage.WARMING
            if self.target
            else RoundStage.IDLE
        )
        self.generation += 1
        return [SaveRound(self.generation, self.members), *self._send_view(self.members)]

    def _send_view(self, nodes: Iterable[str]) -> list[Action]:
        return [SendView(node, self.generation, self.view) for node in nodes]

    def _settled(self) -> list[Action]:
        """Report once that the service's work is done, or that the whole target is up. Called after
        every change, because a node that was not up may have left.
        """
        if done := self._finished():
            return done
        if not self._awaited or not self._is_complete():
            return []
        self._awaited, self.deadline = False, None
        return [AllUp(self.generation, self.members)]

    def _notice_ends(self, now: float) -> list[Action]:
        """Handle processes that have ended. Leavers are released. Other failures wait for the
        failure grace, because the node may be lost with its agent.
        """
        actions: list[Action] = []
        for node in sorted(self.holdings.assigned):
            if not self.holdings.is_in(node, *BROKEN, AssignmentPhase.SUCCEEDED):
                continue
            if node in self._leaving:
                del self._leaving[node]
                actions += self.holdings.release([node])
            elif (
                node in self.target
                and not self.holdings.is_in(node, AssignmentPhase.SUCCEEDED)
                and node not in self._reported_failures
            ):
                self._failures_due.setdefault(node, now + self.settings.failure_grace_s)
        return actions

    def _failed(self, node: str, now: float) -> list[Action]:
        if node in self.holdings.unreachable or node in self.holdings.doubted:
            self._failures_due[node] = now + self.settings.failure_grace_s
            return []
        del self._failures_due[node]
        if not self.holdings.is_in(node, *BROKEN):
            return []
        running_nodes = [n for n in self.target if n != node and self._up(n)]
        if (
            running_nodes and node not in self._came_up
        ):  # it runs elsewhere, so the job did not fail
            return self._reject([node], "the service's process ended there at once")
        failures = by_cause(self.holdings.phases[node].failures)
        if unfit(self.holdings.phases[node]):
            if self._awaited and any(not self.holdings.is_in(n, *BROKEN) for n in self.target):
                self._failures_due[node] = now + self.settings.failure_grace_s
                return []  # it may still start elsewhere
            return self._reject([node], describe(failures).rstrip("."), unfit=True)
        return self._process_ended(node, now)

    def _process_ended(self, node: str, now: float) -> list[Action]:
        """Return what follows from a process that ended by itself, on a node that is fit."""
        self._reported_failures.add(node)
        failures = by_cause(self.holdings.phases[node].failures)
        return [
            Broke(
                failures,
                describe(failures)
                if failures
                else f"The process of the service on {node} ended; see its log.",
            )
        ]

    def _finished(self) -> list[Action]:
        if (
            self.stage is RoundStage.COMPLETED
            or not self.target
            or not all(self.holdings.is_in(n, AssignmentPhase.SUCCEEDED) for n in self.target)
        ):
            return []
        self.stage, self.deadline = RoundStage.COMPLETED, None
        return [WorkersDone()]


@dataclass
class FarmRounds(ServiceRounds):
    """The membership of a farm: the nodes that take tasks from its queue. A service with two
    differences:

    * A member learns nothing of the others, only whether it leaves itself.
    * A launcher that ends is started again, because its tasks are not lost. It uses up no try of
      the job, unless none has ever come up. A node on which it ends :data:`MAX_RESTARTS` times is
      rejected.

    A farm is completed when its tasks are: see :mod:`malletrain.core.task_queue`.
    """

    _restarts: dict[str, int] = field(default_factory=dict)
    """Node → number of times that its launcher was started again."""

    def _send_view(self, nodes: Iterable[str]) -> list[Action]:
        own = {entry[0]: entry for entry in self.view}
        return [
            SendView(node, self.generation, (own[node],) if node in own else ()) for node in nodes
        ]

    def _process_ended(self, node: str, now: float) -> list[Action]:
        if self.generation == 0:  # it has not come up anywhere
            return super()._process_ended(node, now)
        count = self._restarts[node] = self._restarts.get(node, 0) + 1
        if count > MAX_RESTARTS:
            return self._reject([node], f"the launcher of the farm ended there {count} times")
        self._came_up.discard(node)
        self._awaited, self.deadline = True, now + self.settings.warmup_s
        return self.holdings.assign(node)
