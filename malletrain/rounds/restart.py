"""How one job gets from one set of nodes to another: the rescale as a pure state machine. Events
in, actions out; no I/O, no clock.

    IDLE ─target─▶ WARMING ─joiners ready─▶ DRAINING ─snapshot taken─▶ FORMING ─all run─▶ RUNNING
                      │ joiners start while the others train; leavers are released
                      └── a member is lost: straight to FORMING with those that are left
    RUNNING ─all workers ended well─▶ COMPLETED

A round has exactly the members that were planned and are ready; nobody waits for a last call. A
joiner that does not come up in time is left out (partial scale-up). Workers that fail because a
peer vanished are no failure of the job: the verdict waits a moment for the news of the loss. This
module decides membership, ranks and the order of steps; which nodes a job gets is the controller's
decision.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from malletrain.protocol.failures import by_cause, describe, secondary
from malletrain.protocol.messages import Assignment, Failure
from malletrain.rounds.actions import (
    Action,
    Broke,
    Finished,
    Formed,
    LeftOut,
    SaveRound,
    SendAssign,
    SendDrain,
    SendRelease,
    SendRound,
)
from malletrain.rounds.settings import RoundSettings

__all__ = [
    "Action",
    "Broke",
    "Finished",
    "Formed",
    "JobRounds",
    "LeftOut",
    "RoundSettings",
    "SaveRound",
    "SendAssign",
    "SendDrain",
    "SendRelease",
    "SendRound",
    "Stage",
    "describe",
]

PATIENCE_WITH_PEERS = 3.0
"""Times ``verdict_s`` that a failure waits when every last word speaks of a lost peer and nobody
has said yet which.
"""


class Stage(str, Enum):
    """Where the job's rescale stands (see the module's picture)."""

    IDLE = "idle"
    WARMING = "warming"
    DRAINING = "draining"
    FORMING = "forming"
    RUNNING = "running"
    COMPLETED = "completed"


@dataclass
class JobRounds:
    """The rescales of one job. Every method returns the actions to carry out, in order."""

    settings: RoundSettings = field(default_factory=RoundSettings)
    min_nodes: int = 1
    generation: int = 0
    stage: Stage = Stage.IDLE
    members: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    phases: dict[str, Assignment] = field(default_factory=dict)
    deadline: float | None = None
    drains: int = 0
    drain_s: float = 10.0
    suspects: set[str] = field(default_factory=set)
    lost_member: bool = False
    _store: tuple[str, int] | None = None
    _assigned: set[str] = field(default_factory=set)
    _releasing: set[str] = field(default_factory=set)
    _hurry_s: float | None = None
    _failed_at: float | None = None
    _verdict_at: float | None = None
    _blamed: int = 0

    # --- what the controller wants ---

    def move(self, nodes: Iterable[str], now: float, within_s: float | None = None) -> list[Action]:
        """Go to exactly ``nodes`` (none: let go of all). ``within_s``: a node of the old set is
        gone by then.
        """
        if (done := self._finished()) or self.stage is Stage.COMPLETED:
            return done
        self.target = tuple(nodes)
        self._verdict_at = self._failed_at = None
        self.drain_s = (
            self.settings.drain_s
            if within_s is None
            else max(0.2, min(self.settings.drain_s, within_s * 0.6))
        )
        self._hurry_s = None
        if within_s is not None and not set(self.members) <= set(self.target):
            # Without enough survivors nobody trains until the joiners are there. They get a moment
            # to come up; no longer, because the main scheduler's job waits for the node.
            enough = len(self._survivors()) >= self.min_nodes
            self._hurry_s = (
                0.0
                if enough
                else max(0.0, min(self.settings.linger_s, within_s * 0.9 - self.drain_s))
            )
        sound = not self.lost_member and not self._bad()
        actions = self._release(
            n for n in sorted(self._assigned) if n not in self.target and n not in self.members
        )
        for node in self.target:
            actions += self._assign(node)
        if self.stage is Stage.FORMING and sound and set(self.members) <= set(self.target):
            return actions  # more nodes join when this round is formed
        if self.stage is Stage.DRAINING and self._whole():
            self.deadline = min(self.deadline or now, now + self.drain_s)
            return actions
        if self.stage is Stage.DRAINING:
            return actions + self._form(now)
        return actions + (self._await_joiners(now) if self.target else self._drain(now))

    def stop(self) -> list[Action]:
        """The job has ended: release every node."""
        self.target, self.members, self.stage, self.deadline, self._verdict_at = (
            (),
            (),
            Stage.IDLE,
            None,
            None,
        )
        return self._release(sorted(self._assigned))

    def adopt(
        self, generation: int, members: Iterable[str], phases: dict[str, Assignment], now: float
    ) -> list[Action]:
        """After a restart of the daemon: take over what the agents report, all nodes that hold the
        job included.

        Where that is the whole round of the store, the stage is RUNNING (or WARMING, when others
        are to join) afterwards. Else it is IDLE: have the controller plan a new round.
        """
        self.generation, self.members = generation, tuple(members)
        self.phases = {n: a for n, a in phases.items() if a.generation <= generation}
        self._assigned = set(phases)
        strange = self._release(
            n for n in sorted(phases) if n not in self.phases
        )  # of a newer round than the store knows
        others = (n for n in sorted(self.phases) if n not in self.members)
        self.target = (*(n for n in self.members if n in self.phases), *others)
        self.lost_member = any(n not in self.phases for n in self.members)
        if not self.members or self.lost_member or not all(self._in_round(n) for n in self.members):
            return strange
        self.stage, self.drains = Stage.RUNNING, int(now)
        if done := self._finished():
            return done
        # A drain that was under way is taken back, and its number is not used again.
        onwards: list[Action] = [SendDrain(self.members[0], self.generation, 0)]
        joining = self._await_joiners(now) if len(self.target) > len(self.members) else []
        return [*strange, *onwards, *self._judge(now), *joining]

    # --- what the agents say ---

    def phase(self, node: str, assignment: Assignment, now: float) -> list[Action]:
        """The agent on ``node`` reports its assignment."""
        if node in self._releasing or assignment.generation > self.generation:
            return []  # what is being stopped does not count, nor a round that nobody formed
        if node not in (*self.target, *self.members, *self._assigned):
            return self._release([node])
        self._assigned.add(node)
        self.phases[node] = assignment
        if done := self._finished():
            return done
        if self.stage is Stage.WARMING:
            return self._judge(now) or self._warm(now)
        if self.stage is Stage.DRAINING and not self._whole():
            return self._form(now)
        if self.stage is Stage.FORMING:
            if self._whole():
                self.stage, self.deadline = Stage.RUNNING, None
                formed: list[Action] = [Formed(self.generation, self.members)]
                return (
                    formed
                    if set(self.target) == set(self.members)
                    else formed + self._await_joiners(now)
                )
            return self._judge(now) or ([] if self._bad() else self._invite(node))
        return self._judge(now) if self.stage is Stage.RUNNING else []

    def store_up(self, node: str, generation: int, host: str, port: int) -> list[Action]:
        """The node of rank 0 serves the round's store."""
        if (
            generation != self.generation
            or self.stage is not Stage.FORMING
            or node != self.members[0]
        ):
            return []
        self._store = (host, port)
        return [action for member in self.members[1:] for action in self._invite(member)]

    def drained(self, node: str, generation: int, now: float) -> list[Action]:
        """The snapshot asked for is on disk, or there is none to take."""
        if (
            self.stage is Stage.DRAINING
            and generation == self.generation
            and node == (self.members or ("",))[0]
        ):
            return self._form(now)
        return []

    def released(self, node: str, now: float) -> list[Action]:
        """No process of the job is left on ``node``."""
        asked = node in self._releasing
        self._forget(node)
        if self.stage in (Stage.IDLE, Stage.COMPLETED) or node not in self.target:
            return []
        actions = self._assign(node)
        if (
            node in self.members and not asked
        ):  # its agent began anew: a new round is needed, and nobody is to blame
            self.lost_member = True
            return actions + (
                self._form(now) if self.stage is Stage.DRAINING else self._await_joiners(now)
            )
        return actions

    def gone(self, node: str, now: float) -> list[Action]:
        """The node is lost. What follows is the controller's plan; only what was under way anyway
        goes on without it.
        """
        self._forget(node)
        self.suspects.discard(node)
        self.target = tuple(n for n in self.target if n != node)
        if node in self.members:
            self.lost_member, self._verdict_at = True, None
            if (
                self.stage is Stage.WARMING
                and self.deadline is not None
                and len(self._survivors()) >= self.min_nodes
            ):
                self.deadline = min(
                    self.deadline, now + self.settings.warmup_broken_s
                )  # those that are left stand still now
        if self.stage is Stage.DRAINING and not self._whole():
            return self._form(now)
        return self._warm(now) if self.stage is Stage.WARMING else []

    # --- time ---

    def tick(self, now: float) -> list[Action]:
        """Carry on where a time limit has passed."""
        if self._verdict_at is not None and now >= self._verdict_at:
            return self._judge(now)
        if self.deadline is None or now < self.deadline:
            return []
        if self.stage is Stage.WARMING:
            return self._warm(now)
        if self.stage is Stage.DRAINING:
            return self._form(now)
        if self.lost_member:  # no plan came: go on with those that are left
            return self._await_joiners(now)
        if self.suspects.intersection(self.members):
            self.deadline = now + self.settings.verdict_s
            return []
        absent = [n for n in self.members if not self._is(n, "running", "succeeded")]
        return self._break(
            (), f"{', '.join(absent)} did not join the round within {self.settings.join_s:g} s."
        )

    def next_wakeup(self) -> float | None:
        """When :meth:`tick` is due."""
        times = [t for t in (self.deadline, self._verdict_at) if t is not None]
        return min(times) if times else None

    # --- how things stand ---

    def _is(self, node: str, *phases: str) -> bool:
        a = self.phases.get(node)
        return (
            a is not None
            and a.phase in phases
            and (a.phase in ("starting", "ready", "exited") or a.generation == self.generation)
        )

    def _ready(self, node: str) -> bool:
        """Whether the launcher on ``node`` can take a round: it waits for one, or its workers run
        and will be stopped.
        """
        a = self.phases.get(node)
        return a is not None and a.phase in ("ready", "running", "failed", "succeeded")

    def _in_round(self, node: str) -> bool:
        """Whether the workers on ``node`` belong to the current round, whatever became of them."""
        a = self.phases.get(node)
        return (
            a is not None
            and a.phase in ("running", "succeeded", "failed", "exited")
            and a.generation == self.generation
        )

    def _survivors(self) -> tuple[str, ...]:
        """Members of the last round that stay and whose launcher lives, in rank order."""
        return tuple(n for n in self.members if n in self.target and self._ready(n))

    def _whole(self) -> bool:
        """Whether every member of the last round runs, or is done."""
        return (
            bool(self.members)
            and not self.lost_member
            and all(self._is(n, "running", "succeeded") for n in self.members)
        )

    def _bad(self) -> list[str]:
        return [n for n in self.members if self._is(n, "failed", "exited")]

    # --- steps ---

    def _assign(self, node: str) -> list[Action]:
        if node in self._releasing or (node in self._assigned and not self._is(node, "exited")):
            return []
        self._assigned.add(node)
        self.phases.pop(node, None)
        return [SendAssign(node)]

    def _release(self, nodes: Iterable[str]) -> list[Action]:
        """Let go of ``nodes``; what they still say of the job does not count any more."""
        actions: list[Action] = []
        for node in nodes:
            if node not in self._releasing:
                self._forget(node)
                self._releasing.add(node)
                actions.append(SendRelease(node))
        return actions

    def _forget(self, node: str) -> None:
        self._assigned.discard(node)
        self._releasing.discard(node)
        self.phases.pop(node, None)

    def _await_joiners(self, now: float) -> list[Action]:
        """Wait for the launchers of the target to be up: shortly while those that could train stand
        still, else longer. Those that are left after a loss wait for nobody: newcomers join in a
        round of their own.
        """
        idle = not self._whole() and len(self._survivors()) >= max(1, self.min_nodes)
        if idle and self.lost_member:
            return self._form(now)
        wait = self.settings.warmup_broken_s if idle else self.settings.warmup_s
        self.stage, self.deadline = (
            Stage.WARMING,
            now + (wait if self._hurry_s is None else self._hurry_s),
        )
        return self._warm(now)

    def _warm(self, now: float) -> list[Action]:
        ready = [n for n in self.target if self._ready(n)]
        ended = [n for n in self.target if self._is(n, "exited")]
        coming = [n for n in self.target if n not in ready and n not in ended]
        actions: list[Action] = []
        if ended and ready:  # it comes up elsewhere, so it is not the job's fault
            actions += self._leave_out(ended, "the launcher ended there at once")
        if coming and (self.deadline is None or now < self.deadline):
            return actions
        if not ready and ended:
            failures = by_cause(f for n in ended for f in self.phases[n].failures)
            return self._break(
                failures,
                f"The launcher ended at once on {', '.join(ended)}; see `malletrain logs "
                "--launcher`.",
            )
        if not ready and coming and self._hurry_s is None:
            return self._break((), f"No launcher came up in time on {', '.join(coming)}.")
        if coming and self._hurry_s is None:
            actions += self._leave_out(coming, "the launcher did not come up there in time")
            coming = []
        self.deadline = None
        if len(ready) < max(1, self.min_nodes) and self._hurry_s is None:
            return actions  # the controller hears of what is missing; its plan follows
        if set(ready) == set(self.members) and not coming and self._whole():
            self.stage = Stage.RUNNING
            return [*actions, Formed(self.generation, self.members)]
        return actions + self._drain(now)

    def _leave_out(self, nodes: list[str], why: str) -> list[Action]:
        self.target = tuple(n for n in self.target if n not in nodes)
        return [*self._release(nodes), LeftOut(tuple(nodes), why)]

    def _drain(self, now: float) -> list[Action]:
        """Have rank 0 save what is done so far, where the whole round still runs."""
        if not self._whole():
            return self._form(now)
        self.stage, self.deadline = Stage.DRAINING, now + self.drain_s
        if not self._is(self.members[0], "running"):
            return []  # it is done, and the others will be in a moment
        self.drains += 1
        return [SendDrain(self.members[0], self.generation, self.drains)]

    def _form(self, now: float) -> list[Action]:
        keep = self._survivors()
        ready = (*keep, *(n for n in self.target if n not in keep and self._ready(n)))
        actions = self._release(n for n in sorted(self._assigned) if n not in self.target)
        self.deadline = self._verdict_at = self._failed_at = self._hurry_s = None
        if self.target and len(ready) < max(1, self.min_nodes):
            return actions + self._await_joiners(now)
        self.members, self._store, self.lost_member = ready, None, False
        if not ready:
            self.stage = Stage.IDLE
            return actions
        self.generation += 1
        self.stage, self.deadline = Stage.FORMING, now + self.settings.join_s
        return [*actions, SaveRound(self.generation, ready), *self._invite(ready[0])]

    def _invite(self, node: str) -> list[Action]:
        """Tell ``node`` of the round that is being formed, unless it cannot take part yet; saying
        it again does no harm.
        """
        a = self.phases.get(node)
        if node not in self.members or a is None or a.generation >= self.generation:
            return []
        rank, size = self.members.index(node), len(self.members)
        if rank and self._store is None:
            return []
        return [SendRound(node, self.generation, rank, size, self._store if rank else None)]

    def _finished(self) -> list[Action]:
        """Whether every worker ended well, whatever else was planned."""
        if (
            self.stage is Stage.COMPLETED
            or not self.members
            or not all(self._is(n, "succeeded") for n in self.members)
        ):
            return []
        self.stage, self.deadline, self._verdict_at = Stage.COMPLETED, None, None
        return [Finished()]

    def _judge(self, now: float) -> list[Action]:
        """Whether the members failed by themselves; nothing is said before the news of a loss had
        time to come.
        """
        bad = self._bad()
        if not bad or self.lost_member or self._blamed == self.generation:
            self._verdict_at = self._failed_at = None
            return []
        if self._failed_at is None:
            self._failed_at = now
            self._verdict_at = now + self.settings.verdict_s
        if self._verdict_at is None or now < self._verdict_at:
            return []
        if self.suspects.intersection(self.members):
            self._verdict_at = now + self.settings.verdict_s
            return []
        failures = by_cause(f for n in bad for f in self.phases[n].failures)
        patience = self._failed_at + PATIENCE_WITH_PEERS * self.settings.verdict_s
        if failures and secondary(failures[0]) and now < patience:
            self._verdict_at = patience
            return []
        what = "launcher ended" if all(self._is(n, "exited") for n in bad) else "workers failed"
        sentence = f"The {what} on {', '.join(bad)}; see `malletrain logs --launcher`."
        return self._break(failures, describe(failures) if failures else sentence)

    def _break(self, failures: tuple[Failure, ...], sentence: str) -> list[Action]:
        self.stage, self.deadline, self._verdict_at, self._blamed = (
            Stage.IDLE,
            None,
            None,
            self.generation,
        )
        return [Broke(failures, sentence)]
