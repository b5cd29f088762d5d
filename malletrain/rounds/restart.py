"""Moves a job from one set of nodes to another: a pure state machine without a clock.

    IDLE ─target─▶ WARMING ─joiners ready─▶ DRAINING ─snapshot taken─▶ FORMING ─all run─▶ RUNNING
                      │ joiners start while the others train; leavers are released
                      └── a member is lost: straight to FORMING with the remaining members
    RUNNING ─target, while the script ends─▶ FINISHING ─all workers ended well─▶ COMPLETED
                      └── it continues to train, or its node must leave: as above

A round has exactly the members that were planned and are ready. A joiner that is not ready in time
is rejected. :class:`JobRounds` decides membership, ranks and the order of steps. The controller
decides the nodes, :mod:`malletrain.rounds.failure_grace` which failures are the job's own.

:class:`ScriptEnds` decides when a job is completed: its script has ended with exit code 0 on every
node of one round. What happens to the nodes afterwards and which round is being formed does not
matter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from malletrain.protocol.messages import Assignment
from malletrain.protocol.phases import AT_WORK, BROKEN, TAKES_ROUND, TRAINS, AssignmentPhase
from malletrain.rounds.actions import (
    Action,
    Broke,
    Formed,
    NodesRejected,
    SaveRound,
    SendDrain,
    SendRound,
    WorkersDone,
)
from malletrain.rounds.failure_grace import FailureGrace, launchers_ended
from malletrain.rounds.holdings import Holdings
from malletrain.rounds.interface import RoundPolicy, RoundSettings, RoundStage, View


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


_INTERRUPTIBLE = (RoundStage.WARMING, RoundStage.DRAINING, RoundStage.RUNNING, RoundStage.FINISHING)
"""Stages in which the workers of the newest round run."""


@dataclass
class JobRounds:
    """The rescales of one job. Every method returns the actions to carry out, in order."""

    settings: RoundSettings = field(default_factory=RoundSettings)
    min_nodes: int = 1
    """Minimum number of nodes on which the job trains."""
    generation: int = 0
    """Number of the newest round."""
    policy: RoundPolicy | None = None
    """The steps in which another mode differs; None for restart mode."""
    stage: RoundStage = RoundStage.IDLE
    members: tuple[str, ...] = ()
    """The nodes of the newest round, in rank order."""
    target: tuple[str, ...] = ()
    """The nodes of the newest plan."""
    holdings: Holdings = field(default_factory=Holdings)
    deadline: float | None = None
    """Time limit of the stage; None if it has none."""
    drains: int = 0
    """Number of the newest drain request."""
    drain_s: float = 10.0
    """Current maximum time of a drain, seconds."""
    lost_member: bool = False
    """Whether a member was lost since the newest round was formed."""
    interrupts: bool = True
    view: View = ()
    failure: FailureGrace = field(default_factory=FailureGrace)
    ends: ScriptEnds = field(default_factory=ScriptEnds)
    _store: tuple[str, int] | None = None
    """Host and port of the newest round's store; None until rank 0 reports it."""
    _drain_heirs: tuple[str, ...] = ()
    """Addresses of the keepers in the newest drain request."""
    _joiners_until: float | None = None
    """Time limit for joiners because a node is taken; None for the usual one."""
    _end_by: float | None = None
    """Time limit for the end of the script because a node is taken; None for no limit."""

    @property
    def _policy(self) -> RoundPolicy:
        return self.policy or self

    # --- calls of the controller ---

    def move(self, nodes: Iterable[str], now: float, within_s: float | None = None) -> list[Action]:
        """See :class:`malletrain.rounds.interface.Rounds`, also for the other methods."""
        if (done := self._finished()) or self.stage is RoundStage.COMPLETED:
            return done
        self.target = tuple(nodes)
        self.failure.clear()
        self.drain_s = self.settings.drain_limit_s(within_s)
        if within_s is not None:
            until = now + self.settings.self_exit_limit_s(within_s)
            self._end_by = until if self._end_by is None else min(until, self._end_by)
        elif set(self.members) <= set(self.target):
            self._end_by = None
        if self.finishing and self.stage in _INTERRUPTIBLE:
            return self._await_end()
        waited_until, self._joiners_until = self._joiners_until or 0.0, None
        if within_s is not None and not set(self.members) <= set(self.target):
            survivors_suffice = len(self._policy.survivors()) >= self.min_nodes
            until = now + (0.0 if survivors_suffice else self.settings.joiner_wait_s(within_s))
            self._joiners_until = (
                min(waited_until, until) if waited_until > now else until
            )  # and no longer
        intact = not self.lost_member and not self.failing()
        actions = self._policy.release(
            n
            for n in sorted(self.holdings.assigned)
            if n not in self.target and n not in self.members
        )
        for node in self.target:
            actions += self.holdings.assign(node)
        if self.stage is RoundStage.FORMING and intact and self._policy.keeps_round(now, within_s):
            return actions  # it moves to the target after this round is formed
        if self.stage is RoundStage.DRAINING and self.whole():
            self.deadline = min(self.deadline or now, now + self.drain_s)
            same = self.holdings.keepers(self._next_members()) == self._drain_heirs
            return actions if same else actions + self._send_drain()
        if self.stage is RoundStage.DRAINING:
            return actions + self._policy.form(now)
        return actions + (self._await_joiners(now) if self.target else self._policy.drain(now))

    def stop(self) -> list[Action]:
        """Release every node, because the job has ended."""
        self.target, self.members, self.stage, self.deadline = (), (), RoundStage.IDLE, None
        self.failure.clear()
        self.ends.clear()
        self._end_by = None
        return self._policy.release(sorted(self.holdings.assigned))

    def adopt(
        self, generation: int, members: Iterable[str], phases: dict[str, Assignment], now: float
    ) -> list[Action]:
        """If the agents report the complete round of the store, the stage is RUNNING afterwards, or
        WARMING if other nodes join. Otherwise it is IDLE, and the controller must plan a new round.
        """
        self.generation, self.members = generation, tuple(members)
        releases = self.holdings.adopt(phases, generation)
        others = (n for n in sorted(self.holdings.phases) if n not in self.members)
        self.target = (*(n for n in self.members if n in self.holdings.phases), *others)
        self.lost_member = any(n not in self.holdings.phases for n in self.members)
        for node, assignment in self.holdings.phases.items():
            self.ends.note(node, assignment)
        if done := self._finished():
            return [*releases, *done]
        whole = all(self.holdings.belongs(n, self.generation) for n in self.members)
        if not self.members or self.lost_member or not whole:
            return releases
        self.stage, self.drains = RoundStage.RUNNING, int(now)
        # A drain in progress is cancelled, and its number is not used again.
        cancelled_drain: list[Action] = [SendDrain(self.members[0], self.generation, 0)]
        joining: list[Action] = []
        if len(self.target) > len(self.members):
            joining = self._await_end() if self.finishing else self._await_joiners(now)
        return [*releases, *cancelled_drain, *self._check_failures(now), *joining]

    # --- reports of the agents ---

    def phase(self, node: str, assignment: Assignment, now: float) -> list[Action]:
        """Handle the assignment that the agent on ``node`` reports."""
        if node in self.holdings.releasing or assignment.generation > self.generation:
            return []  # ignore nodes being released, and rounds that were not formed here
        if node not in (*self.target, *self.members, *self.holdings.assigned):
            return self._policy.release([node])
        if node in self.holdings.occupied and self.stage is RoundStage.WARMING:
            self.deadline = self._joiners_until or now + self.settings.warmup_s
        self.holdings.note(node, assignment)
        self.ends.note(node, assignment)
        if done := self._finished():
            return done
        if self.stage in (RoundStage.WARMING, RoundStage.DRAINING) and self.finishing:
            return self._await_end()
        if self.stage is RoundStage.FINISHING:
            return self._check_finishing(now)
        if self.stage is RoundStage.WARMING:
            return self._check_failures(now) or self._check_joiners(now)
        if self.stage is RoundStage.DRAINING and not self.whole():
            return self._policy.form(now)
        if self.stage is RoundStage.FORMING:
            if self.whole():
                self.stage, self.deadline = RoundStage.RUNNING, None
                formed: list[Action] = [Formed(self.generation, self.members)]
                target_differs = set(self.target) != set(self.members)
                return formed + self._await_joiners(now) if target_differs else formed
            failures = self._check_failures(now)
            return failures or ([] if self.failing() else self._invite(node))
        return self._check_failures(now) if self.stage is RoundStage.RUNNING else []

    def store_up(self, node: str, generation: int, host: str, port: int) -> list[Action]:
        """Note the address of the round's store, which the node of rank 0 serves."""
        newest = self.stage is RoundStage.FORMING and generation == self.generation
        if not newest or node != self.members[0]:
            return []
        self._store = (host, port)
        return [action for member in self.members[1:] for action in self._invite(member)]

    def drained(self, node: str, generation: int, now: float, number: int = 0) -> list[Action]:
        """Note that the requested snapshot (``number``, if known) is saved, or that there is
        none.
        """
        newest = generation == self.generation and number in (0, self.drains)
        awaited = self.stage is RoundStage.DRAINING and newest
        return self._policy.form(now) if awaited and node == self.members[0] else []

    def released(self, node: str, now: float) -> list[Action]:
        """Note that no process of the job is left on ``node``."""
        expected = node in self.holdings.releasing
        self.holdings.forget(node)
        if self.stage in (RoundStage.IDLE, RoundStage.COMPLETED) or node not in self.target:
            return []
        actions = self.holdings.assign(node)
        if node not in self.members or expected or self.ends.on(node, self.generation):
            return actions
        self.lost_member = True  # its agent restarted: a new round is needed, the job did not fail
        continue_with = (
            self._policy.form if self.stage is RoundStage.DRAINING else self._await_joiners
        )
        return actions + continue_with(now)

    def gone(self, node: str, now: float) -> list[Action]:
        """Handle the loss of a node. Until the next plan, only a rescale in progress continues."""
        self.holdings.forget(node)
        self.holdings.unreachable.discard(node)
        self.target = tuple(n for n in self.target if n != node)
        if node in self.members and not self.ends.on(node, self.generation):
            self.lost_member = True
            self.failure.clear()
            survivors_suffice = len(self._policy.survivors()) >= self.min_nodes
            if self.stage is RoundStage.WARMING and self.deadline is not None and survivors_suffice:
                self.deadline = min(self.deadline or now, now + self.settings.warmup_blocking_s)
        if self.stage is RoundStage.DRAINING and not self.whole():
            return self._policy.form(now)
        return self._check_joiners(now) if self.stage is RoundStage.WARMING else []

    # --- time ---

    def tick(self, now: float) -> list[Action]:
        """Handle the time limits that have passed."""
        if self.failure.due is not None and now >= self.failure.due:
            return self._check_failures(now)
        if self.deadline is None or now < self.deadline:
            return []
        if self.stage is RoundStage.WARMING:
            return self._check_joiners(now)
        if self.stage is RoundStage.DRAINING and self.between_epochs and self._end_by is None:
            self.deadline = now + self.drain_s  # it saves after that code
            return []
        if self.stage in (RoundStage.DRAINING, RoundStage.FINISHING):
            return self._policy.form(now)
        if self.lost_member:  # no plan came: continue with the remaining members
            return self._await_joiners(now)
        if self.holdings.unreachable.intersection(self.members):
            self.deadline = now + self.settings.failure_grace_s
            return []
        absent = [n for n in self.members if not self.is_in(n, *AT_WORK)]
        why = f"did not join the round within {self.settings.join_s:g} s"
        if self.members[0] in absent or len(self.members) - len(absent) < max(1, self.min_nodes):
            return self._report_failure(Broke((), f"{', '.join(absent)} {why}."))
        why += f"; a firewall may block ports between there and {self.members[0]}"
        return [*self.reject(absent, why), *self._policy.form(now)]

    def unreachable(self, node: str) -> None:
        """Note that the agent on ``node`` cannot be reached. Failures of its peers may come from
        its loss.
        """
        self.holdings.unreachable.add(node)

    def reachable(self, node: str) -> None:
        """Note that the agent on ``node`` can be reached again."""
        self.holdings.unreachable.discard(node)

    def give_up(self) -> list[Action]:
        """See :class:`malletrain.rounds.interface.Rounds`."""
        self.lost_member = True
        self.failure.give_up(self.members, self.generation)
        return []

    def occupied(self, node: str) -> None:
        """Note that another job is still leaving ``node``."""
        self.holdings.occupied.add(node)

    def doubt(self, node: str, over: bool) -> list[Action]:
        """Hold back a failure on ``node`` that the node may have caused; ``over``: the node did not
        cause it.
        """
        self.holdings.doubt(node, over)
        return []

    def postpone(self, by_s: float) -> None:
        """Extend all running time limits by a time in which no agent could be reached."""
        self.deadline = None if self.deadline is None else self.deadline + by_s
        self.failure.postpone(by_s)

    def next_wakeup(self) -> float | None:
        """Return the time at which :meth:`tick` is due; None if no time limit runs."""
        return min((t for t in (self.deadline, self.failure.due) if t is not None), default=None)

    # --- state of the round ---

    def is_in(self, node: str, *phases: AssignmentPhase) -> bool:
        """Return whether the last phase of ``node`` is one of ``phases``, of the newest round if it
        belongs to a round.
        """
        return self.holdings.is_in_round(node, self.generation, *phases)

    def ready(self, node: str) -> bool:
        """Return whether the launcher on ``node`` is alive and can join a round."""
        return self.holdings.is_in(node, *TAKES_ROUND)

    def survivors(self) -> tuple[str, ...]:
        """Return the staying members of the last round whose launcher is alive, in rank order."""
        return tuple(n for n in self.members if n in self.target and self._policy.ready(n))

    def whole(self) -> bool:
        """Return whether every member of the last round runs or has completed."""
        at_work = all(
            self.is_in(n, *AT_WORK) or self.ends.on(n, self.generation) for n in self.members
        )
        return bool(self.members) and not self.lost_member and at_work

    @property
    def finishing(self) -> bool:
        """See :class:`malletrain.rounds.interface.Rounds`."""
        return self.whole() and any(
            self.is_in(n, AssignmentPhase.FINISHING) or self.ends.on(n, self.generation)
            for n in self.members
        )

    @property
    def between_epochs(self) -> bool:
        """See :class:`malletrain.rounds.interface.Rounds`."""
        return any(self.is_in(n, AssignmentPhase.BETWEEN_EPOCHS) for n in self.members)

    def keeps_round(self, now: float, within_s: float | None) -> bool:
        """Return whether a round that is being formed is completed first: if all its members
        stay.
        """
        return set(self.members) <= set(self.target)

    def broken(self) -> list[str]:
        """Return the members whose workers failed or whose launcher ended."""
        return [n for n in self.members if self.is_in(n, *BROKEN)]

    def failing(self) -> dict[str, Assignment]:
        """Return the broken members that the newest round does not restart, with their reports."""
        return self.failure.newly({n: self.holdings.phases[n] for n in self._policy.broken()})

    # --- steps ---

    def release(self, nodes: Iterable[str]) -> list[Action]:
        """Release ``nodes`` from the job."""
        return self.holdings.release(nodes)

    def _await_end(self) -> list[Action]:
        """Delay the change of nodes until the script has ended, as long as the nodes may stay."""
        actions: list[Action] = []
        if self.stage is RoundStage.DRAINING:
            actions.append(SendDrain(self.members[0], self.generation, 0))
        self.stage, self.deadline = RoundStage.FINISHING, self._end_by
        return actions + self._policy.release(
            n for n in sorted(self.holdings.assigned) if n not in (*self.target, *self.members)
        )

    def _check_finishing(self, now: float) -> list[Action]:
        """Handle a report while the change of nodes waits for the end of the script."""
        if self.finishing:
            return []
        if not self.whole():  # the change of nodes restarts the failed workers
            changes = set(self.target) != set(self.members) and not self.lost_member
            return self._policy.form(now) if changes else self._check_failures(now)
        self.stage, self.deadline = RoundStage.RUNNING, None
        remaining_s = None if self._end_by is None else max(0.0, self._end_by - now)
        return self.move(self.target, now, remaining_s)

    def _await_joiners(self, now: float) -> list[Action]:
        """Wait for the launchers of the target; for a shorter time if the remaining members could
        train.
        """
        idle = not self.whole() and len(self._policy.survivors()) >= max(1, self.min_nodes)
        if idle and self.lost_member:
            return self._policy.form(now)
        wait_s = self.settings.warmup_blocking_s if idle else self.settings.warmup_s
        self.stage, self.deadline = RoundStage.WARMING, self._joiners_until or now + wait_s
        return self._check_joiners(now)

    def _check_joiners(self, now: float) -> list[Action]:
        ready = [n for n in self.target if self._policy.ready(n)]
        ended = [n for n in self.target if self.is_in(n, AssignmentPhase.EXITED)]
        coming = [n for n in self.target if n not in ready and n not in ended]
        actions: list[Action] = []
        if ended and ready:  # it starts elsewhere, so the job did not fail
            actions += self.reject(ended, "the launcher ended there at once")
        if coming and (self.deadline is None or now < self.deadline):
            return actions
        occupied = [n for n in coming if n in self.holdings.occupied]
        if occupied and self._joiners_until is None:
            coming = [n for n in coming if n not in occupied]
            intact = set(ready) == set(self.members) and self.whole()
            if not coming and (intact or len(ready) < max(1, self.min_nodes)):
                self.deadline = now + self.settings.warmup_s
                return actions
        if not ready and ended:
            broke, unfit = launchers_ended({n: self.holdings.phases[n] for n in ended})
            if not unfit:
                return self._report_failure(broke)
            self.deadline = now + self.settings.warmup_s if coming else None
            return self.reject(ended, broke.sentence.rstrip("."), unfit=True)
        if not ready and coming and self._joiners_until is None:
            return self._report_failure(
                Broke((), f"No launcher came up in time on {', '.join(coming)}.")
            )
        if coming and self._joiners_until is None:
            actions += self.reject(coming, "the launcher did not come up there in time")
            coming = []
        too_few = len(ready) < max(1, self.min_nodes) and self._joiners_until is None
        self.deadline = now + self.settings.warmup_blocking_s if too_few and ready else None
        if too_few:
            return actions  # the controller plans again after the rejection, or these nodes must do
        if set(ready) == set(self.members) and not coming and self.whole():
            self.stage = RoundStage.RUNNING
            return [*actions, Formed(self.generation, self.members)]
        return actions + self._policy.drain(now)

    def reject(self, nodes: list[str], why: str, unfit: bool = False) -> list[Action]:
        """Continue without ``nodes``."""
        self.target = tuple(n for n in self.target if n not in nodes)
        return [*self._policy.release(nodes), NodesRejected(tuple(nodes), why, unfit)]

    def drain(self, now: float) -> list[Action]:
        """Ask rank 0 to save its progress if the whole round still runs; else form the next
        round.
        """
        if not self.whole():
            return self._policy.form(now)
        self.stage, self.deadline = RoundStage.DRAINING, now + self.drain_s
        return self._send_drain()

    def _send_drain(self) -> list[Action]:
        if not self.is_in(self.members[0], *TRAINS):
            return []  # it has ended, and the others will soon
        self.drains, self._drain_heirs = (
            self.drains + 1,
            self.holdings.keepers(self._next_members()),
        )
        return [SendDrain(self.members[0], self.generation, self.drains, self._drain_heirs)]

    def _next_members(self) -> tuple[str, ...]:
        staying = (*self._policy.survivors(), *self.holdings.givers)
        return (*staying, *(n for n in self.target if n not in staying and self._policy.ready(n)))

    def form(self, now: float, because_lost: bool = False) -> list[Action]:
        """Form the next round of the survivors and all other nodes that are ready."""
        ready = self._next_members()
        actions = self._policy.release(
            n
            for n in sorted(self.holdings.assigned)
            if n not in (*self.target, *self.holdings.givers)
        )
        self.deadline = self._joiners_until = self._end_by = None
        self.failure.answer({n: self.holdings.phases[n] for n in ready})
        if self.target and len(ready) < max(1, self.min_nodes):
            return actions + self._await_joiners(now)
        self.members, self._store, self.lost_member, self.holdings.givers = ready, None, False, ()
        if not ready:
            self.stage = RoundStage.IDLE
            return actions
        self.generation, self.stage = self.generation + 1, RoundStage.FORMING
        self.deadline = now + self.settings.join_s
        return [*actions, SaveRound(self.generation, ready, because_lost), *self._invite(ready[0])]

    def _invite(self, node: str) -> list[Action]:
        """Send ``node`` the round that is being formed, unless it cannot take part yet. A
        repetition is harmless.
        """
        a = self.holdings.phases.get(node)
        if node not in self.members or a is None or a.generation >= self.generation:
            return []
        rank, size = self.members.index(node), len(self.members)
        if rank and self._store is None:
            return []
        return [SendRound(node, self.generation, rank, size, self._store if rank else None)]

    def _finished(self) -> list[Action]:
        """Complete the job if all workers have ended without error, even if a rescale was
        planned.
        """
        if self.stage is RoundStage.COMPLETED:
            return []
        return self.complete() if self.ends.everywhere(self.generation, self.members) else []

    def complete(self) -> list[Action]:
        """Complete the job."""
        self.stage, self.deadline = RoundStage.COMPLETED, None
        self.failure.clear()
        return [WorkersDone()]

    def _check_failures(self, now: float) -> list[Action]:
        """Report a failure of the members, once there was enough time for the report of a lost
        node.
        """
        broken = self.failing()
        if not broken or self.lost_member or self.failure.told_of == self.generation:
            self.failure.clear()
            return []
        to_come = not (self.holdings.unreachable | self.holdings.doubted).isdisjoint(self.members)
        grace_s = self.settings.failure_grace_s
        broke = self.failure.look(broken, to_come, now, grace_s, len(self.members))
        return [] if broke is None else self._report_failure(broke)

    def _report_failure(self, broke: Broke) -> list[Action]:
        self.stage, self.deadline, self.failure.told_of = RoundStage.IDLE, None, self.generation
        self.failure.clear()
        return [broke]
