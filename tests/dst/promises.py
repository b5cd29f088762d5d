"""What must hold at any time, and what at the end, whatever went wrong in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

from malletrain.core.events import JobState
from malletrain.protocol import messages
from tests.dst.head import GRACE_S
from tests.dst.training import BATCH, STEP_S

if TYPE_CHECKING:
    from tests.dst.world import World

FORGOTTEN_S = 20.0
"""So long after a node was out of touch its old workers may be there yet."""
UNTOLD_S = 6.0
"""What a fault may cost of the counts: the samples of so many seconds (docs/concepts.md)."""


class Promises:
    """Of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._touched: dict[str, float] = {}
        """Node → when it was cut off last, or the daemon was away."""
        self._heard: dict[str, dict[tuple[int, int, int], float]] = {}
        self._counted: dict[str, float] = {}
        world.head.heard = self._hears

    def _hears(self, message: object) -> None:
        if isinstance(message, messages.Progress):
            counts = self._heard.setdefault(message.job, {})
            key = message.generation, message.rank, message.pid
            counts[key] = max(counts.get(key, 0.0), message.samples)

    def out_of_touch(self, node: str) -> bool:
        """Whether the daemon could not reach this node of late."""
        now = self._world.loop.time()
        return now - self._touched.get(node, -1e9) < FORGOTTEN_S

    def look(self) -> None:
        """What holds at any time."""
        world = self._world
        now = world.loop.time()
        for node in world.machine.nodes:
            if world.network.cut(node) or not world.head.alive or node in world.network.slow:
                self._touched[node] = now
        daemon = world.head.daemon
        if daemon is None:
            return
        if daemon.mishaps.count:
            world.fail(daemon.mishaps.told())
        if daemon.service is not None:
            for job, run in daemon.service.core.runs.items():
                self._count(job, run.monitor.total)

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
        """What holds once nothing goes wrong any more and everything has come to rest."""
        world = self._world
        rows = world.head.store.list_jobs()
        keys = [spec.key for spec in world.specs]
        if len(rows) != len(keys):
            world.fail(f"{len(keys)} jobs were submitted, and there are {len(rows)}")
        for row in rows:
            truth = world.trainings.jobs.get(row.id)
            state = JobState(row.state)
            if state is JobState.CANCELLED:
                if row.id not in world.user.cancelled:
                    world.fail(f"{row.id} is cancelled, and nobody wished that")
            elif state is JobState.COMPLETED:
                if truth is None or not truth.finished:
                    world.fail(f"{row.id} is completed, and its training is not")
            elif truth is None or truth.crashes == 0:
                world.fail(f"{row.id} failed, and not by itself: {row.reason}")
            self._count(row.id, row.samples)
            if state is JobState.COMPLETED and truth is not None:
                self._not_too_few(row.id, row.samples, truth.trained)
        for node in world.machine.nodes.values():
            if node.launchers:
                world.fail(f"a launcher is left on {node.name}")

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
