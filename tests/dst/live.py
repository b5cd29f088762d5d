"""A launcher with its worker in live mode: :mod:`malletrain.launch.live`, and the worker's part of
:mod:`malletrain.elastic.membership` and :mod:`malletrain.elastic.step`, told in states and times.

The worker is started once and goes from round to round with the state that it holds. What a group
of them does together is :mod:`tests.dst.live_groups`.
"""

from __future__ import annotations

from typing import Any

from malletrain.protocol import worker_channel as local
from malletrain.protocol.messages import Abort, Failure, Round, StoreUp
from malletrain.protocol.phases import RESTART_CODE, AssignmentPhase
from tests.dst.launcher import CRASHED, VirtualLauncher
from tests.dst.live_groups import LiveGroup
from tests.dst.truth import BATCH

LAST_RESORT_S = 10.0
"""Time after a loss after which a worker that has not given up its step ends itself, seconds."""
SAVES_S = 1.8
"""A snapshot takes so long at the longest."""
STOP_WAIT_S = 60.0
"""Maximum time that a worker waits to be stopped after a requested snapshot, seconds."""


class LiveWorker:
    """One process of the script. It is in a group, or on its way to one (``group`` None)."""

    def __init__(self, launcher: LiveNodeLauncher, pid: int) -> None:
        self.launcher, self.pid = launcher, pid
        self.alive, self.up = True, False
        """``up``: its script has come to the point where it takes rounds."""
        self.has_state = False
        self.position = 0.0
        """Samples that its state has seen."""
        self.lost_share = 0
        """Number of processes in the step that it has given up."""
        self.group: LiveGroup | None = None
        self.place: Round | None = None
        """The newest round that it received."""
        self.tried = 0
        """The round that it was in, or tried to enter, last."""
        self.entering: LiveGroup | None = None
        self.draining = 0
        """The drain that it has served, and waits to be stopped."""
        self.served = 0
        self.deaf: tuple[LiveGroup, bool] | None = None
        """End of its group, while the worker waits to be stopped and does not notice."""
        self.rank = 0
        self._aborted: set[int] = set()
        self._samples, self._steps, self._first = 0.0, 0, 0.0

    @property
    def _groups(self) -> Any:
        return self.launcher.groups

    # --- news ---

    def receive(self, place: Round) -> None:
        """Receive its place in a round; it checks in while it continues to train."""
        self.place = place
        if self.up:
            self.launcher.in_while(0.01, 0.2, self._check_in, place)
            self._leave_void()

    def came_up(self) -> None:
        """The script is ready."""
        self.up = True
        if self.place is not None:
            self.receive(self.place)

    def abort(self, generation: int) -> None:
        """A member of that round is lost."""
        self._aborted.add(generation)
        if self.group is not None and self.group.generation == generation:
            self._groups.breaks(self.group)
            self.launcher.in_while(LAST_RESORT_S, LAST_RESORT_S, self._last_resort, generation)
        else:
            self._leave_void()

    def _last_resort(self, generation: int) -> None:
        if self.alive and self.group is not None and self.group.generation == generation:
            self.launcher.peers_died(self)

    def _check_in(self, place: Round) -> None:
        if not self.alive or self.place is not place:
            return
        group = self._groups.group(self.launcher.job, place.generation, place.group_size)
        if group.store is not None and not group.store.alive:
            self._say_lost(place.generation)
        elif group.store is None or not self._reaches(group.store):
            self.launcher.in_while(0.1, 0.3, self._check_in, place)
        elif self._groups.checked_in(group, place.group_rank, self):
            self.go_on()

    def _reaches(self, other: LiveNodeLauncher) -> bool:
        return other is self.launcher or (self.launcher.node.up and other.node.up)

    def ready_to_go(self) -> bool:
        """Whether all members of a newer round have checked in."""
        place, group = self.place, self.group
        if place is None or group is None or place.generation <= group.generation:
            return False
        newest = self._groups.group(self.launcher.job, place.generation, place.group_size)
        return bool(newest.everyone)

    # --- from group to group ---

    def leaves(self) -> None:
        """The last step of its group is over."""
        assert self.group is not None
        self.tried, self.group = self.group.generation, None
        self.go_on()

    def gives_up(self, group: LiveGroup, committed: bool) -> None:
        """A peer is lost: the step is done, or never was."""
        if not self.alive or self.group is not group:
            return
        if self.draining:
            self.deaf = group, committed
            return
        if group.stepping and committed:
            self.commit(group.size)
        else:
            self.lost_share = group.size if group.stepping else 0
        self.tried, self.group = group.generation, None
        self._say_lost(group.generation)
        self.go_on()

    def go_on(self) -> None:
        """Enter the newest round, if it can be entered."""
        place = self.place
        if not self.alive or not self.up or self.group is not None or self.entering is not None:
            return
        if place is None or place.generation <= self.tried:
            return
        group = self._groups.group(self.launcher.job, place.generation, place.group_size)
        if place.generation in self._aborted:
            self.tried = place.generation
            self._say_lost(place.generation)
        elif group.everyone and group.came.get(place.group_rank) is self:
            self.tried, self.entering = place.generation, group
            self._groups.enters(group, self)

    def _leave_void(self) -> None:
        """Leave the round that it was about to enter, because the round is void."""
        group, place = self.entering, self.place
        assert place is not None or group is None
        if group is not None and place is not None:
            newer = place.generation > group.generation
            if newer or group.generation in self._aborted:
                self._groups.breaks(group)
                self.interrupted(group)
                return
        self.go_on()

    def interrupted(self, group: LiveGroup) -> None:
        """The round that it was about to enter comes to nothing."""
        if self.alive and self.entering is group:
            self.entering = None
            self._say_lost(group.generation)
            self.go_on()

    def _say_lost(self, generation: int) -> None:
        if self.has_state:
            self.launcher.lost(self, generation)

    def entered(self, group: LiveGroup, rank: int, furthest: float) -> None:
        """The group is formed, and all of it hold the same."""
        self.entering, self.group, self.rank = None, group, rank
        self._samples, self._steps = 0.0, 0
        if self.has_state and furthest == self.position + BATCH * self.lost_share > self.position:
            self._report()  # what it gave up counts after all
        self.has_state, self.lost_share, self.position = True, 0, furthest
        if rank == 0:
            self.launcher.workers(local.Capable(self._sender()))
        self.launcher.in_while(0.0, 0.05, self.launcher.joined, self, group.generation)

    # --- steps ---

    def commit(self, size: int) -> None:
        """A step counts: ``size`` processes have made it."""
        truth = self.launcher.truth
        self.position += BATCH * size
        truth.reached = max(truth.reached, self.position)
        self._report()

    def _report(self) -> None:
        truth, now = self.launcher.truth, self.launcher.wall()
        truth.trained += BATCH
        self._samples += BATCH
        self._steps += 1
        self._first = self._first if self._steps > 1 else now
        counts = self._samples, self._steps, BATCH, self._first, now
        self.launcher.workers(local.WorkerProgress(self._sender(), *counts))

    def _sender(self) -> local.Sender:
        return local.Sender(self.launcher.job, self.tried, self.rank, self.pid)

    def drain(self, number: int) -> None:
        """Wait to be stopped; the snapshot is on disk."""
        self.draining = self.served = number
        self.launcher.in_while(0.05, SAVES_S, self._drained, number)
        self.launcher.in_while(STOP_WAIT_S, STOP_WAIT_S, self.trains_on, number)

    def _drained(self, number: int) -> None:
        if self.alive and self.draining == number:
            self.launcher.workers(local.DrainDone(self._sender(), number, True))

    def trains_on(self, number: int) -> None:
        """Nobody has come, or the request was taken back."""
        if not self.alive or self.draining != number or self.group is None:
            return
        self.draining = 0
        if self.deaf is not None:
            (group, committed), self.deaf = self.deaf, None
            self.gives_up(group, committed)
        else:
            self._groups.step(self.group)

    def ends(self) -> None:
        """The process is gone."""
        if self.alive:
            self.alive = False
            self._groups.gone(self)


class LiveNodeLauncher(VirtualLauncher):
    """The worker of one live job on this node."""

    def _begin(self) -> None:
        self.groups = self._trainings.live
        self._worker: LiveWorker | None = None
        self._round: Round | None = None
        self._generation = 0
        self._last_report: tuple[AssignmentPhase | None, int] = (None, 0)
        self._pid = 0
        self._serves: set[int] = set()
        self._farewell = False
        self._start_worker()

    def workers(self, datagram: local.Datagram) -> None:
        """A worker tells the agent."""
        self._workers(datagram)

    def wall(self) -> float:
        """Return the time of the wall clock, seconds."""
        return self._trainings.loop.wall()

    def in_while(self, least_s: float, most_s: float, call: Any, *args: Any) -> None:
        """Make the call after that time, if this process lives."""
        self._after(self._rng.uniform(least_s, most_s), call, *args)

    # --- the agent ---

    def _heard(self, message: Any) -> None:
        if self._farewell:
            return
        if isinstance(message, Abort):
            if self._worker is not None:
                self._worker.abort(message.generation)
            return
        assert isinstance(message, Round), message
        if self._round is None or message.generation > self._round.generation:
            self._round = message
            self._pass_on(message)

    def _pass_on(self, message: Round) -> None:
        if self._worker is None:
            self._start_worker()
        if not message.store_host and message.generation not in self._serves:
            self._serves.add(message.generation)
            self.groups.group(self.job, message.generation, message.group_size).store = self
            self._say(StoreUp(self.job, message.generation, self.node.name, 29500))
        assert self._worker is not None
        self._worker.receive(message)

    def _tell(
        self, phase: AssignmentPhase, generation: int, failures: tuple[Failure, ...] = ()
    ) -> None:
        self._last_report = (phase, generation)
        self._phase(phase, generation, failures)

    def _flagged(self, number: int) -> None:
        worker = self._worker
        if worker is None or not worker.draining:
            return
        if number:
            worker.drain(number)
        else:
            worker.trains_on(worker.draining)

    def wanted_drain(self) -> int:
        """The drain that is asked for."""
        return self._flags.number

    # --- the worker ---

    def _start_worker(self) -> None:
        self._pid += 1
        self._worker = worker = LiveWorker(self, self.number * 1000 + self._pid)
        self.in_while(0.2, 1.5, self._up, worker)

    def _up(self, worker: LiveWorker) -> None:
        if worker.alive:
            if self._last_report[0] in (None, AssignmentPhase.READY):
                self._tell(AssignmentPhase.READY, 0)
            worker.came_up()

    def joined(self, worker: LiveWorker, generation: int) -> None:
        """The worker trains in that round."""
        if worker.alive and generation > self._generation:
            self._generation = generation
            self._serves = {g for g in self._serves if g >= generation}
            self._tell(AssignmentPhase.RUNNING, generation)

    def lost(self, worker: LiveWorker, generation: int) -> None:
        """The worker's group broke."""
        newest = self._round.generation if self._round is not None else 0
        if generation == newest and self._last_report != (AssignmentPhase.LOST, newest):
            self._tell(AssignmentPhase.LOST, newest)

    def succeeded(self, worker: LiveWorker) -> None:
        """The script has come to its end."""
        if worker.alive:
            worker.alive = False
            self._worker = None
            self._tell(AssignmentPhase.SUCCEEDED, self._generation)

    def crash(self) -> None:
        worker = self._worker
        if self._code is None and worker is not None and worker.up and worker.group is not None:
            self.truth.crashes += 1
            self._stop_worker()
            self._failed(1, CRASHED)

    def peers_died(self, worker: LiveWorker) -> None:
        """The worker could not give up what it was in, and has ended itself."""
        if self._worker is worker:
            self._stop_worker()
            self._failed(RESTART_CODE, "This process starts again.")

    def _failed(self, code: int, words: str) -> None:
        rank = self._round.group_rank if self._round is not None and self._generation else 0
        failures = (Failure(rank, code, self.wall(), words),)
        self._tell(AssignmentPhase.FAILED, self._generation, failures)

    def _stop_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.ends()
