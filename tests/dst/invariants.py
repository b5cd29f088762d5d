"""Invariants: some must hold at any time, others at the end, after any faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from malletrain.core.events import JobState
from malletrain.protocol import messages
from tests.dst.head import GRACE_S
from tests.dst.profiles import ProfileInvariants
from tests.dst.service import ServiceNodeLauncher
from tests.dst.truth import BATCH, STEP_S, JobTruth

if TYPE_CHECKING:
    from tests.dst.world import World

FORGOTTEN_S = 20.0
"""Time after the loss of contact with a node during which its old workers may still exist,
seconds.
"""
ORDERLY = frozenset(("notice", "cancel", "scale", "meddle"))
"""Causes of a change of nodes by which no sample is lost or trained twice."""
SETTLED_S = 15.0
"""Maximum time after the last fault, and after the last plan for a job, until the job has its
planned nodes, seconds.
"""
UNTOLD_S = 6.0
"""Seconds whose samples a fault may remove from the counts (docs/concepts.md)."""


class Invariants:
    """Checks the invariants of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._touched: dict[str, float] = {}
        """Node → when it was cut off last, or the daemon was away."""
        self._heard: dict[str, dict[tuple[int, int, int], float]] = {}
        self._sent: dict[str, tuple[frozenset[str], float]] = {}
        """Job → the nodes that the controller gives it, and since when."""
        self._trained: dict[str, tuple[float, float]] = {}
        """Job → the samples that it has trained, and when that was seen first."""
        self._profiles = ProfileInvariants(world)
        world.head.heard = self._hears

    def _hears(self, message: object) -> None:
        if isinstance(message, messages.Progress):
            counts = self._heard.setdefault(message.job, {})
            key = message.generation, message.rank, message.pid
            counts[key] = max(counts.get(key, 0.0), message.samples)

    def touch(self, node: str) -> None:
        """Note that messages of this node are late from now on."""
        self._touched[node] = self._world.loop.time()

    def out_of_touch(self, node: str) -> bool:
        """Whether the daemon could not reach this node of late."""
        now = self._world.loop.time()
        return now - self._touched.get(node, -1e9) < FORGOTTEN_S

    def look(self) -> None:
        """Check the invariants that hold at any time."""
        world = self._world
        now = world.loop.time()
        for node in world.machine.nodes:
            if world.network.cut(node) or world.head.deaf or node in world.network.slow:
                self._touched[node] = now
        daemon = world.head.daemon
        if daemon is None:
            return
        if daemon.handler_failures.count:
            world.fail(daemon.handler_failures.summary())
        if daemon.components is not None:
            state = daemon.components.state
            if world.profiles:
                self._profiles.look(state.controller)
            for job, run in state.runs.items():
                self._count(job, run.monitor.total)
                self._where_it_was_sent(job, frozenset(state.controller.jobs[job].nodes))

    def _where_it_was_sent(self, job: str, nodes: frozenset[str]) -> None:
        """A job has processes on the nodes that it was given, and nowhere else; of a service each
        of them has the same members in view.
        """
        world, now = self._world, self._world.loop.time()
        last_nodes, since = self._sent.get(job, (None, now))
        if last_nodes != nodes or world.quiet_since is None:
            self._sent[job] = nodes, now
            return
        truth = world.trainings.jobs.get(job)
        if truth is None or truth.finished or now - since < SETTLED_S:
            return
        here = [n for n in world.machine.nodes.values() if any(x.job == job for x in n.launchers)]
        if any(self.out_of_touch(node) for node in nodes.union(node.name for node in here)):
            return
        if {node.name for node in here} != nodes:
            names = ", ".join(node.name for node in here)
            world.fail(f"{job} was given {', '.join(sorted(nodes))}, and is on {names or 'none'}")
        self._goes_on(job, truth, now)
        for launcher in (each for node in here for each in node.launchers):
            view = launcher.view if isinstance(launcher, ServiceNodeLauncher) else None
            if view is not None and {member.node for member in view.members} != nodes:
                members = ", ".join(member.node for member in view.members)
                world.fail(f"{launcher.node.name} takes {members} for the members of {job}")

    def _goes_on(self, job: str, truth: JobTruth, now: float) -> None:
        """A job that has had the same nodes for a while trains."""
        trained, since = self._trained.get(job, (-1.0, now))
        if trained != truth.trained:
            self._trained[job] = truth.trained, now
        elif now - since > SETTLED_S and self._sent[job][0]:
            self._world.fail(f"{job} has trained nothing for {now - since:.0f} s")

    def _count(self, job: str, counted: float) -> None:
        world = self._world
        heard = sum(self._heard.get(job, {}).values())
        truth = world.trainings.jobs.get(job)
        trained = truth.trained if truth is not None else 0.0
        if counted > heard + 1e-6 or counted > trained + 1e-6:
            world.fail(
                f"{counted:g} samples of {job} are counted; {heard:g} were told, {trained:g} "
                "trained"
            )

    def at_the_end(self) -> None:
        """Check the invariants that hold once there are no more faults and everything has come to
        rest.
        """
        world = self._world
        self._profiles.at_the_end()
        rows = world.head.store.list_jobs()
        keys = [spec.key for spec in world.specs]
        if len(rows) != len(keys):
            world.fail(f"{len(keys)} jobs were submitted, and there are {len(rows)}")
        for row in rows:
            truth = world.trainings.jobs.get(row.id)
            state = JobState(row.state)
            if state is JobState.CANCELLED:
                if not any(row.id in user.cancelled for user in world.users):
                    world.fail(f"{row.id} is cancelled, and nobody wished that")
            elif state is JobState.COMPLETED:
                if truth is None or not truth.finished:
                    world.fail(f"{row.id} is completed, and its training is not")
            elif truth is None or truth.crashes == 0:
                world.fail(f"{row.id} failed, and not by itself: {row.reason}")
            self._count(row.id, row.samples)
            if state is JobState.COMPLETED and truth is not None and truth.spec.mode != "service":
                self._not_too_few(row.id, row.samples, truth.trained)
            if truth is not None and world.happened.keys() <= ORDERLY:
                self._nothing_lost(row.id, truth, state)
        for node in world.machine.nodes.values():
            if node.launchers:
                world.fail(f"a launcher is left on {node.name}")

    def _nothing_lost(self, job: str, truth: JobTruth, state: JobState) -> None:
        """If nodes leave with notice, every sample is trained exactly once, and each process of a
        service hands over its work. In restart mode the first step of a round may be lost: a worker
        says that it saves on request only after that step.
        """
        world = self._world
        steps, first = 0, 0.0
        if truth.spec.mode == "restart":
            steps = sum(world.happened.values())
            first = sum(BATCH * group.size for group in truth.groups.values() if group.steps == 1)
        allowed = max(steps * BATCH * len(world.machine.nodes), first)
        if truth.spec.mode != "service" and abs(truth.trained - truth.reached) > allowed + 1e-6:
            world.fail(
                f"{job} trained {truth.trained:g} samples for the {truth.reached:g} that its "
                "state has seen, and nodes were only taken with notice"
            )
        if truth.cut_short and state is not JobState.CANCELLED:
            world.fail(f"{truth.cut_short} processes of {job} could not hand over")

    def _not_too_few(self, job: str, counted: float, trained: float) -> None:
        world = self._world
        faults = sum(world.happened.values())
        most = BATCH / STEP_S * len(world.machine.nodes)
        allowed = faults * (UNTOLD_S + GRACE_S) * most
        if trained - counted > allowed + 1e-6:
            world.fail(
                f"{trained:g} samples of {job} were trained and {counted:g} are counted; after "
                f"{faults} faults {allowed:g} may be missing"
            )
