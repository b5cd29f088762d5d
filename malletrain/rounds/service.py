"""The membership of a service: who is in it, who joins, who leaves and until when. A pure state
machine as :mod:`malletrain.rounds`.

    assigned ─process up─▶ member ─not planned any more─▶ leaving ─drained, or time over─▶ released
                                │ lost, or its process ended: out of the next view at once

What differs from :class:`malletrain.rounds.JobRounds`: nobody is stopped because another one comes
or goes. A round is a *view*, a numbered list of the members with their addresses; every change
makes a new view, saved and then told to all members. A leaver stays a member of the views until it
says that it is drained, or until its time is over. A process that ended by itself is told to the
controller (one try of the job is used up) and is started again by the plan that follows; the others
go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from malletrain.protocol.failures import by_cause, describe
from malletrain.protocol.messages import Assignment
from malletrain.rounds.actions import Action, Broke, Finished, Formed, SaveRound, SendView
from malletrain.rounds.restart import JobRounds, Stage


def drain_limit(within_s: float, stop_s: float) -> float:
    """Seconds that a process gets to hand over when its node is gone in ``within_s``: its agent
    stops it itself after that.
    """
    return max(0.2, 0.95 * (within_s - min(stop_s + 1.0, within_s / 2)))


View = tuple[tuple[str, str, float | None], ...]


@dataclass
class ServiceRounds(JobRounds):
    """The views of one service. ``members``: everybody in the newest view, leavers included, in
    rank order. ``view``: the same with the address of each and the time it leaves.
    """

    _leaving: dict[str, float] = field(default_factory=dict)
    view: View = ()
    _came_up: set[str] = field(default_factory=set)
    _blamed_nodes: set[str] = field(default_factory=set)
    _verdicts: dict[str, float] = field(default_factory=dict)
    _awaited: bool = False

    # --- what the controller wants ---

    def move(self, nodes: Iterable[str], now: float, within_s: float | None = None) -> list[Action]:
        if self.stage is Stage.COMPLETED:
            return []
        self.target = tuple(nodes)
        self.drain_s = (
            self.settings.drain_s
            if within_s is None
            else drain_limit(within_s, self.settings.stop_s)
        )
        self._verdicts.clear()
        self._blamed_nodes.clear()
        actions: list[Action] = []
        for node in self.target:
            self._leaving.pop(node, None)
            actions += self._assign(node)
        for node in sorted(self._assigned - set(self.target)):
            if self._up(node):
                self._leaving[node] = min(
                    now + self.drain_s, self._leaving.get(node, now + self.drain_s)
                )
            else:
                actions += self._release([node])
        self._awaited, self.deadline = True, now + self.settings.warmup_s
        return actions + self._announce() + self._settle(now)

    def stop(self) -> list[Action]:
        self._leaving.clear()
        self._verdicts.clear()
        self.view, self._awaited = (), False
        return super().stop()

    def adopt(
        self, generation: int, members: Iterable[str], phases: dict[str, Assignment], now: float
    ) -> list[Action]:
        self.generation = generation
        self.phases = {n: a for n, a in phases.items() if a.generation <= generation}
        self._assigned = set(phases)
        actions = self._release(n for n in sorted(phases) if n not in self.phases)
        order = [n for n in members if n in self.phases]
        self.target = (*order, *(n for n in sorted(self.phases) if n not in order))
        self.members = tuple(order)
        self._came_up = {n for n in self.target if self._up(n)}
        actions += self._announce()
        if self.members:
            self.stage = Stage.RUNNING
        return actions + self._notice_ends(now) + self._finished()

    # --- what the agents say ---

    def phase(self, node: str, assignment: Assignment, now: float) -> list[Action]:
        if node in self._releasing or assignment.generation > self.generation:
            return []
        if node not in (*self.target, *self._assigned):
            return self._release([node])
        self._assigned.add(node)
        self.phases[node] = assignment
        if self._up(node):
            self._came_up.add(node)
            self._blamed_nodes.discard(node)
        if done := self._finished():
            return done
        news = self._announce()
        if not news and node in self.members and assignment.generation < self.generation:
            news = self._tell(
                [node]
            )  # it may have missed the newest view while its connection was broken
        return news + self._notice_ends(now) + self._settle(now)

    def store_up(self, node: str, generation: int, host: str, port: int) -> list[Action]:
        return []

    def drained(self, node: str, generation: int, now: float) -> list[Action]:
        """Its process has nothing left that it would lose."""
        if self._leaving.pop(node, None) is None:
            return []
        return self._release([node]) + self._announce() + self._settle(now)

    def released(self, node: str, now: float) -> list[Action]:
        self._out(node)
        actions = (
            self._assign(node) if node in self.target and self.stage is not Stage.COMPLETED else []
        )
        return actions + self._announce()

    def gone(self, node: str, now: float) -> list[Action]:
        self.suspects.discard(node)
        self.target = tuple(n for n in self.target if n != node)
        self._out(node)
        return self._announce() + self._settle(now)

    # --- time ---

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        over = sorted(n for n, at in self._leaving.items() if now >= at)
        for node in over:
            del self._leaving[node]
        actions += self._release(over)
        due = sorted(n for n, at in self._verdicts.items() if now >= at)
        for node in due:
            actions += self._verdict(node, now)
        if self._awaited and self.deadline is not None and now >= self.deadline:
            late = [n for n in self.target if n not in self._came_up and not self._is(n, "exited")]
            if late and len(late) < len(self.target):
                actions += self._leave_out(
                    late, "the service's process did not come up there in time"
                )
            elif late:
                self._awaited, self.deadline = False, None
                return [
                    *actions,
                    Broke((), f"No process of the service came up in time on {', '.join(late)}."),
                ]
            self.deadline = None
        return actions + self._announce() + self._settle(now)

    def next_wakeup(self) -> float | None:
        awaited = [self.deadline] if self._awaited and self.deadline is not None else []
        return min([*self._leaving.values(), *self._verdicts.values(), *awaited], default=None)

    # --- inside ---

    def _up(self, node: str) -> bool:
        a = self.phases.get(node)
        return a is not None and a.phase in ("ready", "running")

    def _whole(self) -> bool:
        return bool(self.target) and all(
            self._up(n) or self._is(n, "succeeded") for n in self.target
        )

    def _is(self, node: str, *phases: str) -> bool:
        a = self.phases.get(node)
        return a is not None and a.phase in phases

    def _out(self, node: str) -> None:
        self._forget(node)
        self._leaving.pop(node, None)
        self._verdicts.pop(node, None)
        self._came_up.discard(node)

    def _announce(self) -> list[Action]:
        """A new view for all members, if it differs from the newest."""
        order = dict.fromkeys((*self.members, *self.target))
        there = [
            n for n in order if n in self._assigned and n not in self._releasing and self._up(n)
        ]
        view = tuple((n, self.phases[n].address, self._leaving.get(n)) for n in there)
        if view == self.view:
            return []
        self.view, self.members = view, tuple(there)
        self.stage = Stage.RUNNING if there else Stage.WARMING if self.target else Stage.IDLE
        self.generation += 1
        return [SaveRound(self.generation, self.members), *self._tell(self.members)]

    def _tell(self, nodes: Iterable[str]) -> list[Action]:
        return [SendView(node, self.generation, self.view) for node in nodes]

    def _settle(self, now: float) -> list[Action]:
        """Say once that everybody of the target is up."""
        if not self._awaited or not self._whole():
            return []
        self._awaited, self.deadline = False, None
        return [Formed(self.generation, self.members)]

    def _notice_ends(self, now: float) -> list[Action]:
        """Processes that ended: leavers are released; the others wait for a verdict, for the node
        may be lost with its agent.
        """
        actions: list[Action] = []
        for node in sorted(self._assigned):
            if not self._is(node, "failed", "exited", "succeeded"):
                continue
            if node in self._leaving:
                del self._leaving[node]
                actions += self._release([node])
            elif (
                node in self.target
                and not self._is(node, "succeeded")
                and node not in self._blamed_nodes
            ):
                self._verdicts.setdefault(node, now + self.settings.verdict_s)
        return actions

    def _verdict(self, node: str, now: float) -> list[Action]:
        if node in self.suspects:
            self._verdicts[node] = now + self.settings.verdict_s
            return []
        del self._verdicts[node]
        if not self._is(node, "failed", "exited"):
            return []
        others = [n for n in self.target if n != node and self._up(n)]
        if (
            others and node not in self._came_up
        ):  # it comes up elsewhere, so it is not the job's fault
            return self._leave_out([node], "the service's process ended there at once")
        self._blamed_nodes.add(node)
        failures = by_cause(self.phases[node].failures)
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
            self.stage is Stage.COMPLETED
            or not self.target
            or not all(self._is(n, "succeeded") for n in self.target)
        ):
            return []
        self.stage, self.deadline = Stage.COMPLETED, None
        return [Finished()]
