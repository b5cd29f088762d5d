"""The rescales of a job in restart mode. Pure, without a clock.

A round has exactly the members that were planned and are ready. A joiner that is not ready in time
is rejected. :data:`malletrain.rounds.table.RESTART_TABLE` decides what happens in which
stage, the methods of :class:`RestartRounds` membership, ranks and time limits. The controller
decides the nodes, :mod:`malletrain.rounds.failure_grace` which failures are the job's own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from malletrain.protocol.messages import Assignment
from malletrain.protocol.phases import AT_WORK, BROKEN, TAKES_ROUND, TRAINS, AssignmentPhase
from malletrain.rounds.failure_grace import FailureGrace, launchers_ended
from malletrain.rounds.holdings import Holdings, NodeHolder, ScriptEnds
from malletrain.rounds.interface import (
    Action,
    Broke,
    NodesRejected,
    RoundSettings,
    RoundStage,
    SaveRound,
    SendDrain,
    SendRound,
    View,
    WorkersDone,
    WorkersRunning,
)
from malletrain.rounds.table import RESTART_TABLE, Occurrence, RoundEvent, RoundMachine, Table

IDLE, WARMING, DRAINING, FORMING, RUNNING, FINISHING, COMPLETED = RoundStage


@dataclass
class RestartRounds(RoundMachine, NodeHolder):
    """The rescales of one job. Every method returns the actions to carry out, in order; see
    :class:`malletrain.rounds.interface.Rounds`.
    """

    table: ClassVar[Table] = RESTART_TABLE
    interrupts: ClassVar[bool] = True

    settings: RoundSettings = field(default_factory=RoundSettings)
    min_nodes: int = 1
    """Minimum number of nodes on which the job trains."""
    generation: int = 0
    """Number of the newest round."""
    stage: RoundStage = IDLE
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
    outdated: bool = False
    """Whether the members of the newest round need another one although they stay the same."""
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

    # --- calls of the controller ---

    def move(self, nodes: Iterable[str], now: float, within_s: float | None = None) -> list[Action]:
        """Move to exactly ``nodes``."""
        planned = Occurrence(RoundEvent.PLANNED, now, within_s=within_s)
        if self._script_over():
            return self.handle(planned.then(RoundEvent.ENDED))
        self.target = tuple(nodes)
        self.failure.clear()
        self.drain_s = self.settings.drain_limit_s(within_s)
        if within_s is not None:
            until = now + self.settings.self_exit_limit_s(within_s)
            self._end_by = until if self._end_by is None else min(until, self._end_by)
        elif set(self.members) <= set(self.target):
            self._end_by = None
        return self.handle(planned)

    def stop(self) -> list[Action]:
        """Release every node, because the job has ended."""
        return self.handle(Occurrence(RoundEvent.STOPPED, 0.0))

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
        event = RoundEvent.ENDED if self._script_over() else RoundEvent.ADOPTED
        return releases + self.handle(Occurrence(event, now))

    def give_up(self) -> list[Action]:
        """Give up the hanging workers of the round."""
        self.lost_member = True
        self.failure.give_up(self.members, self.generation)
        return []

    def outdate(self) -> None:
        """Form a new round with the next plan, even if its nodes are the members."""
        self.outdated = True

    # --- reports of the agents ---

    def phase(self, node: str, assignment: Assignment, now: float) -> list[Action]:
        """Handle the assignment that the agent on ``node`` reports."""
        if node in self.holdings.releasing or assignment.generation > self.generation:
            return []  # ignore nodes being released, and rounds that were not formed here
        if node not in (*self.target, *self.members, *self.holdings.assigned):
            return self.release([node])
        if node in self.holdings.occupied and self.stage is WARMING:
            self.deadline = self._joiners_until or now + self.settings.warmup_s
        self.holdings.note(node, assignment)
        self.ends.note(node, assignment)
        event = RoundEvent.ENDED if self._script_over() else RoundEvent.REPORTED
        return self.handle(Occurrence(event, now, node, assignment))

    def store_up(self, node: str, generation: int, host: str, port: int) -> list[Action]:
        """Note the address of the round's store, which the node of rank 0 serves."""
        answer = Occurrence(RoundEvent.STORE_UP, 0.0, node, number=generation)
        if self.stage is FORMING and self.is_newest_store(answer):
            self._store = (host, port)
        return self.handle(answer)

    def drained(self, node: str, generation: int, now: float, number: int = 0) -> list[Action]:
        """Note that the requested snapshot (``number``, if known) is saved, or that there is
        none.
        """
        if generation != self.generation or number not in (0, self.drains):
            return []
        return self.handle(Occurrence(RoundEvent.DRAINED, now, node))

    def released(self, node: str, now: float) -> list[Action]:
        """Note that no process of the job is left on ``node``."""
        expected = node in self.holdings.releasing
        self.holdings.forget(node)
        if self.stage in (IDLE, COMPLETED) or node not in self.target:
            return []
        actions = self.holdings.assign(node)
        if node not in self.members or expected or self.ends.on(node, self.generation):
            return actions
        self.lost_member = True  # a new round is needed; the job did not fail
        return actions + self.handle(Occurrence(RoundEvent.RESTARTED, now, node))

    def gone(self, node: str, now: float) -> list[Action]:
        """Handle the loss of a node."""
        self.holdings.forget(node)
        self.holdings.unreachable.discard(node)
        self.target = tuple(n for n in self.target if n != node)
        if node in self.members and not self.ends.on(node, self.generation):
            self.lost_member = True
            self.failure.clear()
            survivors_suffice = len(self.survivors()) >= self.min_nodes
            if self.stage is WARMING and self.deadline is not None and survivors_suffice:
                self.deadline = min(self.deadline or now, now + self.settings.warmup_blocking_s)
        return self.handle(Occurrence(RoundEvent.LOST, now, node))

    # --- time ---

    def tick(self, now: float) -> list[Action]:
        """Handle the time limits that have passed."""
        if self.failure.due is not None and now >= self.failure.due:
            return self.handle(Occurrence(RoundEvent.FAILURE_DUE, now))
        if self.deadline is None or now < self.deadline:
            return []
        return self.handle(Occurrence(RoundEvent.TIME_OVER, now))

    def postpone(self, by_s: float) -> None:
        """Extend all running time limits by a time in which no agent could be reached."""
        self.deadline = None if self.deadline is None else self.deadline + by_s
        self.failure.postpone(by_s)

    def hasten(self, node: str, now: float, within_s: float) -> list[Action]:
        """Shorten a drain, or the wait for the end of the script."""
        drain_s, exit_s = self.settings.drain_limit_s, self.settings.self_exit_limit_s
        limits_s = {DRAINING: drain_s(within_s), FINISHING: exit_s(within_s)}
        if self.deadline is not None and node not in self.target and self.stage in limits_s:
            self.deadline = min(self.deadline, now + limits_s[self.stage])
        return []

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
        return tuple(n for n in self.members if n in self.target and self.ready(n))

    def whole(self) -> bool:
        """Return whether every member of the last round runs or has completed."""
        at_work = all(
            self.is_in(n, *AT_WORK) or self.ends.on(n, self.generation) for n in self.members
        )
        return bool(self.members) and not self.lost_member and at_work

    @property
    def finishing(self) -> bool:
        """Whether the script has ended somewhere or runs the code after its training."""
        for n in self.members:
            if self.is_in(n, AssignmentPhase.FINISHING) or self.ends.on(n, self.generation):
                return self.whole()
        return False

    @property
    def between_epochs(self) -> bool:
        """Whether the script is in the code after the steps of an epoch."""
        return any(self.is_in(n, AssignmentPhase.BETWEEN_EPOCHS) for n in self.members)

    def broken(self) -> list[str]:
        """Return the members whose workers failed or whose launcher ended."""
        return [n for n in self.members if self.is_in(n, *BROKEN)]

    def failing(self) -> dict[str, Assignment]:
        """Return the broken members that the newest round does not restart, with their reports."""
        return self.failure.newly({n: self.holdings.phases[n] for n in self.broken()})

    def _script_over(self) -> bool:
        return self.ends.everywhere(self.generation, self.members)

    def _absent(self) -> list[str]:
        return [n for n in self.members if not self.is_in(n, *AT_WORK)]

    def _enough(self, nodes: Collection[str]) -> bool:
        return len(nodes) >= max(1, self.min_nodes)

    # --- guards ---

    def finishing_now(self, _: Occurrence) -> bool:
        """The script is ending."""
        return self.finishing

    def all_at_work(self, _: Occurrence) -> bool:
        """Every member of the newest round runs."""
        return self.whole()

    def has_target(self, _: Occurrence) -> bool:
        """The job has nodes in the plan."""
        return bool(self.target)

    def keeps_round(self, occurrence: Occurrence) -> bool:
        """The round that is being formed is intact and completed first: all its members stay."""
        return self._is_intact() and set(self.members) <= set(self.target)

    def _is_intact(self) -> bool:
        return not self.lost_member and not self.failing()

    def changes_nodes(self, _: Occurrence) -> bool:
        """The plan has other nodes than the newest round, which has lost none."""
        return set(self.target) != set(self.members) and not self.lost_member

    def changes_nodes_of_round(self, _: Occurrence) -> bool:
        """The plan has other nodes than the newest round."""
        return set(self.target) != set(self.members)

    def is_newest_store(self, occurrence: Occurrence) -> bool:
        """The store is that of the round that is being formed."""
        return occurrence.number == self.generation and occurrence.node == self.members[0]

    def answers_drain(self, occurrence: Occurrence) -> bool:
        """The node is the one that was asked to save."""
        return occurrence.node == self.members[0]

    def drains_after_epoch(self, _: Occurrence) -> bool:
        """The script saves after the code between two epochs, and no node is taken."""
        return self.between_epochs and self._end_by is None

    def has_lost_member(self, _: Occurrence) -> bool:
        """A member was lost since the newest round was formed."""
        return self.lost_member

    def has_unreachable_member(self, _: Occurrence) -> bool:
        """A member cannot be reached and may be lost."""
        return bool(self.holdings.unreachable.intersection(self.members))

    def lacks_members(self, _: Occurrence) -> bool:
        """The first member, or too many, did not join."""
        absent = self._absent()
        return self.members[0] in absent or not self._enough(set(self.members) - set(absent))

    def round_continues(self, _: Occurrence) -> bool:
        """After a restart of the daemon: every member belongs to the newest round."""
        whole = all(self.holdings.belongs(n, self.generation) for n in self.members)
        return bool(self.members) and not self.lost_member and whole

    # --- steps: the nodes of the plan ---

    def request_nodes(self, occurrence: Occurrence) -> list[Action]:
        """Assign the job to the nodes of the plan, and release those that only a former plan had.
        Limit the wait for joiners if a node is taken.
        """
        now, within_s = occurrence.now, occurrence.within_s
        waited_until, self._joiners_until = self._joiners_until or 0.0, None
        if within_s is not None and not set(self.members) <= set(self.target):
            survivors_suffice = len(self.survivors()) >= self.min_nodes
            until = now + (0.0 if survivors_suffice else self.settings.joiner_wait_s(within_s))
            self._joiners_until = (
                min(waited_until, until) if waited_until > now else until
            )  # and no longer
        actions = self.release(
            n
            for n in sorted(self.holdings.assigned)
            if n not in self.target and n not in self.members
        )
        for node in self.target:
            actions += self.holdings.assign(node)
        return actions

    def await_joiners(self, occurrence: Occurrence) -> list[Action]:
        """Wait for the launchers of the target; for a shorter time if the remaining members could
        train.
        """
        if self.lost_member and self._enough(self.survivors()):
            return self.form(occurrence)
        self.stage = WARMING
        self.deadline = self._joiners_until or occurrence.now + self._joiners_s
        return self.check_joiners(occurrence)

    @property
    def _joiners_s(self) -> float:
        """Maximum time for joiners to start, seconds."""
        idle = not self.whole() and self._enough(self.survivors())
        return self.settings.warmup_blocking_s if idle else self.settings.warmup_s

    def check_joiners(self, occurrence: Occurrence) -> list[Action]:
        """Continue if the launchers of the target are ready, or if the wait for them is over.
        Reject nodes whose launchers ended at once or too often, or did not start in time.
        """
        now, taken = occurrence.now, self._joiners_until is not None
        ready = [n for n in self.target if self.ready(n)]
        in_time = self.deadline is None or now < self.deadline
        restarts = bool(ready) and (in_time or taken)
        actions = self.holdings.restart_ended(self.target) if restarts else []
        if actions and in_time:
            until = now + self._joiners_s
            self.deadline = until if self.deadline is None else min(self.deadline, until)
        ended = [n for n in self.target if self.is_in(n, AssignmentPhase.EXITED)]
        coming = [n for n in self.target if n not in ready and n not in ended]
        if ended and ready:  # it starts elsewhere, so the job did not fail
            at_once = [n for n in ended if not self.holdings.phases[n].generation]
            again = [n for n in ended if n not in at_once]
            actions += self.reject(at_once, "the launcher ended there at once") if at_once else []
            actions += (
                self.reject(again, "the launcher ended there again and again") if again else []
            )
        if coming and in_time:
            return actions
        occupied = [n for n in coming if n in self.holdings.occupied]
        if occupied and not taken:
            coming = [n for n in coming if n not in occupied]
            intact = set(ready) == set(self.members) and self.whole()
            if not coming and (intact or not self._enough(ready)):
                self.deadline = now + self.settings.warmup_s
                return actions
        if not ready and ended:
            broke, unfit = launchers_ended({n: self.holdings.phases[n] for n in ended})
            if not unfit:
                return self._report_failure(broke)
            self.deadline = now + self.settings.warmup_s if coming else None
            return self.reject(ended, broke.sentence.rstrip("."), unfit=True)
        if not ready and coming and not taken:
            late = Broke((), f"No launcher came up in time on {', '.join(coming)}.")
            return self._report_failure(late)
        if coming and not taken:
            actions += self.reject(coming, "the launcher did not come up there in time")
            coming = []
        too_few = not self._enough(ready) and not taken
        self.deadline = now + self.settings.warmup_blocking_s if too_few and ready else None
        if too_few:
            return actions  # the controller plans again after the rejection, or these nodes must do
        same = set(ready) == set(self.members) and not coming and self.whole()
        same = same and not self.outdated
        event = RoundEvent.ROUND_SUFFICES if same else RoundEvent.JOINERS_READY
        return actions + self.handle(occurrence.then(event))

    def release(self, nodes: Iterable[str]) -> list[Action]:
        """Release ``nodes`` from the job."""
        return self.holdings.release(nodes)

    def reject(self, nodes: list[str], why: str, unfit: bool = False) -> list[Action]:
        """Continue without ``nodes``."""
        self.target = tuple(n for n in self.target if n not in nodes)
        return [*self.release(nodes), NodesRejected(tuple(nodes), why, unfit)]

    def release_all(self, _: Occurrence) -> list[Action]:
        """Release every node."""
        self.target, self.members, self.stage, self.deadline = (), (), IDLE, None
        self.failure.clear()
        self.ends.clear()
        self._end_by = None
        return self.release(sorted(self.holdings.assigned))

    # --- steps: the state ---

    def drain(self, occurrence: Occurrence) -> list[Action]:
        """Ask rank 0 to save its progress if the whole round still runs; else form the next
        round.
        """
        if not self.whole():
            return self.form(occurrence)
        self.stage, self.deadline = DRAINING, occurrence.now + self.drain_s
        return self._send_drain()

    def drain_sooner(self, occurrence: Occurrence) -> list[Action]:
        """Shorten the drain, and repeat it if other nodes keep the snapshot."""
        self.deadline = min(self.deadline or occurrence.now, occurrence.now + self.drain_s)
        same = self.holdings.keepers(self._next_members()) == self._drain_heirs
        return [] if same else self._send_drain()

    def extend_drain(self, occurrence: Occurrence) -> list[Action]:
        """Wait for the end of the code between two epochs."""
        self.deadline = occurrence.now + self.drain_s
        return []

    def _send_drain(self) -> list[Action]:
        if not self.is_in(self.members[0], *TRAINS):
            return []  # it has ended, and the others will soon
        self.drains, self._drain_heirs = (
            self.drains + 1,
            self.holdings.keepers(self._next_members()),
        )
        return [SendDrain(self.members[0], self.generation, self.drains, self._drain_heirs)]

    # --- steps: the next round ---

    def form(self, occurrence: Occurrence) -> list[Action]:
        """Form the next round of the survivors and all other nodes that are ready."""
        return self._form(occurrence)

    def _form(self, occurrence: Occurrence, because_lost: bool = False) -> list[Action]:
        ready = self._next_members()
        actions = self.release(
            n
            for n in sorted(self.holdings.assigned)
            if n not in (*self.target, *self.holdings.givers)
        )
        self.deadline = self._joiners_until = self._end_by = None
        self.failure.answer({n: self.holdings.phases[n] for n in ready})
        if self.target and not self._enough(ready):
            return actions + self.await_joiners(occurrence)
        self.members, self._store, self.lost_member, self.holdings.givers = ready, None, False, ()
        if not ready:
            self.stage = IDLE
            return actions
        self.generation, self.stage, self.outdated = self.generation + 1, FORMING, False
        self.deadline = occurrence.now + self.settings.join_s
        return [*actions, SaveRound(self.generation, ready, because_lost), *self._invite(ready[0])]

    def _next_members(self) -> tuple[str, ...]:
        """Return the members of the next round in rank order. Workers start again, so that ranks
        are free to change: those of one host are neighbours.
        """
        staying, joining = self._staying_and_joining()
        return self.settings.by_host((*staying, *joining))

    def _staying_and_joining(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        staying = (*self.survivors(), *self.holdings.givers)
        return staying, tuple(n for n in self.target if n not in staying and self.ready(n))

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
        store, samples = self._store if rank else None, self.holdings.samples(self.members)
        return [SendRound(node, self.generation, rank, size, store, samples)]

    def invite_reporter(self, occurrence: Occurrence) -> list[Action]:
        """Send the node that reported the round, unless a member has failed."""
        return [] if self.failing() else self._invite(occurrence.node)

    def invite_others(self, _: Occurrence) -> list[Action]:
        """Send the round to all members but the first, which serves the store."""
        return [action for member in self.members[1:] for action in self._invite(member)]

    def run(self, occurrence: Occurrence) -> list[Action]:
        """Note that every member runs, and move on if the plan has changed since."""
        return [*self.resume(occurrence), *self.handle(occurrence.then(RoundEvent.WORKERS_RUNNING))]

    def resume(self, _: Occurrence) -> list[Action]:
        """Note that the newest round runs on the nodes of the plan."""
        self.stage, self.deadline = RUNNING, None
        return [WorkersRunning(self.generation, self.members)]

    def extend_by_grace(self, occurrence: Occurrence) -> list[Action]:
        """Wait for a report on the member that cannot be reached."""
        self.deadline = occurrence.now + self.settings.failure_grace_s
        return []

    def fail_join(self, _: Occurrence) -> list[Action]:
        """Report that members did not join."""
        return self._report_failure(Broke((), f"{', '.join(self._absent())} {self._not_joined}."))

    def form_without_absent(self, occurrence: Occurrence) -> list[Action]:
        """Reject the members that did not join, and form the next round."""
        why = f"{self._not_joined}; a firewall may block ports between there and {self.members[0]}"
        return [*self.reject(self._absent(), why), *self.form(occurrence)]

    @property
    def _not_joined(self) -> str:
        return f"did not join the round within {self.settings.join_s:g} s"

    def take_over(self, occurrence: Occurrence) -> list[Action]:
        """Continue a round after a restart of the daemon. A drain in progress is cancelled, and its
        number is not used again.
        """
        self.stage, self.drains = RUNNING, int(occurrence.now)
        cancelled_drain = SendDrain(self.members[0], self.generation, 0)
        joining: list[Action] = []
        if len(self.target) > len(self.members):
            await_nodes = self.await_end if self.finishing else self.await_joiners
            joining = await_nodes(occurrence)
        return [cancelled_drain, *self.check_failures(occurrence), *joining]

    # --- steps: the end of the script, and failures ---

    def await_end(self, _: Occurrence) -> list[Action]:
        """Delay the change of nodes until the script has ended, as long as the nodes may stay."""
        actions: list[Action] = []
        if self.stage is DRAINING:
            actions.append(SendDrain(self.members[0], self.generation, 0))
        self.stage, self.deadline = FINISHING, self._end_by
        return actions + self.release(
            n for n in sorted(self.holdings.assigned) if n not in (*self.target, *self.members)
        )

    def await_plan(self, occurrence: Occurrence) -> list[Action]:
        """Wait for a plan after a loss, for a limited time."""
        until = occurrence.now + self.settings.failure_grace_s
        self.deadline = until if self.deadline is None else min(self.deadline, until)
        return []

    def move_on(self, occurrence: Occurrence) -> list[Action]:
        """Move to the plan, because the script continues to train."""
        self.stage, self.deadline = RUNNING, None
        now, end_by = occurrence.now, self._end_by
        return self.move(self.target, now, None if end_by is None else max(0.0, end_by - now))

    def complete(self, _: Occurrence) -> list[Action]:
        """Complete the job, even if a rescale was planned."""
        self.stage, self.deadline = COMPLETED, None
        self.failure.clear()
        return [WorkersDone()]

    def check_failures(self, occurrence: Occurrence) -> list[Action]:
        """Report a failure of the members, once there was enough time for the report of a lost
        node.
        """
        broken = self.failing()
        if not broken or self.lost_member or self.failure.told_of == self.generation:
            self.failure.clear()
            return []
        to_come = not (self.holdings.unreachable | self.holdings.doubted).isdisjoint(self.members)
        grace_s = self.settings.failure_grace_s
        broke = self.failure.decide(broken, to_come, occurrence.now, grace_s, len(self.members))
        return [] if broke is None else self._report_failure(broke)

    def _report_failure(self, broke: Broke) -> list[Action]:
        self.stage, self.deadline, self.failure.told_of = IDLE, None, self.generation
        self.failure.clear()
        return [broke]
