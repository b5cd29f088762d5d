"""How one job gets from one set of nodes to another: the rescale as a pure state machine. Events in, actions out; no I/O, no clock.

    IDLE ──target──▶ WARMING ──joiners ready──▶ DRAINING ──snapshot taken──▶ FORMING ──all run──▶ RUNNING ──▶ COMPLETED
                        │ joiners start while the others train │ leavers are released  │
                        └──────────── a member is lost: straight to FORMING with those that are left ─────┘

A round has exactly the members that were planned and are ready; nobody waits for a last call. A joiner that does not come up in time is left
out (partial scale-up). Workers that fail because a peer vanished are no failure of the job: the verdict waits a moment for the news of the
loss. This module decides membership, ranks and the order of steps; which nodes a job gets is the controller's decision.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from malletrain.wire import Assignment, Failure


@dataclass(frozen=True)
class RoundSettings:
    """Time limits in seconds. ``warmup_s``: for joiners to come up while the others train; ``warmup_broken_s``: while nobody trains;
    ``verdict_s``: how long a failure waits for the news that a node was lost."""

    warmup_s: float = 60.0
    warmup_broken_s: float = 15.0
    drain_s: float = 10.0
    join_s: float = 60.0
    verdict_s: float = 2.5


class Stage(str, Enum):
    """Where the job's rescale stands (see the module's picture)."""

    IDLE = "idle"
    WARMING = "warming"
    DRAINING = "draining"
    FORMING = "forming"
    RUNNING = "running"
    COMPLETED = "completed"


# --- actions ---


@dataclass(frozen=True)
class SendAssign:
    """Start the job's launcher on ``node``."""

    node: str


@dataclass(frozen=True)
class SendRelease:
    """Stop everything of the job on ``node``."""

    node: str


@dataclass(frozen=True)
class SendDrain:
    """Have the worker of rank 0 on ``node`` take a snapshot and stand still (``number`` 0: train on)."""

    node: str
    generation: int
    number: int


@dataclass(frozen=True)
class SaveRound:
    """Write the new generation and its members to the store before anybody hears of it."""

    generation: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class SendRound:
    """Tell ``node`` its place; without a store it is the one to serve it."""

    node: str
    generation: int
    rank: int
    size: int
    store: tuple[str, int] | None


@dataclass(frozen=True)
class Formed:
    """All members run."""

    generation: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class Broke:
    """The job's own workers failed; the first cause first."""

    failures: tuple[Failure, ...]
    sentence: str


@dataclass(frozen=True)
class Finished:
    """Every worker ended well."""


@dataclass(frozen=True)
class LeftOut:
    """These nodes are unfit for the job: its launcher did not come up there. The job goes on without them."""

    nodes: tuple[str, ...]
    sentence: str


Action = SendAssign | SendRelease | SendDrain | SaveRound | SendRound | Formed | Broke | Finished | LeftOut

PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "DistBackendError",
    "DistNetworkError",
    "Connect timeout",
    "failed to connect",
    "Connection refused",
)
"""What a worker's last words look like when it died of another's death (gloo, NCCL and TCPStore messages)."""


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
    _hurry: bool = False
    _verdict_at: float | None = None

    # --- what the controller wants ---

    def move(self, nodes: Iterable[str], now: float, within_s: float | None = None) -> list[Action]:
        """Go to exactly ``nodes`` (none: let go of all). ``within_s``: a node of the old set is gone by then."""
        self.target = tuple(nodes)
        self._verdict_at = None
        self._hurry = within_s is not None and len(self._survivors()) >= self.min_nodes
        self.drain_s = self.settings.drain_s if within_s is None else max(0.2, min(self.settings.drain_s, within_s * 0.6))
        actions: list[Action] = []
        for node in self.target:
            actions += self._assign(node)
        if self.stage is Stage.DRAINING:
            return actions if self._drain_node() else actions + self._form(now)
        if not self.target:
            return actions + self._drain(now)
        return actions + self._await_joiners(now)

    def stop(self) -> list[Action]:
        """The job has ended: release every node."""
        self.target, self.members, self.stage, self.deadline, self._verdict_at = (), (), Stage.IDLE, None, None
        return self._release(sorted(self._assigned))

    def adopt(self, generation: int, members: Iterable[str], phases: dict[str, Assignment], now: float) -> list[Action]:
        """After a restart of the daemon: take over the round that agents report, or form a new one of those that are there."""
        self.generation, self.members = generation, tuple(members)
        self.target, self.phases, self._assigned = self.members, dict(phases), set(phases)
        whole = all(n in phases and phases[n].generation == generation for n in self.members)
        if whole and all(phases[n].phase in ("running", "succeeded") for n in self.members):
            self.stage = Stage.RUNNING
            return self._judge(now)
        return []

    # --- what the agents say ---

    def phase(self, node: str, assignment: Assignment, now: float) -> list[Action]:
        """The agent on ``node`` reports its assignment."""
        if node in self._releasing:
            return []
        self._assigned.add(node)
        self.phases[node] = assignment
        if self.stage is Stage.WARMING:
            return self._warm(now)
        if self.stage is Stage.DRAINING and not self._drain_node():
            return self._form(now)
        if self.stage is Stage.FORMING:
            if assignment.phase == "exited" and node in self.members:
                return self._judge(now)
            if assignment.phase == "failed" and node in self.members and assignment.generation == self.generation:
                return self._judge(now)
            if all(self._is(n, "running", "succeeded") for n in self.members):
                self.stage, self.deadline = Stage.RUNNING, None
                late = self._await_joiners(now) if set(self.target) != set(self.members) else []
                return [Formed(self.generation, self.members), *self._judge(now), *late]
        if self.stage is Stage.RUNNING:
            return self._judge(now)
        return []

    def store_up(self, node: str, generation: int, host: str, port: int) -> list[Action]:
        """The node of rank 0 serves the round's store."""
        if generation != self.generation or self.stage is not Stage.FORMING or not self.members or node != self.members[0]:
            return []
        self._store = (host, port)
        size = len(self.members)
        return [SendRound(n, generation, rank, size, self._store) for rank, n in enumerate(self.members) if rank]

    def drained(self, node: str, generation: int, now: float) -> list[Action]:
        """The snapshot asked for is on disk, or there is none to take."""
        if self.stage is Stage.DRAINING and generation == self.generation and node == (self.members or ("",))[0]:
            return self._form(now)
        return []

    def released(self, node: str, now: float) -> list[Action]:
        """No process of the job is left on ``node``."""
        self._forget(node)
        self._releasing.discard(node)
        if node in self.target and self.stage is not Stage.IDLE:
            return self._assign(node)
        return []

    def gone(self, node: str, now: float) -> list[Action]:
        """The node is lost. What follows is the controller's plan; until then only the verdict on failures changes."""
        self._forget(node)
        self.suspects.discard(node)
        if node in self.members:
            self.lost_member, self._verdict_at = True, None
        self._releasing.discard(node)
        self.target = tuple(n for n in self.target if n != node)
        if self.stage is Stage.DRAINING and not self._drain_node():
            return self._form(now)
        if self.stage is Stage.WARMING:
            return self._warm(now)
        return []

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
        if self.stage is Stage.FORMING:
            absent = [n for n in self.members if not self._is(n, "running", "succeeded")]
            self.deadline = None
            return [Broke((), f"{', '.join(absent)} did not join the round within {self.settings.join_s:g} s.")]
        return []

    def next_wakeup(self) -> float | None:
        """When :meth:`tick` is due."""
        times = [t for t in (self.deadline, self._verdict_at) if t is not None]
        return min(times) if times else None

    # --- steps ---

    def _survivors(self) -> tuple[str, ...]:
        """Members of the last round that stay and whose launcher lives, in rank order."""
        return tuple(n for n in self.members if n in self.target and n in self._assigned and not self._is(n, "exited"))

    def _is(self, node: str, *phases: str) -> bool:
        a = self.phases.get(node)
        return a is not None and a.phase in phases and (a.phase in ("starting", "ready", "exited") or a.generation == self.generation)

    def _assign(self, node: str) -> list[Action]:
        if node in self._releasing or (node in self._assigned and not self._is(node, "exited")):
            return []
        self._assigned.add(node)
        self.phases.pop(node, None)
        return [SendAssign(node)]

    def _ready(self, node: str) -> bool:
        """Whether the launcher on ``node`` can take a round: it waits for one, or its workers run and will be stopped."""
        a = self.phases.get(node)
        return a is not None and a.phase in ("ready", "running", "failed", "succeeded")

    def _release(self, nodes: Iterable[str]) -> list[Action]:
        """Let go of ``nodes``; what they still say of the job does not count any more."""
        actions: list[Action] = []
        for node in nodes:
            if node not in self._releasing:
                self._forget(node)
                self._releasing.add(node)
                actions.append(SendRelease(node))
        return actions

    def _await_joiners(self, now: float) -> list[Action]:
        """Wait for the launchers of the target to be up: long while the last round trains on, shortly while nobody does."""
        trains = self._drain_node() is not None
        self.stage = Stage.WARMING
        self.deadline = now + (0.0 if self._hurry else self.settings.warmup_s if trains or not self._survivors() else self.settings.warmup_broken_s)
        return self._warm(now)

    def _warm(self, now: float) -> list[Action]:
        actions: list[Action] = []
        ended = [n for n in self.target if self._is(n, "exited")]
        if ended and len(ended) < len(self.target):
            actions += self._leave_out(ended, "the launcher ended there at once")
        elif ended:
            self.deadline, self.stage = None, Stage.IDLE
            failures = tuple(f for n in ended for f in self.phases[n].failures)
            return [Broke(failures, f"The launcher ended at once on {', '.join(ended)}; see `malletrain logs --launcher`.")]
        waiting = [n for n in self.target if not self._ready(n)]
        overdue = self.deadline is not None and now >= self.deadline
        if waiting and not overdue:
            return actions
        if len(self.target) - len(waiting) < max(1, self.min_nodes):
            self.deadline, self.stage = None, Stage.IDLE
            return [*actions, Broke((), f"No launcher came up in time on {', '.join(waiting) or 'enough nodes'}.")]
        if waiting and not self._hurry:
            actions += self._leave_out(waiting, f"the launcher did not come up within {self.settings.warmup_s:g} s")
        if set(self.target) - set(waiting) == set(self.members) and self._drain_node():
            self.stage, self.deadline = Stage.RUNNING, None
            return actions
        return actions + self._drain(now)

    def _leave_out(self, nodes: list[str], why: str) -> list[Action]:
        self.target = tuple(n for n in self.target if n not in nodes)
        return [*self._release(nodes), LeftOut(tuple(nodes), why)]

    def _drain_node(self) -> str | None:
        """The node whose worker can take the snapshot: rank 0's, while the whole last round still runs."""
        if not self.members or self.lost_member or not all(self._is(n, "running", "succeeded") for n in self.members):
            return None
        return self.members[0] if self._is(self.members[0], "running") else None

    def _drain(self, now: float) -> list[Action]:
        node = self._drain_node()
        if node is None or self.generation == 0:
            return self._form(now)
        self.stage, self.deadline = Stage.DRAINING, now + self.drain_s
        self.drains += 1
        return [SendDrain(node, self.generation, self.drains)]

    def _form(self, now: float) -> list[Action]:
        keep = self._survivors()
        ready = tuple(n for n in (*keep, *(n for n in self.target if n not in keep)) if self._ready(n))
        actions = self._release(n for n in sorted(self._assigned) if n not in ready and n not in self.target)
        self._store, self.deadline, self._verdict_at, self.lost_member, self._hurry = None, None, None, False, False
        self.members = ready
        if not ready:
            self.stage = Stage.IDLE
            return actions + (self._await_joiners(now) if self.target else [])
        self.generation += 1
        self.stage, self.deadline = Stage.FORMING, now + self.settings.join_s
        return [*actions, SaveRound(self.generation, ready), SendRound(ready[0], self.generation, 0, len(ready), None)]

    def _judge(self, now: float) -> list[Action]:
        """Look at how the members stand: all done, or broken, or nothing to say yet."""
        if self.members and all(self._is(n, "succeeded") for n in self.members):
            self.stage = Stage.COMPLETED
            return [Finished()]
        bad = [n for n in self.members if self._is(n, "failed", "exited")]
        if not bad or self.lost_member or any(n in self.suspects for n in self.members):
            return []
        if self._verdict_at is None:
            self._verdict_at = now + self.settings.verdict_s
            return []
        if now < self._verdict_at:
            return []
        self._verdict_at, self.deadline = None, None
        failures = sorted((f for n in bad for f in self.phases[n].failures), key=lambda f: (_secondary(f), f.time))
        return [Broke(tuple(failures), describe(failures) if failures else f"The launcher ended on {', '.join(bad)}.")]

    def _forget(self, node: str) -> None:
        self._assigned.discard(node)
        self.phases.pop(node, None)


def _secondary(failure: Failure) -> bool:
    """Whether the worker was stopped by somebody or died of a peer's death: never the first cause."""
    return failure.exitcode == -15 or any(words in failure.tail for words in PEER_LOST)


def describe(failures: Iterable[Failure]) -> str:
    """One sentence on the first cause of a failure."""
    first = next(iter(failures))
    how = f"was killed by signal {-first.exitcode}" if first.exitcode < 0 else f"exited with code {first.exitcode}"
    last = next((line.strip() for line in reversed(first.tail.splitlines()) if line.strip()), "")
    return f"Rank {first.rank} {how}." + (f" Its last line: {last}" if last else "")
